"""verl's reward functions and reward managers, which map a batch to a batch of rewards.

A manager here wraps one of `slipstream.rewards` and is called with a whole `DataProto`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, cast

import anyio
import torch

from slipstream.build.data import make_reward_manager
from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.config.tree import to_dict
from slipstream.errors import DataError
from slipstream.rewards.custom import get_custom_reward_fn as load_custom_reward_fn
from slipstream.rewards.data_proto import DataProto, DataProtoItem
from slipstream.rewards.functions import default_compute_score as score_by_source
from slipstream.rewards.protocol import (
    SCORE_PART,
    GroupRewardManager,
    RewardManager,
    apply_score,
)
from slipstream.rewards.sandbox.fusion import FusionSandbox
from slipstream.rewards.sandbox.protocol import DEFAULT_LIMITS
from slipstream.rewards.scorers import gsm8k
from slipstream.rewards.signatures import RETURN_DICT, takes
from slipstream.types import Sample, Segment, Status

__all__ = [
    "DataProto",
    "DataProtoItem",
    "VerlRewardManager",
    "compute_reward",
    "compute_reward_async",
    "config_of",
    "default_compute_score",
    "get_custom_reward_fn",
    "load_reward_manager",
]


_log = logging.getLogger(__name__)

_GSM8K = ("openai/gsm8k", "gsm8k")

_OF_SAMPLES = (
    "data_source",
    "reward_model",
    "extra_info",
    "uid",
    "raw_prompt",
    "response_text",
)
"""Batch fields that become fields of a `Sample`; all others go to its `extra_info`."""


def config_of(
    config: Any,
    *,
    complete: bool = False,
    overrides: Sequence[str] = (),
    sections: Sequence[str] = (),
) -> Config:
    """Return a `Config` from the forms that verl programs use.

    `config` is a `Config`, a mapping (or OmegaConf) of options in verl's spelling, the path of a
    YAML file, or a list of overrides. `Enum` members in a mapping stand for their values. With
    `complete`, it must name a model. `sections` are the sections that the caller uses: rules
    between options of others do not apply, and notices about them are left out. Raises ConfigError.
    """
    load = functools.partial(load_config, complete=complete, verl=True, sections=sections)
    if isinstance(config, Config):
        if not overrides:
            return config
        config = to_dict(config)
    if isinstance(config, Mapping):
        values = cast("Mapping[str, Any]", _without_enums(plain_mapping(config)))
        return load(overrides, values=values)
    if isinstance(config, str | Path):
        return load(overrides, file=Path(config))
    arguments = [] if config is None else list(config)
    return load([*arguments, *overrides])


def plain_mapping(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a mapping without OmegaConf's types.

    Interpolations of a part of a configuration are resolved in the whole one.
    """
    from omegaconf import DictConfig, OmegaConf

    if not isinstance(config, DictConfig):
        return config
    part = config._get_parent() is not None
    return cast("Mapping[str, Any]", OmegaConf.to_container(config, resolve=part))


def _without_enums(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_without_enums(key): _without_enums(item) for key, item in value.items()}
    return [_without_enums(item) for item in value] if isinstance(value, list | tuple) else value


class RewardsOfBatch:
    """The method of verl's managers that reads rewards which a batch has already."""

    def _extract_reward_from_rm_scores(self, data: DataProto, return_dict: bool = False) -> Any:
        """Return the tensor `rm_scores` in the form that a manager returns, None if it is missing.

        `meta_info["reward_extra_keys"]` names the fields that are the extra information.
        """
        if "rm_scores" not in data.batch:
            return None
        scores = data.batch["rm_scores"]
        if not return_dict:
            return scores
        names = data.meta_info.get("reward_extra_keys", [])
        extra = {name: data.non_tensor_batch[name] for name in names}
        return {"reward_tensor": scores, "reward_extra_info": extra}


