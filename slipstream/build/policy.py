"""Builds the trained policy: weights, LoRA adapter, optimizer, backend, and its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import psutil
import torch

from slipstream.build.algorithm import full_kl_in_loss, takes_full_kl, wants_critic, wants_reference
from slipstream.checkpoint.layout import lora_folder, policy_folder
from slipstream.config.engines import ENGINE_KEY, engine_lacks, engines_with, generates_with
from slipstream.config.schema import Config
from slipstream.config.schema_actor import ModelSection, OptimSection
from slipstream.config.validate import no_decay
from slipstream.data.end_tokens import end_token_ids
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
    add_end_tokens,
    load_policy,
    load_sharded,
    policy_config,
)
from slipstream.models.vocabulary import check_vocabulary
from slipstream.threads import usable_cores
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.lora import BaseWeights
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import ReferencePolicy, TrainingBackend
from slipstream.training.single import SingleProcessBackend
from slipstream.types import PolicyKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.distributed.team import Team

POLICY, REFERENCE = "policy", "reference"
"""Names of the trainers within a process of a distributed run."""


def process_count(config: Config) -> int:
    """The number of processes of the run: one per GPU, or one per node without GPUs."""
    return config.trainer.nnodes * max(1, config.trainer.n_gpus_per_node)


def thread_count(config: Config) -> int | None:
    """`trainer.num_threads`, or a share of the cores if several processes use this machine. None:
    PyTorch's default."""
    trainer = config.trainer
    if trainer.num_threads is not None or process_count(config) == 1:
        return trainer.num_threads
    return max(1, usable_cores() // (trainer.n_gpus_per_node or trainer.nnodes))


def memory_sharers(config: Config) -> int:
    """The number of processes that share the memory of this one's device; 1 on a GPU."""
    return 1 if device_of(config).type == "cuda" else process_count(config)


def device_of(config: Config) -> torch.device:
    """The device of the run: `trainer.device`, with auto resolved."""
    name = config.trainer.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def make_policy(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | None,
    team: Team | None = None,
    *,
    trained: bool = True,
) -> Policy:
    """Build a policy or reference: with weights from `folder`, or random weights by `model.init`.

    In a distributed run its weights are sharded over the processes at once, unless it gets a LoRA
    adapter first. Its end tokens include those of `end_tokens`. `trained` is as in `load_policy`.
    """
    if folder is None:
        return make_decoder(config, tokenizer, None)
    model, device = config.actor_rollout_ref.model, device_of(config)
    positions = model.override_config.max_position_embeddings
    policy: Policy
    if team is None:
        policy = load_policy(
            folder,
            model.implementation,
            device=device,
            positions=positions,
            trained=trained,
        )
    elif model.lora_rank or model.lora_adapter_path is not None:
        # In host memory until it is sharded.
        policy = load_policy(folder, model.implementation, positions=positions)
    else:
        policy = load_sharded(folder, team.ranks.mesh, device=device, positions=positions)
    check_tokenizer(policy.config, tokenizer, folder)
    add_end_tokens(policy, end_tokens(config, tokenizer))
    return policy


def end_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a response of `tokenizer`'s chat template, or a plain text."""
    return end_token_ids(tokenizer, config.data.apply_chat_template_kwargs)


def make_decoder(
    config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path | None
) -> Decoder:
    """Like `make_policy`, for the built-in decoder only."""
    if folder is not None:
        positions = config.actor_rollout_ref.model.override_config.max_position_embeddings
        loaded = load_checkpoint(folder, device=device_of(config), positions=positions)
        check_tokenizer(loaded.config, tokenizer, folder)
        add_end_tokens(loaded, end_tokens(config, tokenizer))
        return loaded
    decoder = Decoder(initial_config(config, tokenizer))
    decoder.init_weights(config.trainer.seed)
    return decoder.to(device_of(config))


def add_adapter(config: Config, decoder: Policy, *, first: bool) -> None:
    """Add the LoRA adapter to be trained, if any. A `HFPolicy` cannot have one.

    `first`: the policy has the weights that `model` names, to which the adapter in
    `lora_adapter_path` belongs. Raises ConfigError for names that match no layer, or a rank that
    differs from the adapter's.
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
    """The policy's architecture: from `folder`, or from `model.init`. Raises ConfigError if the run
    uses features that a model in transformers lacks."""
    if folder is None:
        return initial_config(config, tokenizer)
    model = config.actor_rollout_ref.model
    found = policy_config(
        folder, model.implementation, positions=model.override_config.max_position_embeddings
    )
    if isinstance(found, HFPolicyConfig):
        check_hf_policy(config, found, folder)
    check_tokenizer(found, tokenizer, folder)
    return found.with_end_tokens(end_tokens(config, tokenizer))


_MEDIA_TOKENS = ("image_token", "boi_token", "eoi_token", "audio_token", "video_token")


def check_tokenizer(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise CheckpointError if the tokenizer has tokens without an embedding in `policy`.

    Placeholders of images and sounds do not count, since texts have none: Gemma 3's tokenizer has
    one that its text-only model lacks.
    """
    media = {getattr(tokenizer, name, None) for name in _MEDIA_TOKENS}
    beyond = {
        number: token
        for token, number in tokenizer.get_vocab().items()
        if number >= policy.vocab_size and token not in media
    }
    if beyond:
        highest = max(beyond)
        raise CheckpointError(
            f"the tokenizer has {len(beyond)} tokens without an embedding, up to {highest} -> "
            f"{beyond[highest]!r}: the model in {folder} has vocab_size={policy.vocab_size}. "
            f"Resize it once with transformers: model.resize_token_embeddings({highest + 1}, "
            "pad_to_multiple_of=64) and model.save_pretrained(FOLDER), then set "
            "actor_rollout_ref.model.path=FOLDER; or set actor_rollout_ref.model.tokenizer_path to "
            "the model's own tokenizer"
        )


def check_hf_policy(config: Config, policy: HFPolicyConfig, folder: Path) -> None:
    """Raise ConfigError for settings that a policy computed by transformers does not support."""
    for problem, remedy in _beyond_transformers(config):
        raise ConfigError(
            f"{folder} holds a model of the family {policy.family}, which transformers computes, "
            f"not "
            f"Slipstream's decoder: {problem}; set {remedy}"
        )


def _beyond_transformers(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that need the decoder, with their remedies."""
    model = config.actor_rollout_ref.model
    key = "actor_rollout_ref"
    if engine_lacks(config, generates_with(PolicyKind.TRANSFORMERS)):
        yield (
            f"{ENGINE_KEY}={config.actor_rollout_ref.rollout.name} does not generate with it",
            engines_with(generates_with(PolicyKind.TRANSFORMERS)),
        )
    if process_count(config) > 1:
        yield (
            f"its weights cannot be sharded over {process_count(config)} processes",
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
    """The architecture by `model.init`. Raises ConfigError if it is missing, or if its vocabulary
    is too small."""
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
    try:
        made = ModelConfig(
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
    except ConfigError as error:
        raise ConfigError(f"actor_rollout_ref.model.init: {error}") from error
    made = made.with_end_tokens(end_tokens(config, tokenizer))
    memory = psutil.virtual_memory().total
    if device_of(config).type == "cpu" and 4 * made.parameters > memory:
        raise ConfigError(
            f"actor_rollout_ref.model.init describes a model with {made.parameters:,} parameters, "
            f"which need {4 * made.parameters / 1e9:,.0f} GB, but this machine has "
            f"{memory / 1e9:,.0f} GB of memory; lower hidden_size={init.hidden_size}, "
            f"intermediate_size={init.intermediate_size}, num_layers={init.num_layers} or "
            f"vocab_size={vocab}"
        )
    return made


def max_model_len(config: Config) -> int:
    """The engine's context length: as set, or the longest prompt plus the longest response."""
    data = config.data
    wanted = data.max_prompt_length + data.max_response_length
    return config.actor_rollout_ref.rollout.max_model_len or wanted


def too_long(longest: int, limit: ContextLimit, keys: str) -> str:
    """The message for sequences of up to `longest` tokens that exceed `limit`. `keys` are the
    settings that fit the limit."""
    elsewhere = (
        ", or let transformers compute the model with actor_rollout_ref.model.implementation="
        f"transformers and {engines_with(generates_with(PolicyKind.TRANSFORMERS))}"
    )
    return (
        f"may have {longest} tokens, but {limit.reason}; set {keys}"
        f"{elsewhere if limit.of_decoder else ''}"
    )


def rollout_too_long(
    config: Config, limit: ContextLimit, section: str = "actor_rollout_ref.model"
) -> str | None:
    """The message if prompt and response exceed `limit` of the model of `section`; None if they
    fit."""
    longest, key = max_model_len(config), "actor_rollout_ref.rollout.max_model_len"
    if longest <= limit.tokens:
        return None
    given = config.actor_rollout_ref.rollout.max_model_len is not None
    own = f" and {key}={limit.tokens}" if given else ""
    lengths = f"data.max_prompt_length and data.max_response_length to {limit.tokens} together"
    longer = (
        ", or to extrapolate beyond the lengths that the model was trained for, "
        f"{section}.override_config.max_position_embeddings={longest}"
        if limit.of_config
        else ""
    )
    return f"prompt and response {too_long(longest, limit, lengths + own + longer)}"


def optim_settings(
    optim: OptimSection, total_steps: int, *, key: str, shift_decay: bool = False
) -> OptimSettings:
    """Optimizer and schedule from the section `key`. `total_steps` is the length of the run in the
    schedule's unit. Warm-up is a number of steps or a share of all steps.

    Without `zero_indexed_step`, the warm-up is one step ahead. With `shift_decay`, so is the decay,
    as in VERL, and the last step has the minimum rate. RL shifts it, and SFT does not. Raises
    ConfigError if no steps are left for the decay.
    """
    steps = optim.total_training_steps if optim.total_training_steps > 0 else total_steps
    warmup = optim.lr_warmup_steps
    first = 0 if optim.zero_indexed_step else 1
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
        num_cycles=optim.num_cycles,
        stable_ratio=optim.lr_wsd_stable_steps_ratio,
        warmup_offset=first,
        decay_offset=first if shift_decay else 0,
    )


def actor_optim(config: Config, rl_steps: int) -> OptimSettings:
    """The policy's optimizer and schedule for `rl_steps` RL steps.

    A schedule of optimizer steps has none in the RL steps in which only the critic learns. A
    schedule of RL steps covers all of them, as in VERL. Raises ConfigError if no steps are left.
    """
    actor, batch = config.actor_rollout_ref.actor, config.data.train_batch_size
    warmup = config.trainer.critic_warmup
    if warmup > rl_steps > 0:
        raise ConfigError(
            f"trainer.critic_warmup={warmup} trains the policy only from step {warmup} on, but the "
            f"run has {rl_steps} steps; set trainer.critic_warmup={rl_steps // 2} or more steps"
        )
    steps = rl_steps
    if actor.optim.lr_schedule_unit == "optimizer_step":
        steps = max(0, rl_steps - max(0, warmup - 1))
        steps *= actor.ppo_epochs * (batch // (actor.ppo_mini_batch_size or batch))
    return optim_settings(actor.optim, steps, key="actor_rollout_ref.actor.optim", shift_decay=True)


def make_backend(
    config: Config,
    decoder: Policy,
    compute: ComputeThread,
    *,
    optim: OptimSettings,
    sft: bool = False,
    team: Team | None = None,
    part: str = POLICY,
) -> TrainingBackend:
    """Build the trainer of one phase. It works on `compute`; in a distributed run it works as
    `part`, together with the trainers of the other processes."""
    actor = config.actor_rollout_ref.actor
    device = device_of(config)
    recompute = config.actor_rollout_ref.model.enable_gradient_checkpointing
    if recompute and isinstance(decoder, HFPolicy) and not decoder.supports_checkpointing:
        raise ConfigError(
            "actor_rollout_ref.model.enable_gradient_checkpointing=true: transformers does not "
            f"support it for the family {decoder.config.family}; set "
            "actor_rollout_ref.model.enable_gradient_checkpointing=false"
        )
    by_rows = not sft and not actor.use_dynamic_bsz
    tokens = config.sft.max_tokens_per_micro_batch if sft else actor.ppo_max_token_len_per_gpu
    make: Callable[..., TrainingBackend] = partial(SingleProcessBackend, decoder)
    if team is not None:
        assert isinstance(decoder, Decoder), "checked with the configuration"
        # Imported here because it imports torch.distributed, which a single process does not need.
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
        share_prompts=actor.use_prefix_grouper,
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
    """Check that the reference of `ref.path` has the policy's vocabulary and a long enough context.
    Raises CheckpointError and ConfigError."""
    path = config.actor_rollout_ref.ref.path
    if path is None:
        return
    source = f"actor_rollout_ref.ref.path={path}"
    trust = config.actor_rollout_ref.model.trust_remote_code
    # The KL over the whole vocabulary compares all outputs.
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
    policy: Policy,
    compute: ComputeThread,
    backend: TrainingBackend,
    team: Team | None = None,
) -> ReferencePolicy | None:
    """The reference of a KL term, or a teacher; None if neither is wanted.

    It is `ref.path`, or the policy in `initial` that RL starts from: a frozen copy, or with a LoRA
    adapter the base weights of `backend`, which trains `policy`. If the KL is over the whole
    vocabulary, `backend` gets the reference, too.
    """
    if not wants_reference(config):
        return None
    path = config.actor_rollout_ref.ref.path
    reference: ReferencePolicy
    decoder = None
    if path is None and lora_layers(policy):
        reference = BaseWeights(backend)
    else:
        folder = initial if path is None else policy_folder(Path(path))
        decoder = make_policy(config, tokenizer, folder, team)
        if folder is not None:
            check_reference(config, decoder.config, policy.config, folder, tokenizer)
        reference = make_backend(
            config, decoder, compute, optim=OptimSettings(lr=0.0), team=team, part=REFERENCE
        )
    if takes_full_kl(config):
        backend.use_full_kl(decoder, full_kl_in_loss(config))
    return reference


def initial_policy(config: Config) -> Path | None:
    """The Hugging Face folder of `model.path`; None if weights are random.

    Raises CheckpointError if there is no such folder.
    """
    path = config.actor_rollout_ref.model.path
    if path is None:
        return None
    if not Path(path).expanduser().is_dir():
        hub = "/" in path and path.count("/") == 1 and not path.startswith((".", "~", "/"))
        remedy = (
            f"download it first: hf download {path} --local-dir models/{path.split('/')[1]}"
            if hub
            else "give a folder with config.json and model.safetensors"
        )
        raise CheckpointError(f"actor_rollout_ref.model.path={path} is not a folder; {remedy}")
    return policy_folder(Path(path))
