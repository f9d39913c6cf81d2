"""VERL's reward functions and managers, which take and give batches.

A manager here is one of `slipstream.rewards`, called with a whole `DataProto`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import torch

from slipstream.build.data import decode_with, make_reward_manager
from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.config.tree import to_dict
from slipstream.errors import ConfigError, DataError
from slipstream.rewards.custom import get_custom_reward_fn as load_custom_reward_fn
from slipstream.rewards.data_proto import DataProto, DataProtoItem
from slipstream.rewards.functions import default_compute_score as score_by_source
from slipstream.rewards.load import load_reward_manager as load_manager
from slipstream.rewards.protocol import (
    SCORE_PART,
    GroupRewardManager,
    RewardManager,
    apply_score,
)
from slipstream.rewards.sandbox.fusion import FusionSandbox
from slipstream.rewards.sandbox.protocol import DEFAULT_LIMITS
from slipstream.rewards.signatures import RETURN_DICT, takes
from slipstream.types import Sample, Segment, Status

__all__ = [
    "BatchRewardManager",
    "DAPORewardManager",
    "DataProto",
    "DataProtoItem",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "VerlRewardManager",
    "compute_reward",
    "compute_reward_async",
    "config_of",
    "default_compute_score",
    "get_custom_reward_fn",
    "load_reward_manager",
]


_log = logging.getLogger(__name__)

_OF_SAMPLES = (
    "data_source",
    "reward_model",
    "extra_info",
    "uid",
    "raw_prompt",
    "response_text",
)
"""Fields of batches that samples have as their own."""


def config_of(config: Any, *, complete: bool = False, overrides: Sequence[str] = ()) -> Config:
    """A `Config` of what VERL's programs hold: its own, a mapping (OmegaConf's, too) of options in
    VERL's spellings, the path of a YAML file, or a list of overrides. `complete`: it must name a
    model. Raises ConfigError."""
    if isinstance(config, Config):
        if not overrides:
            return config
        config = to_dict(config)
    if isinstance(config, Mapping):
        from omegaconf import DictConfig, OmegaConf

        plain = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
        return load_config(overrides, values=cast("Mapping[str, Any]", plain), complete=complete)
    if isinstance(config, str | Path):
        return load_config(overrides, file=Path(config), complete=complete)
    given = [] if config is None else list(config)
    return load_config([*given, *overrides], complete=complete)


class VerlRewardManager:
    """A reward manager as VERL's trainer calls it: with a batch of finished responses."""

    def __init__(self, manager: RewardManager) -> None:
        self.manager = manager

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Rewards (B, R), each at the last token of its response; with `return_dict` a mapping of
        `reward_tensor` and `reward_extra_info`, lists by the name of a part.

        A batch with `rm_scores` has its rewards already. Failures are told in a warning and as the
        part `failed`. Raises RewardError where `reward_model.on_failure` is `stop`.
        """
        extra: dict[str, list[Any]] = {}
        if "rm_scores" in data.batch:
            scores = data.batch["rm_scores"]
        else:
            scores, extra = anyio.run(self.score, data)
        return {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores

    async def score(self, data: DataProto) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """What calling it gives, from a running event loop."""
        samples = samples_of(data)
        given = await self.manager.score_group(samples)
        groups: dict[str, list[Sample]] = {}
        for sample, score in zip(samples, given, strict=True):
            apply_score(sample, score)
            groups.setdefault(sample.uid, []).append(sample)
        if isinstance(self.manager, GroupRewardManager):
            for members in groups.values():
                await self.manager.finish_group(members)
        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        for row, sample in enumerate(samples):
            if sample.response_length:
                rewards[row, sample.response_length - 1] = sample.reward
        names = dict.fromkeys(n for s in samples for n in s.reward_parts if n != SCORE_PART)
        extra: dict[str, list[Any]] = {n: [s.reward_parts.get(n) for s in samples] for n in names}
        if any(score.answer is not None for score in given):
            extra["pred"] = [score.answer for score in given]
        failed = [score.failure for score in given if score.failure is not None]
        if failed:
            extra["failed"] = [score.failure for score in given]
            _log.warning("%d of %d responses failed: %s", len(failed), len(given), failed[0])
        return rewards, extra


def _manager_class(name: str) -> Callable[..., VerlRewardManager]:
    def make(
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> VerlRewardManager:
        """VERL's manager of this name around `compute_score`; None: the built-in functions.

        `num_examine` is accepted. Raises ConfigError for a `reward_fn_key` of another column: that
        is `data.reward_fn_key`, and batches have it as `data_source`.
        """
        if reward_fn_key != "data_source":
            raise ConfigError(
                f"reward_fn_key={reward_fn_key!r}: batches have the source of a row as "
                f"data_source; set data.reward_fn_key={reward_fn_key}, which fills it"
            )
        manager = load_manager(
            name,
            decode=decode_with(tokenizer),
            function=compute_score,
            reward_kwargs=reward_kwargs,
        )
        return VerlRewardManager(manager)

    return make


NaiveRewardManager = _manager_class("naive")
BatchRewardManager = _manager_class("batch")
DAPORewardManager = _manager_class("dapo")
PrimeRewardManager = _manager_class("prime")


def samples_of(data: DataProto) -> list[Sample]:
    """The rows of a batch as finished samples: from `responses` and `attention_mask` (or
    `response_mask`), with `prompts`, `data_source`, `reward_model`, `extra_info` and `uid` where
    they are; other fields that are no tensors go to `extra_info`. Raises KeyError without
    responses, and DataError for a `reward_model` or `extra_info` that is no mapping."""
    batch, others = data.batch, data.non_tensor_batch
    responses = batch["responses"]
    width = responses.shape[1]
    if "attention_mask" in batch:
        there = batch["attention_mask"][:, -width:] if width else responses
    else:
        there = batch.get("response_mask", torch.ones_like(responses))

    def field(name: str, row: int, default: Any) -> Any:
        value = others[name][row] if name in others else None
        return default if value is None else value

    def _object(name: str, row: int) -> dict[str, Any]:
        value = field(name, row, {})
        if not isinstance(value, Mapping):
            raise DataError(
                f"row {row}: {name} must be a mapping, got {type(value).__name__} {value!r}"
            )
        return dict(value)

    samples = []
    for row in range(len(data)):
        prompt: list[int] = []
        if "prompts" in batch:
            tokens = batch["prompts"][row]
            mask = batch["attention_mask"][row, : len(tokens)] if "attention_mask" in batch else 1
            prompt = tokens[torch.as_tensor(mask).bool().expand(len(tokens))].tolist()
        answer = responses[row][there[row].bool()].tolist()
        own = {key: values[row] for key, values in others.items() if key not in _OF_SAMPLES}
        samples.append(
            Sample(
                prompt=field("raw_prompt", row, ""),
                segments=[
                    Segment.given("prompt", prompt),
                    Segment.given("assistant", answer, loss=1.0),
                ],
                status=Status.COMPLETED,
                uid=str(field("uid", row, row)),
                data_source=str(field("data_source", row, "")),
                ground_truth=_object("reward_model", row).get("ground_truth"),
                extra_info={**own, **_object("extra_info", row)},
            )
        )
    return samples


def load_reward_manager(
    config: Any, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any
) -> VerlRewardManager:
    """The manager that `reward_model.*` and `custom_reward_function.*` of `config` name.

    `reward_kwargs` are added to `reward_model.reward_kwargs`. `num_examine` is accepted: responses
    are shown by `trainer.log_val_generations`. Raises ConfigError.
    """
    wanted = config_of(config)
    manager = make_reward_manager(wanted, tokenizer, more_kwargs=reward_kwargs)
    return VerlRewardManager(manager)


def compute_reward(
    data: DataProto, reward_fn: Callable[..., Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rewards (B, R) or (B,) of a batch, and what goes with them, by a manager or a function."""
    asked = {RETURN_DICT: True} if takes(reward_fn, RETURN_DICT) else {}
    returned = reward_fn(data, **asked)
    if isinstance(returned, Mapping):
        return returned["reward_tensor"], dict(returned.get("reward_extra_info") or {})
    if isinstance(returned, tuple):
        return returned[0], dict(returned[1])
    return returned, {}


