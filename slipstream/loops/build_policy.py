"""Wiring of the policy that is trained: weights, adapter, optimizer, backend, and its reference.

Called by the phases, through `build`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.config.schema import Config
from slipstream.config.schema_actor import ModelConfig as ModelSettings
from slipstream.config.schema_actor import OptimConfig
from slipstream.config.validate import no_decay
from slipstream.environment.tokenizer import vocabulary_in
from slipstream.errors import ConfigError
from slipstream.loops.build_algorithm import (
    full_kl_in_loss,
    takes_full_kl,
    wants_reference,
)
from slipstream.loops.snapshot import lora_folder, policy_folder
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import load_checkpoint, load_config
from slipstream.models.lora import LoraConfig, add_lora, lora_layers
from slipstream.models.lora_io import load_adapter, read_adapter
from slipstream.models.numerics import WIDTH_MULTIPLE, dtype_from_name, round_up
from slipstream.models.vocabulary import check_vocabulary
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.lora import BaseWeights
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import ReferencePolicy
from slipstream.training.single import SingleProcessBackend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def device_of(config: Config) -> torch.device:
    """`trainer.device`, with auto resolved."""
    name = config.trainer.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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


def max_model_len(config: Config) -> int:
    """Context of the engine: as set, else longest prompt plus longest response."""
    data = config.data
    wanted = data.max_prompt_length + data.max_response_length
    return config.actor_rollout_ref.rollout.max_model_len or wanted


def shorten_to(config: Config, tokens: int) -> str:
    """What to set where `max_model_len` is too much."""
    key = "actor_rollout_ref.rollout.max_model_len"
    own = "" if config.actor_rollout_ref.rollout.max_model_len is None else f" and {key}={tokens}"
    return f"set data.max_prompt_length and data.max_response_length to {tokens} together{own}"


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


def check_reference(
    config: Config,
    reference: ModelConfig,
    policy: ModelConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Refuse a `ref.path`, whose `folder` holds `reference`, that reads other tokens than the
    policy writes, or too few of them. Raises CheckpointError and ConfigError."""
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
    limit = reference.context_limit
    if max_model_len(config) > limit.tokens:
        raise ConfigError(
            f"{source}: prompt and response may take {max_model_len(config)} tokens, but "
            f"{limit.reason}; {shorten_to(config, limit.tokens)}, or name another reference"
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
