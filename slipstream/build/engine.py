"""Builds the rollout engine, and checks that it can serve the policy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from slipstream.build.data import (
    decode_with,
)
from slipstream.build.policy import (
    device_of,
    max_model_len,
    memory_sharers,
    process_count,
    rollout_too_long,
)
from slipstream.build.speculation import make_speculation
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.engine.memory import kv_budget
from slipstream.inference.protocol import InferenceEngine
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, takes_sequences_in_a_row
from slipstream.models.hf_policy import HFPolicy
from slipstream.models.lora import copy_weights, merged_weights
from slipstream.models.numerics import check_widths, dtype_from_name
from slipstream.models.policy import Policy, PolicyConfig
from slipstream.models.single_copy_weights import allocate_single_copy
from slipstream.training.compute_thread import ComputeThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


def rollout_dtype(config: Config) -> torch.dtype:
    """`rollout.dtype`, where auto is the actor's."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    name = actor.dtype if rollout.dtype == "auto" else rollout.dtype
    return dtype_from_name(name, device_of(config))


def check_engine(config: Config, model: PolicyConfig) -> None:
    """Refuse an engine that could not serve `model`. Raises ConfigError."""
    rollout = config.actor_rollout_ref.rollout
    if problem := rollout_too_long(config, model.context_limit):
        raise ConfigError(problem)
    if rollout.name == "fake":
        raise ConfigError(
            "actor_rollout_ref.rollout.name=fake answers from a script and is for tests; use "
            "embedded or hf"
        )
    kernels = isinstance(model, ModelConfig) and takes_sequences_in_a_row(
        model, rollout_dtype(config), device_of(config)
    )
    if rollout.one_thread_below and not (rollout.name == "embedded" and kernels):
        raise ConfigError(
            f"actor_rollout_ref.rollout.one_thread_below={rollout.one_thread_below} is of the "
            "embedded engine's compiled kernels on a CPU, which do not run here; set "
            "actor_rollout_ref.rollout.one_thread_below=0"
        )
    if rollout.name == "embedded" and isinstance(model, ModelConfig):
        check_widths(
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            head_dim=model.head_dim,
        )
        kv_bytes(config, model)


def kv_bytes(config: Config, model: ModelConfig) -> int:
    """What keys and values of the embedded engine may take. Raises ConfigError for too little."""
    rollout = config.actor_rollout_ref.rollout
    return kv_budget(
        model,
        rollout_dtype(config),
        device_of(config),
        max_model_len=max_model_len(config),
        wanted=rollout.kv_cache_bytes,
        share=rollout.gpu_memory_utilization / memory_sharers(config),
    )


def make_engine(
    config: Config,
    decoder: Policy,
    tokenizer: PreTrainedTokenizerBase,
    compute: ComputeThread,
    *,
    speculate: Callable[[str], None] | None = None,
) -> InferenceEngine:
    """The rollout engine with weights of its own, equal to `decoder`'s; it works on `compute`.

    With `speculate`, which is told what there is to say, it drafts after `speculative`.
    """
    rollout = config.actor_rollout_ref.rollout
    device = device_of(config)
    dtype = rollout_dtype(config)
    check_engine(config, decoder.config)
    decode = decode_with(tokenizer)
    if rollout.name == "hf" or isinstance(decoder, HFPolicy):
        return _hf_engine(config, decoder, dtype, decode, compute)
    if keeps_one_copy(config):
        with torch.device("meta"):
            own = Decoder(decoder.config)
        allocate_single_copy(own, dtype, device)
    else:
        own = Decoder(decoder.config).to(device)
    copy_weights(decoder, own)
    # Now: keys and values get a share of what the weights leave free.
    settings = engine_settings(config, own.config)
    _log.info("keys and values may take %d bytes", settings.kv_budget_bytes)
    speculation = None
    if speculate is not None:
        speculation = make_speculation(
            config,
            own,
            dtype=settings.dtype,
            device=device,
            kv_budget_bytes=settings.kv_budget_bytes,
            free_cache=settings.free_cache_engine,
            notify=speculate,
        )
    return EmbeddedEngine(
        own,
        settings,
        decode=decode,
        executor=compute.executor,
        proposer=None if speculation is None else speculation.proposer,
        selector=None if speculation is None else speculation.selector,
    )


def engine_settings(config: Config, model: ModelConfig) -> EngineSettings:
    """Limits of the embedded engine."""
    rollout = config.actor_rollout_ref.rollout
    free = rollout.free_cache_engine
    if free is None:
        # Kept prefixes live in what the store leaves of the budget.
        free = device_of(config).type != "cpu" or rollout.enable_prefix_caching
    return EngineSettings(
        max_model_len=max_model_len(config),
        dtype=rollout_dtype(config),
        max_num_seqs=rollout.max_num_seqs,
        kv_budget_bytes=kv_bytes(config, model),
        max_prefill_tokens=rollout.max_num_batched_tokens,
        prefix_caching=rollout.enable_prefix_caching,
        enforce_eager=rollout.enforce_eager,
        free_cache_engine=free,
        one_thread_below=rollout.one_thread_below,
        stagger_samples=config.speculative.enable and config.speculative.history.stagger_samples,
        one_copy=keeps_one_copy(config),
    )


def keeps_one_copy(config: Config) -> bool:
    """Whether the engine has no second copy of its weights: several GPUs are for models of which
    one has no room for more."""
    return process_count(config) > 1 and device_of(config).type == "cuda"


def _hf_engine(
    config: Config,
    decoder: Policy,
    dtype: torch.dtype,
    decode: Callable[[list[int]], str],
    compute: ComputeThread,
) -> InferenceEngine:
    from transformers import AutoConfig, AutoModelForCausalLM

    from slipstream.inference.hf import HFCore, HFEngine

    if isinstance(decoder, HFPolicy):
        model = decoder.copy_as(dtype)
    else:
        raw = decoder.config.to_hf()
        hf_config = AutoConfig.for_model(raw.pop("model_type"), **raw)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).to(decoder.device)
        model.load_state_dict(merged_weights(decoder), strict=False)
    core = HFCore(
        model,
        max_model_len=max_model_len(config),
        max_num_seqs=config.actor_rollout_ref.rollout.max_num_seqs,
        eos_token_ids=decoder.config.eos_token_ids,
        decode=decode,
    )
    return HFEngine(core, executor=compute.executor)
