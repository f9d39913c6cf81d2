"""Time and page size of `slipstream report` for a long run.

    python bench/report.py runs/quickstart --steps 1000

Makes a run of that length by repeating the steps of a real run, with their rollouts, and draws its
report several times.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median


def lengthen(run: Path, folder: Path, steps: int) -> None:
    """Copy `run` to `folder` with its RL steps repeated until there are `steps`."""
    ignored = shutil.ignore_patterns("global_step_*", "rollouts", "validation", "tensorboard")
    shutil.copytree(run, folder, ignore=ignored, dirs_exist_ok=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > 0]
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as out:
        for step in range(1, steps + 1):
            source = lines[(step - 1) % len(lines)]
            out.write(json.dumps({**source, "step": step}) + "\n")
            for kind in (Path("rollouts"), Path("rollouts", "tokens")):
                path = run / kind / f"{source['step']}.jsonl"
                if path.exists():
                    (folder / kind).mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, folder / kind / f"{step}.jsonl")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "run"
        lengthen(args.run, folder, args.steps)
        command = [sys.executable, "-m", "slipstream.cli", "report", str(folder)]
        times = []
        for _ in range(args.rounds):
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - started)
        size = (folder / "report.html").stat().st_size
    print(
        f"{args.steps} steps: {median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, "
        f"{args.rounds} rounds; promised: below 5 s), {size / 1e6:.2f} MB (promised: below 5 MB)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
