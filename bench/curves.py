"""Curves for the pages of docs/algorithms: RL with each algorithm, from one SFT checkpoint.

Trains as `slipstream bench learning` does (same settings, same prompts), validates along the way,
and draws one PNG for each algorithm: held-out accuracy with its interval, and the reward of each
step. A page whose picture exists gets a section that shows it. Without --policy a run of the recipe
`quickstart_small` is made first: RL begins where its SFT ended, and where its RL ended is the
teacher of `on_policy_distillation`. With 30 steps an algorithm takes minutes.
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
    # Groups of one, in which the two differ, do not come about here.
    "rloo": ("advantages/rloo.md", "advantages/rloo_vectorized.md"),
    # Estimator and loss of one paper, run together.
    "gpg": ("advantages/gpg.md", "losses/gpg.md"),
    **{name: (f"losses/{name}.md",) for name in (
        "vanilla", "gspo", "sapo", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl",
        "dro", "bypass_mode",
    )},
}  # fmt: skip
"""Name of a run of `bench learning` -> the pages that its curve belongs on."""

_ACCURACY = re.compile(r"val-core/(?P<source>.+)/acc/mean@(?P<n>\d+)")

Point = tuple[int, float, float, float]
"""Step, accuracy, and its 95 % interval's lower and upper end."""


def accuracies(lines: Sequence[Mapping[str, float]]) -> list[Point]:
    """Held-out accuracy of each validation, by the number of RL steps done before it."""
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
    """The PNG `out/name.png`. Raises DataError where nothing was logged."""
    # Imported here: matplotlib takes its time, and errors of usage should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from slipstream.metrics.picture import INK, MUTED

    rewards = [line[REWARD] for line in lines if REWARD in line]
    points = accuracies(lines)
    if not rewards or not points:
        raise DataError(
            f"{name}: nothing to draw, {len(rewards)} rewards and {len(points)} validations were "
            "logged; train for longer (--steps)"
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
    """Give `page` a section with `picture`, and `how` it came to be, unless it has it; whether the
    page was changed."""
    above = "../" * (len(page.relative_to(DOCS).parts) - 1)
    link = f"![held-out accuracy and reward by RL step]({above}{PICTURES}/{picture.name})"
    text = page.read_text(encoding="utf-8")
    if link in text:
        return False
    page.write_text(f"{text.rstrip()}\n\n## Curve\n\n{link}\n\n({how})\n", encoding="utf-8")
    return True


def policy_run(folder: Path, say: Callable[[str], None]) -> Path:
    """SFT and RL of the recipe `quickstart_small`, in `folder`."""
    say(f"SFT and RL of the recipe quickstart_small, in {folder}")
    line = [sys.executable, "-m", "slipstream.cli", "train", "--recipe", "quickstart_small"]
    run_line([*line, f"trainer.default_local_dir={folder}"], say)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Draw what each algorithm learns, for its page in docs/algorithms."
    )
    parser.add_argument("--policy", metavar="RUN", type=Path, help="run folder to begin from")
    parser.add_argument("--steps", metavar="N", type=positive, default=30, help="default: 30")
    parser.add_argument("--every", metavar="N", type=positive, default=5, help="validate so often")
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=PAGES, default=[])
    parser.add_argument("--out", metavar="DIR", type=Path, default=DOCS / PICTURES)
    parser.add_argument("settings", metavar="key=value", nargs="*", help="of every run")
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
            print(f"RL, {name}: {' '.join(RUNS[name]) or 'as it comes'}")
            target = Path(scratch) / name
            run_line(command(bench, name, target), print)
            print(draw(name, read_steps(target), args.out))
            if args.out == DOCS / PICTURES:
                for page in PAGES[name]:
                    show(DOCS / page, args.out / f"{name}.png", how)
    return 0


if __name__ == "__main__":
    sys.exit(main())
