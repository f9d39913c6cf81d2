"""Options of `speculative`: FastRL's tree for speculative decoding and draft-model co-training.

Knows names, types and defaults only. Part of the tree in `schema`. `validate` refuses
`speculative.enable=true`: this version decodes without speculation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.config.fields import NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Shape of the draft and its tuning."""

    spec_model_path: str | None = None
    """Folder of the draft model."""
    spec_steps: PositiveInt = 8
    """Depth of the draft tree: tokens drafted one after another."""
    spec_topk: PositiveInt = 4
    """Branches per drafted token."""
    spec_verify_tokens: PositiveInt = 48
    """Drafted tokens that the policy checks in one pass."""
    tune_algorithm: Literal["EG", "UCB1", "PREDEFINED", "BEG"] = "BEG"
    """Bandit that picks the draft shape: bucketed epsilon-greedy by default."""
    mab_configs: tuple[str, ...] = ("8_4_32", "8_4_16", "8_4_8")
    """Shapes to pick from, as `steps_topk_tokens`."""
    mab_bs_threshold: tuple[PositiveInt, ...] = (1, 2, 5, 21)
    """Batch sizes at which a bucket starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptimConfig:
    """Optimizer of the draft model."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: NonNegativeInt = 1000
    """Steps of linear warm-up."""
    min_lr_ratio: NonNegativeFloat | None = None
    """Share of the peak rate at which the schedule ends; null: 0."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTrainConfig:
    """Training of the draft model while the policy learns."""

    enable_drafter_training: bool = False
    """Train the draft model during RL."""
    training_interval_steps: PositiveInt = 10
    """RL steps between two trainings."""
    batch_size_per_gpu: PositiveInt = 2
    """Sequences per training step."""
    max_seq_len: PositiveInt = 8192
    """Longest training sequence."""
    max_epochs: PositiveInt = 10
    """Passes over the collected features."""
    checkpoint_path: str | None = None
    """Folder of draft checkpoints."""
    min_workers_for_training: PositiveInt = 1
    """Idle workers needed before training starts."""
    collect_hidden_states_from_sgl: bool = False
    """Take features from the engine's decoding instead of the trainer's forward pass."""
    optim: DrafterOptimConfig = field(default_factory=DrafterOptimConfig)
    """Optimizer of the draft model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding; not available in this version."""

    enable: bool = False
    """Decode with a draft model."""
    spec_strategy: Literal["eagle"] = "eagle"
    """Kind of draft model."""
    bs_threshold: PositiveInt | None = 32
    """Speculate while at most this many requests run; null: always."""
    eagle: EagleConfig = field(default_factory=EagleConfig)
    """Shape of the draft and its tuning."""
    train: DrafterTrainConfig = field(default_factory=DrafterTrainConfig)
    """Training of the draft model while the policy learns."""
