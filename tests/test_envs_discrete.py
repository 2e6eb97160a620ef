"""Images, dictionaries, discrete actions and masks: what each adapter makes of them, and which families step for real.

The toys know the right answer and refuse or count what is wrong; envpool's games are compared with their own memory.
"""

import ctypes
import sys

import gymnasium
import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers the toys under their bare names too
from gymnasium import spaces

from common import envs as vecenvs
from common.envs.discretize import DiscretizedVecEnv
from common.errors import InputError

CPU = torch.device("cpu")


@pytest.fixture
def make(monkeypatch, tmp_path):
    """vecenvs.make on the CPU; what it made is closed after the test."""
    monkeypatch.chdir(tmp_path)  # ViZDoom leaves a file where it runs
    made = []

    def _make(env_id, num_envs=3, seed=0, action_bins=0, **env_kwargs):
        made.append(vecenvs.make(env_id, num_envs, CPU, seed, env_kwargs, action_bins))
        return made[-1]

    yield _make
    for envs in made:
        envs.close()
        envs.close()


def sizes_of(space):
    return [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()


def legal(envs, rng):
    """Uniformly random among the allowed: [N] or [N, D] int64."""
    sizes = sizes_of(envs.action_space)
    mask = torch.ones(envs.num_envs, sum(sizes), dtype=torch.bool) if envs.action_mask is None else envs.action_mask
    assert mask.shape == (envs.num_envs, sum(sizes)) and mask.dtype == torch.bool
    parts = mask.numpy().astype(float) * rng.uniform(0.5, 1, mask.shape)
    actions = np.stack([part.argmax(1) for part in np.split(parts, np.cumsum(sizes)[:-1], axis=1)], 1)
    return torch.from_numpy(actions[:, 0] if isinstance(envs.action_space, spaces.Discrete) else actions)


def idle(envs):
    """Action 0 of every env, or the middle of a Box."""
    dtype = torch.float32 if isinstance(envs.action_space, spaces.Box) else torch.int64
    return torch.zeros(envs.num_envs, *envs.action_space.shape, dtype=dtype)


class Recorder:
    """Stands between an adapter and envpool; keeps what came back last, and which rows were started anew."""

    def __init__(self, envs):
        self.envs, self.pool, envs.envs = envs, envs.envs, self

    def step(self, actions, ids=None):
        result = self.pool.step(actions, *([] if ids is None else [ids]))
        if ids is None:
            self.result, self.restarted = result, None
        else:
            assert np.array_equal(result[4]["env_id"], ids) and not result[1].any()
            self.restarted = result[4]
        return result

    def reset(self, *ids):
        return self.pool.reset(*ids)

    def close(self):
        self.pool.close()


# ---- observations ----


@pytest.mark.parametrize(
    "shape, expected",
    [((5, 4, 3), (3, 5, 4)), ((3, 5, 4), (3, 5, 4)), ((3, 5, 3), (3, 5, 3)), ((6, 7), (1, 6, 7))],
)
def test_images_are_channels_first_and_stay_uint8(make, shape, expected):
    envs = make("gym/toy_envs:Picture-v0", 2, shape=shape)
    hwc = shape == (5, 4, 3)
    assert envs.observation_space.shape == expected and envs.observation_space.dtype == np.uint8
    assert envs.unflattened_shape is None
    obs = envs.reset()[0]
    for t in range(1, 7):
        step = envs.step(torch.zeros(2, 1))
        for image, time in ((step.obs, t % 5), (step.final_obs, 5)):
            if image is None:
                continue
            picture = torch.from_numpy(toy_envs.picture(time, *shape))
            assert image.dtype == torch.uint8 and image.shape == (2, *expected)
            for c in range(expected[0]):
                for y in range(expected[1]):
                    for x in range(expected[2]):
                        pixel = picture[y, x] if picture.ndim == 2 else picture[y, x, c] if hwc else picture[c, y, x]
                        assert image[:, c, y, x].eq(pixel).all()
        assert step.obs.stride() == obs.stride(), "a reset must not change how images lie in memory"
        assert (step.final_obs is not None) == (t == 5)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("keys", ["view map arm place mission hint deep", "hint deep mission place arm map view"])
def test_dictionaries_with_images_stay_dictionaries(make, capsys, keys, mode):
    envs = make("gym/toy_envs:Cameras-v0", 2, keys=keys, vectorization=mode)
    shapes = {"arm": (4,), "deep/cam": (2, 8, 8), "deep/z": (2,), "map": (1, 6, 7), "place": (6,), "view": (3, 5, 4)}
    space = envs.observation_space
    assert isinstance(space, spaces.Dict) and list(space) == list(shapes) and space is envs.critic_observation_space
    assert {key: part.shape for key, part in space.items()} == shapes and envs.unflattened_shape is None
    notice, choice = capsys.readouterr().err.splitlines()
    assert "hint, mission dropped" in notice and "view 3x5x4" in choice
    obs, critic_obs = envs.reset()
    assert critic_obs is obs
    for t in range(1, 7):
        step = envs.step(torch.zeros(2, 1))
        for seen, time in ((step.obs, t % 5), (step.final_obs, 5)):
            if seen is None:
                continue
            assert list(seen) == list(shapes) and all(seen[key].shape == (2, *shapes[key]) for key in shapes)
            assert [seen[key].dtype for key in shapes] == [space[key].dtype == np.uint8 and torch.uint8 or torch.float32
                                                           for key in shapes]  # fmt: skip
            assert seen["arm"].tolist() == [[time, 1, 2, 3.5]] * 2 and seen["deep/z"].tolist() == [[1, 0]] * 2
            assert torch.equal(seen["place"], torch.eye(6)[[time] * 2])
            for key, picture in (("view", toy_envs.picture(time, 5, 4, 3).transpose(2, 0, 1)),
                                 ("map", toy_envs.picture(time, 1, 6, 7)),
                                 ("deep/cam", toy_envs.picture(time, 2, 8, 8))):  # fmt: skip
                assert np.array_equal(seen[key][1], picture)
        assert (step.final_obs is not None) == (t == 5) and step.critic_obs is step.obs


def test_the_order_of_keys_does_not_matter(make):
    first, second = (make("gym/toy_envs:Cameras-v0", 2, keys=keys) for keys in ("place arm", "arm place"))
    assert first.observation_space == second.observation_space == spaces.Box(-np.inf, np.inf, (10,), np.float32)
    assert torch.equal(first.reset()[0], second.reset()[0])
    obs = first.step(torch.zeros(2, 1)).obs
    assert obs.tolist() == [[1, 1, 2, 3.5, 0, 1, 0, 0, 0, 0]] * 2
    assert torch.equal(obs, second.step(torch.zeros(2, 1)).obs)


def test_privileged_dictionaries(make):
    envs = make("gym/toy_envs:PrivilegedCameras-v0", 2)
    assert list(envs.observation_space) == ["arm", "view"] and envs.critic_observation_space.shape == (6,)
    envs.reset()
    for t in range(1, 7):
        step = envs.step(torch.zeros(2, 1))
        assert step.critic_obs.tolist() == [[t % 5, 0, t % 5 + 1, 1, t % 5 + 2, 2]] * 2
        assert step.obs["arm"][:, 0].eq(t % 5).all() and step.obs["view"].dtype == torch.uint8
        if t == 5:
            assert step.final_critic_obs.tolist() == [[5, 0, 6, 1, 7, 2]] * 2
            assert step.final_obs["arm"][:, 0].eq(5).all()


def test_dictionaries_are_never_written_again(make):
    envs, kept, copies = make("gym/toy_envs:Cameras-v0", 2), [], []
    envs.reset()
    for _ in range(11):
        step = envs.step(torch.zeros(2, 1))
        kept += [x for seen in (step.obs, step.final_obs) if seen is not None for x in seen.values()]
        copies += [x.clone() for x in kept[len(copies) :]]
    assert len(kept) == 13 * 6 and all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


@pytest.mark.parametrize("keys, named", [("mission", "without any number"), ("hint mission", "without any number")])
def test_a_dictionary_of_texts_is_refused(make, keys, named):
    with pytest.raises(InputError, match=named):
        make("gym/toy_envs:Cameras-v0", keys=keys)


@pytest.mark.parametrize("env_id", ["envpool/Pong-v5", "envpool/CarRacing-v3", "envpool/MiniGrid-Empty-5x5-v0"])
def test_pixels_are_not_copied_by_the_adapter(make, env_id):
    envs = make(env_id, 2)
    recorder = Recorder(envs)
    envs.reset()
    step = envs.step(idle(envs))
    raw = recorder.result[0]
    seen, raw = (step.obs["image"], raw["image"]) if isinstance(raw, dict) else (step.obs, raw)
    assert seen.dtype == torch.uint8 and np.shares_memory(seen.numpy(), raw)
    assert np.array_equal(seen, raw if raw.shape[1] == 4 else raw.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    "env_id, shape",
    [("gym/toy_envs:Matrix-v0", (2, 3)), ("gym/toy_envs:ZeroDim-v0", ()), ("envpool/Highway-v0", (5, 5)),
     ("envpool/CartPole-v1", (4,)), ("gym/toy_envs:Masked-v0", None), ("envpool/FrozenLake-v1", None),
     ("envpool/Pong-v5", None), ("gym/toy_envs:Asymmetric-v0", (3,))],
)  # fmt: skip
def test_shape_before_flattening(make, env_id, shape):
    assert make(env_id, 1).unflattened_shape == shape


# ---- actions ----


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "kind, sizes, actions, arrived",
    [
        ("discrete", [3], [0, 2], [[-1], [1]]),
        ("multi", [2, 4, 3], [[0, 0, 0], [1, 3, 2]], [[5, 0, -2], [6, 3, 0]]),
        ("matrix", [2, 3, 4, 5], [[0, 0, 0, 0], [1, 2, 3, 4]], [[0, 1, 2, 3], [1, 3, 5, 7]]),
        ("binary", [2, 2, 2, 2], [[0, 1, 1, 0], [1, 1, 0, 1]], [[0, 1, 1, 0], [1, 1, 0, 1]]),
        ("integers", [3, 2], [[0, 0], [2, 1]], [[-1, 3], [1, 4]]),
    ],
)
def test_discrete_actions_arrive_in_the_units_of_the_env(make, mode, kind, sizes, actions, arrived):
    """The env itself refuses another shape or type, and what lies outside its space."""
    envs = make("gym/toy_envs:EchoChoice-v0", 2, kind=kind, vectorization=mode)
    assert isinstance(envs.action_space, spaces.Discrete if kind == "discrete" else spaces.MultiDiscrete)
    assert sizes_of(envs.action_space) == sizes and not np.any(envs.action_space.start)
    envs.reset()
    given = torch.tensor(actions)
    assert envs.step(given).obs.tolist() == arrived
    assert given.tolist() == actions, "the caller's tensor is left alone"
    rng = np.random.default_rng(0)
    for _ in range(20):
        envs.step(legal(envs, rng))


