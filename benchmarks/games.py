"""How well a policy of ppo_multiagent.py plays TicTacToe or Connect Four, against players that are known.

    python benchmarks/games.py --checkpoint runs/NAME/last.pt               # which game, the checkpoint knows

TicTacToe: every line that an opponent can choose, as first and as second player; a perfect player never loses.
Connect Four: games against random moves and alpha-beta searches of 2 and 4 plies that know won and lost, nothing
else, and choose among equal moves at random. The policy plays its most probable move, without search.
"""

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import ppo_multiagent
from common.errors import InputError


class Board:
    """A position of a game in which rows*columns cells are filled and `length` in a line win.

    stones: bits of the player to move and of the other. Cell (row, column) is bit column * (rows + 1) + row, row 0 at
    the bottom where stones fall (drop), so that the bit above a column is never set and lines do not wrap around.
    """

    def __init__(self, rows: int, columns: int, length: int, drop: bool):
        self.rows, self.columns, self.length, self.drop = rows, columns, length, drop
        self.own, self.theirs, self.cells = 0, 0, rows * columns

    def copy(self) -> "Board":
        other = object.__new__(Board)
        other.__dict__.update(self.__dict__)
        return other

    def bit(self, action: int) -> int:
        """Where an action's stone comes to lie; actions are columns, or else cells from the top left, row by row."""
        if not self.drop:
            row, column = divmod(action, self.columns)
            return 1 << column * (self.rows + 1) + self.rows - 1 - row
        taken, bottom = self.own | self.theirs, action * (self.rows + 1)
        return (taken + (1 << bottom)) & ((1 << self.rows + 1) - 1 << bottom)

    def actions(self) -> list[int]:
        if not self.drop:
            return [a for a in range(self.cells) if not self.bit(a) & (self.own | self.theirs)]
        top = self.rows - 1
        return [a for a in range(self.columns) if not (self.own | self.theirs) >> a * (self.rows + 1) + top & 1]

    def play(self, action: int) -> "Board":
        """The position after it, seen by the next player."""
        after = self.copy()
        after.own, after.theirs = self.theirs, self.own | self.bit(action)
        return after

    def lost(self) -> bool:
        """Whether the player who has just moved has a line."""
        for shift in (1, self.rows, self.rows + 1, self.rows + 2):
            line = self.theirs
            for _ in range(self.length - 1):
                line &= line >> shift
            if line:
                return True
        return False

    def full(self) -> bool:
        return (self.own | self.theirs).bit_count() == self.cells

    def planes(self) -> list[float]:
        """What the environment shows the player to move: [rows, columns, 2] from the top left, flattened, and a 1."""
        cells = [column * (self.rows + 1) + row for row in reversed(range(self.rows)) for column in range(self.columns)]
        return [float(stones >> cell & 1) for cell in cells for stones in (self.own, self.theirs)] + [1.0]


GAMES = {"envpool/TicTacToe-v1": (3, 3, 3, False), "envpool/ConnectFour-v1": (6, 7, 4, True)}


def negamax(board: Board, depth: int, alpha: float = -1.0, beta: float = 1.0) -> float:
    """Value for the player to move, in [-1, 1]; sooner wins are worth more. 0 beyond `depth` plies."""
    if board.lost():
        return -1.0 + 0.001 * (board.own | board.theirs).bit_count()
    if depth == 0 or board.full():
        return 0.0
    best = -1.0
    for action in board.actions():
        best = max(best, -negamax(board.play(action), depth - 1, -beta, -max(alpha, best)))
        if best >= beta:
            break
    return best


class Search:
    """Alpha-beta search of `depth` plies; 0 plays at random."""

    def __init__(self, depth: int, seed: int = 0):
        self.depth, self.random = depth, random.Random(seed)

    def __call__(self, boards: list[Board]) -> list[int]:
        return [self.choose(board) for board in boards]

    def choose(self, board: Board) -> int:
        actions = board.actions()
        if self.depth == 0:
            return self.random.choice(actions)
        values = [-negamax(board.play(action), self.depth - 1) for action in actions]
        return self.random.choice([a for a, value in zip(actions, values, strict=True) if value == max(values)])


class PolicyPlayer:
    """The most probable allowed action of a trained agent."""

    def __init__(self, agent: "ppo_multiagent.Agent"):
        self.agent = agent

    def __call__(self, boards: list[Board]) -> list[int]:
        count = boards[0].columns if boards[0].drop else boards[0].cells
        mask = torch.tensor([[action in set(board.actions()) for action in range(count)] for board in boards])
        obs = torch.tensor([board.planes() for board in boards])
        return self.agent.act(obs[:, None], True, mask[:, None])[:, 0].tolist()


def all_lines(player: PolicyPlayer, board: Board, moves: bool) -> Counter:
    """Games won, drawn and lost by player over every choice of its opponent; moves: it is player's turn."""
    if board.lost():
        return Counter(lost=1) if moves else Counter(won=1)
    if board.full():
        return Counter(drawn=1)
    actions = player([board]) if moves else board.actions()
    return sum((all_lines(player, board.play(action), not moves) for action in actions), Counter())


def match(players: tuple, board: Board, games: int) -> Counter:
    """Results for players[0], who moves first in all games."""
    boards, results, turn = [board] * games, Counter(), 0
    while boards:
        boards = [b.play(action) for b, action in zip(boards, players[turn](boards), strict=True)]
        results["won" if turn == 0 else "lost"] += sum(b.lost() for b in boards)
        results["drawn"] += sum(b.full() and not b.lost() for b in boards)
        boards, turn = [b for b in boards if not b.lost() and not b.full()], 1 - turn
    return results


def show(label: str, results: Counter) -> None:
    games = sum(results.values())
    score = (results["won"] + results["drawn"] / 2) / games
    counts = ", ".join(f"{results[name]} {name}" for name in ("won", "drawn", "lost"))
    print(f"{label}: {counts} of {games}; won {results['won'] / games:.1%}, score {score:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--games", type=int, default=500, help="of each kind and seat, in Connect Four")
    parser.add_argument("--depths", type=int, nargs="*", default=[0, 2, 4], help="plies of the searches; 0: random")
    args = parser.parse_args()
    try:
        agent, state = ppo_multiagent.load_agent(args.checkpoint)
    except InputError as error:
        parser.error(str(error))
    if state["env_id"] not in GAMES:
        parser.error(f"{args.checkpoint} is of {state['env_id']}; there are {', '.join(GAMES)}")
    torch.set_num_threads(1)
    player, board = PolicyPlayer(agent), Board(*GAMES[state["env_id"]])
    if not board.drop:
        for first in (True, False):
            show("first" if first else "second", all_lines(player, board, first))
        return
    print(f"first move: column {player([board])[0]} (the centre is {board.columns // 2})")
    for depth in args.depths:
        name, games = f"depth {depth}" if depth else "random", args.games
        as_first, as_second = match((player, Search(depth)), board, games), Counter()
        mirrored = match((Search(depth, 1), player), board, games)
        as_second.update(won=mirrored["lost"], drawn=mirrored["drawn"], lost=mirrored["won"])
        for label, results in (("first", as_first), ("second", as_second), ("both", as_first + as_second)):
            show(f"{name}, {label}", results)


if __name__ == "__main__":
    main()
