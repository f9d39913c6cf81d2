"""Estimates the memory of a run from its settings and the sizes of its models.

The memory of a trainer is measured on small models (`trainer_memory`). Weights, KV cache and
sampled tokens are counted. Each phase holds some parts all the time, and needs others one after
the other. So a phase needs the sum of the former plus the largest of the latter. All responses are
assumed to have their maximum length, so a run with shorter responses needs less. Parts without an
estimate are listed in `MemoryEstimate.uncounted`. Called by `dry_run`.
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
from slipstream.build.speculation import copy_bytes, head_to_be
from slipstream.checkpoint.layout import lora_folder, policy_folder
from slipstream.config.engines import engine_entry
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.inference.engine.kv_blocks import SLAB_SHARE
from slipstream.inference.engine.kv_store import make_store
from slipstream.inference.engine.memory import free_bytes
from slipstream.metrics.resident import FreedMemory, resident_bytes
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
    MAX_TOKENS,
    MakeTrainer,
    TrainerBytes,
    logits_bytes,
    measure_trainer,
    rope_bytes,
)
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import TrainingBackend

POLICY = "policy and optimizer"
"""The part of a phase with the policy's weights and its optimizer's state."""

COPY = "quantized copy of the policy"
"""The part of a phase with the quantized weights that draft."""

ROW_BYTES = 240
"""Bytes of host memory per sampled token.

140 bytes are in the lists of its `Sample`. At the peak of the update, 100 bytes are in the columns
of its `TrainBatch` and in padded tensors. Measured with GRPO and responses of equal length
(`python -m bench.train_batch --spread 0`).
"""

_HEAP_FACTOR, _HEAP_FACTOR_FP32 = 1.35, 1.25
_HEAP_FACTOR_SHARDED, _HEAP_FACTOR_CHECKPOINTING = 1.2, 2.7
"""Resident bytes of an optimizer step on a CPU, divided by its allocated bytes.

Freed memory leaves gaps in the heap of the C library. Several processes return it to the system,
one process keeps it. With `actor.dtype=float32` the gaps are smaller. With gradient
checkpointing, which allocates activations again, the gaps are larger. Measured with glibc
(`python -m bench.memory`).
"""

_KV_GROWTH = {"cuda": 1.5, "cpu": 1 + 1 / SLAB_SHARE}
"""By device type: peak bytes of the KV cache while it grows, divided by the bytes it needs.

