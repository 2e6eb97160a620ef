"""Adapters of several agents against the contract of common/envs/multiagent.py: whose each row is, who lives, who acts.

PettingZoo and VMAS are compared with their own environments stepped by hand, envpool's games with games replayed on a
board here. StarCraft II cannot be had in a test: SMAC and SMACv2 are stand-ins that have their documented interface.
"""

import importlib
import sys
import types
from itertools import product

import envpool
import numpy as np
import pytest
import torch
from gymnasium import spaces

from common import envs as vecenvs
from common.envs.multiagent import FrameStackVecEnv, pad_actions
from common.errors import InputError

CPU = torch.device("cpu")


@pytest.fixture
def make():
    """vecenvs.make of several agents on the CPU; what it made is closed after the test, twice."""
    made = []

    def _make(env_id, num_envs=3, seed=0, frame_stack=1, **env_kwargs):
        made.append(vecenvs.make(env_id, num_envs, CPU, seed, env_kwargs, multi_agent=True, frame_stack=frame_stack))
        return made[-1]

    yield _make
    for envs in made:
        envs.close()
        envs.close()


def refused(make, named, *args, **kwargs):
    with pytest.raises(InputError) as error:
        make(*args, **kwargs)
    assert named in str(error.value) and "\n" not in str(error.value)


def random_actions(envs, steps, seed=0):
    """Actions of all agents that no mask forbids, one step at a time, since masks change."""
    generator, space = torch.Generator().manual_seed(seed), envs.action_space
    N, G = envs.num_envs, envs.num_agents
    for _ in range(steps):
        if isinstance(space, spaces.Box):
            drawn = torch.rand(N, G, *space.shape, generator=generator)
            yield torch.from_numpy(space.low) + drawn * torch.from_numpy(space.high - space.low)
            continue
        sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()
        mask = torch.ones(N, G, sum(sizes), dtype=torch.bool) if envs.action_mask is None else envs.action_mask
        scores = torch.where(mask, torch.rand(mask.shape, generator=generator), -1.0)
        choices = torch.stack([x.argmax(-1) for x in scores.split(sizes, -1)], -1)
        yield choices[..., 0] if isinstance(space, spaces.Discrete) else choices


def check_shapes(envs, step):
    """Shapes and types of the contract, and that both ends exclude each other."""
    N, G, state_space = envs.num_envs, envs.num_agents, envs.state_space
    assert step.obs.shape == (N, G, *envs.observation_space.shape) and step.obs.dtype == torch.float32
    assert step.rewards.shape == (N, G) and step.rewards.dtype == torch.float32
    assert (step.state is None) == (state_space is None)
    assert state_space is None or step.state.shape == (N, *state_space.shape) and step.state.dtype == torch.float32
    for ends in (step.terminations, step.truncations):
        assert ends.shape == (N,) and ends.dtype == torch.bool
    assert not (step.terminations & step.truncations).any()
    for who in (step.alive, step.final_alive):
        assert who.shape == (N, G) and who.dtype == torch.bool
    assert step.alive is envs.alive and step.action_mask is envs.action_mask and step.acting is envs.acting
    if step.truncations.any():
        assert step.final_obs.shape == step.obs.shape and (step.final_state is None) == (state_space is None)
    if isinstance(envs.action_space, spaces.Discrete) and step.action_mask is not None:
        assert step.action_mask.shape == (N, G, envs.action_space.n) and step.action_mask.dtype == torch.bool


@pytest.mark.parametrize("env_id, kwargs", [
    ("pz/mpe2.simple_spread_v3", {"max_cycles": 4}), ("pz/mpe2.simple_speaker_listener_v4", {"max_cycles": 4}),
    ("pz/pettingzoo.classic.rps_v2", {"max_cycles": 4}), ("pz/pettingzoo.sisl.multiwalker_v9", {"max_cycles": 4}),
    ("pz/pettingzoo.classic.tictactoe_v3", {}),
    ("vmas/simple_spread", {"max_episode_steps": 4}), ("vmas/simple_speaker_listener", {"max_episode_steps": 4}),
    ("vmas/balance", {"max_episode_steps": 4, "continuous_actions": False}), ("envpool/TicTacToe-v1", {}),
    ("envpool/IntersectionMultiAgent-v1", {}),
])  # fmt: skip
@pytest.mark.parametrize("num_envs", [1, 3])
def test_shapes_types_and_that_nothing_is_written_again(make, env_id, kwargs, num_envs):
    envs = make(env_id, num_envs, **kwargs)
    obs, state = envs.reset()
    kept, ends = [(x, x.clone()) for x in (obs, state, envs.alive, envs.action_mask) if x is not None], 0
    for actions in random_actions(envs, 20):
        before = actions.clone()
        step = envs.step(actions)
        check_shapes(envs, step)
        assert torch.equal(actions, before)
        kept += [(x, x.clone()) for x in step if x is not None]
        ends += int((step.terminations | step.truncations).sum())
    assert ends and all(torch.equal(x, copy) for x, copy in kept)
    assert envs.env_id == env_id and envs.num_envs == num_envs


@pytest.mark.parametrize("env_id", ["pz/mpe2.simple_spread_v3", "vmas/simple_spread", "envpool/LeducHoldem-v1"])
def test_seeds(make, env_id):
    """One seed, one start; another seed, another one; envs differ; a second episode is not the first again."""

    def starts(seed):
        envs = make(env_id, 8, seed)
        first, _ = envs.reset()
        rows = [first] + [envs.step(actions).obs for actions in random_actions(envs, 6)]
        again, _ = envs.reset()
        return torch.stack([*rows, again])

    assert torch.equal(starts(3), starts(3)) and not torch.equal(starts(3), starts(4))
    if not env_id.startswith("envpool"):  # there are few hands
        rows = starts(3)
        assert len(rows[0].unique(dim=0)) == 8 and not torch.equal(rows[0], rows[-1])


# ---- PettingZoo: an env whose numbers tell whose they are ----


