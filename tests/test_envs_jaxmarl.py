"""smax/ and jaxmarl/ against JaxMARL's own environments stepped by hand, with the same keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import ppo_multiagent as ppo
from common import checkpoint
from common import envs as vecenvs
from common.errors import InputError

SPREAD, SMAX, SPEAKER = "jaxmarl/MPE_simple_spread_v3", "smax/3m", "jaxmarl/MPE_simple_speaker_listener_v4"
NAMES = [SPREAD, SMAX, SPEAKER]


def make(name, num_envs=5, seed=3, **kwargs):
    return vecenvs.make(name, num_envs, torch.device("cpu"), seed, kwargs, multi_agent=True)


@functools.cache
def shared(name):
    """Compiled once for all tests."""
    return make(name)


def begin(name, seed=3):
    envs = shared(name)
    envs.key = jax.device_put(jax.random.PRNGKey(seed), envs.jax_device)
    return envs, *envs.reset()


def random_actions(envs, generator):
    shape = envs.num_envs, envs.num_agents, int(envs.action_space.n)
    mask = torch.ones(shape) if envs.action_mask is None else envs.action_mask.float() + 1e-9
    return torch.multinomial(mask.flatten(0, 1), 1, generator=generator).view(shape[:2])


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_env_stepped_by_hand(name):
    """Rows, agents, padding, masks, rewards, deaths, ends and the true last observation, over several episodes."""
    envs, obs, state = begin(name)
    env, agents, limit = envs.env, envs.agents, envs.max_episode_steps
    key, own = jax.random.split(jax.random.PRNGKey(3))
    rows = [env.reset(k) for k in jax.random.split(own, 5)]  # (obs, state) of each env
    elapsed, generator, seen = [0] * 5, torch.Generator().manual_seed(0), {"ends": 0, "deaths": 0, "cuts": 0}

    def check(tensor, all_obs):
        for n, own_obs in enumerate(all_obs):
            for g, agent in enumerate(agents):
                row = np.asarray(own_obs[agent])
                np.testing.assert_allclose(tensor[n, g, : len(row)].numpy(), row, rtol=1e-4, atol=1e-5)
                assert (tensor[n, g, len(row) :] == 0).all()

    check(obs, [row[0] for row in rows])
    step_env, reset = jax.jit(env.step_env), jax.jit(env.reset)
    for _ in range(60):
        actions = random_actions(envs, generator)
        step = envs.step(actions)
        key, step_key, reset_key = jax.random.split(key, 3)
        step_keys, reset_keys = jax.random.split(step_key, 5), jax.random.split(reset_key, 5)
        now = []
        for n in range(5):
            chosen = {agent: jnp.int32(actions[n, g].item()) for g, agent in enumerate(agents)}
            own_obs, own_state, rewards, dones, _ = step_env(step_keys[n], rows[n][1], chosen)
            elapsed[n] += 1
            terminated = bool(dones["__all__"])
            cut = not terminated and elapsed[n] == limit
            assert step.terminations[n].item() == terminated and step.truncations[n].item() == cut
            for g, agent in enumerate(agents):
                assert step.rewards[n, g].item() == pytest.approx(float(rewards[agent]), abs=1e-4)
                assert step.final_alive[n, g].item() == (not bool(dones[agent]))
                seen["deaths"] += bool(dones[agent])
            now.append(own_obs)
            if name == SMAX:
                np.testing.assert_allclose(step.final_state[n].numpy(), np.asarray(own_obs["world_state"]), atol=1e-4)
                enemies = np.asarray(own_state.state.unit_alive)[3:]
                assert step.won[n].item() == (not enemies.any())
            if terminated or cut:
                rows[n], elapsed[n] = reset(reset_keys[n]), 0
                assert step.alive[n].all()
                seen["ends"] += 1
                seen["cuts"] += cut
            else:
                rows[n] = own_obs, own_state
                assert torch.equal(step.alive[n], step.final_alive[n])
            if envs.masks:
                allowed = env.get_avail_actions(rows[n][1])
                expected = np.stack([np.asarray(allowed[agent]) for agent in agents]).astype(bool)
                assert (step.action_mask[n].numpy() == expected).all()
        check(step.final_obs, now)
        check(step.obs, [row[0] for row in rows])
    assert seen["ends"] > 4 and (seen["deaths"] > 0 if name == SMAX else seen["cuts"] == seen["ends"])
    assert envs._advance._cache_size() == 1


def test_shapes_and_kinds():
    envs, obs, state = begin(SMAX)
    assert envs.env_id == SMAX and obs.shape == (5, 3, 75) and obs.dtype == torch.float32 and obs.device.type == "cpu"
    assert state.shape == (5, 72) and envs.state_space.shape == (72,) and envs.observation_space.shape == (75,)
    assert envs.action_space == spaces.Discrete(8) and envs.action_mask.shape == (5, 3, 8)
    assert envs.alive.dtype == torch.bool and envs.max_episode_steps == 100
    step = envs.step(random_actions(envs, torch.Generator().manual_seed(0)))
    assert step.terminations.dtype == step.truncations.dtype == step.won.dtype == torch.bool
    spread, obs, state = begin(SPREAD)
    assert state is None and spread.state_space is None and spread.action_mask is None
    assert spread.max_episode_steps == 25


def test_agents_of_different_spaces_are_padded():
    """The speaker sees 3 numbers and says one of 3 things, the listener sees 11 and moves in 5 ways."""
    envs, obs, _ = begin(SPEAKER)
    assert obs.shape == (5, 2, 11) and envs.action_space == spaces.Discrete(5)
    assert envs.action_mask[:, 0].sum(-1).tolist() == [3] * 5 and envs.action_mask[:, 1].all()
    assert (obs[:, 0, 3:] == 0).all() and (obs[:, 0, :3] != 0).any()


def test_tensors_that_were_returned_are_never_written():
    envs, obs, state = begin(SMAX)
    generator, kept = torch.Generator().manual_seed(1), [(obs, obs.clone()), (state, state.clone())]
    for _ in range(8):
        step = envs.step(random_actions(envs, generator))
        kept += [(x, x.clone()) for x in step if x is not None]
    assert all(torch.equal(x, copy) for x, copy in kept)


def test_actions_may_be_overwritten_after_the_step():
    results = []
    for overwrite in (False, True):
        envs, _, _ = begin(SPREAD)
        actions = torch.arange(15).view(5, 3) % 5
        step = envs.step(actions)
        if overwrite:
            actions.zero_()
        results.append(step.obs.clone())
        step = envs.step(torch.ones(5, 3, dtype=torch.int64))
        results.append(step.obs.clone())
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_seeds():
    first, again, other = (begin(SPREAD, seed)[1].clone() for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(row.flatten().tolist()) for row in first}) == 5
    envs, obs, _ = begin(SPREAD)
    assert not torch.equal(envs.reset()[0], obs)


@pytest.mark.parametrize("name", [SPREAD, SMAX])
def test_continues_exactly(name):
    envs, _, _ = begin(name)
    generator = torch.Generator().manual_seed(2)
    for _ in range(7):
        envs.step(random_actions(envs, generator))
    saved = envs.state_dict()
    assert all(isinstance(leaf, torch.Tensor) for leaf in saved["leaves"])
    actions, steps = [], []
    for _ in range(30):
        actions.append(random_actions(envs, generator))
        steps.append(envs.step(actions[-1]))
    begin(name, seed=9)
    obs, state = envs.load_state_dict(saved)
    for own, step in zip(actions, steps, strict=True):
        again = envs.step(own)
        for x, y in zip(step, again, strict=True):
            assert x is None and y is None or torch.equal(x, y)


def test_limit_and_one_env():
    """A limit of one's own; an end in the last allowed step is still a termination."""
    envs = make(SMAX, num_envs=1, max_episode_steps=4)
    envs.reset()
    ends = [envs.step(random_actions(envs, torch.Generator().manual_seed(t))).truncations.item() for t in range(8)]
    assert ends == [False, False, False, True] * 2


