"""How many bytes keys and values may take, a share of the memory that is free, and giving back.

On CPUs free is what the system can give without swapping, and no more than the limits of the
control groups (containers) that the process is in; on a GPU what the driver says.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from slipstream.errors import ConfigError
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.models.config import ModelConfig
from slipstream.models.numerics import row_multiple

_ROLLOUT = "actor_rollout_ref.rollout"


def kv_budget(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int,
    wanted: int | None,
    share: float,
) -> int:
    """`wanted` bytes, or else `share` of what is free now.

    Raises ConfigError where that does not hold one sequence of `max_model_len` tokens.
    """
    one = KVStore(config, dtype, device, 0, row_multiple=row_multiple(dtype, device))
    needed = one.size(1, max_model_len)
    if wanted is not None:
        budget, setting = wanted, f"{_ROLLOUT}.kv_cache_bytes={wanted}"
    else:
        free = free_bytes(device)
        budget = int(share * free)
        setting = f"{_ROLLOUT}.gpu_memory_utilization={share:g} of {free} free bytes"
    if budget < needed:
        raise ConfigError(
            f"{setting} is too small: keys and values of one sequence of {max_model_len} tokens "
            f"take {needed} bytes; raise it, or lower data.max_prompt_length, "
            "data.max_response_length or what else is in memory"
        )
    return budget


def free_bytes(device: torch.device) -> int:
    """Memory that `device` has left for this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = int(psutil.virtual_memory().available)
    return min([free, *_group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _group_limits(listing: Path, root: Path) -> list[int]:
    """What the control groups of this process, and those around them, leave free (Linux).

    A group's pages of files that nobody has used lately count as free: they go first.
    """
    if not listing.exists():
        return []
    free = []
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "memory"
        else:
            continue
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top):
                free += _left_of(group, *names)
    return free


def _left_of(group: Path, limit: str, usage: str, inactive: str) -> list[int]:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        # In a container the listing may name groups that are not visible from inside.
        return []
    if most == "max":
        return []
    return [max(0, int(most) - used + int(stat.get(inactive, 0)))]


class FreedMemory:
    """What was freed, and what the C library keeps of it for later: given back to the system.

    Rollouts leave pieces of all sizes behind, so that without it a process grows by some percent
    over thousands of them.
    """

    EVERY_SECONDS = 0.5
    """At most so often: it takes some milliseconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, -math.inf
        # Only glibc has it.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def give_back(self) -> bool:
        """Do it, unless it was done just now. Returns whether it was."""
        now = self._clock()
        if self._trim is None or now - self._last < self.EVERY_SECONDS:
            return False
        self._last = now
        self._trim(0)
        return True
