"""A process killed at any moment of a save leaves a complete checkpoint."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from slipstream.checkpoint.manager import CheckpointManager, verify

KILLS = 30
COMPLETE_SAVES = 3
"""At most this many saves of a process are complete before the wait for its kill begins."""
WINDOW = 3.0
"""A process is killed within the time of this many saves."""

# Each save writes its number into three files and prints it before and after. Every third save
# replaces the previous step.
PROGRAM = """
import sys
from pathlib import Path
from slipstream.checkpoint.manager import CheckpointManager

manager = CheckpointManager(Path(sys.argv[1]), keep=2)
count = int(sys.argv[2])
while True:
    count += 1
    step = count - (count % 3 == 0)

    def write(folder):
        (folder / "actor").mkdir()
        for name in ("a", "b", "actor/c"):
            (folder / name).write_text(str(count) * 2000)

    print("begin", count, step, flush=True)
    manager.save(step, write)
    print("end", count, step, flush=True)
"""


def test_latest_is_a_complete_checkpoint_after_every_kill(tmp_path: Path) -> None:
    root = tmp_path / "run"
    manager = CheckpointManager(root, keep=2)
    rng = random.Random(0)
    count = 0
    newest = 0
    killed_while_saving = 0
    began = time.perf_counter()
    CheckpointManager(tmp_path / "timed", keep=2).save(1, lambda folder: None)
    duration = time.perf_counter() - began
    for kill in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(root), str(count)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            # The moment of the kill follows the progress of the process, not the clock: a save may
            # take milliseconds, or seconds on a busy machine. The first process is killed before
            # there is a checkpoint.
            for _ in range(rng.randrange(COMPLETE_SAVES + 1) if kill else 0):
                began = time.perf_counter()
                lines += [process.stdout.readline() for _ in ("end", "begin")]
                # Lines that were buffered are read in no time.
                duration = max(0.9 * duration, time.perf_counter() - began)
            time.sleep(rng.uniform(0, WINDOW if kill else 0.5) * duration)
            process.kill()
            lines += process.stdout.readlines()
        events = [line.split() for line in lines if line.endswith("\n")]
        started = max(int(number) for kind, number, _ in events if kind == "begin")
        ended = max((int(number) for kind, number, _ in events if kind == "end"), default=newest)
        killed_while_saving += started > ended

        path = manager.latest()
        count = started
        if path is None:
            assert ended == 0
            continue
        verify(path)
        saved = {(path / name).read_text() for name in ("a", "b", "actor/c")}
        found = [n for n in {ended, started} if saved == {str(n) * 2000}]
        assert len(found) == 1
        newest = found[0]
    assert killed_while_saving >= KILLS // 3
    manager.save(count + 1, lambda folder: None)
    assert len(manager.steps()) == 2
    assert [p for p in root.iterdir() if p.is_dir() and p.name.startswith(".")] == []