class VerlRewardManager(RewardsOfBatch):
    """A reward manager with verl's interface: it is called with a batch of finished responses."""

    def __init__(self, manager: RewardManager) -> None:
        self.manager = manager

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Return rewards (B, R); each reward is at the last token of its response.

        With `return_dict`, return a mapping with `reward_tensor` and `reward_extra_info`, which has
        one list per reward part. If the batch has `rm_scores`, these are the rewards, and
        `meta_info["reward_extra_keys"]` names the fields with extra information. Failures are
        logged as a warning and listed under `failed`. Raises RewardError if a response cannot be
        scored and `reward_model.on_failure` is `stop`.
        """
        found = self._extract_reward_from_rm_scores(data, return_dict)
        if found is not None:
            return found
        scores, extra = anyio.run(self.score, data)
        return {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores

    async def score(self, data: DataProto) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """Return rewards (B, R) and extra information. The async form of calling the manager."""
        samples = samples_of(data)
        scores = await self.manager.score_group(samples)
        groups: dict[str, list[Sample]] = {}
        for sample, score in zip(samples, scores, strict=True):
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
        if any(score.answer is not None for score in scores):
            extra["pred"] = [score.answer for score in scores]
        failed = [score.failure for score in scores if score.failure is not None]
        if failed:
            extra["failed"] = [score.failure for score in scores]
            _log.warning("%d of %d responses failed: %s", len(failed), len(scores), failed[0])
        return rewards, extra


def samples_of(data: DataProto) -> list[Sample]:
    """Return the rows of a batch as finished samples.

    The response is `responses` where `attention_mask` (else `response_mask`) is 1. `prompts`,
    `data_source`, `reward_model`, `extra_info` and `uid` are used if present. Other non-tensor
    fields go to `extra_info`. Raises KeyError without `responses`, and DataError if `reward_model`
    or `extra_info` is not a mapping.
    """
    batch, others = data.batch, data.non_tensor_batch
    responses = batch["responses"]
    width = responses.shape[1]
    if "attention_mask" in batch:
        mask = batch["attention_mask"][:, -width:] if width else responses
    else:
        mask = batch.get("response_mask", torch.ones_like(responses))

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
            seen = batch["attention_mask"][row, : len(tokens)] if "attention_mask" in batch else 1
            prompt = tokens[torch.as_tensor(seen).bool().expand(len(tokens))].tolist()
        answer = responses[row][mask[row].bool()].tolist()
        other_fields = {k: values[row] for k, values in others.items() if k not in _OF_SAMPLES}
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
                extra_info={**other_fields, **_object("extra_info", row)},
            )
        )
    return samples


def load_reward_manager(
    config: Any, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any
) -> VerlRewardManager:
    """Return the manager that `reward_model.*` and `custom_reward_function.*` of `config` select.

    `reward_kwargs` are added to `reward_model.reward_kwargs`. `num_examine` is accepted and unused:
    set `trainer.log_val_generations` to print responses. Raises ConfigError.
    """
    full_config = config_of(config, sections=("reward_model", "custom_reward_function"))
    manager = make_reward_manager(full_config, tokenizer, more_kwargs=reward_kwargs)
    return VerlRewardManager(manager)


def compute_reward(
    data: DataProto, reward_fn: Callable[..., Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return rewards, (B, R) or (B,), and extra information, from a manager or a function."""
    keywords = {RETURN_DICT: True} if takes(reward_fn, RETURN_DICT) else {}
    returned = reward_fn(data, **keywords)
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
    """Return what `compute_reward` returns, without blocking the event loop.

    The rewards come from `reward_fn`, or if it is None from the manager that `config` selects.
    """
    manager = reward_fn or load_reward_manager(config, tokenizer)
    if isinstance(manager, VerlRewardManager) and "rm_scores" not in data.batch:
        return await manager.score(data)
    return await anyio.to_thread.run_sync(compute_reward, data, manager)


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    """Return the function that `custom_reward_function` of `config` names, with its keywords bound.

    Returns None if it names no function. Raises ConfigError.
    """
    custom = config_of(config, sections=("custom_reward_function",)).custom_reward_function
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
    method: Literal["strict", "flexible"] = "strict",
    **kwargs: Any,
) -> Any:
    """Return the built-in score for a `data_source`.

    `sandbox_fusion_url` and `memory_limit_mb` say where programs run and with how much memory (in
    MB). `concurrent_semaphore`, if given, is held during the call. `method` is the extraction of
    GSM8K's answers. Further keywords are accepted and unused, as in verl. Raises UnknownSourceError
    (a NotImplementedError) if the data source has no function.
    """
    options: dict[str, Any] = {}
    function: Callable[..., Any] = score_by_source
    if sandbox_fusion_url is not None:
        options["sandbox"] = fusion_sandbox(sandbox_fusion_url, memory_limit_mb)
    if method != "strict" and data_source in _GSM8K:
        function, options = gsm8k.compute_score, {"method": method}
    with concurrent_semaphore or contextlib.nullcontext():
        return function(data_source, solution_str, ground_truth, extra_info, **options)


@functools.cache
def fusion_sandbox(
    url: str, memory_mb: int | None = None, run_timeout_s: float | None = None
) -> FusionSandbox:
    """Return the sandbox of a SandboxFusion server; None is the usual limit.

    Raises ConfigError for an invalid `url`.
    """
    limits = DEFAULT_LIMITS
    if memory_mb is not None:
        limits = replace(limits, memory_mb=memory_mb)
    if run_timeout_s is not None:
        limits = replace(limits, run_timeout_s=run_timeout_s)
    return FusionSandbox(url, limits)
