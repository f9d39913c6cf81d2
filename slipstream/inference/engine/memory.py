"""The byte budget of keys and values, and the free memory of a device.

The free memory of a CPU is the memory that the system can provide without swapping, limited by the
control groups (containers) of the process. On a GPU it is the number that the driver reports.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from slipstream.errors import ConfigError
from slipstream.inference.engine.kv_store import make_store
from slipstream.metrics.resident import MemoryGroup, memory_groups
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
    """The budget in bytes: `wanted`, or if that is None, `share` of the memory that is free now.

    Raises ConfigError if the budget does not hold one sequence of `max_model_len` tokens.
    """
    one = make_store(config, dtype, device, 0, row_multiple=row_multiple(dtype, device))
    needed = one.size([max_model_len])
    if wanted is not None:
        budget, setting = wanted, f"{_ROLLOUT}.kv_cache_bytes={wanted}"
    else:
        free = free_bytes(device)
        budget = int(share * free)
        setting = f"{_ROLLOUT}.gpu_memory_utilization={share:g} of {free} free bytes"
    if budget < needed:
        raise ConfigError(
            f"{setting} is too small: keys and values of one sequence of {max_model_len} tokens "
            f"need {needed} bytes; raise it, lower data.max_prompt_length or "
            "data.max_response_length, or free other memory"
        )
    return budget


def free_bytes(device: torch.device) -> int:
    """Bytes of free memory of `device` that this process can use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = int(psutil.virtual_memory().available)
    return min([free, *_group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _group_limits(listing: Path, root: Path) -> list[int]:
    """Bytes that each control group of this process, and each of its parents, leaves free (Linux).

    Inactive file pages of a group count as free, because the kernel drops them first.
    """
    return [free for group in memory_groups(listing, root) for free in _free_in_group(group)]


def _free_in_group(group: MemoryGroup) -> list[int]:
    """Free bytes of one control group; empty if it has no limit or cannot be read."""
    try:
        most, used = group.limit.read_text().strip(), int(group.usage.read_text())
        stat = dict(line.split() for line in group.stat.read_text().splitlines())
    except OSError:
        # In a container, the listing may name groups that are not visible inside it.
        return []
    if most == "max":
        return []
    return [max(0, int(most) - used + int(stat.get(group.inactive, 0)))]