async def compute_reward_async(
    data: DataProto,
    config: Any = None,
    tokenizer: Any = None,
    reward_fn: Callable[..., Any] | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """`compute_reward` while other tasks of the event loop go on: by `reward_fn`, else by the
    manager of `config` and `tokenizer`."""
    manager = reward_fn or load_reward_manager(config, tokenizer)
    if isinstance(manager, VerlRewardManager) and "rm_scores" not in data.batch:
        return await manager.score(data)
    return await anyio.to_thread.run_sync(compute_reward, data, manager)


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    """The function that `custom_reward_function` of `config` names, with its keywords; None where
    none is named. Raises ConfigError."""
    custom = config_of(config).custom_reward_function
    if custom.path is None:
        return None
    return load_custom_reward_fn(custom.path, custom.name, custom.reward_kwargs)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
) -> Any:
    """The built-in score of a `data_source`.

    `sandbox_fusion_url` and `memory_limit_mb`: where programs run. `concurrent_semaphore` is held
    during the call, where there is one.
    """
    call = functools.partial(score_by_source, data_source, solution_str, ground_truth, extra_info)
    if sandbox_fusion_url is not None:
        sandbox = _fusion_sandbox(sandbox_fusion_url, memory_limit_mb or DEFAULT_LIMITS.memory_mb)
        call = functools.partial(call, sandbox=sandbox)
    if concurrent_semaphore is None:
        return call()
    with concurrent_semaphore:
        return call()


@functools.cache
def _fusion_sandbox(url: str, memory_mb: int) -> FusionSandbox:
    return FusionSandbox(url, replace(DEFAULT_LIMITS, memory_mb=memory_mb))
