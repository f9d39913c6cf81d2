"""Wiring: with the other `build_*` modules the only place that reads the whole configuration and
puts objects together.

Every function takes the configuration and gives one part. One process and a cluster differ only in
what these modules make. What holds tensors is made on the compute thread that will work on it
(`training.compute_thread`); the callers see to that.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.config.schema_actor import ValKwargsConfig
from slipstream.config.val_settings import val_settings
from slipstream.environment.data_buffer import DataBuffer
from slipstream.errors import ConfigError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.engine.memory import kv_budget
from slipstream.inference.protocol import InferenceEngine
from slipstream.loops.build_algorithm import (
    critic_budget,
    group_filter,
    make_kl_in_reward,
    rl_config,
    wants_critic,
    wants_greedy,
    wants_ref_log_probs,
    wants_reference,
)
from slipstream.loops.build_data import (
    decode_with,
    make_data_buffer,
    make_demonstrations,
    make_reward_manager,
    make_task,
    make_tokenizer,
    rl_steps,
    validation_prompts,
)
from slipstream.loops.build_policy import (
    POLICY,
    REFERENCE,
    actor_optim,
    add_adapter,
    check_reference,
    device_of,
    make_backend,
    make_decoder,
    make_policy,
    make_reference,
    max_model_len,
    memory_sharers,
    model_config,
    optim_settings,
    process_count,
    rollout_too_long,
    thread_count,
    too_long,
)
from slipstream.loops.build_speculation import check_speculation, make_speculation
from slipstream.loops.evaluate import EvalSettings
from slipstream.loops.threads_choice import usable_cores
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, takes_sequences_in_a_row
from slipstream.models.foreign import ForeignModel
from slipstream.models.lora import copy_weights, merged_weights
from slipstream.models.narrow import empty_narrow
from slipstream.models.numerics import check_widths, dtype_from_name
from slipstream.models.policy import Policy, PolicyConfig
from slipstream.rewards.protocol import RewardManager
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.packing import padded_length
from slipstream.types import GenerationSink, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

__all__ = [
    "POLICY",
    "REFERENCE",
    "actor_optim",
    "add_adapter",
    "check_budgets",
    "check_demonstrations",
    "check_engine",
    "check_reference",
    "check_speculation",
    "decode_with",
    "device_of",
    "engine_settings",
    "eval_settings",
    "import_external",
    "keeps_one_copy",
    "kv_bytes",
    "make_backend",
    "make_data_buffer",
    "make_decoder",
    "make_demonstrations",
    "make_engine",
    "make_kl_in_reward",
    "make_policy",
    "make_reference",
    "make_reward_manager",
    "make_rollouts",
    "make_task",
    "make_tokenizer",
    "max_model_len",
    "memory_sharers",
    "model_config",
    "optim_settings",
    "process_count",
    "rl_config",
    "rl_steps",
    "rollout_dtype",
    "rollout_too_long",
    "sampling_params",
    "set_threads",
    "thread_count",
    "validation_prompts",
    "wants_critic",
    "wants_ref_log_probs",
    "wants_reference",
]


_log = logging.getLogger(__name__)


def import_external(config: Config) -> None:
    """Import `model.external_lib`, so that what it registers can be named.

    Raises ConfigError where it cannot be imported.
    """
    name = config.actor_rollout_ref.model.external_lib
    if name is None:
        return
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: modules in the present folder
    try:
        importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"actor_rollout_ref.model.external_lib={name} cannot be imported "
            f"({type(error).__name__}: {error}); it takes a module's dotted name, and PYTHONPATH "
            "says where modules lie"
        ) from error


def set_threads(config: Config) -> None:
    """Apply `thread_count`; None: PyTorch's choice, one per core, but no more than this process may
    use."""
    given = thread_count(config)
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()) if given is None else given)


def sampling_params(config: Config) -> SamplingParams:
    """How training rollouts are sampled."""
    r = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=r.temperature if r.do_sample else 0.0,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        stop_token_ids=r.stop_token_ids,
        stop=r.stop,
        ignore_eos=r.ignore_eos,
    )


def eval_settings(config: Config) -> EvalSettings:
    """How validation is sampled: `rollout.val_kwargs`."""
    r = config.actor_rollout_ref.rollout

    def settings(v: ValKwargsConfig) -> EvalSettings:
        return EvalSettings(
            params=SamplingParams(
                max_tokens=config.data.max_response_length,
                temperature=v.temperature if v.do_sample else 0.0,
                top_k=v.top_k,
                top_p=v.top_p,
                stop_token_ids=r.stop_token_ids,
                stop=r.stop,
            ),
            seed=config.trainer.seed,
            n=v.n,
            batch_size=config.data.val_batch_size,
            timeout_s=config.trainer.stage_timeout_s,
        )

    by_source = {name: settings(val_settings(config, name)) for name in r.val_kwargs.by_source}
    return replace(settings(r.val_kwargs), by_source=by_source)


def rollout_dtype(config: Config) -> torch.dtype:
    """`rollout.dtype`, where auto is the actor's."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    name = actor.dtype if rollout.dtype == "auto" else rollout.dtype
    return dtype_from_name(name, device_of(config))


