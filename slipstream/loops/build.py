"""Wiring: the only place that reads the whole configuration and puts objects together.

Every function takes the configuration and gives one part. One process and a cluster differ only in
what this module makes. What holds tensors is made on the compute thread that will work on it
(`training.compute_thread`); the callers see to that.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.config.schema import Config
from slipstream.config.schema_actor import ModelConfig as ModelSettings
from slipstream.config.schema_actor import OptimConfig
from slipstream.config.validate import no_decay
from slipstream.environment.data_buffer import DataBuffer
from slipstream.environment.tokenizer import vocabulary_in
from slipstream.errors import ConfigError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.engine.memory import kv_budget
from slipstream.inference.protocol import InferenceEngine
from slipstream.loops.build_algorithm import (
    full_kl_in_loss,
    group_filter,
    make_kl_in_reward,
    rl_config,
    takes_full_kl,
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
from slipstream.loops.build_speculation import check_speculation, make_speculation
from slipstream.loops.evaluate import EvalSettings
from slipstream.loops.snapshot import lora_folder, policy_folder
from slipstream.loops.threads_choice import usable_cores
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, takes_sequences_in_a_row
from slipstream.models.hf_io import load_checkpoint, load_config
from slipstream.models.lora import LoraConfig, add_lora, copy_weights, lora_layers, merged_weights
from slipstream.models.lora_io import load_adapter, read_adapter
from slipstream.models.numerics import WIDTH_MULTIPLE, check_widths, dtype_from_name, round_up
from slipstream.models.vocabulary import check_vocabulary
from slipstream.rewards.protocol import RewardManager
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.lora import BaseWeights
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import ReferencePolicy
from slipstream.training.single import SingleProcessBackend
from slipstream.types import GenerationSink, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

__all__ = [
    "actor_optim",
    "add_adapter",
    "check_engine",
    "check_reference",
    "check_speculation",
    "decode_with",
    "device_of",
    "engine_settings",
    "eval_settings",
    "import_external",
    "kv_bytes",
    "make_backend",
    "make_data_buffer",
    "make_decoder",
    "make_demonstrations",
    "make_engine",
    "make_kl_in_reward",
    "make_reference",
    "make_reward_manager",
    "make_rollouts",
    "make_task",
    "make_tokenizer",
    "max_model_len",
    "model_config",
    "optim_settings",
    "rl_config",
    "rl_steps",
    "rollout_dtype",
    "sampling_params",
    "set_threads",
    "validation_prompts",
    "wants_critic",
    "wants_ref_log_probs",
    "wants_reference",
]


_log = logging.getLogger(__name__)


def device_of(config: Config) -> torch.device:
    """`trainer.device`, with auto resolved."""
    name = config.trainer.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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
    """Apply `trainer.num_threads`; null: PyTorch's choice, one per core, but no more than this
    process may use."""
    given = config.trainer.num_threads
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()) if given is None else given)


def make_decoder(
    config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path | None
) -> Decoder:
    """The policy: weights from `folder`, or freshly drawn after `model.init`."""
    if folder is not None:
        return load_checkpoint(folder, device=device_of(config))
    decoder = Decoder(model_config(config, tokenizer, None))
    decoder.init_weights(config.trainer.seed)
    return decoder.to(device_of(config))


def add_adapter(config: Config, decoder: Decoder, *, first: bool) -> None:
    """Give the policy the LoRA adapter that is to be trained, if any. `first`: it has the weights
    that `model` names, on which the adapter in `lora_adapter_path` belongs.

    Raises ConfigError for names that match no layer, or a rank that is not the adapter's.
    """
    model = config.actor_rollout_ref.model
    key = "actor_rollout_ref.model"
    lora = (
        LoraConfig(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=model.target_modules,
            exclude_modules=model.exclude_modules,
        )
        if model.lora_rank
        else None
    )
    if model.lora_adapter_path is not None:
        adapter = lora_folder(Path(model.lora_adapter_path))
        given, _ = read_adapter(adapter)
        for name, wanted, default, own in (
            ("lora_rank", model.lora_rank, 0, given.rank),
            ("lora_alpha", model.lora_alpha, ModelSettings().lora_alpha, given.alpha),
        ):
            if wanted not in (default, own):
                raise ConfigError(
                    f"{key}.{name}={wanted:g}, but the adapter in {key}.lora_adapter_path="
                    f"{model.lora_adapter_path} has {own:g}; set {key}.{name}={own:g}"
                )
        if first:
            load_adapter(decoder, adapter)
            return
        lora = given
    if lora is not None:
        try:
            add_lora(decoder, lora, seed=config.trainer.seed)
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}") from None


def model_config(
    config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path | None
) -> ModelConfig:
    """Sizes of the policy: those in `folder`, or `model.init`'s."""
    if folder is not None:
        return load_config(folder)
    init = config.actor_rollout_ref.model.init
    if init is None:
        raise ConfigError(
            "no model: set actor_rollout_ref.model.path=FOLDER, or sizes under "
            "actor_rollout_ref.model.init for random weights"
        )
    vocab = init.vocab_size or round_up(len(tokenizer), WIDTH_MULTIPLE)
    if vocab < len(tokenizer):
        raise ConfigError(
            f"actor_rollout_ref.model.init.vocab_size={vocab} is smaller than the tokenizer's "
            f"{len(tokenizer)} tokens"
        )
    return ModelConfig(
        family=init.family,
        vocab_size=vocab,
        hidden_size=init.hidden_size,
        intermediate_size=init.intermediate_size,
        num_layers=init.num_layers,
        num_heads=init.num_heads,
        num_kv_heads=init.num_kv_heads,
        head_dim=init.head_dim or init.hidden_size // init.num_heads,
        max_position_embeddings=init.max_position_embeddings,
        rope_theta=init.rope_theta,
        tie_word_embeddings=init.tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def optim_settings(optim: OptimConfig, total_steps: int, *, key: str) -> OptimSettings:
    """Optimizer and schedule of the section `key`; warm-up as a step count or as a share of all
    steps. Raises ConfigError where the steps leave nothing to decay over."""
    steps = optim.total_training_steps if optim.total_training_steps > 0 else total_steps
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = int(optim.lr_warmup_steps_ratio * steps)
    for problem in no_decay(key, optim, steps, warmup):
        raise ConfigError(problem)
    return OptimSettings(
        lr=optim.lr,
        optimizer=optim.optimizer,
        muon_lr=(optim.lr if optim.muon_lr is None else optim.muon_lr)
        if optim.optimizer == "Muon"
        else None,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        warmup_steps=warmup,
        schedule=optim.lr_scheduler_type,
        min_lr_ratio=optim.min_lr_ratio,
        total_steps=steps,
    )


def actor_optim(config: Config, rl_steps: int) -> OptimSettings:
    """The policy's optimizer and schedule in so many RL steps, less those before which only a
    critic learns. Raises ConfigError where that is all of them."""
    actor, batch = config.actor_rollout_ref.actor, config.data.train_batch_size
    warmup = config.trainer.critic_warmup
    if warmup > rl_steps > 0:
        raise ConfigError(
            f"trainer.critic_warmup={warmup} lets the policy learn from step {warmup} on, and the "
            f"run has {rl_steps}; set trainer.critic_warmup={rl_steps // 2} or more steps"
        )
    rl_steps -= max(0, warmup - 1)
    steps = max(0, rl_steps) * actor.ppo_epochs * (batch // (actor.ppo_mini_batch_size or batch))
    return optim_settings(actor.optim, steps, key="actor_rollout_ref.actor.optim")


def make_backend(
    config: Config,
    decoder: Decoder,
    compute: ComputeThread,
    *,
    optim: OptimSettings,
    sft: bool = False,
) -> SingleProcessBackend:
    """The trainer of one phase; it works on `compute`."""
    actor = config.actor_rollout_ref.actor
    device = device_of(config)
    by_rows = not sft and not actor.use_dynamic_bsz
    tokens = config.sft.max_tokens_per_micro_batch if sft else actor.ppo_max_token_len_per_gpu
    return SingleProcessBackend(
        decoder,
        optim=optim,
        dtype=dtype_from_name(actor.dtype, device),
        device=device,
        max_tokens_per_micro_batch=None if by_rows else tokens,
        max_rows_per_micro_batch=actor.ppo_micro_batch_size_per_gpu if by_rows else None,
        grad_clip=actor.grad_clip,
        gradient_checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        max_nonfinite_steps=actor.max_nonfinite_steps,
        log_prob_chunk=actor.log_prob_chunk_tokens,
        log_prob_keep_bytes=actor.log_prob_keep_bytes,
        metrics_prefix="sft" if sft else "actor",
        compute=compute,
    )


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
    v = r.val_kwargs
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


def rollout_dtype(config: Config) -> torch.dtype:
    """`rollout.dtype`, where auto is the actor's."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    name = actor.dtype if rollout.dtype == "auto" else rollout.dtype
    return dtype_from_name(name, device_of(config))


def max_model_len(config: Config) -> int:
    """Context of the engine: as set, else longest prompt plus longest response."""
    data = config.data
    wanted = data.max_prompt_length + data.max_response_length
    return config.actor_rollout_ref.rollout.max_model_len or wanted


def check_engine(config: Config, model: ModelConfig) -> None:
    """Refuse an engine that could not serve `model`. Raises ConfigError."""
    rollout, limit = config.actor_rollout_ref.rollout, max_model_len(config)
    if limit > model.max_position_embeddings:
        raise ConfigError(
            f"prompt and response may take {limit} tokens, but the model has "
            f"{model.max_position_embeddings} positions; lower data.max_prompt_length or "
            "data.max_response_length"
        )
    if rollout.name == "fake":
        raise ConfigError(
            "actor_rollout_ref.rollout.name=fake answers from a script and is for tests; use "
            "embedded or hf"
        )
    kernels = takes_sequences_in_a_row(model, rollout_dtype(config), device_of(config))
    if rollout.one_thread_below and not (rollout.name == "embedded" and kernels):
        raise ConfigError(
            f"actor_rollout_ref.rollout.one_thread_below={rollout.one_thread_below} is of the "
            "embedded engine's compiled kernels on a CPU, which do not run here; set "
            "actor_rollout_ref.rollout.one_thread_below=0"
        )
    if rollout.name == "embedded":
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
        share=rollout.gpu_memory_utilization,
    )


def make_engine(
    config: Config,
    decoder: Decoder,
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
    if rollout.name == "hf":
        return _hf_engine(config, decoder, dtype, decode, compute)
    own = Decoder(decoder.config).to(device)
    copy_weights(decoder, own)
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
    )


def _hf_engine(
    config: Config,
    decoder: Decoder,
    dtype: torch.dtype,
    decode: Callable[[list[int]], str],
    compute: ComputeThread,
) -> InferenceEngine:
    from transformers import AutoConfig, AutoModelForCausalLM

    from slipstream.inference.hf import HFCore, HFEngine

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


def check_reference(
    config: Config,
    reference: ModelConfig,
    policy: ModelConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Refuse a `ref.path`, whose `folder` holds `reference`, that reads other tokens than the
    policy writes. Raises CheckpointError."""
    path = config.actor_rollout_ref.ref.path
    if path is None:
        return
    source = f"actor_rollout_ref.ref.path={path}"
    trust = config.actor_rollout_ref.model.trust_remote_code
    # Over the whole vocabulary policies are compared output by output.
    alike = policy.vocab_size == reference.vocab_size or not takes_full_kl(config)
    check_vocabulary(
        reference,
        policy,
        role="reference",
        source=source,
        remedy="name a reference, or a teacher, with the policy's tokenizer",
        other_vocab=vocabulary_in(folder, source=source, trust_remote_code=trust)
        if alike
        else None,
        policy_vocab=tokenizer.get_vocab(),
    )


def make_reference(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    initial: Path | None,
    compute: ComputeThread,
    backend: SingleProcessBackend,
) -> ReferencePolicy | None:
    """The initial policy (or `ref.path`), where a KL term or a teacher is wanted: a frozen copy, or
    under LoRA the base weights of `backend`. Where the KL is over the whole vocabulary, `backend`
    gets it, too."""
    if not wants_reference(config):
        return None
    path = config.actor_rollout_ref.ref.path
    reference: ReferencePolicy
    decoder = None
    if path is None and lora_layers(backend.decoder):
        reference = BaseWeights(backend)
    else:
        folder = initial if path is None else policy_folder(Path(path))
        decoder = make_decoder(config, tokenizer, folder)
        if folder is not None:
            check_reference(config, decoder.config, backend.decoder.config, folder, tokenizer)
        reference = make_backend(config, decoder, compute, optim=OptimSettings(lr=0.0))
    if takes_full_kl(config):
        backend.use_full_kl(decoder, full_kl_in_loss(config))
    return reference
