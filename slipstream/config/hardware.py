"""What the machine has, found without importing torch.

Knows device files, environment variables and `nvidia-smi`; not what a run wants of them. Called by
`load.load_config` when no `Hardware` is given; tests pass their own.
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
    """GPUs that `nvidia-smi` lists: where there are no device files, as under WSL."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", done.stdout, flags=re.MULTILINE))


def _visible(setting: str, present: int) -> int:
    """How many of `present` GPUs CUDA_VISIBLE_DEVICES leaves; CUDA stops at the first bad entry."""
    count = 0
    for entry in setting.split(","):
        name = entry.strip()
        known = name.isdigit() and int(name) < present
        if not known and not name.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return min(count, present)


def detect_hardware(device_dir: Path = Path("/dev")) -> Hardware:
    """Count GPUs by device files (else by `nvidia-smi`), less those CUDA_VISIBLE_DEVICES hides."""
    present = sum(1 for path in device_dir.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    if not present and device_dir == Path("/dev"):
        present = _listed_by_driver()
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = present if setting is None else _visible(setting, present)
    return Hardware(gpus=gpus)