def check_budgets(config: Config, policy: PolicyConfig, mode: Mode) -> None:
    """Refuse a budget of tokens per forward pass that one sequence exceeds with its padding, where
    rows are padded. Raises ConfigError."""
    actor, device = config.actor_rollout_ref.actor, device_of(config)
    dtype = dtype_from_name(actor.dtype, device)
    if isinstance(policy, ModelConfig) and takes_sequences_in_a_row(policy, dtype, device):
        return
    key, longest = "ppo_max_token_len_per_gpu", max_model_len(config)
    budgets: dict[str, tuple[int | None, int]] = {}
    if "sft" in mode:
        sft = config.sft
        budgets["sft.max_tokens_per_micro_batch"] = sft.max_tokens_per_micro_batch, sft.max_length
    if "rl" in mode:
        own = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
        budgets[f"actor_rollout_ref.actor.{key}"] = own, longest
        if wants_critic(config):
            budgets[f"critic.{key}"] = critic_budget(config), longest
    for name, (budget, length) in budgets.items():
        if budget is not None and budget < padded_length(length):
            raise ConfigError(
                f"{name}={budget} cannot hold one sequence of {length} tokens, which takes "
                f"{padded_length(length)} with its padding; set {name}={padded_length(length)}"
            )


def check_demonstrations(config: Config, policy: PolicyConfig) -> None:
    """Refuse an SFT on texts that may be too long for the policy. Raises ConfigError."""
    longest, limit = config.sft.max_length, policy.context_limit
    if longest > limit.tokens:
        raise ConfigError(f"SFT texts {too_long(longest, limit, f'sft.max_length={limit.tokens}')}")


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
    if rollout.name == "hf" or isinstance(decoder, ForeignModel):
        return _hf_engine(config, decoder, dtype, decode, compute)
    if keeps_one_copy(config):
        with torch.device("meta"):
            own = Decoder(decoder.config)
        empty_narrow(own, dtype, device)
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

    if isinstance(decoder, ForeignModel):
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


def make_rollouts(
    config: Config,
    engine: InferenceEngine,
    data_buffer: DataBuffer,
    rewards: RewardManager,
    *,
    sink: GenerationSink | None = None,
) -> AsyncRolloutManager:
    """The rollout manager over one engine; `sink` may take hidden states from its decoding."""
    r = config.actor_rollout_ref.rollout
    settings = RolloutSettings(
        batch_size=config.data.train_batch_size,
        n=r.n,
        params=sampling_params(config),
        seed=config.trainer.seed,
        over_sampling=r.over_sample_rate,
        partial_rollout=r.partial_rollout,
        timeout_s=r.timeout_s or config.trainer.stage_timeout_s,
        greedy_baseline=wants_greedy(config),
    )
    wanted = config.algorithm.filter_groups
    if wanted.enable:
        # So many batches of prompts, of which one is kept.
        tries = wanted.max_num_gen_batches - 1 if wanted.max_num_gen_batches else math.inf
        settings = replace(settings, max_rejected=tries)
    return AsyncRolloutManager(
        [engine], data_buffer, rewards, settings, group_filter=group_filter(config), sink=sink
    )