def test_the_choice_is_one_line(make, capsys):
    make("envpool/HumanoidStandup-v5", 1, action_bins=1001)
    assert capsys.readouterr().err.count("\n") == 1


def test_integers_without_bounds_are_no_choice(make):
    with pytest.raises(InputError, match="values in one dimension"):
        make("gym/toy_envs:EchoChoice-v0", kind="endless")


def test_bins_are_evenly_spaced_and_include_the_bounds(make):
    envs = make("gym/toy_envs:Matrix-v0", 2, action_bins=5)
    assert envs.action_space == spaces.MultiDiscrete([5] * 4)
    envs.reset()
    for i, value in enumerate((-1, -0.5, 0, 0.5, 1)):  # the reward is the second number + 10 times the third
        rewards = envs.step(torch.tensor([[0, i, 2, 0], [4, 2, i, 1]])).rewards
        assert torch.allclose(rewards, torch.tensor([value, 10.0 * value]))
    echo = make("gym/toy_envs:EchoAction-v0", 3, action_bins=3)
    echo.reset()
    assert echo.step(torch.tensor([[0], [1], [2]])).rewards.tolist() == [-2.0, 0.5, 3.0]


def test_binned_envs_are_the_same_in_all_else(make):
    plain, binned = make("envpool/Pendulum-v1", 2), make("envpool/Pendulum-v1", 2, action_bins=3)
    assert isinstance(binned, DiscretizedVecEnv) and sizes_of(binned.action_space) == [3]
    for name in ("env_id", "num_envs", "device", "observation_space", "max_episode_steps", "value_size", "action_mask"):
        assert getattr(binned, name) == getattr(plain, name)
    assert binned.state_dict() is None and not hasattr(binned, "no_such_attribute")
    assert torch.equal(plain.reset()[0], binned.reset()[0])
    a, b = plain.step(torch.tensor([[-2.0], [2.0]])), binned.step(torch.tensor([[0], [2]]))
    assert torch.equal(a.obs, b.obs) and torch.equal(a.rewards, b.rewards)
    evaluation = vecenvs.make_for_episodes("envpool/Pendulum-v1", 4, 2, CPU, 0, ["max_episode_steps=7"], 11)
    assert sizes_of(evaluation.action_space) == [11] and evaluation.max_episode_steps == 7
    evaluation.close()


