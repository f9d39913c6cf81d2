"""Curves for the pages in docs/algorithms: RL with each algorithm, from one SFT checkpoint.

The runs have the settings and prompts of `slipstream bench learning`, with validations in between.
For each algorithm the script draws one PNG: held-out accuracy with its interval, and the reward of
each step. It adds a section with the picture to the page of the algorithm. Without --policy it
first runs the recipe `quickstart_small`. RL starts from that run's SFT policy; the run's last
policy is the teacher of `on_policy_distillation`. With 30 steps, an algorithm takes minutes.
`python bench/curves.py [--policy RUN] [--steps N] [--only NAME ...] [--out DIR] [key=value ...]`
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.learning import REWARD, RUNS, LearningBench, command, read_steps
from slipstream.bench.rl_line import run_line
from slipstream.config.launch import exit_status, positive
from slipstream.errors import DataError

DOCS = Path(__file__).parents[1] / "docs" / "algorithms"
PICTURES = "curves"

PAGES: dict[str, tuple[str, ...]] = {
    **{name: (f"advantages/{name}.md",) for name in (
        "grpo", "grpo_passk", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
        "gae", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline",
        "on_policy_distillation",
    )},
    # The two pages differ only for groups of one response, which these runs do not have.
    "rloo": ("advantages/rloo.md", "advantages/rloo_vectorized.md"),
    # An estimator and a loss of the same paper, in one run.
    "gpg": ("advantages/gpg.md", "losses/gpg.md"),
    **{name: (f"losses/{name}.md",) for name in (
        "vanilla", "gspo", "sapo", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl",
        "dro", "bypass_mode",
    )},
}  # fmt: skip
"""Name of a run of `bench learning` -> the pages that show its curve."""

_ACCURACY = re.compile(r"val-core/(?P<source>.+)/acc/mean@(?P<n>\d+)")

Point = tuple[int, float, float, float]
"""Step, accuracy, and its 95 % interval's lower and upper end."""


def accuracies(lines: Sequence[Mapping[str, float]]) -> list[Point]:
    """Held-out accuracy of each validation, with the number of RL steps before it."""
    points: list[Point] = []
    step = 0
    for line in lines:
        step += "timing_s/step" in line
        for name, value in line.items():
            if match := _ACCURACY.fullmatch(name):
                aux = f"val-aux/{match['source']}/acc/mean@{match['n']}"
                low, high = (line.get(f"{aux}/{end}", value) for end in ("ci_low", "ci_high"))
                points.append((step, value, low, high))
    return points


def draw(name: str, lines: Sequence[Mapping[str, float]], out: Path) -> Path:
    """Draw the PNG `out/name.png`. Raises DataError if nothing was logged."""
    # Imported here because it is slow, and usage errors should appear at once.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from slipstream.metrics.picture import INK, MUTED

    rewards = [line[REWARD] for line in lines if REWARD in line]
    points = accuracies(lines)
    if not rewards or not points:
        raise DataError(
            f"{name}: cannot draw {len(rewards)} rewards and {len(points)} validations; raise "
            "--steps"
        )
    figure = Figure(figsize=(7.2, 2.4), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True)
    steps, accuracy, low, high = zip(*points, strict=True)
    left.fill_between(steps, low, high, color=INK, alpha=0.15, linewidth=0)
    left.plot(steps, accuracy, color=INK, marker="o", markersize=3, linewidth=1.4)
    left.set_title("held-out accuracy, 95 % interval", fontsize=9)
    right.plot(range(1, len(rewards) + 1), rewards, color=MUTED, linewidth=1.2)
    right.set_title("mean reward of a step", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("RL step", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(color="#e5e7eb", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.png")
    return out / f"{name}.png"


def show(page: Path, picture: Path, how: str) -> bool:
    """Add a section with `picture` and the text `how` to `page`, unless it has one.

    Returns whether the page was changed.
    """
    above = "../" * (len(page.relative_to(DOCS).parts) - 1)
    link = f"![held-out accuracy and reward by RL step]({above}{PICTURES}/{picture.name})"
    text = page.read_text(encoding="utf-8")
    if link in text:
        return False
    page.write_text(f"{text.rstrip()}\n\n## Curve\n\n{link}\n\n({how})\n", encoding="utf-8")
    return True


def policy_run(folder: Path, say: Callable[[str], None]) -> Path:
    """Run the recipe `quickstart_small` (SFT and RL) in `folder`."""
    say(f"SFT and RL of the recipe quickstart_small, in {folder}")
    line = [sys.executable, "-m", "slipstream.cli", "train", "--recipe", "quickstart_small"]
    run_line([*line, f"trainer.default_local_dir={folder}"], say)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Draw the learning curve of each algorithm, for its page in docs/algorithms."
    )
    parser.add_argument("--policy", metavar="RUN", type=Path, help="run folder to start from")
    parser.add_argument("--steps", metavar="N", type=positive, default=30, help="default: 30")
    parser.add_argument(
        "--every",
        metavar="N",
        type=positive,
        default=5,
        help="RL steps between validations (default: 5)",
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=PAGES, default=[])
    parser.add_argument("--out", metavar="DIR", type=Path, default=DOCS / PICTURES)
    parser.add_argument("settings", metavar="key=value", nargs="*", help="settings of every run")
    args = parser.parse_args(argv)
    return exit_status(lambda: _draw_all(args), debug=False)


def _draw_all(args: argparse.Namespace) -> int:
    how = (
        f"One run of {args.steps} steps, from the SFT of the quickstart's smaller recipe: `python "
        f"bench/curves.py --steps {args.steps} --every {args.every}`."
    )
    with TemporaryDirectory() as scratch:
        policy = args.policy or policy_run(Path(scratch) / "policy", print)
        bench = LearningBench(
            policy=policy,
            steps=args.steps,
            only=tuple(args.only),
            settings=(f"trainer.test_freq={args.every}", *args.settings),
        )
        for name in args.only or PAGES:
            print(f"RL, {name}: {' '.join(RUNS[name]) or 'default settings'}")
            target = Path(scratch) / name
            run_line(command(bench, name, target), print)
            print(draw(name, read_steps(target), args.out))
            if args.out == DOCS / PICTURES:
                for page in PAGES[name]:
                    show(DOCS / page, args.out / f"{name}.png", how)
    return 0


if __name__ == "__main__":
    sys.exit(main())
