"""Learning curves from run folders: mean over seeds, and the band from the lowest to the highest.

    python benchmarks/plot.py curves.png "HalfCheetah-v5=runs/hc_*" "Hopper-v5=runs/hop_*"

Each LABEL=GLOB is one panel; the dashed line is a score given as LABEL:SCORE=GLOB.
"""

import argparse
import glob
import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402


def curve(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Env transitions and mean training return of one run."""
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    points = [(row["global_step"], row["charts/episodic_return"]) for row in rows if "charts/episodic_return" in row]
    steps, returns = np.array(points).T
    return steps, returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("groups", nargs="+")
    args = parser.parse_args()
    columns = min(3, len(args.groups))
    lines = -(-len(args.groups) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 3.5 * lines), squeeze=False)
    for ax, group in zip(axes.flat, args.groups, strict=False):
        label, pattern = group.split("=", 1)
        label, _, score = label.partition(":")
        curves = [curve(folder) for folder in sorted(glob.glob(pattern))]
        if not curves:
            raise SystemExit(f"{pattern}: no run folder matches")
        grid = np.linspace(max(c[0][0] for c in curves), min(c[0][-1] for c in curves), 200)
        returns = np.stack([np.interp(grid, *c) for c in curves])
        ax.plot(grid, returns.mean(0))
        ax.fill_between(grid, returns.min(0), returns.max(0), alpha=0.25)
        if score:
            ax.axhline(float(score), linestyle="--", color="gray", linewidth=1)
        seeds = f"{len(curves)} seed{'s' * (len(curves) > 1)}"
        ax.set(title=f"{label} ({seeds})", xlabel="env transitions", ylabel="training return")
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    for ax in axes.flat[len(args.groups) :]:
        ax.set_axis_off()
    figure.tight_layout()
    figure.savefig(args.output, dpi=90)


if __name__ == "__main__":
    main()