@pytest.mark.parametrize(
    "env_id, bins, named",
    [("envpool/Pendulum-v1", 1, "at least 2"), ("envpool/Pendulum-v1", -3, "at least 2"),
     ("gym/toy_envs:Unbounded-v0", 3, r"no bounds in action dimensions \[0\]"),
     ("envpool/CartPole-v1", 3, "discrete already")],
)  # fmt: skip
def test_what_cannot_be_binned_is_refused(make, env_id, bins, named):
    with pytest.raises(InputError, match=named) as error:
        make(env_id, action_bins=bins)
    assert "\n" not in str(error.value) and f"--action-bins {bins}" in str(error.value)


# ---- masks ----


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("source", ["obs", "info", "method"])
def test_a_mask_belongs_to_the_observation_that_came_with_it(make, source, mode):
    """Three envs of which at most two allow the same: one row or one reset too late would be punished."""
    envs, rng, ends = make("gym/toy_envs:Choosy-v0", source=source, vectorization=mode), np.random.default_rng(0), 0
    envs.reset()
    for _ in range(1000 if mode == "sync" else 100):
        step = envs.step(legal(envs, rng))
        assert step.rewards.eq(0).all() and envs.action_mask is step.action_mask
        assert torch.equal(step.action_mask, torch.eye(3, dtype=torch.bool)[step.obs[:, 0].long()])
        ends += int(step.terminations.sum())
    assert ends > (700 if mode == "sync" else 70)
    assert envs.step((step.obs[:, 0].long() + 1) % 3).rewards.eq(-1).all()