def test_trains_and_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = {"env_id": SMAX, "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "hidden_sizes": (16,),
            "device": "cpu", "torch_threads": 1, "central_critic": True, "lr_schedule": "constant"}  # fmt: skip
    ppo.main(ppo.Args(**args, total_timesteps=128, run_name="parts"))
    ppo.main(ppo.Args(**args, total_timesteps=256, run_name="parts", resume="auto"))
    ppo.main(ppo.Args(**args, total_timesteps=256, run_name="one"))
    one, parts = (checkpoint.load(f"runs/{name}/last.pt")["agent"] for name in ("one", "parts"))
    assert all(torch.equal(one[key], parts[key]) for key in one)


@pytest.mark.parametrize(
    "name, kwargs, words",
    [
        ("smax/3n", {}, "3m"),
        ("jaxmarl/MPE_simple_spred_v3", {}, "MPE_simple_spread_v3"),
        (SMAX, {"max_episode_steps": 0}, "max_episode_steps=0"),
        (SPREAD, {"number": 3}, "number"),
    ],
)
def test_mistakes_are_one_line(name, kwargs, words):
    with pytest.raises(InputError) as error:
        make(name, **kwargs)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_gpu_that_jax_does_not_see_is_refused():
    if torch.cuda.is_available():
        return
    with pytest.raises(InputError, match="JAX does not see cuda"):
        vecenvs.make(SPREAD, 2, torch.device("cuda"), 0, {}, multi_agent=True)
