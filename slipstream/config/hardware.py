"""Counts the GPUs of the machine without importing torch.

It reads device files, `nvidia-smi` and CUDA_VISIBLE_DEVICES, and knows no options. `load_config`
calls it if the caller passes no `Hardware`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """GPUs that this process may use."""

    gpus: int


def _listed_by_driver() -> int:
    """Return the number of GPUs that `nvidia-smi` lists, for systems without device files (WSL)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        result = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", result.stdout, flags=re.MULTILINE))


def _visible(setting: str, present: int) -> int:
    """Return how many of `present` GPUs are visible with CUDA_VISIBLE_DEVICES=`setting`.

    Like CUDA, it ignores all entries from the first invalid one.
    """
    count = 0
    for entry in setting.split(","):
        name = entry.strip()
        known = name.isdigit() and int(name) < present
        if not known and not name.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return min(count, present)


def detect_hardware(device_dir: Path = Path("/dev")) -> Hardware:
    """Count the GPUs by device files, or by `nvidia-smi` if there are no device files.

    GPUs that CUDA_VISIBLE_DEVICES hides do not count.
    """
    present = sum(1 for path in device_dir.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    if not present and device_dir == Path("/dev"):
        present = _listed_by_driver()
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = present if setting is None else _visible(setting, present)
    return Hardware(gpus=gpus)
