"""How much memory a run will take, from its settings and the sizes of its policy.

A trainer's share is measured on little ones (`footprint`); weights, keys and values and rows are
counted. Each phase holds some things from its beginning to its end and others one at a time: it
takes the sum of the ones and the largest of the others. All responses count as long as they may be,
so a run whose responses stay short takes less. Called by `dry_run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.memory import FreedMemory
from slipstream.loops import build
from slipstream.loops.batch_table import Batches
from slipstream.loops.build_critic import critic_optim
from slipstream.loops.build_speculation import head_to_be
from slipstream.loops.footprint import TrainerBytes, logits_bytes, measure_trainer
from slipstream.metrics.resident import resident_bytes
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.numerics import row_multiple
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.optim import OptimSettings
from slipstream.training.single import SingleProcessBackend

ROW_BYTES = 300
"""Of a sampled token in Python's lists: ids, log-probs, masks, advantages."""

_COPIED = 1.5
"""Keys and values while they grow: half as many, and these."""


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
    """Bytes on the run's device: `base` is the process without a run in it, `phases` by name."""

    base: int
    phases: Mapping[str, PhaseBytes]

    @property
    def total(self) -> int:
        return self.base + max(phase.total for phase in self.phases.values())


def estimate_memory(
    config: Config, mode: Mode, policy: ModelConfig, batches: Batches
) -> MemoryEstimate:
    """Trains little models, so on the main thread (`metrics.allocations`)."""
    phases: dict[str, PhaseBytes] = {}
    if batches.sft is not None:
        phases["SFT"] = _sft(config, policy, batches)
    if "rl" in mode:
        phases["RL"] = _rl(config, policy, batches)
    # Now: what the little trainers have loaded stays, as it does in a run.
    return MemoryEstimate(base=_process(build.device_of(config)), phases=phases)


def _process(device: torch.device) -> int:
    """Bytes that this process takes on the run's device; of a GPU, all that is in use there."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    FreedMemory().give_back()
    return resident_bytes()


def _sft(config: Config, policy: ModelConfig, batches: Batches) -> PhaseBytes:
    assert batches.sft is not None
    optim = build.optim_settings(config.sft.optim, config.sft.total_training_steps, key="sft.optim")
    trainer = _trainer(config, policy, optim, sft=True)
    held = {"policy and optimizer": _kept(trainer, policy)}
    if batches.validation and config.sft.test_freq > 0:
        held |= _engine(config, policy, batches.validation)
    return PhaseBytes(
        held=held,
        one_at_a_time={
            "an optimizer step": _step(config, trainer, policy, batches.sft.micro_batch_tokens),
            "writing a checkpoint": _checkpoint(trainer, policy),
        },
    )


def _rl(config: Config, policy: ModelConfig, batches: Batches) -> PhaseBytes:
    rl = batches.rl
    assert rl is not None
    trainer = _trainer(config, policy, build.actor_optim(config, rl.steps))
    held = {"policy and optimizer": _kept(trainer, policy)}
    actor_ref = config.actor_rollout_ref
    # Under LoRA the base weights are the reference.
    own = actor_ref.ref.path is not None or not actor_ref.model.lora_rank
    if build.wants_reference(config) and own:
        held["reference"] = 4 * _parameters(policy)
    one_at_a_time = {
        "an optimizer step": _step(config, trainer, policy, rl.micro_batch_tokens),
        "writing a checkpoint": _checkpoint(trainer, policy),
    }
    if build.wants_critic(config):
        of_critic = _trainer(config, policy, critic_optim(config, rl.steps))
        held["critic and optimizer"] = _kept(of_critic, policy)
        one_at_a_time["a critic's step"] = _step(config, of_critic, policy, rl.micro_batch_tokens)
    held |= _engine(config, policy, max(rl.in_flight, batches.validation))
    if config.speculative.enable and config.speculative.spec_strategy != "history":
        held["draft head"] = _head(config, policy, rl.in_flight)
    held["sampled tokens"] = ROW_BYTES * rl.tokens
    return PhaseBytes(held=held, one_at_a_time=one_at_a_time)


def _trainer(
    config: Config, policy: ModelConfig, optim: OptimSettings, *, sft: bool = False
) -> TrainerBytes:
    def make(decoder: Decoder, compute: ComputeThread) -> SingleProcessBackend:
        build.add_adapter(config, decoder, first=True)
        return build.make_backend(config, decoder, compute, optim=optim, sft=sft)

    actor = config.actor_rollout_ref.actor
    budget = config.sft.max_tokens_per_micro_batch if sft else actor.ppo_max_token_len_per_gpu
    by_rows = not sft and not actor.use_dynamic_bsz
    return measure_trainer(
        policy,
        make,
        device=build.device_of(config),
        max_tokens=None if by_rows else budget,
        recomputes=config.actor_rollout_ref.model.enable_gradient_checkpointing,
    )


def _kept(trainer: TrainerBytes, policy: ModelConfig) -> int:
    return trainer.kept.at(policy.num_layers, policy.vocab_size, 0)


def _step(config: Config, trainer: TrainerBytes, policy: ModelConfig, tokens: int) -> int:
    actor = config.actor_rollout_ref.actor
    logits = logits_bytes(
        policy.vocab_size,
        tokens,
        chunk=actor.log_prob_chunk_tokens,
        keep=actor.log_prob_keep_bytes,
    )
    return trainer.step(policy.num_layers, policy.vocab_size, tokens, logits=logits)


def _checkpoint(trainer: TrainerBytes, policy: ModelConfig) -> int:
    """A copy of the optimizer's state."""
    return max(0, _kept(trainer, policy) - 4 * _parameters(policy))


def _parameters(policy: ModelConfig) -> int:
    with torch.device("meta"):
        decoder = Decoder(policy)
    return sum(parameter.numel() for parameter in decoder.parameters())


def _engine(config: Config, policy: ModelConfig, in_flight: int) -> dict[str, int]:
    """Weights in fp32 and as they are computed with; keys and values of so many responses."""
    dtype = build.rollout_dtype(config)
    if config.actor_rollout_ref.rollout.name != "embedded":
        return {"engine's weights": dtype.itemsize * _parameters(policy)}
    device, longest = build.device_of(config), build.max_model_len(config)
    store = KVStore(policy, dtype, device, 0, row_multiple=row_multiple(dtype, device))
    rows = min(in_flight, config.actor_rollout_ref.rollout.max_num_seqs)
    wanted = round(_COPIED * store.size(rows, longest))
    return {
        "engine's weights": (4 + dtype.itemsize) * _parameters(policy),
        "keys and values": min(wanted, build.kv_bytes(config, policy)),
    }


def _head(config: Config, policy: ModelConfig, in_flight: int) -> int:
    """Its weights, twice where it learns, with an optimizer, and its keys and values."""
    head = head_to_be(config, policy)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    dtype = build.rollout_dtype(config)
    each = 4 + dtype.itemsize
    train = config.speculative.train
    if train.enable_drafter_training and train.mode != "opportunistic":
        each += 16
    layer = KVStore(policy, dtype, build.device_of(config), 0).slot_bytes // policy.num_layers
    return each * parameters + in_flight * build.max_model_len(config) * layer
