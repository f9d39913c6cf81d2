"""Keys of VERL whose meaning depends on other settings: batches of generation, TIS, adapters.

`apply_combined` translates them once all sources are read. Called by `load`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slipstream.config.tree import is_count, show
from slipstream.config.verl_defaults import is_default

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"
_KWARGS = "reward_model.reward_kwargs"

GEN_BATCH = "data.gen_batch_size"
TIS_CAP = f"{_ACTOR}.tis_imp_ratio_cap"
LORA_RANK, LORA_ALPHA = f"{_MODEL}.lora.rank", f"{_MODEL}.lora.alpha"

MIN_LR = (f"{_ACTOR}.optim.min_lr", "critic.optim.min_lr", "sft.optim.min_lr")

COMBINED = (GEN_BATCH, TIS_CAP, LORA_RANK, LORA_ALPHA, *MIN_LR)
"""Keys that this module translates."""

SEQUENCE_PARALLEL = {
    f"{section}.{key}": section
    for section in (_ACTOR, "critic")
    for key in (
        "ulysses_sequence_parallel_size",
        "fsdp_config.ulysses_sequence_parallel_size",
        "fsdp.ulysses_sequence_parallel_size",
        "megatron.context_parallel_size",
    )
}
"""Keys without effect of their own that this module reads -> their section."""

Get = Callable[[str], Any]
Set = Callable[[str, Any], None]


def apply_combined(given: Mapping[str, Any], get: Get, set_: Set) -> Iterator[tuple[str, bool]]:
    """Translate the keys `given`. Yield `(message, problem)`: a problem, or a notice.

    `get` and `set_` read and write our options.
    """
    yield from _gen_batch(given.get(GEN_BATCH), get, set_)
    yield from _tis(given.get(TIS_CAP), get, set_)
    yield from _lora(given, get, set_)
    for section in (_ACTOR, "critic"):
        yield from _token_budget(section, given, get, set_)
    for key in MIN_LR:
        yield from _min_lr(key, given.get(key), get, set_)
    yield from _overlong(get)


def _gen_batch(size: Any, get: Get, set_: Set) -> Iterator[tuple[str, bool]]:
    batch = get("data.train_batch_size")
    if size is None or size == batch:
        return
    if not is_count(size) or not is_count(batch):
        yield f"{GEN_BATCH}={show(size)}: set it to a number of prompts, or to null", True
        return
    if get("algorithm.filter_groups.enable") is not True:
        # VERL's data loader draws batches of this size, and nothing reduces them.
        set_("data.train_batch_size", size)
        yield (
            f"{GEN_BATCH}={size}: without algorithm.filter_groups.enable, a step trains on all of "
            f"these prompts, so data.train_batch_size={size} (instead of {batch})",
            False,
        )
        return
    limit = "algorithm.filter_groups.max_num_gen_batches"
    tries, more = get(limit), ""
    if is_count(tries):
        set_(limit, math.ceil(tries * size / batch))
        more = f"; {limit}={get(limit)} (instead of {tries}) allows the same number of prompts"
    yield (
        f"{GEN_BATCH}={size} has no effect: rejected groups are replaced one by one, until "
        f"data.train_batch_size={batch} groups are accepted{more}",
        False,
    )


def _tis(cap: Any, get: Get, set_: Set) -> Iterator[tuple[str, bool]]:
    if cap is None or cap == -1:
        return
    if isinstance(cap, bool) or not isinstance(cap, int | float) or cap <= 0:
        yield f"{TIS_CAP}={show(cap)}: set it to a number above 0, or to -1", True
        return
    if (level := get(f"{_CORRECTION}.rollout_is")) is not None:
        yield (
            f"{TIS_CAP}={show(cap)} has no effect: {_CORRECTION}.rollout_is={show(level)} is set",
            False,
        )
        return
    set_(f"{_CORRECTION}.rollout_is", "token")
    set_(f"{_CORRECTION}.rollout_is_threshold", cap)
    yield (
        f"{TIS_CAP}={show(cap)} is an alias of {_CORRECTION}.rollout_is=token and "
        f"{_CORRECTION}.rollout_is_threshold={show(cap)}",
        False,
    )


def _lora(given: Mapping[str, Any], get: Get, set_: Set) -> Iterator[tuple[str, bool]]:
    rank, alpha = given.get(LORA_RANK), given.get(LORA_ALPHA)
    if rank in (None, 0):
        if alpha is not None and not is_default(LORA_ALPHA, alpha):
            yield f"{LORA_ALPHA}={show(alpha)} has no effect without {LORA_RANK}", False
        return
    set_(f"{_MODEL}.lora_rank", rank)
    if alpha is not None:
        set_(f"{_MODEL}.lora_alpha", alpha)
    yield f"{LORA_RANK} and {LORA_ALPHA} are aliases of {_MODEL}.lora_rank and lora_alpha", False


def _token_budget(
    section: str, given: Mapping[str, Any], get: Get, set_: Set
) -> Iterator[tuple[str, bool]]:
    """Raise a budget of tokens per GPU that holds only a part of the longest sequence.

    In VERL, the processes of a sequence add up their budgets. Here one process holds the sequence.
    """
    sizes = [given[key] for key, of in SEQUENCE_PARALLEL.items() if of == section and key in given]
    size = max((size for size in sizes if is_count(size)), default=1)
    key = f"{section}.ppo_max_token_len_per_gpu"
    lengths = (get("data.max_prompt_length"), get("data.max_response_length"))
    budget = get(key)
    if not all(map(is_count, (budget, *lengths))):
        return
    needed = sum(lengths)
    if budget < needed <= budget * size:
        set_(key, needed)
        yield (
            f"{key}={budget} is for a part of a sequence, which {size} processes share in VERL; "
            f"one process holds a whole sequence, so {key}={needed}",
            False,
        )


def _min_lr(key: str, least: Any, get: Get, set_: Set) -> Iterator[tuple[str, bool]]:
    """Translate Megatron's least learning rate to a share of the peak."""
    section = key.removesuffix(".min_lr")
    peak = get(f"{section}.lr")
    if least is None or least == 0:
        return
    numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in (least, peak))
    if not numbers or not 0 <= least <= peak:
        yield f"{key}={show(least)}: set it to a number from 0 to {section}.lr={show(peak)}", True
        return
    set_(f"{section}.min_lr_ratio", least / peak)
    yield f"{key}={show(least)} is an alias of {section}.min_lr_ratio={least / peak:g}", False


def _overlong(get: Get) -> Iterator[tuple[str, bool]]:
    """Fill in what VERL's DAPO recipe passes to its reward manager.

    It passes the buffer to all managers, and only `dapo` has one. The length of responses is
    `data.max_response_length`.
    """
    kwargs, manager = get(_KWARGS), get("reward_model.reward_manager")
    if not isinstance(kwargs, dict) or "overlong_buffer_cfg" not in kwargs:
        return
    buffer = kwargs["overlong_buffer_cfg"]
    if buffer is not None and not isinstance(buffer, Mapping):
        yield (
            f"{_KWARGS}.overlong_buffer_cfg={show(buffer)}: set its entries, such as "
            f"{_KWARGS}.overlong_buffer_cfg.enable=true",
            True,
        )
        return
    if manager == "dapo":
        kwargs.setdefault("max_resp_len", get("data.max_response_length"))
    elif manager == "naive":
        del kwargs["overlong_buffer_cfg"]
        kwargs.pop("max_resp_len", None)
        if buffer and buffer.get("enable"):
            yield (
                f"{_KWARGS}.overlong_buffer_cfg has no effect with "
                "reward_model.reward_manager=naive",
                False,
            )