While a rectangle on a GPU grows, the old one of half the size still exists. Blocks on a CPU are
allocated in slabs, the last of which may be unused.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBytes:
    """Bytes of a phase by part: `held` all the time, and `one_at_a_time` one after the other."""

    held: Mapping[str, int]
    one_at_a_time: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.held.values()) + max(self.one_at_a_time.values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the run's device.

    `base` is the memory of the process without a run. `phases` has an entry for SFT and RL, if the
    run has them. `uncounted` names parts of the run without an estimate.
    """

    base: int
    phases: Mapping[str, PhaseBytes]
    uncounted: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.base + max(phase.total for phase in self.phases.values())


def estimate_memory(
    config: Config, mode: Mode, policy: ModelConfig, batches: Batches
) -> MemoryEstimate:
    """Estimate the memory of a run.

    It trains small models to measure their memory. Call it on the main thread, as
    `metrics.allocations` requires.
    """
    phases: dict[str, PhaseBytes] = {}
    if batches.sft is not None:
        phases["SFT"] = _sft(config, policy, batches, before_rl="rl" in mode)
    if batches.rl is not None:
        phases["RL"] = _rl(config, policy, batches)
    # Measured last: libraries that the small trainers have loaded stay in memory, as in a run.
    return MemoryEstimate(
        base=_process(device_of(config)) + rope_bytes(policy, rollout_dtype(config)),
        phases=phases,
        uncounted=tuple(_uncounted(config)) if batches.rl is not None else (),
    )


def _process(device: torch.device) -> int:
    """Return the bytes of this process on the run's device.

    On a GPU, return all bytes in use there, also by other processes.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    FreedMemory(limit_bytes=0).give_back()
    return resident_bytes()


def _uncounted(config: Config) -> Iterator[str]:
    train, rollout = config.speculative.train, config.actor_rollout_ref.rollout
    if config.reward_model.enable:
        yield "the learned reward model"
    if isinstance(_named_reference(config), HFPolicyConfig):
        yield "the reference policy (runs through transformers)"
    if takes_full_kl(config):
        yield "the KL over the whole vocabulary"
    if train.enable_drafter_training:
        if train.mode == "opportunistic":
            yield "the process that trains the draft head"
        yield "training data of the draft head (at most speculative.train.buffer_bytes)"
    if config.speculative.drafts_from_history:
        yield "the text that history drafts come from"
    if process_count(config) > 1 and device_of(config).type == "cuda":
        yield "12 bytes per weight of main memory on the first machine during a checkpoint"
    if device_of(config).type == "cuda" and not rollout.enforce_eager:
        yield "CUDA graphs of decode steps"


def _sft(config: Config, policy: ModelConfig, batches: Batches, *, before_rl: bool) -> PhaseBytes:
    assert batches.sft is not None
    optim = optim_settings(config.sft.optim, config.sft.total_training_steps, key="sft.optim")
    trainer = _trainer(config, policy, optim)
    held = {POLICY: _kept(trainer, policy)}
    # SFT ends with a validation, unless RL starts with one.
    validates_at_end = not (before_rl and config.trainer.val_before_train)
    if batches.validation and (config.sft.test_freq > 0 or validates_at_end):
        held |= _engine(config, policy, batches.validation, held)
    tokens, length = batches.sft.micro_batch_tokens, config.sft.max_length
    return PhaseBytes(
        held=held,
        one_at_a_time={
            "an optimizer step": _step(
                config, trainer, policy, tokens, length, accumulates=batches.sft.accumulates
            ),
            "writing a checkpoint": _optimizer_state(config, trainer, policy),
        },
    )


def _rl(config: Config, policy: ModelConfig, batches: Batches) -> PhaseBytes:
    rl = batches.rl
    assert rl is not None
    trainer = _trainer(config, policy, actor_optim(config, rl.steps))
    held = {POLICY: _kept(trainer, policy)}
    if (reference := _reference(config, policy)) is not None:
        held["reference"] = 4 * _parameters(reference) // process_count(config)
    one_at_a_time = {
        "an optimizer step": _step(
            config,
            trainer,
            policy,
            rl.micro_batch_tokens,
            batches.longest,
            accumulates=rl.micro_batches > 1,
        ),
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
            accumulates=rl.critic_accumulates,
        )
        checkpointing = config.critic.model.enable_gradient_checkpointing
        one_at_a_time["an optimizer step of the critic"] = _resident(
            config, step, recomputes=checkpointing
        )
    if config.trainer.sync_every > 1:
        held["last published weights"] = 4 * _parameters(policy)
    held |= _engine(config, policy, max(rl.in_flight, batches.validation), held)
    if config.speculative.drafts_with_head:
        held["draft head"] = _head(config, policy, rl.in_flight)
    if config.speculative.drafts_with_copy:
        held[COPY] = copy_bytes(config, policy)
    if device_of(config).type == "cpu":
        held["sampled tokens"] = ROW_BYTES * rl.tokens
    return PhaseBytes(held=held, one_at_a_time=one_at_a_time)


def _reference(config: Config, policy: ModelConfig) -> ModelConfig | None:
    """Return the sizes of the reference policy if it needs its own weights and has an estimate.

    With LoRA, the reference uses the policy's base weights, so the result is None.
    """
    actor_ref = config.actor_rollout_ref
    if not wants_reference(config):
        return None
    if actor_ref.ref.path is None:
        lora = actor_ref.model.lora_rank or actor_ref.model.lora_adapter_path is not None
        return None if lora else policy
    found = _named_reference(config)
    return found if isinstance(found, ModelConfig) else None


def _named_reference(config: Config) -> PolicyConfig | None:
    """Return the sizes of the model at `ref.path`; None without a reference or path."""
    ref, model = config.actor_rollout_ref.ref, config.actor_rollout_ref.model
    if ref.path is None or not wants_reference(config):
        return None
    return policy_config(
        policy_folder(Path(ref.path)),
        model.implementation,
        positions=model.override_config.max_position_embeddings,
    )


def _trainer(config: Config, policy: ModelConfig, optim: OptimSettings) -> TrainerBytes:
    """Return the memory of the policy's trainer in each process."""
    recompute = config.actor_rollout_ref.model.enable_gradient_checkpointing
    make = _maker(config, optim, _small_adapter(config))
    device = device_of(config)
    trainer = measure_trainer(
        policy, make, device=device, recomputes=recompute, squares=optim.optimizer == "Muon"
    )
    count = process_count(config)
    if count == 1:
        return trainer
    # In fp32, a process gathers all weights outside of layers, those of one layer, and in the
    # backward pass those of the next layer in advance.
    gathered = replace(policy, num_layers=2, windowed_layers=())
    muon = 4 * _parameters(policy) if optim.optimizer == "Muon" else None
    return trainer.sharded(
        count, 4 * _parameters(gathered), recomputes=recompute, whole_optimizer=muon
    )


def _critic(config: Config, policy: ModelConfig, rl_steps: int) -> tuple[ModelConfig, TrainerBytes]:
    """Return the sizes of the critic, and the memory of its trainer.

    A critic needs as much memory as a policy of the same sizes without logits and LoRA adapter.
    """
    critic = config.critic.model
    positions = critic.override_config.max_position_embeddings
    model = (
        policy
        if critic.path is None
        else load_config(policy_folder(Path(critic.path)), positions=positions)
    )
    # A critic has no LM head.
    model = replace(model, tie_word_embeddings=True)
    optim = critic_optim(config, rl_steps)
    return model, measure_trainer(
        model,
        _maker(config, optim, None),
        device=device_of(config),
        recomputes=critic.enable_gradient_checkpointing,
        squares=optim.optimizer == "Muon",
    )


def _maker(config: Config, optim: OptimSettings, lora: LoraConfig | None) -> MakeTrainer:
    """Return a function that makes small trainers with the settings of the run.

    Their micro-batch limit is so high that a small step is a single forward pass.
    """
    ref = config.actor_rollout_ref
    actor = replace(ref.actor, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=MAX_TOKENS)

    def make(small: ModelConfig, compute: ComputeThread, recompute: bool) -> TrainingBackend:
        model = replace(ref.model, enable_gradient_checkpointing=recompute)
        small_config = replace(config, actor_rollout_ref=replace(ref, actor=actor, model=model))

        def make_on_thread() -> TrainingBackend:
            decoder = Decoder(small)
            decoder.init_weights(0)
            if lora is not None:
                add_lora(decoder, lora)
            return make_backend(small_config, decoder, compute, optim=optim)

        return compute.run(make_on_thread)

    return make


def _small_adapter(config: Config) -> LoraConfig | None:
    """Return the run's adapter in a form that fits any number of layers.

    If only some layers adapt a module, the result adapts it in all layers.
    """
    model = config.actor_rollout_ref.model
    if model.lora_adapter_path is not None:
        lora, _ = read_adapter(lora_folder(Path(model.lora_adapter_path)))
    elif model.lora_rank:
        lora = LoraConfig(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=model.target_modules,
            exclude_modules=model.exclude_modules,
        )
    else:
        return None
    return replace(
        lora,
        target_modules=tuple(dict.fromkeys(name.split(".")[-1] for name in lora.target_modules)),
        exclude_modules=tuple(name for name in lora.exclude_modules if "." not in name),
    )


def _kept(trainer: TrainerBytes, model: ModelConfig) -> int:
    return trainer.kept.at(model.num_layers, model.vocab_size)


def _step(
    config: Config,
    trainer: TrainerBytes,
    policy: ModelConfig,
    tokens: int,
    length: int,
    *,
    accumulates: bool,
) -> int:
    actor = config.actor_rollout_ref.actor
    logits = logits_bytes(
        policy.vocab_size,
        tokens,
        chunk=actor.log_prob_chunk_tokens,
        keep=actor.log_prob_keep_bytes,
    )
    step = trainer.step(
        policy.num_layers,
        policy.vocab_size,
        tokens,
        length,
        logits=logits,
        accumulates=accumulates,
    )
    checkpointing = config.actor_rollout_ref.model.enable_gradient_checkpointing
    return _resident(config, step, recomputes=checkpointing)


def _resident(config: Config, step: int, *, recomputes: bool) -> int:
    if device_of(config).type != "cpu":
        return step
    if recomputes:
        return round(_HEAP_FACTOR_CHECKPOINTING * step)
    if process_count(config) > 1:
        return round(_HEAP_FACTOR_SHARDED * step)
    fp32 = config.actor_rollout_ref.actor.dtype == "float32"
    return round((_HEAP_FACTOR_FP32 if fp32 else _HEAP_FACTOR) * step)


def _optimizer_state(config: Config, trainer: TrainerBytes, policy: ModelConfig) -> int:
    """Return the bytes of the copy of the optimizer's state that writing a checkpoint makes.

    The first of several processes copies the state of all, into the main memory of its machine. So
    the result is 0 for several GPU processes: it counts GPU memory.
    """
    count, weights = process_count(config), 4 * _parameters(policy)
    if count > 1 and device_of(config).type != "cpu":
        return 0
    own = _kept(trainer, policy) - weights // count
    return max(0, own if own > weights else count * own)


def _parameters(model: ModelConfig) -> int:
    # All layers have the same sizes, so two models of one and two layers tell the size of any.
    one, two = (
        _counted(replace(model, num_layers=n, windowed_layers=(), sliding_window=None))
        for n in (1, 2)
    )
    return one + (model.num_layers - 1) * (two - one)


def _counted(model: ModelConfig) -> int:
    with torch.device("meta"):
        decoder = Decoder(model)
    return sum(parameter.numel() for parameter in decoder.parameters())


def _engine(
    config: Config, policy: ModelConfig, in_flight: int, held: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes of the engine's weights and of its KV cache.

    Weights count in the compute dtype and, unless the engine keeps a single copy, in fp32. The KV
    cache holds `in_flight` responses of maximum length. Its size is limited by
    rollout.kv_cache_bytes, or by the share rollout.gpu_memory_utilization of the memory that is
    free next to `held`.
    """
    rollout, dtype, device = (
        config.actor_rollout_ref.rollout,
        rollout_dtype(config),
        device_of(config),
    )
    store = make_store(policy, dtype, device, 0, row_multiple=row_multiple(dtype, device))
    rows = min(in_flight, rollout.max_num_seqs)
    size = store.size([max_model_len(config)] * rows)
    growth = _KV_GROWTH.get(device.type, 1.0)
    if not engine_entry(rollout.name).capabilities.kv_budget:
        return {
            "weights of the engine": dtype.itemsize * _parameters(policy),
            "KV cache": round(growth * size),
        }
    one_copy = keeps_one_copy(config)
    weights = ((0 if one_copy else 4) + dtype.itemsize) * _parameters(policy)
    budget = rollout.kv_cache_bytes
    if budget is None:
        free = free_bytes(device) - sum(held.values()) - weights
        share = rollout.gpu_memory_utilization / memory_sharers(config)
        budget = round(share * max(0, free))
    # Blocks never grow beyond the budget; a rectangle that grows exists twice.
    kv = growth * min(size, budget) if device.type == "cuda" else min(growth * size, budget)
    return {"weights of the engine": weights, "KV cache": round(kv)}


def _head(config: Config, policy: ModelConfig, in_flight: int) -> int:
    """Return the bytes of the draft head: its weights, the KV cache of its layer, and the rows of
    the policy's LM head that a draft vocabulary copies, in two layouts.

    If this process trains the head, add 16 bytes per weight for gradients and optimizer.
    """
    head = head_to_be(config, policy)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    dtype, train = rollout_dtype(config), config.speculative.train
    bytes_per_weight = 4 + dtype.itemsize
    if train.enable_drafter_training and train.mode != "opportunistic":
        bytes_per_weight += 16
    layer = make_store(policy, dtype, device_of(config), 0).slot_bytes // policy.num_layers
    rows = 0 if head.draft_tokens is None else head.draft_vocab_size
    copied = 2 * rows * policy.hidden_size * dtype.itemsize
    return bytes_per_weight * parameters + copied + in_flight * max_model_len(config) * layer