def trio_row(i, g, t, episode, size=2):
    return torch.tensor([100.0 * i + 10 * g + t, episode] + [7.0] * (size - 2))


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("ending", ["truncate", "terminate", "both"])
def test_rows_are_those_of_their_env_agent_and_time(make, num_envs, ending):
    envs = make("pz/toy_envs:Trio", num_envs, ending=ending, length=4)
    obs, state = envs.reset()
    for n, g in product(range(num_envs), range(3)):
        assert torch.equal(obs[n, g], trio_row(n, g, 0, 0)) and state[n].tolist() == [n, 0, 0]
    for k, actions in enumerate(random_actions(envs, 10), 1):
        step = envs.step(actions)
        check_shapes(envs, step)
        over, t, episode = k % 4 == 0, k % 4, k // 4
        terminated = over and ending != "truncate"
        assert step.terminations.tolist() == [terminated] * num_envs
        assert step.truncations.tolist() == [over and not terminated] * num_envs
        assert step.alive.all() and step.final_alive.all() == (not terminated)
        for n, g in product(range(num_envs), range(3)):
            assert step.rewards[n, g] == 100 * n + 10 * g + actions[n, g]
            assert torch.equal(step.obs[n, g], trio_row(n, g, t, episode))
            assert step.state[n].tolist() == [n, t, episode]
            if not terminated:
                assert torch.equal(step.final_obs[n, g], trio_row(n, g, 4 if over else t, episode - over))
                assert step.final_state[n].tolist() == [n, 4 if over else t, episode - over]


def test_a_state_that_is_an_image_is_left_out(make):
    envs = make("pz/toy_envs:Trio", 2, state="image")
    assert envs.state_space is None and envs.reset()[1] is None
    assert envs.step(next(random_actions(envs, 1))).final_state is None


def test_the_limit_that_is_kept_here(make):
    """max_episode_steps cuts what does not end; a termination in the same step wins; counting begins anew."""
    envs = make("pz/toy_envs:Trio", 2, length=99, max_episode_steps=3)
    assert envs.max_episode_steps == 3
    envs.reset()
    ends = torch.stack([envs.step(actions).truncations for actions in random_actions(envs, 7)])
    assert ends.tolist() == [[t % 3 == 2] * 2 for t in range(7)]
    envs.step(next(random_actions(envs, 1)))
    envs.reset()
    assert [envs.step(a).truncations.any().item() for a in random_actions(envs, 3)] == [False, False, True]
    envs = make("pz/toy_envs:Trio", 2, length=3, ending="terminate", max_episode_steps=3)
    envs.reset()
    steps = [envs.step(actions) for actions in random_actions(envs, 3)]
    assert steps[2].terminations.all() and not steps[2].truncations.any() and not steps[2].final_alive.any()


