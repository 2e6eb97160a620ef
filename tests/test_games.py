"""benchmarks/games.py: the yardstick players against positions whose values are known, and against envpool's rules."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import games

from common import envs as vecenvs

TICTACTOE, CONNECT_FOUR = games.GAMES["envpool/TicTacToe-v1"], games.GAMES["envpool/ConnectFour-v1"]


def played(game, moves):
    board = games.Board(*game)
    for move in moves:
        assert move in board.actions() and not board.lost()
        board = board.play(move)
    return board


@pytest.mark.parametrize("env_id", list(games.GAMES))
def test_rules_are_envpools(env_id):
    """The same observations, legal moves, ends and winners over random games, seen by both players."""
    envs = vecenvs.make(env_id, 8, torch.device("cpu"), 5, multi_agent=True)
    obs, _ = envs.reset()
    boards, ended = [games.Board(*games.GAMES[env_id])] * 8, Counter()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        seat = envs.acting.long().argmax(1)
        for n in range(8):
            if envs.alive[n].all():
                assert obs[n, seat[n]].tolist() == boards[n].planes()
                assert envs.action_mask[n, 0].nonzero().flatten().tolist() == boards[n].actions()
        actions = torch.multinomial(envs.action_mask[:, 0].float(), 1, generator=generator)
        before, step = envs.alive.all(1), envs.step(actions.expand(-1, 2))
        for n in range(8):
            if not before[n]:  # the row after a game
                boards[n] = games.Board(*games.GAMES[env_id])
                continue
            boards[n] = boards[n].play(actions[n].item())
            over = boards[n].lost() or boards[n].full()
            assert step.terminations[n].item() == over and not step.truncations[n]
            if boards[n].lost():
                assert step.rewards[n, seat[n]] == 1 and step.rewards[n, 1 - seat[n]] == -1
                ended["won"] += 1
            elif over:
                assert (step.rewards[n] == 0).all()
                ended["drawn"] += 1
        obs = step.obs
    assert ended["won"] > 20 and (ended["drawn"] > 3 or env_id != "envpool/TicTacToe-v1")


def test_lines():
    assert played(TICTACTOE, [0, 3, 1, 4, 2]).lost() and played(TICTACTOE, [0, 1, 4, 2, 8]).lost()
    assert played(TICTACTOE, [2, 0, 4, 1, 6]).lost() and not played(TICTACTOE, [0, 3, 1, 4]).lost()
    assert played(CONNECT_FOUR, [0, 1, 0, 1, 0, 1, 0]).lost()  # a column
    assert played(CONNECT_FOUR, [0, 0, 1, 1, 2, 2, 3]).lost()  # a row
    assert played(CONNECT_FOUR, [0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3]).lost()  # a rising diagonal
    assert played(CONNECT_FOUR, [6, 5, 5, 4, 4, 3, 4, 3, 3, 0, 3]).lost()  # a falling one
    # the top of one column and the bottom of the next are no line
    stacked = games.Board(*CONNECT_FOUR)
    for row, column in ((5, 0), (4, 0), (0, 1), (1, 1)):
        stacked.theirs |= 1 << column * 7 + row
    assert not stacked.lost()
    # nor are the end of a row and the beginning of the one above
    wrapped = games.Board(*CONNECT_FOUR)
    for row, column in ((0, 5), (0, 6), (1, 0), (1, 1)):
        wrapped.theirs |= 1 << column * 7 + row
    assert not wrapped.lost()


def test_a_full_column_and_a_full_board():
    board = played(CONNECT_FOUR, [3] * 6)
    assert board.actions() == [0, 1, 2, 4, 5, 6] and not board.full()
    drawn = played(TICTACTOE, [0, 1, 2, 4, 3, 5, 7, 6, 8])
    assert drawn.full() and drawn.actions() == [] and not drawn.lost()


def test_search_wins_at_once_and_blocks():
    player = games.Search(2)
    assert player.choose(played(CONNECT_FOUR, [0, 1, 0, 1, 0, 1])) == 0  # wins, and does not block
    assert player.choose(played(CONNECT_FOUR, [0, 1, 0, 1, 0])) == 0  # blocks
    assert player.choose(played(TICTACTOE, [0, 4, 1])) == 2


def test_search_sees_as_far_as_its_depth():
    """Two open stones in the bottom row: a third with both ends free wins in three plies, which two do not show."""
    board = played(CONNECT_FOUR, [2, 2, 3, 3])
    values = {depth: games.negamax(board, depth) for depth in (2, 3)}
    assert values[2] == 0 and values[3] > 0.9
    assert {games.Search(3, seed).choose(board) for seed in range(20)} <= {1, 4}
    assert {games.Search(2, seed).choose(board) for seed in range(40)} > {1, 4}
    assert {games.Search(0, seed).choose(board) for seed in range(80)} == set(range(7))
    assert games.negamax(played(CONNECT_FOUR, [0, 1, 0, 1, 0, 1, 0]), 0) < -0.9


def test_perfect_tictactoe_is_a_draw():
    assert games.negamax(games.Board(*TICTACTOE), 9) == 0
    perfect = games.Search(9)
    for first in (True, False):
        lines = games.all_lines(perfect, played(TICTACTOE, [] if first else [4]), True)
        assert lines["lost"] == 0 and lines["drawn"] > 0
    bad = games.all_lines(games.Search(0), games.Board(*TICTACTOE), False)
    assert bad["lost"] > 0 and bad["won"] > 0


def test_a_match_counts_for_the_first_player():
    strong, weak = games.Search(2), games.Search(0, 1)
    board = games.Board(*CONNECT_FOUR)
    results, mirrored = games.match((strong, weak), board, 60), games.match((weak, strong), board, 60)
    assert results["won"] >= 45 and mirrored["lost"] >= 45
    assert sum(results.values()) == sum(mirrored.values()) == 60
