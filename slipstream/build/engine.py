"""Builds the rollout engine, and checks that it can serve the policy.

The registry of engines (`config.engines`) says which function makes the engine that a run selects;
those of the built-in engines are here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.build.data import make_decode
from slipstream.build.episodes import has_episodes
from slipstream.build.policy import (
    device_of,
    max_model_len,
    memory_sharers,
    process_count,
    rollout_too_long,
)
from slipstream.build.speculation import check_copy, make_speculation
from slipstream.config.engines import ENGINE_KEY, engine_entry, engines_with, generates_with
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.engine.memory import kv_budget
from slipstream.inference.protocol import InferenceEngine
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, supports_varlen, without_init
from slipstream.models.hf_policy import HFPolicy
from slipstream.models.lora import copy_weights, merged_weights
from slipstream.models.numerics import check_widths, dtype_from_name
from slipstream.models.policy import Policy, PolicyConfig
from slipstream.models.single_copy_weights import allocate_single_copy
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import PolicyKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The arguments of an engine's factory, which is called on the thread of `compute`."""

    config: Config
    policy: Policy
    """The weights to begin with. The engine copies them if they are `trained`."""
    trained: bool
    """Whether training changes the weights of `policy`."""
    decode: Callable[[list[int]], str]
    """From token ids to text."""
    compute: ComputeThread
    """The thread on which the trainer works; an engine in this process works on it, too."""
    notify: Callable[[str], None] | None
    """Takes messages for the user about speculation. None: the engine must not speculate."""


def rollout_dtype(config: Config) -> torch.dtype:
    """The dtype of rollouts: `rollout.dtype`, or the actor's if that is auto."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    name = actor.dtype if rollout.dtype == "auto" else rollout.dtype
    return dtype_from_name(name, device_of(config))


def check_engine(config: Config, model: PolicyConfig) -> None:
    """Raise ConfigError if the engine cannot serve `model`."""
    rollout = config.actor_rollout_ref.rollout
    if problem := rollout_too_long(config, model.context_limit):
        raise ConfigError(problem)
    entry = engine_entry(rollout.name)
    kind = PolicyKind.DECODER if isinstance(model, ModelConfig) else PolicyKind.TRANSFORMERS
    remedy = engines_with(generates_with(kind))
    if entry.capabilities.for_tests:
        raise ConfigError(f"{ENGINE_KEY}={entry.name} is for tests; set {remedy}")
    if kind not in entry.capabilities.policies:
        raise ConfigError(
            f"{ENGINE_KEY}={entry.name} does not generate with this policy, which "
            f"{_COMPUTES[kind]} computes; set {remedy}"
        )
    kernels = isinstance(model, ModelConfig) and supports_varlen(
        model, rollout_dtype(config), device_of(config)
    )
    if rollout.one_thread_below and not (entry.capabilities.one_thread_tail and kernels):
        raise ConfigError(
            f"actor_rollout_ref.rollout.one_thread_below={rollout.one_thread_below} needs the "
            "embedded engine's compiled CPU kernels, which this run does not use; set "
            "actor_rollout_ref.rollout.one_thread_below=0"
        )
    entry.check_settings(config, model)


_COMPUTES = {
    PolicyKind.DECODER: "Slipstream's decoder",
    PolicyKind.TRANSFORMERS: "transformers",
}


def check_embedded(config: Config, model: PolicyConfig) -> None:
    """Raise ConfigError for layer widths that exact mode does not support, for a KV cache without
    room for one sequence, and for a policy that cannot have the quantized copy that drafts."""
    assert isinstance(model, ModelConfig), "the embedded engine has no other capability"
    check_widths(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        head_dim=model.head_dim,
    )
    check_copy(config, model, rollout_dtype(config), device_of(config))
    kv_bytes(config, model)


def kv_bytes(config: Config, model: ModelConfig) -> int:
    """The size limit of the embedded engine's KV cache in bytes. Raises ConfigError if too
    small."""
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
    trained: bool = True,
) -> InferenceEngine:
    """Build the rollout engine with a copy of `decoder`'s weights. It works on `compute`.

    Unless `trained`, the weights never change, so the embedded engine uses them without a copy.
    With `speculate`, which receives messages for the user, it drafts by the section `speculative`.
    Raises ConfigError if the engine cannot serve the policy, or if its `capabilities` differ from
    the registered ones.
    """
    check_engine(config, decoder.config)
    entry = engine_entry(config.actor_rollout_ref.rollout.name)
    engine: InferenceEngine = entry.make(
        EngineSetup(
            config=config,
            policy=decoder,
            trained=trained,
            decode=make_decode(config, tokenizer, decoder.config.eos_token_ids),
            compute=compute,
            notify=speculate,
        )
    )
    if engine.capabilities != entry.capabilities:
        raise ConfigError(
            f"{ENGINE_KEY}={entry.name}: the engine has {engine.capabilities}, but was registered "
            f"with {entry.capabilities}; register it with its own capabilities"
        )
    return engine


def make_embedded(setup: EngineSetup) -> InferenceEngine:
    """The embedded engine. The registry's factory of `embedded`."""
    config, decoder = setup.config, setup.policy
    assert isinstance(decoder, Decoder), "see `check_engine`"
    device, dtype = device_of(config), rollout_dtype(config)
    if keeps_one_copy(config):
        with torch.device("meta"):
            own = Decoder(decoder.config)
        allocate_single_copy(own, dtype, device)
        copy_weights(decoder, own)
    elif setup.trained:
        with without_init():
            own = Decoder(decoder.config).to(device)
        copy_weights(decoder, own)
    else:
        own = decoder
    # After the weights are loaded: the KV cache gets a share of the free memory.
    settings = engine_settings(config, own.config)
    _log.info("the KV cache may use %d bytes", settings.kv_budget_bytes)
    speculation = None
    if setup.notify is not None:
        speculation = make_speculation(
            config,
            own,
            dtype=settings.dtype,
            device=device,
            kv_budget_bytes=settings.kv_budget_bytes,
            free_cache=settings.free_cache_engine,
            notify=setup.notify,
        )
    return EmbeddedEngine(
        own,
        settings,
        decode=setup.decode,
        executor=setup.compute.executor,
        proposer=None if speculation is None else speculation.proposer,
        selector=None if speculation is None else speculation.selector,
    )


