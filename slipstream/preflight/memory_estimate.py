"""How much memory a run will take, from its settings and the sizes of its models.

A trainer's share is measured on little ones (`footprint`); weights, keys and values and rows are
counted. Each phase holds some things from its beginning to its end and others one at a time: it
takes the sum of the ones and the largest of the others. All responses count as long as they may be,
so a run whose responses stay short takes less. What is left out is said (`Estimate.uncounted`).
Called by `dry_run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from slipstream.build.algorithm import takes_full_kl, wants_critic, wants_reference
from slipstream.build.critic import critic_optim
from slipstream.build.engine import keeps_one_copy, rollout_dtype
from slipstream.build.policy import (
    actor_optim,
    device_of,
    make_backend,
    max_model_len,
    memory_sharers,
    optim_settings,
    process_count,
)
from slipstream.build.speculation import head_to_be
from slipstream.checkpoint.layout import lora_folder, policy_folder
from slipstream.config.engines import engine_entry
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.memory import FreedMemory, free_bytes
from slipstream.metrics.resident import resident_bytes
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import load_config
from slipstream.models.hf_policy import HFPolicyConfig
from slipstream.models.lora import LoraConfig, add_lora
from slipstream.models.lora_io import read_adapter
from slipstream.models.numerics import row_multiple
from slipstream.models.policy import PolicyConfig, policy_config
from slipstream.preflight.batch_table import Batches
from slipstream.preflight.trainer_memory import (
    MOST_TOKENS,
    MakeTrainer,
    TrainerBytes,
    logits_bytes,
    measure_trainer,
)
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import TrainingBackend

ROW_BYTES = 240
"""Host memory of a sampled token: 140 bytes in the lists of its `Sample`, and 100 at the peak of
the update in the columns of its `TrainBatch` and in padded tensors. Measured with GRPO and
responses of equal length (`python -m bench.train_batch --spread 0`)."""

_GAPS, _GAPS_AGAIN = 1.2, 2.0
"""Resident bytes of a step on a CPU over allocated ones: what is freed and allocated anew leaves
gaps in the C library's heap, most where activations are computed again. Measured, with glibc
(`python -m bench.memory`)."""

_COPIED = {"cuda": 1.5}
"""By device: keys and values while they grow, half as many and these. A CPU's system gives pages
only when they are written to, and then the half is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBytes:
    """By what it is for: what is held throughout a phase, and what is there one at a time."""

    held: Mapping[str, int]
    one_at_a_time: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.held.values()) + max(self.one_at_a_time.values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the run's device: `base` is the process without a run in it, `phases` by name.
    `uncounted` names what the run has and no line counts."""

    base: int
    phases: Mapping[str, PhaseBytes]
    uncounted: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.base + max(phase.total for phase in self.phases.values())


def estimate_memory(
    config: Config, mode: Mode, policy: ModelConfig, batches: Batches
) -> MemoryEstimate:
    """Trains little models, so on the main thread (`metrics.allocations`)."""
    phases: dict[str, PhaseBytes] = {}
    if batches.sft is not None:
        phases["SFT"] = _sft(config, policy, batches, before_rl="rl" in mode)
    if batches.rl is not None:
        phases["RL"] = _rl(config, policy, batches)
    # Now: what the little trainers have loaded stays, as it does in a run.
    return MemoryEstimate(
        base=_process(device_of(config)),
        phases=phases,
        uncounted=tuple(_uncounted(config)) if batches.rl is not None else (),
    )


def _process(device: torch.device) -> int:
    """Bytes that this process takes on the run's device; of a GPU, all that is in use there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    FreedMemory().give_back()
    return resident_bytes()


def _uncounted(config: Config) -> Iterator[str]:
    train, rollout = config.speculative.train, config.actor_rollout_ref.rollout
    if config.reward_model.enable:
        yield "the learned reward model"
    if isinstance(_named_reference(config), HFPolicyConfig):
        yield "the reference, which transformers computes"
    if takes_full_kl(config):
        yield "the KL over the whole vocabulary"
    if train.enable_drafter_training:
        if train.mode == "opportunistic":
            yield "the process in which the draft head learns"
        yield "what the draft head learns from (speculative.train.buffer_bytes at most)"
    if config.speculative.enable and config.speculative.spec_strategy != "eagle":
        yield "the history that is drafted from"
    if process_count(config) > 1 and device_of(config).type == "cuda":
        yield "12 bytes a weight in the first machine's memory while a checkpoint is written"
    if device_of(config).type == "cuda" and not rollout.enforce_eager:
        yield "recorded decode steps (CUDA graphs)"


def _sft(config: Config, policy: ModelConfig, batches: Batches, *, before_rl: bool) -> PhaseBytes:
    assert batches.sft is not None
    optim = optim_settings(config.sft.optim, config.sft.total_training_steps, key="sft.optim")
    trainer = _trainer(config, policy, optim)
    held = {"policy and optimizer": _kept(trainer, policy)}
    # The last step is validated, unless RL begins by it.
    last = not (before_rl and config.trainer.val_before_train)
    if batches.validation and (config.sft.test_freq > 0 or last):
        held |= _engine(config, policy, batches.validation, held)
    tokens, length = batches.sft.micro_batch_tokens, config.sft.max_length
    return PhaseBytes(
        held=held,
        one_at_a_time={
            "an optimizer step": _step(config, trainer, policy, tokens, length),
            "writing a checkpoint": _optimizer_state(config, trainer, policy),
        },
    )


def _rl(config: Config, policy: ModelConfig, batches: Batches) -> PhaseBytes:
    rl = batches.rl
    assert rl is not None
    trainer = _trainer(config, policy, actor_optim(config, rl.steps))
    held = {"policy and optimizer": _kept(trainer, policy)}
    if (reference := _reference(config, policy)) is not None:
        held["reference"] = 4 * _parameters(reference) // process_count(config)
    one_at_a_time = {
        "an optimizer step": _step(config, trainer, policy, rl.micro_batch_tokens, batches.longest),
        "writing a checkpoint": _optimizer_state(config, trainer, policy),
    }
    if wants_critic(config):
        model, critic = _critic(config, policy, rl.steps)
        held["critic and optimizer"] = _kept(critic, model)
        step = critic.step(
            model.num_layers,
            model.vocab_size,
            rl.critic_micro_batch_tokens,
            batches.longest,
            logits=0,
        )
        again = config.critic.model.enable_gradient_checkpointing
        one_at_a_time["a critic's step"] = _resident(config, step, recomputes=again)
    if config.trainer.sync_every > 1:
        held["weights that were published last"] = 4 * _parameters(policy)
    held |= _engine(config, policy, max(rl.in_flight, batches.validation), held)
    if config.speculative.enable and config.speculative.spec_strategy != "history":
        held["draft head"] = _head(config, policy, rl.in_flight)
    if device_of(config).type == "cpu":
        held["sampled tokens"] = ROW_BYTES * rl.tokens
    return PhaseBytes(held=held, one_at_a_time=one_at_a_time)


def _reference(config: Config, policy: ModelConfig) -> ModelConfig | None:
    """What is compared with, where that has weights of its own that are counted; under LoRA those
    of the base are there already."""
    actor_ref = config.actor_rollout_ref
    if not wants_reference(config):
        return None
    if actor_ref.ref.path is None:
        lora = actor_ref.model.lora_rank or actor_ref.model.lora_adapter_path is not None
        return None if lora else policy
    found = _named_reference(config)
    return found if isinstance(found, ModelConfig) else None


def _named_reference(config: Config) -> PolicyConfig | None:
    """That of `ref.path`, if one is wanted and named."""
    ref, model = config.actor_rollout_ref.ref, config.actor_rollout_ref.model
    if ref.path is None or not wants_reference(config):
        return None
    return policy_config(policy_folder(Path(ref.path)), model.implementation)


def _trainer(config: Config, policy: ModelConfig, optim: OptimSettings) -> TrainerBytes:
    """Of the policy."""
    recompute = config.actor_rollout_ref.model.enable_gradient_checkpointing
    make = _maker(config, optim, _little_adapter(config))
    device = device_of(config)
    trainer = measure_trainer(policy, make, device=device, recomputes=recompute)
    count = process_count(config)
    if count == 1:
        return trainer
    one = replace(policy, num_layers=1, windowed_layers=())
    # In fp32 a layer, and what belongs to none.
    muon = 4 * _parameters(policy) if optim.optimizer == "Muon" else None
    return trainer.spread(count, 4 * _parameters(one), recomputes=recompute, whole_optimizer=muon)


def _critic(config: Config, policy: ModelConfig, rl_steps: int) -> tuple[ModelConfig, TrainerBytes]:
    """The sizes of the critic, and what it takes: as much as a policy of these sizes, but for
    logits. It has no adapter."""
    given = config.critic.model
    model = policy if given.path is None else load_config(policy_folder(Path(given.path)))
    # There is no LM head.
    model = replace(model, tie_word_embeddings=True)
    make = _maker(config, critic_optim(config, rl_steps), None)
    recompute = given.enable_gradient_checkpointing
    device = device_of(config)
    return model, measure_trainer(model, make, device=device, recomputes=recompute)


def _maker(config: Config, optim: OptimSettings, lora: LoraConfig | None) -> MakeTrainer:
    """Of trainers as the run's, whose forward passes take all of a little step."""
    ref = config.actor_rollout_ref
    actor = replace(ref.actor, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=MOST_TOKENS)

    def make(little: ModelConfig, compute: ComputeThread, recompute: bool) -> TrainingBackend:
        model = replace(ref.model, enable_gradient_checkpointing=recompute)
        own = replace(config, actor_rollout_ref=replace(ref, actor=actor, model=model))

        def begin() -> TrainingBackend:
            decoder = Decoder(little)
            decoder.init_weights(0)
            if lora is not None:
                add_lora(decoder, lora)
            return make_backend(own, decoder, compute, optim=optim)

        return compute.run(begin)

    return make


def _little_adapter(config: Config) -> LoraConfig | None:
    """The run's adapter for models of any number of layers: those that only some layers have are
    taken for all."""
    model = config.actor_rollout_ref.model
    if model.lora_adapter_path is not None:
        given, _ = read_adapter(lora_folder(Path(model.lora_adapter_path)))
    elif model.lora_rank:
        given = LoraConfig(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=model.target_modules,
            exclude_modules=model.exclude_modules,
        )
    else:
        return None
    return replace(
        given,
        target_modules=tuple(dict.fromkeys(name.split(".")[-1] for name in given.target_modules)),
        exclude_modules=tuple(name for name in given.exclude_modules if "." not in name),
    )


def _kept(trainer: TrainerBytes, model: ModelConfig) -> int:
    return trainer.kept.at(model.num_layers, model.vocab_size)


def _step(
    config: Config, trainer: TrainerBytes, policy: ModelConfig, tokens: int, length: int
) -> int:
    actor = config.actor_rollout_ref.actor
    logits = logits_bytes(
        policy.vocab_size,
        tokens,
        chunk=actor.log_prob_chunk_tokens,
        keep=actor.log_prob_keep_bytes,
    )
    step = trainer.step(policy.num_layers, policy.vocab_size, tokens, length, logits=logits)
    again = config.actor_rollout_ref.model.enable_gradient_checkpointing
    return _resident(config, step, recomputes=again)


def _resident(config: Config, step: int, *, recomputes: bool) -> int:
    if device_of(config).type != "cpu":
        return step
    return round((_GAPS_AGAIN if recomputes else _GAPS) * step)


def _optimizer_state(config: Config, trainer: TrainerBytes, policy: ModelConfig) -> int:
    """A copy of it is what is written: of several processes by the first, in its host's memory."""
    count, weights = process_count(config), 4 * _parameters(policy)
    if count > 1 and device_of(config).type != "cpu":
        return 0
    own = _kept(trainer, policy) - weights // count
    return max(0, own if own > weights else count * own)


def _parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        decoder = Decoder(model)
    return sum(parameter.numel() for parameter in decoder.parameters())


def _engine(
    config: Config, policy: ModelConfig, in_flight: int, held: Mapping[str, int]
) -> dict[str, int]:
    """Weights as they are computed with and, unless one copy is all, in fp32; keys and values of so
    many responses, of which the store takes its share of what is free beside `held`."""
    rollout, dtype, device = (
        config.actor_rollout_ref.rollout,
        rollout_dtype(config),
        device_of(config),
    )
    store = KVStore(policy, dtype, device, 0, row_multiple=row_multiple(dtype, device))
    rows = min(in_flight, rollout.max_num_seqs)
    size = store.size(rows, max_model_len(config))
    copied = _COPIED.get(device.type, 1.0)
    if not engine_entry(rollout.name).capabilities.kv_budget:
        return {
            "engine's weights": dtype.itemsize * _parameters(policy),
            "keys and values": round(copied * size),
        }
    one_copy = keeps_one_copy(config)
    weights = ((0 if one_copy else 4) + dtype.itemsize) * _parameters(policy)
    budget = rollout.kv_cache_bytes
    if budget is None:
        free = free_bytes(device) - sum(held.values()) - weights
        share = rollout.gpu_memory_utilization / memory_sharers(config)
        budget = round(share * max(0, free))
    return {"engine's weights": weights, "keys and values": round(copied * min(size, budget))}


def _head(config: Config, policy: ModelConfig, in_flight: int) -> int:
    """Its weights, with gradients and an optimizer where it learns in this process, and its keys
    and values."""
    parameters = sum(parameter.numel() for parameter in head_to_be(config, policy).parameters())
    dtype, train = rollout_dtype(config), config.speculative.train
    each = 4 + dtype.itemsize
    if train.enable_drafter_training and train.mode != "opportunistic":
        each += 16
    layer = KVStore(policy, dtype, device_of(config), 0).slot_bytes // policy.num_layers
    return each * parameters + in_flight * max_model_len(config) * layer
