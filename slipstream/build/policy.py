"""Wiring of the policy that is trained: weights, adapter, optimizer, backend, and its reference.

Called by the phases, through `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from slipstream.build.algorithm import full_kl_in_loss, takes_full_kl, wants_critic, wants_reference
from slipstream.checkpoint.layout import lora_folder, policy_folder
from slipstream.config.schema import Config
from slipstream.config.schema_actor import ModelSection, OptimSection
from slipstream.config.validate import no_decay
from slipstream.data.tokenizer import vocabulary_in
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.config import ContextLimit, Family, ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.hf_policy import HFPolicy, HFPolicyConfig
from slipstream.models.lora import LoraConfig, add_lora, lora_layers
from slipstream.models.lora_io import load_adapter, read_adapter
from slipstream.models.numerics import WIDTH_MULTIPLE, dtype_from_name, round_up
from slipstream.models.policy import (
    Policy,
    PolicyConfig,
    load_policy,
    load_sharded,
    policy_config,
)
from slipstream.models.vocabulary import check_vocabulary
from slipstream.threads import usable_cores
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.lora import BaseWeights
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import ReferencePolicy
from slipstream.training.single import SingleProcessBackend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.distributed.team import Team

_BY_TRANSFORMERS = (
    "actor_rollout_ref.model.implementation=transformers and actor_rollout_ref.rollout.name=hf"
)


POLICY, REFERENCE = "policy", "reference"
"""Names of the trainers among the parts of a process (`distributed`)."""


def process_count(config: Config) -> int:
    """How many processes train and generate: one for each GPU, or without GPUs for each node."""
    return config.trainer.nnodes * max(1, config.trainer.n_gpus_per_node)


def thread_count(config: Config) -> int | None:
    """`trainer.num_threads`, or where several processes share this machine's cores a part of them;
    None: PyTorch's choice."""
    trainer = config.trainer
    if trainer.num_threads is not None or process_count(config) == 1:
        return trainer.num_threads
    return max(1, usable_cores() // (trainer.n_gpus_per_node or trainer.nnodes))


def memory_sharers(config: Config) -> int:
    """How many processes take their memory from where this one does: a GPU has one."""
    return 1 if device_of(config).type == "cuda" else process_count(config)


def device_of(config: Config) -> torch.device:
    """`trainer.device`, with auto resolved."""
    name = config.trainer.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def make_policy(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | None,
    team: Team | None = None,
) -> Policy:
    """A policy, or what it is compared with: weights from `folder`, or freshly drawn after
    `model.init`. Over the processes of a team it is spread at once, unless it gets an adapter
    first."""
    if folder is None:
        return make_decoder(config, tokenizer, None)
    model, device = config.actor_rollout_ref.model, device_of(config)
    if team is None:
        return load_policy(folder, model.implementation, device=device)
    if model.lora_rank or model.lora_adapter_path is not None:
        # In the host's memory until it is spread.
        return load_policy(folder, model.implementation)
    return load_sharded(folder, team.ranks.mesh, device=device)


def make_decoder(
    config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path | None
) -> Decoder:
    """`make_policy` where the built-in decoder is wanted."""
    if folder is not None:
        return load_checkpoint(folder, device=device_of(config))
    decoder = Decoder(initial_config(config, tokenizer))
    decoder.init_weights(config.trainer.seed)
    return decoder.to(device_of(config))


def add_adapter(config: Config, decoder: Policy, *, first: bool) -> None:
    """Give the policy the LoRA adapter that is to be trained, if any, which a `HFPolicy` cannot
    have. `first`: it has the weights
    that `model` names, on which the adapter in `lora_adapter_path` belongs.

    Raises ConfigError for names that match no layer, or a rank that is not the adapter's.
    """
    if isinstance(decoder, HFPolicy):
        return
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
            ("lora_alpha", model.lora_alpha, ModelSection().lora_alpha, given.alpha),
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
) -> PolicyConfig:
    """The policy's architecture: that in `folder`, or `model.init`'s. Raises ConfigError where this
    run asks of transformers what it cannot do."""
    if folder is None:
        return initial_config(config, tokenizer)
    found = policy_config(folder, config.actor_rollout_ref.model.implementation)
    if isinstance(found, HFPolicyConfig):
        check_hf_policy(config, found, folder)
    return found


def check_hf_policy(config: Config, policy: HFPolicyConfig, folder: Path) -> None:
    """Refuse what a policy that transformers computes cannot do. Raises ConfigError."""
    for problem, remedy in _beyond_transformers(config):
        raise ConfigError(
            f"{folder} holds a {policy.family}, which transformers computes and not Slipstream's "
            f"decoder: {problem}; set {remedy}"
        )


