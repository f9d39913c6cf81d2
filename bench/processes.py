"""One run in one process and in several, on the same cores: what changes, and what it costs.

    python bench/processes.py --policy RUN [--processes 2] [--steps 6] [--rounds 3] [key=value ...]

RL of the recipe `quickstart` from RUN's SFT, in turns: one process with as many threads as there
are to be processes, then so many processes with one thread each. Prints which share of the
responses of each step is the same, how far apart the weights end over the way that they went, and
the median seconds of a step and of its parts, as ratios within each round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from safetensors.torch import load_file

from slipstream.checkpoint.layout import policy_folder
from slipstream.checkpoint.state import huggingface_folder
from slipstream.metrics.loggers import read_jsonl

PARTS = ("step", "gen", "update_actor", "sync")


def train(out: Path, policy: Path, steps: int, own: Sequence[str], more: Sequence[str]) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "slipstream.cli", "train", "--recipe", "quickstart"),
            *("trainer.mode=rl", "actor_rollout_ref.model.init=null"),
            f"actor_rollout_ref.model.path={policy}",
            *(f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={out}"),
            *("trainer.val_before_train=false", "trainer.test_freq=1000"),
            *("speculative.enable=false", "trainer.logger=[file]"),
            *(*own, *more),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def responses(out: Path, step: int) -> list[str]:
    lines = (out / "rollouts" / f"{step}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["output"] for line in lines]


def equal(one: Path, several: Path, step: int) -> float:
    """The share of a step's responses that is."""
    a, b = responses(one, step), responses(several, step)
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def seconds(out: Path) -> dict[str, float]:
    """Medians over the steps, but for the first one, which compiles and imports."""
    logged = [metrics for step, metrics in read_jsonl(out / "metrics.jsonl") if step > 1]
    return {p: median(m[f"timing_s/{p}"] for m in logged) for p in PARTS}


def apart(policy: Path, one: Path, several: Path, steps: int) -> float:
    """How far the weights are apart over the way that those of one process went."""
    start, a, b = (
        load_file(folder / "model.safetensors")
        for folder in (
            policy,
            *(huggingface_folder(out / f"global_step_{steps}") for out in (one, several)),
        )
    )
    between = sum(float((a[n] - b[n]).double().square().sum()) for n in a)
    way = sum(float((a[n] - start[n]).double().square().sum()) for n in a)
    return float((between / way) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True, type=Path, help="a run, or a model's folder")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args, more = parser.parse_known_args()
    sft = args.policy / "sft"
    policy = policy_folder(sft if sft.is_dir() else args.policy)
    count = args.processes
    ratios: dict[str, list[float]] = {part: [] for part in PARTS}
    for turn in range(args.rounds):
        with TemporaryDirectory() as folder:
            one, several = Path(folder) / "one", Path(folder) / "several"
            train(one, policy, args.steps, [f"trainer.num_threads={count}"], more)
            own = [f"trainer.nnodes={count}", "trainer.num_threads=1"]
            train(several, policy, args.steps, own, more)
            if not turn:
                pairs = [
                    (responses(one, s), responses(several, s)) for s in range(1, args.steps + 1)
                ]
                same = [sum(x == y for x, y in zip(a, b, strict=True)) / len(a) for a, b in pairs]
                print("same responses by step:", " ".join(f"{share:.0%}" for share in same))
                print(f"weights apart: {apart(policy, one, several, args.steps):.1e} of their way")
            a, b = seconds(one), seconds(several)
            for part in PARTS:
                ratios[part].append(b[part] / a[part])
            shown = ", ".join(f"{part} {a[part]:.3f} and {b[part]:.3f}" for part in PARTS)
            print(f"round {turn + 1}: seconds in one and in {count}: {shown}", flush=True)
    for part, found in ratios.items():
        print(
            f"{part}: {median(found):.2f}x the time of one ({min(found):.2f} to {max(found):.2f})"
        )


if __name__ == "__main__":
    main()