@pytest.mark.parametrize("leaving", ["terminate", "truncate"])
def test_agents_that_leave_are_dead_to_the_end_of_the_episode(make, leaving):
    """a leaves after 2 steps, c after 3, b stays to the time limit. The env itself refuses actions of who left."""
    envs = make("pz/toy_envs:Trio", 2, length=5, leaves=(2, 0, 3), leaving=leaving)
    envs.reset()
    living = {0: [1, 1, 1], 1: [1, 1, 1], 2: [0, 1, 1], 3: [0, 1, 0], 4: [0, 1, 0], 5: [0, 1, 0]}
    for k, actions in enumerate(random_actions(envs, 10), 1):
        step = envs.step(actions)
        t = (k - 1) % 5 + 1
        assert step.final_alive.int().tolist() == [living[t]] * 2
        assert step.alive.int().tolist() == [living[t % 5]] * 2
        assert (step.rewards[:, torch.tensor(living[t - 1]) == 0] == 0).all()
        assert (step.rewards[1, torch.tensor(living[t - 1]) == 1] >= 100).all()
        assert step.truncations.tolist() == [t == 5] * 2 and not step.terminations.any()
        assert torch.equal(step.final_obs[1, 1], trio_row(1, 1, t, (k - 1) // 5))
        assert (step.obs[~step.alive] == 0).all()


def test_the_episode_ends_where_the_last_agent_leaves(make):
    """As a termination where it was terminated, as a truncation where somebody was cut in that step."""
    for leaving in ("terminate", "truncate"):
        envs = make("pz/toy_envs:Trio", 2, length=9, leaves=(1, 2, 3), leaving=leaving)
        envs.reset()
        steps = [envs.step(actions) for actions in random_actions(envs, 6)]
        ends = [(s.terminations if leaving == "terminate" else s.truncations).all().item() for s in steps]
        others = [(s.truncations if leaving == "terminate" else s.terminations).any().item() for s in steps]
        assert ends == [False, False, True] * 2 and not any(others)
        assert steps[2].alive.all() and steps[2].final_alive[0].tolist() == [False, False, leaving == "truncate"]


@pytest.mark.parametrize("ending", ["truncate", "terminate"])
def test_who_has_left_but_is_still_named_is_dead(make, ending):
    envs = make("pz/toy_envs:Trio", 2, length=3, ending=ending, keeps=True)
    envs.reset()
    steps = [envs.step(actions) for actions in random_actions(envs, 6)]
    ends = [(s.truncations if ending == "truncate" else s.terminations).all().item() for s in steps]
    assert ends == [False, False, True] * 2 and steps[2].final_alive.all() == (ending == "truncate")


def test_agents_that_appear_live_from_then_on(make):
    envs = make("pz/toy_envs:Trio", 2, length=4, joins=2)
    envs.reset()
    assert envs.alive.tolist() == [[True, True, False]] * 2
    steps = [envs.step(actions) for actions in random_actions(envs, 5)]
    assert [s.alive[0, 2].item() for s in steps] == [False, True, True, False, False]
    assert [s.final_alive[1, 2].item() for s in steps] == [False, True, True, True, False]
    assert [s.rewards[1, 2].item() >= 120 for s in steps] == [False, False, True, True, False]
    assert torch.equal(steps[1].obs[1, 2], trio_row(1, 2, 2, 0)) and steps[3].truncations.all()


@pytest.mark.parametrize("action", ["Discrete", "MultiDiscrete", "Box"])
def test_unlike_spaces_are_padded_to_the_largest(make, action):
    """The env itself refuses a value that its agent does not have, and a row of another length."""
    envs = make("pz/toy_envs:Trio", 3, padded=True, action=action, state=False)
    obs, state = envs.reset()
    assert state is None and envs.observation_space.shape == (4,)
    rows = {0: [1, 1, 1, 0, 0], 1: [1, 1, 1, 1, 0], 2: [1, 1, 1, 1, 1]}
    if action == "Box":
        assert envs.action_space.shape == (3,)
        rows = {0: [1, 0, 0], 1: [1, 1, 0], 2: [1, 1, 1]}
    elif action == "MultiDiscrete":
        assert envs.action_space.nvec.tolist() == [5, 2]
        rows = {g: row + [1, 1] for g, row in rows.items()}
    for actions in random_actions(envs, 12):
        assert envs.action_mask.int().tolist() == [list(rows.values())] * 3
        step = envs.step(actions)
        for n, g in product(range(3), range(3)):
            own = actions[n, g, : 1 + g] if action == "Box" else actions[n, g]
            torch.testing.assert_close(step.rewards[n, g], (100 * n + 10 * g + own.sum()).float(), atol=1e-4, rtol=0)
            assert step.obs[n, g, 2:].tolist() == [7.0] * g + [0.0] * (2 - g)


def test_continuous_actions_are_clamped(make):
    envs = make("pz/toy_envs:Trio", 2, action="Box")
    envs.reset()
    step = envs.step(torch.full((2, 3, 1), 5.0))
    assert step.rewards.tolist() == [[1, 11, 21], [101, 111, 121]]


@pytest.mark.parametrize("mask", ["info", "dict"])
def test_masks_are_those_of_the_observation_returned(make, mask):
    envs = make("pz/toy_envs:Trio", 2, mask=mask, length=4, leaves=(0, 2, 0))
    envs.reset()
    for k, actions in enumerate(random_actions(envs, 9)):
        t = k % 4
        expected = torch.stack([torch.arange(3) != (t + g) % 3 for g in range(3)])
        assert torch.equal(envs.action_mask[envs.alive], expected.expand(2, -1, -1)[envs.alive])
        step = envs.step(actions)
        assert step.obs.shape == (2, 3, 2)


@pytest.mark.parametrize("name, kwargs, named", [
    ("toy_envs:Trio", {"mask": "short"}, "the action mask of a has 2 entries; expected is one for each of its 3"),
    ("toy_envs:Trio", {"mask": "info", "action": "Box"}, "mask"),
    ("toy_envs:Trio", {"nonsense": 1}, "nonsense"),
    ("toy_envs:Trio", {"max_episode_steps": 0}, "max_episode_steps=0: must be a whole number, at least 1"),
    ("toy_envs:Nobody", {}, "Nobody"),
    ("no_such_module:f", {}, "no_such_module"),
    ("pettingzoo.butterfly.pistonball_v6", {}, "images"),
    ("pettingzoo.sisl.multiwalker_v9", {"max_cycles": "x"}, "max_cycles=x: must be a whole number"),
    ("mpe2.simple_spred", {}, "close names: mpe2.simple_spread_v3"),
])  # fmt: skip
def test_what_pettingzoo_cannot_do_is_refused(make, name, kwargs, named):
    refused(lambda: make(f"pz/{name}", **kwargs).reset(), named)


@pytest.mark.parametrize("name", ["mpe2.simple_spread_v3", "mpe2.simple_speaker_listener_v4", "mpe2.simple_tag_v3",
                                  "pettingzoo.classic.rps_v2"])  # fmt: skip
def test_pettingzoo_equals_its_own_envs_by_hand(make, name):
    """Two episodes of each copy."""
    envs, own = make(f"pz/{name}", 2, 5, max_cycles=4), importlib.import_module(name)
    copies = [own.parallel_env(max_cycles=4) for _ in range(2)]
    seen = [copy.reset(seed=5 + i)[0] for i, copy in enumerate(copies)]
    obs, state = envs.reset()
    assert (envs.action_mask is None) == ("speaker" not in name)
    for actions in random_actions(envs, 8):
        step = envs.step(actions)
        for i, copy in enumerate(copies):
            agents = copy.possible_agents
            for g, agent in enumerate(agents):
                row = np.eye(4)[seen[i][agent]] if name.endswith("rps_v2") else seen[i][agent]
                row = torch.as_tensor(row, dtype=torch.float32)
                assert torch.equal(obs[i, g, : len(row)], row) and (obs[i, g, len(row) :] == 0).all()
                counts = int(copy.action_space(agent).n)
                assert envs.action_mask is None or envs.action_mask[i, g].sum() == counts
            assert state is None or torch.equal(state[i], torch.from_numpy(np.ravel(copy.state())).float())
            chosen = {agent: actions[i, g].item() for g, agent in enumerate(agents)}
            seen[i], rewards, terminated, truncated, _ = copy.step(chosen)
            assert step.rewards[i].tolist() == pytest.approx([rewards[agent] for agent in agents])
            assert step.terminations[i] == all(terminated.values()) and step.truncations[i] == all(truncated.values())
            if step.truncations[i]:
                last = torch.as_tensor(seen[i][agents[0]], dtype=torch.float32).flatten()
                assert name.endswith("rps_v2") or torch.equal(step.final_obs[i, 0, : len(last)], last)
                seen[i] = copy.reset()[0]
        obs, state = step.obs, step.state


def test_time_limit_of_multiwalker_is_no_termination(make):
    """PettingZoo says it is one, and then has no state. A fall still is."""
    for options in ({"max_cycles": 6}, {"max_episode_steps": 6}):
        envs = make("pz/pettingzoo.sisl.multiwalker_v9", 2, **options)
        envs.reset()
        steps = [envs.step(actions) for actions in random_actions(envs, 12)]
        assert [s.truncations.tolist() for s in steps] == ([[False] * 2] * 5 + [[True] * 2]) * 2
        assert not any(s.terminations.any() for s in steps) and all(s.final_alive.all() for s in steps)
        assert (steps[5].final_state.abs().sum(1) > 0).all() and steps[5].state.shape == (2, envs.state_space.shape[0])
        assert not torch.equal(steps[5].obs, steps[5].final_obs)
    envs = make("pz/pettingzoo.sisl.multiwalker_v9", 1)
    assert envs.max_episode_steps == 500
    envs.reset()
    steps = [envs.step(actions) for actions in random_actions(envs, 120)]
    falls = [s for s in steps if s.terminations.any()]
    assert falls and all((s.rewards < -50).all() and not s.final_alive.any() for s in falls)


def test_aec_envs_in_which_all_act_at_once(make):
    """The same walkers by the parallel API and from the AEC env."""
    first, second = (make(f"pz/pettingzoo.sisl.multiwalker_v9{x}", 2, 1, max_cycles=5) for x in ("", ":env"))
    assert torch.equal(first.reset()[0], second.reset()[0]) and second.acting is None
    for actions in random_actions(first, 7):
        one, two = first.step(actions), second.step(actions)
        assert torch.equal(one.obs, two.obs) and torch.equal(one.rewards, two.rewards)
        assert torch.equal(one.final_state, two.final_state) and torch.equal(one.truncations, two.truncations)


def test_pettingzoo_in_turns(make):
    """Against its AEC env played by hand; the conversion takes the action of whose turn it is."""
    from pettingzoo.classic import tictactoe_v3

    envs, own = make("pz/pettingzoo.classic.tictactoe_v3", 2), [tictactoe_v3.env() for _ in range(2)]
    obs, state = envs.reset()
    for game in own:
        game.reset()
    assert state is None and not envs.zero_sum and envs.alive.all()
    results = set()
    for actions in random_actions(envs, 40):
        step = None
        for i, game in enumerate(own):
            mover = game.agents.index(game.agent_selection)
            assert envs.acting[i].tolist() == [mover == 0, mover == 1]
            for g, agent in enumerate(game.agents):
                seen = game.observe(agent)
                assert torch.equal(obs[i, g], torch.from_numpy(seen["observation"]).float().flatten())
            assert torch.equal(envs.action_mask[i, mover], torch.from_numpy(game.last()[0]["action_mask"]).bool())
        step = envs.step(actions)
        for i, game in enumerate(own):
            game.step(actions[i, game.agents.index(game.agent_selection)].item())
            assert step.rewards[i].tolist() == [game.rewards[agent] for agent in game.possible_agents]
            assert step.terminations[i] == all(game.terminations.values()) and not step.truncations[i]
            if step.terminations[i]:
                results.add(tuple(step.rewards[i].tolist()))
                game.reset()
        obs = step.obs
    assert {(1, -1), (-1, 1)} <= results


def test_walkers_that_fall_alone_are_dead(make):
    """PettingZoo's own state() then fails; without it they can be trained."""
    options = {"terminate_on_fall": False, "remove_on_fall": True, "max_cycles": 90}
    envs = make("pz/pettingzoo.sisl.multiwalker_v9", 2, **options, use_state=False)
    assert envs.state_space is None and envs.reset()[1] is None
    alone = False
    for actions in random_actions(envs, 90):
        step = envs.step(actions)
        check_shapes(envs, step)
        alone |= bool((step.final_alive.any(1) & ~step.final_alive.all(1)).any())
    assert alone and step.truncations.any()
    envs = make("pz/pettingzoo.sisl.multiwalker_v9", 2, **options)
    envs.reset()
    refused(lambda: [envs.step(a) for a in random_actions(envs, 90)], "state() fails")
    refused(make, "use_state=3: must be True or False", "pz/toy_envs:Trio", use_state=3)


# ---- frames ----


def test_frames_are_stacked_by_agent_oldest_first(make):
    """Before an episode's first observation, or an agent's, that one stands."""
    envs = make("pz/toy_envs:Trio", 2, frame_stack=3, length=5, leaves=(2, 0, 0), joins=3)
    assert isinstance(envs, FrameStackVecEnv) and envs.observation_space.shape == (6,)
    times = {0: {0: [0, 0, 0], 1: [0, 0, 1]}, 1: {t: [max(t - 2, 0), max(t - 1, 0), t] for t in range(6)},
             2: {3: [3, 3, 3], 4: [3, 3, 4], 5: [3, 4, 5]}}  # fmt: skip

    def check(obs, alive, t, episode):
        for n, g in product(range(2), range(3)):
            if alive[n, g]:
                expected = torch.cat([trio_row(n, g, x, episode) for x in times[g][t]])
                assert torch.equal(obs[n, g], expected), (n, g, t)

    obs, state = envs.reset()
    check(obs, envs.alive, 0, 0)
    assert state.shape == (2, 3)
    for k, actions in enumerate(random_actions(envs, 11), 1):
        step = envs.step(actions)
        check(step.obs, step.alive, k % 5, k // 5)
        check(step.final_obs, step.final_alive, (k - 1) % 5 + 1, (k - 1) // 5)
        assert step.state.shape == (2, 3)


def test_frames_go_on_after_a_restore(make):
    envs, again = (make("vmas/simple_spread", 2, seed, frame_stack=3, max_episode_steps=6) for seed in (1, 2))
    envs.reset()
    actions = list(random_actions(envs, 10))
    for a in actions[:4]:
        envs.step(a)
    obs, _ = again.load_state_dict(envs.state_dict())
    assert torch.equal(obs, envs.stack)
    for a in actions[4:]:
        one, two = envs.step(a), again.step(a)
        assert torch.equal(one.obs, two.obs) and torch.equal(one.final_obs, two.final_obs)
    envs = make("pz/toy_envs:Trio", 2, frame_stack=2)
    assert envs.state_dict() is None and envs.reset()[0].shape == (2, 3, 4)


# ---- padding ----


@pytest.mark.parametrize("agent_spaces, named", [
    ([spaces.Discrete(2), spaces.Box(-1, 1, (2,))], "Box and Discrete actions"),
    ([spaces.Box(-1, 1, (2,)), spaces.Box(-2, 2, (2,))], "not their bounds"),
    ([spaces.Box(-1, 1, (1,)), spaces.Box(np.float32([-1, -1]), np.float32([2, 1]))], "not their bounds"),
    ([spaces.Box(-1, 1, (1,)), spaces.Box(np.float32([-2, -1]), np.float32([1, 1]))], "not their bounds"),
    ([spaces.MultiDiscrete([2, 2]), spaces.MultiDiscrete([2])], "[1, 2] sub-actions"),
])  # fmt: skip
def test_spaces_that_cannot_be_padded_are_refused(agent_spaces, named):
    refused(pad_actions, named, agent_spaces, "toy/Mixed")


def test_padded_spaces():
    space, mask = pad_actions([spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([4, 1])], "toy/Mixed")
    assert space == spaces.MultiDiscrete([4, 3])
    assert mask.astype(int).tolist() == [[1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]
    low = np.float32([-1, -2])
    space, mask = pad_actions([spaces.Box(low[:1], -low[:1]), spaces.Box(low, -low)], "toy/Mixed")
    assert space == spaces.Box(low, -low) and mask.tolist() == [[True, False], [True, True]]
    for alike in (spaces.Discrete(3), spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3])):
        assert pad_actions([alike, alike], "toy/Alike") == (alike, None)


# ---- envpool's games ----


def shuffled(envs, seed=0):
    """envs whose simulator returns envs and their players in an order that is drawn anew in every step."""
    rng, step, reset = np.random.default_rng(seed), envs.envs.step, envs.envs.reset
    N, G = envs.num_envs, envs.num_agents

    def mix(arrays, info):
        order, players = rng.permutation(N), rng.permutation(N)
        rows = (players[:, None] * G + np.arange(G)).ravel()
        pick = {N: order, N * G: rows}
        own = {k: v[order] for k, v in info.items() if isinstance(v, np.ndarray)}
        own["players"] = {k: v[rows] for k, v in info["players"].items()}
        return *(x[pick[len(x)]] for x in arrays), own

    envs.envs = types.SimpleNamespace(
        step=lambda actions: mix((x := step(actions))[:-1], x[-1]), reset=lambda: mix((x := reset())[:-1], x[-1]),
        close=envs.envs.close)  # fmt: skip
    return envs


@pytest.mark.parametrize("name", ["TicTacToe-v1", "KuhnPoker-v1", "SparrowMahjong-v1", "IntersectionMultiAgent-v1"])
def test_the_order_in_which_games_finish_does_not_matter(make, name):
    plain, mixed = make(f"envpool/{name}", 7, 3), shuffled(make(f"envpool/{name}", 7, 3))
    assert torch.equal(plain.reset()[0], mixed.reset()[0])
    for actions in random_actions(plain, 40):
        one, two = plain.step(actions), mixed.step(actions)
        for name, x in one._asdict().items():
            assert (x is None) == (getattr(two, name) is None), name
            assert x is None or torch.equal(x, getattr(two, name)), name


def test_threads_do_not_matter(make):
    one, four = (make("envpool/ConnectFour-v1", 64, 3, num_threads=threads) for threads in (1, 4))
    assert torch.equal(one.reset()[0], four.reset()[0])
    for actions in random_actions(one, 60):
        first, second = one.step(actions), four.step(actions)
        assert torch.equal(first.obs, second.obs) and torch.equal(first.rewards, second.rewards)


LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]


def test_tictactoe_equals_a_game_on_a_board(make):
    """Agent 0 begins every game; each sees its own stones first, the last entry is whose turn it is."""
    envs = make("envpool/TicTacToe-v1", 6, 1)
    obs, state = envs.reset()
    assert state is None and envs.teams == (0, 1) and envs.zero_sum and envs.unflattened_shape == (3, 3, 2)
    assert envs.state_dict() is None and envs.max_episode_steps is None
    boards, turns, results, fillers = torch.full((6, 9), -1), torch.zeros(6, dtype=int), set(), 0
    resting = torch.zeros(6, dtype=bool)
    for actions in random_actions(envs, 60):
        assert torch.equal(envs.alive, ~resting[:, None].expand(-1, 2))
        for n in (~resting).nonzero().flatten().tolist():
            assert envs.acting[n].tolist() == [turns[n] == 0, turns[n] == 1]
            assert torch.equal(envs.action_mask[n], (boards[n] == -1).expand(2, -1))
            for g in (0, 1):
                planes = torch.stack([boards[n] == g, boards[n] == 1 - g], -1).float().flatten()
                assert torch.equal(obs[n, g], torch.cat([planes, envs.acting[n, g, None].float()]))
        fillers += int(resting.sum())
        step = envs.step(actions)
        assert not step.truncations.any() and step.won is None and (step.rewards[resting] == 0).all()
        for n in range(6):
            if resting[n]:  # whatever was sent, this begins a game
                boards[n], turns[n], resting[n] = -1, 0, False
                assert not step.terminations[n] and step.alive[n].all()
                continue
            mover = int(turns[n])
            boards[n, actions[n, mover]] = mover
            won = any((boards[n, line] == mover).all() for line in LINES)
            over = won or bool((boards[n] >= 0).all())
            result = [1.0, -1.0] if won else [0.0, 0.0]
            assert step.rewards[n].tolist() == (result[::-1] if mover else result)
            assert step.terminations[n] == over and step.final_alive[n].all() and step.alive[n].all() != over
            turns[n], resting[n] = 1 - mover, over
            results |= {(tuple(step.rewards[n].tolist()))} if over else set()
        obs = step.obs
    assert results == {(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0)} and fillers > 10


def test_three_players_take_turns(make):
    """Agent 0 is the player who begins, the others follow by their number, which is not the order of their turns."""
    envs = make("envpool/SparrowMahjong-v1", 16)
    raw = envpool.make("SparrowMahjong-v1", env_type="gymnasium", num_envs=16, seed=0, num_threads=1)
    (rows, info), (obs, _) = raw.reset(), envs.reset()
    first = info["current_player"]
    assert set(first) == {0, 1, 2}
    for g in range(3):
        seen = rows.reshape(16, 3, -1)[np.arange(16), (first + g) % 3]
        assert torch.equal(obs[:, g, :-1], torch.from_numpy(seen).float())
    assert envs.num_agents == 3 and envs.teams == (0, 1, 2) and envs.acting.tolist() == [[True, False, False]] * 16
    for actions in random_actions(envs, 60):
        step = envs.step(actions)
        check_shapes(envs, step)
        assert (step.acting.sum(1) == 1).all() and step.rewards.sum(1).abs().max() < 1e-5


def test_drivers_move_at_once_and_each_by_its_own_action(make):
    """Agent 0 brakes and agent 1 speeds up: column 3 of a car's own row is its velocity along x, column 4 along y."""
    envs = make("envpool/IntersectionMultiAgent-v1", 5)
    envs.reset()
    assert envs.acting is None and envs.action_mask is None and not envs.zero_sum and envs.max_episode_steps == 13
    for slow in (0, 1):
        envs.reset()
        for _ in range(2):
            step = envs.step(torch.tensor([0, 2] if slow == 0 else [2, 0]).expand(5, 2))
        speed = step.obs.view(5, 2, 5, 5)[:, :, 0, 3:].norm(dim=-1)
        assert (speed[:, slow] < speed[:, 1 - slow]).all() and step.alive.all()


def test_highway_time_limit_and_filler_rows(make):
    envs = make("envpool/IntersectionMultiAgent-v1", 4, duration=2)
    first, _ = envs.reset()
    for _ in range(2):
        steps = [envs.step(torch.ones(4, 2, dtype=int)) for _ in range(3)]
        assert [s.truncations.all().item() for s in steps] == [False, True, False] and not steps[1].terminations.any()
        assert [s.alive.all().item() for s in steps] == [True, False, True]
        assert steps[1].final_alive.all() and torch.equal(steps[1].final_obs, steps[1].obs)
        assert not torch.equal(steps[1].obs, first) and (steps[2].rewards == 0).all()


@pytest.mark.parametrize("env_id, kwargs, named", [
    ("envpool/CartPole-v1", {}, "one agent: use ppo_continuous.py or ppo_discrete.py"),
    ("gym/CartPole-v1", {}, "one agent"), ("envpool/TicTacToe-v1", {"nonsense": 1}, "nonsense"),
    ("envpool/TicTacToe-v1", {"max_episode_steps": 5}, "leave it out"),
    ("TicTacTo", {}, "TicTacToe-v1"), ("vmas/balanc", {}, "close names: balance"),
    ("vmas/balance", {"nonsense": 1}, "nonsense"), ("vmas/balance", {"max_episode_steps": 0}, "at least 1"),
])  # fmt: skip
def test_what_is_refused(make, env_id, kwargs, named):
    refused(make, named, env_id, **kwargs)


@pytest.mark.parametrize("env_id", ["TicTacToe", "vmas/balance", "pz/mpe2.simple_spread_v3"])
def test_one_agent_is_what_the_other_scripts_need(env_id):
    refused(lambda: vecenvs.make(env_id, 2, CPU, 0), "ppo_multiagent.py")


# ---- VMAS ----


@pytest.mark.parametrize("name, options", [("simple_spread", {}), ("navigation", {"shared_rew": False})])
def test_vmas_equals_its_own_env_by_hand(make, name, options):
    """Agents are in their order, and the noise is VMAS's; torch's own goes on as if nothing had been drawn."""
    import vmas

    torch.manual_seed(7)
    expected = torch.rand(3)
    envs = make(f"vmas/{name}", 4, 5, max_episode_steps=6, **options)
    own = vmas.make_env(name, 4, "cpu", max_steps=6, seed=5, terminated_truncated=True, **options)
    torch.manual_seed(7)
    obs, _ = envs.reset()
    rows = own.reset(seed=5)
    torch.manual_seed(7)
    for actions in random_actions(envs, 6):
        assert torch.equal(obs, torch.stack(rows, 1))
        step = envs.step(actions)
        rows, rewards, _, truncated, _ = own.step(list(actions.unbind(1)))
        assert torch.equal(step.final_obs, torch.stack(rows, 1)) and torch.equal(step.rewards, torch.stack(rewards, 1))
        assert torch.equal(step.truncations, truncated)
        obs = step.obs
    assert step.truncations.all() and not torch.equal(step.obs, step.final_obs) and step.alive.all()
    assert len(step.rewards[0].unique()) == (1 if name == "simple_spread" else envs.num_agents)
    torch.manual_seed(7)
    envs.step(next(random_actions(envs, 1)))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["simple_spread", "balance", "navigation"])
def test_a_vmas_reset_of_some_envs_leaves_the_others_alone(make, name):
    """Against a copy in which nothing was reset; and what is restored goes on bit for bit."""
    envs, twin = (make(f"vmas/{name}", 5, 3, max_episode_steps=1000) for _ in range(2))
    assert torch.equal(envs.reset()[0], twin.reset()[0])
    dones = torch.tensor([True, False, True, False, False])
    kept = ~dones
    for t, actions in enumerate(random_actions(envs, 20)):
        if t == 5:
            with envs._own_random():
                envs._begin(dones)
        one, two = envs.step(actions), twin.step(actions)
        kept &= ~(one.terminations | two.terminations)
        assert torch.equal(one.final_obs[kept], two.final_obs[kept])
        assert torch.equal(one.rewards[kept], two.rewards[kept])
        assert t < 5 or not torch.equal(one.final_obs[0], two.final_obs[0])
    assert kept.any()
    saved, again = envs.state_dict(), make(f"vmas/{name}", 5, 9, max_episode_steps=1000)
    actions = list(random_actions(envs, 5, seed=1))
    first = [envs.step(x) for x in actions]
    again.load_state_dict(saved)
    for one, two in zip(first, [again.step(x) for x in actions], strict=True):
        assert torch.equal(one.obs, two.obs) and torch.equal(one.rewards, two.rewards)


def test_vmas_terminations(make):
    """The package falls: the env starts anew at once, and the value of its last state is not asked for."""
    envs = make("vmas/balance", 16, 2, max_episode_steps=60)
    envs.reset()
    steps = [envs.step(torch.full((16, envs.num_agents, 2), 1.0)) for _ in range(60)]
    ends = torch.stack([s.terminations for s in steps])
    assert ends.any() and not (ends & torch.stack([s.truncations for s in steps])).any()
    for t in range(60):
        changed = (steps[t].obs != steps[t].final_obs).flatten(1).any(1)
        assert torch.equal(changed, steps[t].terminations | steps[t].truncations)


def test_vmas_termination_wins_and_other_envs_noise_is_left_alone(make):
    from vmas.simulator.environment import Environment

    envs = make("vmas/simple_spread", 3, max_episode_steps=1)
    before = Environment.vmas_random_state[0].clone()
    envs.reset()
    envs.env.scenario.done = lambda: torch.tensor([True, False, False])
    step = envs.step(next(random_actions(envs, 1)))
    assert step.terminations.tolist() == [True, False, False] and step.truncations.tolist() == [False, True, True]
    assert torch.equal(Environment.vmas_random_state[0], before)
    del envs.env.scenario.done
    starts = [envs.step(actions).obs for actions in random_actions(envs, 3)]
    assert not torch.equal(starts[0], starts[1]) and not torch.equal(starts[1], starts[2])


def test_vmas_clamps_actions_and_pads_unlike_agents(make):
    one, two = (make("vmas/simple_spread", 2, 1) for _ in range(2))
    one.reset(), two.reset()
    assert torch.equal(one.step(torch.full((2, 3, 2), 9.0)).obs, two.step(torch.ones(2, 3, 2)).obs)
    envs = make("vmas/simple_speaker_listener", 2)
    obs, _ = envs.reset()
    sizes = [space.shape[0] for space in envs.env.observation_space]
    assert len(set(sizes)) == 2 and obs.shape == (2, 2, max(sizes))
    assert all((obs[:, g, size:] == 0).all() for g, size in enumerate(sizes))


# ---- StarCraft II ----


class Battle:
    """Stands in for SMAC's StarCraft2Env, whose documented interface it has; there is no game behind it.

    Three agents: agent g of the env with seed i sees 100 i + 10 g + t, and dies in step dies[g]. They win in step wins,
    lose in step `lost` or reach the limit of 6; in step `breaks` the connection breaks. Only the dead may do nothing,
    action 0.
    """

    def __init__(self, map_name, seed=0, continuing_episode=False, dies=(0, 3, 0), wins=0, breaks=0, lost=0, **more):
        if more:
            raise TypeError(f"__init__() got an unexpected keyword argument {next(iter(more))!r}")
        self.map_name, self.seed, self.continuing, self.dies = map_name, seed, continuing_episode, dies
        self.wins, self.breaks, self.lost, self.t, self.resets = wins, breaks, lost, None, 0

    def get_env_info(self):
        return {"state_shape": 2, "obs_shape": 1, "n_actions": 4, "n_agents": 3, "episode_limit": 6}

    def reset(self):
        self.t, self.resets, self.dead = 0, self.resets + 1, [False] * 3
        return self.get_obs(), self.get_state()

    def get_obs(self):
        return [np.float32([0.0 if self.dead[g] else 100 * self.seed + 10 * g + self.t]) for g in range(3)]

    def get_state(self):
        return np.float32([self.seed, self.t])

    def get_avail_agent_actions(self, g):
        return [1, 0, 0, 0] if self.dead[g] else [0, 1, 1, int((self.t + g) % 2)]

    def get_avail_actions(self):
        return [self.get_avail_agent_actions(g) for g in range(3)]

    def step(self, actions):
        for g, action in enumerate(actions):
            assert self.get_avail_agent_actions(g)[action] == 1, f"Agent {g} cannot perform action {action}"
        if self.t + 1 == self.breaks:
            return 0, True, {}
        self.t += 1
        self.dead = [dead or self.t == self.dies[g] for g, dead in enumerate(self.dead)]
        info, terminated = {"battle_won": False}, self.t in (self.wins, self.lost)
        info["battle_won"] = self.t == self.wins
        if not terminated and self.t >= 6:
            terminated = True
            if self.continuing:
                info["episode_limit"] = True
        return self.seed + sum(actions) / 8, terminated, info

    def close(self):
        pass


class CapabilityWrapper(Battle):
    """Stands in for SMACv2's StarCraftCapabilityEnvWrapper."""

    def __init__(self, capability_config, map_name, conic_fov, obs_own_pos, use_unit_ranges, min_attack_range, **more):
        team = capability_config["team_gen"]
        assert not any("env_key" in x for x in (team, capability_config["start_positions"])), "used twice"
        team["env_key"], capability_config["start_positions"]["env_key"] = "team_gen", "start_positions"
        self.config, self.settings = capability_config, (conic_fov, obs_own_pos, use_unit_ranges, min_attack_range)
        super().__init__(map_name, **more)


@pytest.fixture
def starcraft(monkeypatch):
    """Modules that stand in for smac and smacv2."""
    maps = types.ModuleType("smac.env.starcraft2.maps")
    maps.smac_maps = types.SimpleNamespace(get_smac_map_registry=lambda: {"3m": {}, "2s3z": {}})
    parts = {"smac": {}, "smac.env": {"StarCraft2Env": Battle}, "smac.env.starcraft2": {}, "smacv2": {},
             "smacv2.env": {"StarCraftCapabilityEnvWrapper": CapabilityWrapper}}  # fmt: skip
    for name, names in parts.items():
        module = types.ModuleType(name)
        vars(module).update(names, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, maps.__name__, maps)
    for name in ("common.envs.smac", "common.envs.smacv2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("common.envs.smac", "common.envs.smacv2"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("env_id", ["smac/3m", "smacv2/10gen_terran"])
def test_battles(make, starcraft, env_id):
    """The stand-in refuses an action that the agent does not have, be it dead or alive."""
    envs = make(env_id, 2, 4)
    assert envs.env_id == env_id and envs.max_episode_steps == 6 and envs.action_space == spaces.Discrete(4)
    obs, state = envs.reset()
    assert obs.tolist() == [[[400], [410], [420]], [[500], [510], [520]]] and state.tolist() == [[4, 0], [5, 0]]
    for k, actions in enumerate(random_actions(envs, 13), 1):
        sent = torch.where(envs.alive, actions, 0)
        step = envs.step(torch.where(envs.alive, actions, 3))  # what is said for the dead is ignored
        check_shapes(envs, step)
        t, before = k % 6, (k - 1) % 6 + 1
        torch.testing.assert_close(step.rewards, (torch.tensor([4.0, 5.0]) + sent.sum(1) / 8)[:, None].expand(2, 3))
        assert step.final_alive.tolist() == [[True, before < 3, True]] * 2
        assert step.alive.tolist() == [[True, t < 3, True]] * 2
        assert step.truncations.tolist() == [t == 0] * 2 and not step.terminations.any() and not step.won.any()
        assert step.final_state.tolist() == [[4, before], [5, before]] and step.state.tolist() == [[4, t], [5, t]]
        assert step.obs[1, 2].item() == 520 + t and step.final_obs[0, 0].item() == 400 + before
        expected = [[[0, 1, 1, (t + g) % 2] if g != 1 or t < 3 else [1, 0, 0, 0] for g in range(3)]] * 2
        assert step.action_mask.int().tolist() == expected


@pytest.mark.parametrize("options, t, terminated, won", [
    ({"wins": 4}, 4, True, True), ({"lost": 2}, 2, True, False), ({"wins": 6}, 6, True, True),
    ({"breaks": 3}, 3, False, False), ({"continuing_episode": False}, 6, True, False),
])  # fmt: skip
def test_how_battles_end(make, starcraft, options, t, terminated, won):
    envs = make("smac/2s3z", 2, **options)
    envs.reset()
    steps = [envs.step(actions) for actions in random_actions(envs, 2 * t)]
    for k, step in enumerate(steps, 1):
        over = k % t == 0
        assert step.terminations.tolist() == [over and terminated] * 2 and step.won.tolist() == [over and won] * 2
        assert step.truncations.tolist() == [over and not terminated] * 2
        assert step.state[0].tolist() == [0, k % t]
    assert all(battle.resets == 4 for battle in envs.battles)  # to start the game, at the reset, after each end


def test_battles_of_unlike_length_are_reset_apart(make, starcraft):
    envs = make("smac/3m", 2)
    envs.reset()
    envs.battles[1].wins = 2
    steps = [envs.step(actions) for actions in random_actions(envs, 4)]
    assert [s.state[:, 1].tolist() for s in steps] == [[1, 1], [2, 0], [3, 1], [4, 0]]
    assert [s.won.tolist() for s in steps] == [[False, False], [False, True], [False, False], [False, True]]
    assert steps[1].final_state[1].tolist() == [1, 2]


def test_teams_of_smacv2(make, starcraft):
    """Each copy has a configuration of its own, since SMACv2 writes into it."""
    envs = make("smacv2/10gen_zerg", 2, n_units=3, n_enemies=7)
    first, second = (battle.config for battle in envs.battles)
    assert first["n_units"] == 3 and first["n_enemies"] == 7 and first is not second
    team = first["team_gen"]
    assert team["unit_types"] == ["zergling", "baneling", "hydralisk"] and team["exception_unit_types"] == ["baneling"]
    assert team["weights"] == [0.45, 0.1, 0.45] and team["dist_type"] == "weighted_teams"
    assert first["start_positions"]["map_x"] == 32 and envs.battles[0].settings == (False, True, True, 2)
    assert make("smacv2/10gen_protoss", 1).battles[0].config["n_units"] == 5


@pytest.mark.parametrize("env_id, options, named", [
    ("smac/4m", {}, "close names: 3m"), ("smacv2/10gen_teran", {}, "10gen_terran"),
    ("smac/3m", {"nonsense": 1}, "nonsense"), ("smacv2/10gen_zerg", {"nonsense": 1}, "SC2PATH"),
])  # fmt: skip
def test_battles_that_cannot_be_fought(make, starcraft, env_id, options, named):
    refused(make, named, env_id, **options)


@pytest.mark.parametrize("env_id", ["smac/3m", "smacv2/10gen_terran"])
def test_without_smac_the_message_says_what_to_install(make, env_id):
    refused(make, "pip install -r requirements-smac.txt", env_id)


def test_packages_are_imported_on_demand(monkeypatch, make):
    for name, package in (("vmas", "vmas"), ("pettingzoo", "pettingzoo")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"common.envs.{name}", raising=False)
    refused(make, "needs vmas: pip install -r requirements-marl.txt", "vmas/balance")
    refused(make, "needs pettingzoo: pip install -r requirements-marl.txt", "pz/mpe2.simple_spread_v3")
    assert make("envpool/TicTacToe-v1").num_agents == 2


# With their version: Othello and Backgammon are Atari games too.
GAMES = """
    AnimalShogi-v1 Backgammon-v1 Chess-v1 ChineseGo13x13-v1 ChineseGo19x19-v1 ChineseGo9x9-v1 ConnectFour-v1
    GardnerChess-v1 Go13x13-v1 Go19x19-v1 Go9x9-v1 Hex-v1 KuhnPoker-v1 LeducHoldem-v1 Othello-v1 Shogi-v1
    SparrowMahjong-v1 TicTacToe-v1
""".split()


@pytest.mark.parametrize("name", GAMES)
def test_games_of_envpool(make, name):
    """Whose turn it is can act, rewards add up to 0, and each player has its own view."""
    envs = make(name, 2)
    assert envs.env_id == f"envpool/{name}" and envs.zero_sum
    obs, _ = envs.reset()
    assert envs.acting[:, 0].all() and not torch.equal(obs[:, 0], obs[:, 1])
    for actions in random_actions(envs, 16):
        assert (envs.action_mask.any(-1) | ~envs.alive).all()
        starts = ~envs.alive[:, 0]
        step = envs.step(actions)
        check_shapes(envs, step)
        assert (step.acting.sum(1) == 1).all() and step.acting[starts, 0].all()
        assert step.rewards.sum(1).abs().max() < 1e-5 and not step.truncations.any()
        assert torch.equal(step.obs[..., -1].bool(), step.acting)
