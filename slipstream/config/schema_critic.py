"""Options of `critic`: the value model, its optimizer and its update.

This module has names, types and defaults only; `validate` checks rules between options. Other
modules import the tree from `schema`. For several options, null means the policy's setting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.config.fields import PositiveFloat, PositiveInt
from slipstream.config.schema_actor import LossAggMode, OverrideConfigSection, RLOptimSection


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticModelSection:
    """The checkpoint that the critic starts from."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint: a token classification model with one label, a reward
    model (sequence classification with one label), or a language model, whose values start at 0;
    null: the policy that RL starts from."""
    tokenizer_path: str | None = None
    """Folder of the critic's tokenizer, which must equal the policy's; null: the tokenizer in
    `path`."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. This saves memory and needs about a third more
    time."""
    override_config: OverrideConfigSection = field(default_factory=OverrideConfigSection)
    """Values that replace those in the `config.json` of the checkpoint at `path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection:
    """The value model, which `algorithm.adv_estimator=gae` needs."""

    enable: bool | None = None
    """Train a critic; null: if the advantage estimator needs one."""
    model: CriticModelSection = field(default_factory=CriticModelSection)
    """The checkpoint that the critic starts from."""
    optim: RLOptimSection = field(default_factory=lambda: RLOptimSection(lr=1e-5))
    """The critic's optimizer."""
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; null: `actor_rollout_ref.actor.ppo_mini_batch_size`."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward pass, if `use_dynamic_bsz` is off; null: the policy's."""
    use_dynamic_bsz: bool | None = None
    """Fill micro-batches by token count instead of sequence count. It does not change the update.
    null: off if `ppo_micro_batch_size_per_gpu` is set, otherwise the policy's."""
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """Tokens per forward pass, if `use_dynamic_bsz` is on; null: the policy's."""
    ppo_epochs: PositiveInt | None = None
    """Passes over each rollout batch; null: `actor_rollout_ref.actor.ppo_epochs`."""
    shuffle: bool | None = None
    """Shuffle the groups of a rollout batch before splitting it into mini-batches; null: the
    policy's."""
    cliprange_value: PositiveFloat = 0.5
    """How far a value may move from its value at the start of the update."""
    loss_agg_mode: LossAggMode | None = None
    """How token losses are combined into one number, over the whole mini-batch; null: the
    policy's."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