def _beyond_transformers(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that take the decoder, and what to set instead."""
    model, name = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.name
    key = "actor_rollout_ref"
    if name != "hf":
        yield f"{key}.rollout.name={name} does not generate with it", f"{key}.rollout.name=hf"
    if process_count(config) > 1:
        yield (
            f"its weights are not spread over {process_count(config)} processes",
            "trainer.nnodes=1 and trainer.n_gpus_per_node to at most 1",
        )
    if model.lora_rank:
        yield (
            f"{key}.model.lora_rank={model.lora_rank} adapts the decoder",
            (f"{key}.model.lora_rank=0"),
        )
    if model.lora_adapter_path is not None:
        yield (
            f"{key}.model.lora_adapter_path={model.lora_adapter_path} adapts the decoder",
            (f"{key}.model.lora_adapter_path=null"),
        )
    for where, optim in (
        (f"{key}.actor.optim", config.actor_rollout_ref.actor.optim),
        ("sft.optim", config.sft.optim),
    ):
        if optim.optimizer == "Muon":
            yield (
                f"{where}.optimizer=Muon is for the decoder's matrices",
                f"{where}.optimizer=AdamW",
            )
    if wants_critic(config) and config.critic.model.path is None:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator}: a critic starts from the "
            "decoder",
            "algorithm.adv_estimator=grpo, or critic.model.path to the folder of a "
            f"{' or '.join(get_args(Family))}",
        )


def initial_config(config: Config, tokenizer: PreTrainedTokenizerBase) -> ModelConfig:
    """Sizes after `model.init`. Raises ConfigError where there are none, or too few words."""
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


def too_long(longest: int, limit: ContextLimit, keys: str) -> str:
    """What is said of sequences of up to `longest` tokens, with what to set instead: `keys` is of
    the limit in their place."""
    elsewhere = ", or let transformers compute the model with " + _BY_TRANSFORMERS
    return (
        f"may take {longest} tokens, but {limit.reason}; set {keys}"
        f"{elsewhere if limit.of_decoder else ''}"
    )


def rollout_too_long(config: Config, limit: ContextLimit) -> str | None:
    """`too_long` of prompt and response; None where they fit."""
    longest, key = max_model_len(config), "actor_rollout_ref.rollout.max_model_len"
    if longest <= limit.tokens:
        return None
    given = config.actor_rollout_ref.rollout.max_model_len is not None
    own = f" and {key}={limit.tokens}" if given else ""
    lengths = f"data.max_prompt_length and data.max_response_length to {limit.tokens} together"
    return f"prompt and response {too_long(longest, limit, lengths + own)}"


def optim_settings(optim: OptimSection, total_steps: int, *, key: str) -> OptimSettings:
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
    decoder: Policy,
    compute: ComputeThread,
    *,
    optim: OptimSettings,
    sft: bool = False,
    team: Team | None = None,
    part: str = POLICY,
) -> SingleProcessBackend:
    """The trainer of one phase; it works on `compute`, and where there is a team as its `part`
    together with those of the other processes."""
    actor = config.actor_rollout_ref.actor
    device = device_of(config)
    recompute = config.actor_rollout_ref.model.enable_gradient_checkpointing
    if recompute and isinstance(decoder, HFPolicy) and not decoder.recomputes:
        raise ConfigError(
            "actor_rollout_ref.model.enable_gradient_checkpointing=true: transformers cannot "
            f"compute activations of a {decoder.config.family} again; set "
            "actor_rollout_ref.model.enable_gradient_checkpointing=false"
        )
    by_rows = not sft and not actor.use_dynamic_bsz
    tokens = config.sft.max_tokens_per_micro_batch if sft else actor.ppo_max_token_len_per_gpu
    make: Callable[..., SingleProcessBackend] = partial(SingleProcessBackend, decoder)
    if team is not None:
        assert isinstance(decoder, Decoder), "checked with the configuration"
        # Imported here: it takes torch's part for several processes, and one does without.
        from slipstream.distributed.backend import TeamBackend

        make = partial(TeamBackend, decoder, team, part)
    return make(
        optim=optim,
        dtype=dtype_from_name(actor.dtype, device),
        device=device,
        max_tokens_per_micro_batch=None if by_rows else tokens,
        max_rows_per_micro_batch=actor.ppo_micro_batch_size_per_gpu if by_rows else None,
        grad_clip=actor.grad_clip,
        gradient_checkpointing=recompute,
        max_nonfinite_steps=actor.max_nonfinite_steps,
        log_prob_chunk=actor.log_prob_chunk_tokens,
        log_prob_keep_bytes=actor.log_prob_keep_bytes,
        metrics_prefix="sft" if sft else "actor",
        compute=compute,
    )


def check_reference(
    config: Config,
    reference: PolicyConfig,
    policy: PolicyConfig,
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
    if problem := rollout_too_long(config, reference.context_limit):
        raise ConfigError(f"{source}: {problem}, or name another reference")


def make_reference(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    initial: Path | None,
    compute: ComputeThread,
    backend: SingleProcessBackend,
    team: Team | None = None,
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
        decoder = make_policy(config, tokenizer, folder, team)
        if folder is not None:
            check_reference(config, decoder.config, backend.decoder.config, folder, tokenizer)
        reference = make_backend(
            config, decoder, compute, optim=OptimSettings(lr=0.0), team=team, part=REFERENCE
        )
    if takes_full_kl(config):
        backend.use_full_kl(decoder, full_kl_in_loss(config))
    return reference


def initial_policy(config: Config) -> Path | None:
    """The Hugging Face folder of `model.path`, None where weights are drawn at random.

    Raises CheckpointError where there is no such folder.
    """
    path = config.actor_rollout_ref.model.path
    if path is None:
        return None
    if not Path(path).is_dir():
        hub = "/" in path and path.count("/") == 1 and not path.startswith((".", "~", "/"))
        remedy = (
            f"download it first: hf download {path} --local-dir models/{path.split('/')[1]}"
            if hub
            else "give a folder with config.json and model.safetensors"
        )
        raise CheckpointError(f"actor_rollout_ref.model.path={path} is not a folder; {remedy}")
    return policy_folder(Path(path))