def engine_settings(config: Config, model: ModelConfig) -> EngineSettings:
    """Settings of the embedded engine."""
    rollout = config.actor_rollout_ref.rollout
    caching = rollout.enable_prefix_caching
    if caching is None:
        caching = has_episodes(config)
    free = rollout.free_cache_engine
    if free is None:
        # Cached prefixes use the part of the budget that running requests leave free.
        free = device_of(config).type != "cpu" or caching
    return EngineSettings(
        max_model_len=max_model_len(config),
        dtype=rollout_dtype(config),
        max_num_seqs=rollout.max_num_seqs,
        kv_budget_bytes=kv_bytes(config, model),
        max_prefill_tokens=rollout.max_num_batched_tokens,
        prefix_caching=caching,
        enforce_eager=rollout.enforce_eager,
        free_cache_engine=free,
        one_thread_below=rollout.one_thread_below,
        stagger_samples=config.speculative.enable and config.speculative.history.stagger_samples,
        one_copy=keeps_one_copy(config),
    )


def keeps_one_copy(config: Config) -> bool:
    """True if the engine keeps a single copy of its weights: in runs on several GPUs, whose models
    may fill the memory of one GPU."""
    return process_count(config) > 1 and device_of(config).type == "cuda"


def make_hf(setup: EngineSetup) -> InferenceEngine:
    """An engine on the policy's class in transformers. The registry's factory of `hf`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from slipstream.inference.hf import HFCore, HFEngine

    config, decoder, dtype = setup.config, setup.policy, rollout_dtype(setup.config)
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
        decode=setup.decode,
    )
    return HFEngine(core, executor=setup.compute.executor)