@pytest.mark.parametrize("source", ["obs", "info", "method"])
@pytest.mark.parametrize("joint", [False, True])
def test_masks_of_several_actions(make, joint, source):
    envs, rng = make("gym/toy_envs:Choosy-v0", source=source, joint=joint, sizes=(2, 4, 3)), np.random.default_rng(0)
    assert envs.action_space == (spaces.Discrete(24) if joint else spaces.MultiDiscrete([2, 4, 3]))
    envs.reset()
    for _ in range(100):
        step = envs.step(legal(envs, rng))
        assert step.rewards.eq(0).all() and step.action_mask.sum(1).eq(1 if joint else 3).all()
    if joint:
        assert step.action_mask.int().argmax(1).tolist() == step.obs[:, 0].tolist(), "combinations are in C order"


def test_two_by_two_is_one_entry_for_each_value(make):
    envs = make("gym/toy_envs:Choosy-v0", source="obs", sizes=(2, 2))
    assert envs.action_space == spaces.MultiDiscrete([2, 2])


@pytest.mark.parametrize("source", ["obs", "info", "method"])
@pytest.mark.parametrize("sizes, named", [((3,), "3 entries"), ((2, 4), r"6 entries.*shape \(2, 4\)")])
def test_masks_of_another_size_are_refused(make, source, sizes, named):
    with pytest.raises(InputError, match=rf"mask of shape \(5,\).*{named}") as error:
        make("gym/toy_envs:Choosy-v0", source=source, sizes=sizes, size=5)
    assert "\n" not in str(error.value)


def test_nothing_allowed_is_told_as_it_is(make):
    """What to do then is the algorithm's business (weight 0): the adapter neither hides it nor invents a choice."""
    envs = make("gym/toy_envs:NothingAllowed-v0", 2)
    envs.reset()
    assert not envs.action_mask[:, :2].any() and envs.action_mask[:, 2:].sum(1).eq(1).all()
    assert envs.step(torch.zeros(2, 2, dtype=torch.int64)).action_mask.sum(1).eq(2).all()


def test_a_mask_that_is_not_told_is_no_mask(make):
    envs = make("gym/toy_envs:ForgetfulMask-v0", source="info")
    envs.reset()
    with pytest.raises(InputError, match="not always later"):
        for _ in range(5):
            envs.step(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("task, lowest", [("BinPack-v2", 0.125), ("FlatPack-v0", 0.0), ("Tetris-v0", 0.0)])
def test_jumanji_combinations(make, task, lowest):
    """The mask has an entry for each combination; a forbidden one is punished with -1 and ends the episode."""
    envs, rng = make(f"envpool/Jumanji/{task}", 4), np.random.default_rng(0)
    assert isinstance(envs.action_space, spaces.Discrete) and envs.observation_space.dtype == np.float32
    envs.reset()
    assert min(envs.step(legal(envs, rng)).rewards.min().item() for _ in range(200)) >= lowest
    envs.reset()
    steps = [envs.step(envs.action_mask.int().argmin(1)) for _ in range(6)]
    assert min(step.rewards.min().item() for step in steps) == -1 and any(step.terminations.any() for step in steps)


def test_jumanji_2048(make):
    envs, rng, forbidden = make("envpool/Jumanji/Game2048-v1", 8), np.random.default_rng(0), 0
    obs, ends = envs.reset()[0], 0
    for _ in range(300):
        step = envs.step(legal(envs, rng))
        ends += int(step.terminations.sum())
        assert (step.obs != obs).any(1).all(), "a forbidden move leaves the board as it is"
        obs, worst = step.obs, envs.action_mask.int().argmin(1)
        forbidden += int((~envs.action_mask).any(1).sum())
    assert ends > 5 and forbidden > 100
    kept = envs.step(worst).obs.eq(obs).all(1)
    assert kept[~step.action_mask.gather(1, worst[:, None])[:, 0]].all()


def test_jumanji_tours_and_knapsacks(make):
    tours, rng = make("envpool/Jumanji/TSP-v1", 4), np.random.default_rng(0)
    tours.reset()
    for t in range(1, 61):  # a town that was visited before would end the tour early, at a price of 28
        step = tours.step(legal(tours, rng))
        assert step.terminations.eq(t % 20 == 0).all() and step.rewards.min() > -3
    knapsacks = make("envpool/Jumanji/Knapsack-v1", 4)
    knapsacks.reset()
    steps = [knapsacks.step(legal(knapsacks, rng)) for _ in range(100)]
    assert all(step.rewards.gt(0).all() for step in steps) and any(step.terminations.any() for step in steps)


def test_envpool_mask_in_info(make):
    envs, rng, ends = make("envpool/Play2048-v1", 8), np.random.default_rng(0), 0
    envs.reset()
    for _ in range(300):
        step = envs.step(legal(envs, rng))
        ends += int(step.terminations.sum())
        assert step.rewards.min() >= 0, "a forbidden move costs 1"
    assert ends > 5 and step.obs.shape == (8, 496)


# ---- Atari: lives, clipped rewards and the score of a game ----


def breakout_score(ram):
    """As the cartridge keeps it: binary coded decimals. https://github.com/Farama-Foundation/Arcade-Learning-Environment
    (src/ale/games/supported/Breakout.cpp)
    """
    low, high = ram[:, 77].astype(int), ram[:, 76].astype(int)
    return low % 16 + 10 * (low // 16) + 100 * (high % 16)


def test_breakout_lives_and_score(make):
    envs = make("envpool/Breakout-v5", 4, episodic_life=True, reward_clip=True)
    recorder, rng, totals = Recorder(envs), np.random.default_rng(0), np.zeros(4)
    envs.reset()
    lives, lost, scores = np.full(4, 5), 0, []
    for _ in range(900):
        actions = rng.integers(0, 4, 4)
        actions[rng.random(4) < 0.15] = 1
        step = envs.step(torch.from_numpy(actions))
        info, totals = recorder.result[4], totals + step.raw_rewards.numpy()
        assert torch.equal(step.rewards, step.raw_rewards.sign()) and step.final_obs is None
        assert np.array_equal(step.terminations, info["lives"] < lives) and not step.truncations.any()
        assert np.array_equal(step.episode_ends, info["lives"] == 0)
        assert np.array_equal(breakout_score(info["ram"]), totals)
        scores += totals[step.episode_ends.numpy()].tolist()
        lost += int((step.terminations & ~step.episode_ends).sum())
        totals, lives = totals * ~step.episode_ends.numpy(), info["lives"].copy()
        if step.terminations.any():  # the game goes on with a life less, or there is a new one
            ids, after = step.terminations.numpy(), recorder.restarted
            lives[ids] = np.where(lives[ids] == 0, 5, lives[ids])
            assert np.array_equal(after["lives"], lives[ids])
            assert ((after["elapsed_step"] == 0) == step.episode_ends.numpy()[ids]).all()
    assert len(scores) >= 15 and max(scores) > 1 and lost >= 60
    envs.reset()
    assert envs.step(idle(envs)).raw_rewards.shape == (4,) and (recorder.result[4]["lives"] == 5).all()


def test_atari_without_options_has_nothing_to_add(make):
    envs = make("envpool/Breakout-v5", 2)
    recorder = Recorder(envs)
    envs.reset()
    ends, lost = 0, 0
    for _ in range(300):
        step = envs.step(torch.tensor([1, 1]))
        assert step.raw_rewards is None and step.episode_ends is None
        ends += int(step.terminations.sum())
        lost += int((recorder.result[4]["lives"] < 5).any())
        assert np.array_equal(step.terminations, recorder.result[4]["lives"] == 0)
    assert ends and lost
    only_lives, only_clipped = (make("envpool/Breakout-v5", 2, **{k: True}) for k in ("episodic_life", "reward_clip"))
    for envs, none, given in ((only_lives, 8, 9), (only_clipped, 9, 8)):
        envs.reset()
        step = envs.step(torch.tensor([1, 1]))
        assert step._fields[8:10] == ("raw_rewards", "episode_ends")
        assert step[none] is None and step[given].shape == (2,)


def test_raw_rewards_are_not_clipped(make):
    envs = make("envpool/MsPacman-v5", 2, reward_clip=True)
    envs.reset()
    steps = [envs.step(torch.tensor([3, 3])) for _ in range(120)]
    assert {x for step in steps for x in step.raw_rewards.tolist()} >= {0.0, 10.0}
    assert all(torch.equal(step.rewards, step.raw_rewards.sign()) for step in steps)


def test_an_atari_game_that_is_cut_has_ended(make):
    envs = make("envpool/Breakout-v5", 2, episodic_life=True, max_episode_steps=20)
    envs.reset()
    for t in range(1, 41):
        step = envs.step(torch.tensor([0, 0]))
        assert step.truncations.eq(t % 20 == 0).all() and step.episode_ends.eq(t % 20 == 0).all()
        assert (step.final_obs is not None) == (t % 20 == 0)


# ---- families ----

VECTOR, IMAGE = torch.float32, torch.uint8
FAMILIES = {
    "envpool/Breakout-v5": ((4, 84, 84), [4]),
    "envpool/Pong-v5": ((4, 84, 84), [6]),
    "envpool/CartPole-v1": ((4,), [2]),
    "envpool/Acrobot-v1": ((6,), [3]),
    "envpool/MountainCar-v0": ((2,), [3]),
    "envpool/FrozenLake-v1": ((16,), [4]),
    "envpool/Taxi-v3": ((500,), [6]),
    "envpool/Blackjack-v1": ((3,), [2]),
    "envpool/NChain-v0": ((5,), [2]),
    "envpool/CliffWalking-v1": ((48,), [4]),
    "envpool/Catch-v0": ((50,), [3]),
    "envpool/LunarLander-v3": ((8,), [4]),
    "envpool/Highway-v0": ((25,), [5]),
    "envpool/Intersection-v0": ((105,), [3]),
    "envpool/Jumanji/Snake-v1": ((4720,), [4]),
    "envpool/Jumanji/JobShop-v0": ((500,), [21] * 10),
    "envpool/Jumanji/Sokoban-v0": ({"grid": (2, 10, 10), "step_count": (121,)}, [4]),
    "envpool/MiniGrid-DoorKey-5x5-v0": ({"direction": (4,), "image": (3, 7, 7), "mission": (96,)}, [7]),
    "envpool/D1Basic-v1": ((4, 84, 84), [6]),
    "envpool/gfootball/academy_empty_goal-v1": ((4, 72, 96), [19]),
    "gym/Taxi-v4": ((500,), [6]),
}


@pytest.mark.parametrize("env_id", FAMILIES)
def test_families(make, env_id):
    expected, sizes = FAMILIES[env_id]
    envs, rng = make(env_id, 2), np.random.default_rng(0)
    assert sizes_of(envs.action_space) == sizes
    seen = [envs.reset()[0], *(envs.step(legal(envs, rng)).obs for _ in range(20))]
    for obs in seen:
        parts = obs if isinstance(expected, dict) else {"": obs}
        shapes = expected if isinstance(expected, dict) else {"": expected}
        assert {key: tuple(x.shape[1:]) for key, x in parts.items()} == shapes
        assert all(x.dtype == (IMAGE if x.ndim == 4 else VECTOR) for x in parts.values())
    flat = [torch.cat([x.flatten() for x in (obs.values() if isinstance(obs, dict) else [obs])]) for obs in seen]
    assert any(not torch.equal(flat[0], x) for x in flat), "nothing has happened"


def test_taxi_tells_its_mask(make):
    envs = make("gym/Taxi-v4", 4)
    envs.reset()
    obs = envs.reset()[0]
    for _ in range(30):
        blocked = envs.action_mask.int().argmin(1)
        some = ~envs.action_mask.all(1)
        step = envs.step(blocked)
        assert torch.equal(step.obs[some], obs[some]), "a masked action leaves the state as it is"
        obs = step.obs
    assert envs.action_mask.shape == (4, 6)


@pytest.mark.parametrize(
    "task", ["CarRacing-v3", "Highway-v0", "MiniGrid-Empty-5x5-v0", "Jumanji/Game2048-v1", "D1Basic-v1", "Pong-v5"]
)
def test_time_limits_are_exact(make, task):
    envs = make(f"envpool/{task}", 2, max_episode_steps=4)
    obs = envs.reset()[0]
    for t in range(1, 13):
        step = envs.step(idle(envs) + (4 if task == "Highway-v0" else 0))  # 4 slows down: no crash so soon
        assert step.truncations.eq(t % 4 == 0).all() and not step.terminations.any()
        assert step.critic_obs is step.obs and step.final_critic_obs is step.final_obs
        assert (step.final_obs is None) == (t % 4 > 0)
        pairs = zip(step.obs.values(), obs.values(), strict=True) if isinstance(obs, dict) else [(step.obs, obs)]
        assert all(a.stride() == b.stride() for a, b in pairs), "a reset must not change how images lie in memory"


def test_tasks_that_know_their_limit_keep_it(make):
    """MiniGrid's reward falls with the share of the limit that was used; foraging reports its own limit as a cut."""
    import envpool

    envs, rng = make("envpool/MiniGrid-MemoryS7-v0", 16, 3), np.random.default_rng(0)
    raw = envpool.make("MiniGrid-MemoryS7-v0", env_type="gymnasium", num_envs=16, seed=3)
    envs.reset(), raw.reset()
    earned = 0
    for _ in range(60):
        actions = legal(envs, rng)
        rewards, ended = raw.step(actions.numpy())[1:3]
        assert np.array_equal(envs.step(actions).rewards, rewards)
        earned += (rewards > 0).sum()
        if ended.any():
            raw.reset(np.flatnonzero(ended))
    assert earned
    envs = make("envpool/Jumanji/LevelBasedForaging-v0", 2)
    envs.reset()
    steps = [envs.step(idle(envs)) for _ in range(100)]
    assert steps[-1].truncations.all() and steps[-1].final_obs is not None


def test_procgen_or_the_library_that_it_needs(make):
    try:
        ctypes.CDLL("libQt5Gui.so.5")
    except OSError:
        with pytest.raises(InputError, match="Qt") as error:
            make("envpool/CoinrunEasy-v0")
        assert "\n" not in str(error.value)
    else:
        envs, rng = make("envpool/CoinrunEasy-v0", 2), np.random.default_rng(0)
        assert envs.reset()[0].shape == (2, 3, 64, 64)
        assert envs.step(legal(envs, rng)).obs.dtype == torch.uint8


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_minigrid(make, capsys, mode):
    pytest.importorskip("minigrid")
    envs, rng = make("gym/MiniGrid-DoorKey-5x5-v0", 2, vectorization=mode), np.random.default_rng(0)
    assert "mission dropped" in capsys.readouterr().err
    assert {key: part.shape for key, part in envs.observation_space.items()} == {"direction": (4,), "image": (3, 7, 7)}
    single = gymnasium.make("MiniGrid-DoorKey-5x5-v0")
    image = single.reset(seed=0)[0]["image"]
    assert np.array_equal(envs.reset()[0]["image"][0], image.transpose(2, 0, 1))
    for _ in range(30):
        actions = legal(envs, rng)
        image = single.step(actions[0].item())[0]["image"]
        assert np.array_equal(envs.step(actions).obs["image"][0], image.transpose(2, 0, 1))


def test_minigrid_missing(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(InputError, match="pip install -r requirements-minigrid.txt"):
        make("gym/MiniGrid-DoorKey-5x5-v0")
