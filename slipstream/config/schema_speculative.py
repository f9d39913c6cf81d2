"""Options of `speculative`: FastRL's tree for speculative decoding and draft-head co-training.

This module has names, types and defaults only. Other modules import the tree from `schema`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.config.fields import (
    BelowOne,
    CountOrOff,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

MOST_BRANCHES = 8
"""Largest number of tokens per level that a draft tree follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSection:
    """The draft head, the shape of drafts, and how the shape is chosen."""

    spec_model_path: str | None = None
    """Folder of the draft head, or of a run of `slipstream draft`. Training continues from it and
    keeps its type, EAGLE or EAGLE3."""
    spec_algorithm: Literal["EAGLE", "EAGLE3"] = "EAGLE"
    """Type of a new draft head. `EAGLE` (1 and 2) takes the policy's final hidden states and uses
    the policy's LM head. `EAGLE3` takes the hidden states of three layers and has its own LM
    head."""
    draft_vocab_size: PositiveInt | Literal["auto"] | None = "auto"
    """Number of tokens that a new draft head can draft: the most frequent tokens in the first
    responses of `slipstream draft`, or in `rollout_files`. `auto`: all tokens of a policy with up
    to 16,384 tokens; else the number with the highest estimated speed. null: all tokens. A new
    head of RL has no responses to count in: an EAGLE head starts with the end tokens and the lowest
    token ids, with `auto` 8,192 if the policy has more than 16,384 tokens. Its first training
    chooses the most frequent tokens and, with `auto`, lowers their number to the one with the
    highest estimated speed. Later trainings renew the tokens if the policy writes others. With
    `auto`, a new EAGLE3 head of RL drafts all tokens."""
    aux_hidden_state_layer_ids: tuple[NonNegativeInt, ...] | None = None
    """Auxiliary layers of a new EAGLE3 draft head: three layers of the policy, counted from 0,
    whose inputs the draft head takes; null: layer 2, the middle layer (number of layers divided by
    2), and the third layer from the end."""
    spec_steps: PositiveInt = 7
    """Maximum draft depth: number of tokens drafted one after another. `tune_algorithm` chooses the
    depth of each step."""
    spec_topk: PositiveInt = 1
    """1: drafts are chains. 2 to 8: drafts are trees. A tree follows this number of tokens per
    level; each of them proposes the same number of candidates for the next level."""
    spec_verify_tokens: PositiveInt | None = None
    """Tokens per request that the policy verifies in one pass, including the last known token. For
    trees, this is the average over the batch, and the draft tokens with the highest estimated
    acceptance probability are verified. null: all tokens of a chain, `spec_steps` + 1."""
    tune_algorithm: Literal["COST", "PREDEFINED", "EG", "UCB1", "BEG"] = "COST"
    """How the draft plan of each step is chosen. `COST`: from measured step times and acceptance,
    among chains and trees up to the options above, and plain decoding. `PREDEFINED`: always the
    shape of the options above. FastRL's bandits choose the plan with the most tokens per second
    from `mab_configs` and that shape: `EG` (epsilon-greedy) and `UCB1` from all of them, `BEG` from
    those for the current batch size."""
    exploration: Fraction = 0.005
    """`COST`: share of the time that trying other draft plans may cost, in addition to the first
    trials. It corresponds to a bandit's epsilon."""
    hysteresis: NonNegativeFloat = 0.02
    """`COST`: share by which another draft plan must be faster before decoding switches to it."""
    mab_configs: tuple[str, ...] = ("8_4_32", "8_4_16", "8_4_8")
    """Draft plans that a bandit chooses from, written `steps_topk_tokens`; `0_0_1`: no drafts."""
    mab_bs_threshold: tuple[PositiveInt, ...] = (1, 2, 5, 21)
    """`BEG`: batch sizes from which on it uses plans with fewer tokens to verify. One entry per
    number of tokens to verify, including `spec_verify_tokens`."""
    mab_epsilon: Fraction = 0.1
    """Probability that `EG` and `BEG` choose a random plan."""
    mab_window_size: PositiveInt = 300
    """Number of recent steps, per plan and batch size, that a bandit learns from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySection:
    """Drafts from earlier text, without a draft head."""

    match_tokens: PositiveInt = 3
    """Number of last tokens of a context that must match an earlier text."""
    max_tokens: PositiveInt = 1048576
    """Tokens of finished responses to remember, about 300 bytes each; the oldest are removed
    first."""
    stagger_samples: bool = False
    """While more requests wait than can run, run the samples of a prompt one after another. Later
    samples can then use drafts from earlier ones, but each needs its own prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSection:
    """Drafts by a quantized copy of the policy, without a draft head."""

    bits: Literal[4, 8] = 8
    """Bits of a weight of the copy's layers. Each group of 32 weights has a scale in addition. With
    fewer bits drafts take less time, and fewer of them are accepted."""
    lm_head_bits: Literal[4, 8] = 8
    """Bits of a weight of the copy's LM head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptimSection:
    """An optimizer of the draft head.

    Names are FastRL's, but the defaults differ. FastRL's learning rate of 1e-6 with 1000 warm-up
    steps suits a head that was already trained on millions of tokens. These defaults train a new
    head in half a minute (docs/log/draft_heads.md).
    """

    optimizer: Literal["AdamW", "Muon"] = "Muon"
    """`Muon` for the layer's matrices and AdamW for its norms, or `AdamW` for all."""
    lr: NonNegativeFloat = 1e-3
    """Peak learning rate of the parameters that use AdamW."""
    muon_lr: NonNegativeFloat | Literal["auto"] | None = "auto"
    """Peak learning rate of the matrices, if `optimizer` is Muon. `auto`: 0.05 for policies with a
    hidden size of up to 192, and less for wider ones (0.01 for 576); null: `lr`."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment; the defaults are FastRL's and EAGLE's."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices."""
    lr_warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""
    min_lr_ratio: NonNegativeFloat | None = None
    """Share of the peak learning rate at which the schedule ends; null: 0."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "linear"
    """Schedule of the learning rate after warm-up."""


def _following() -> DrafterOptimSection:
    """Return the optimizer for RL, where a trained head follows the policy until RL ends."""
    return DrafterOptimSection(lr=1e-4, muon_lr=0.003, lr_scheduler_type="constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTrainSection:
    """How a draft head is trained, during RL or separately. Its features are hidden states of the
    policy."""

    enable_drafter_training: bool = False
    """Train the draft head during RL."""
    mode: Literal["interval", "opportunistic"] = "interval"
    """When the draft head trains. `interval`: between two RL steps. The run waits for it, and equal
    runs give equal heads, bit for bit. `opportunistic`: in a separate process, whenever a core is
    idle, or freed by decoding (`actor_rollout_ref.rollout.one_thread_below`)."""
    training_interval_steps: PositiveInt = 10
    """RL steps between two trainings, if `mode` is interval."""
    updates_per_training: PositiveInt = 8
    """Optimizer steps per training; fewer if the collected responses are used up."""
    ema_decay: BelowOne = 0.95
    """Decay of the moving average of the weights; the published head is this average. Each training
    step keeps this share of the average. In the first steps the share is smaller, so that the
    average is the plain mean. 0: publish the newest weights."""
    buffer_bytes: PositiveInt = 268435456
    """Maximum size in bytes of the features of collected responses."""
    lookback_steps: PositiveInt = 2
    """Number of recent RL steps whose responses are trained on. Prompts take turns: each update
    takes responses to the prompts that were used least."""
    long_share: NonNegativeFloat = 0.25
    """Share of `buffer_bytes` in which the longest responses are kept until they are too old."""
    held_out_samples: PositiveInt = 32
    """Number of held-out responses, never trained on, that a new version is measured on before it
    is published."""
    held_out_every: PositiveInt = 8
    """One prompt in this many is held out, with all of its responses."""
    accept_depth: PositiveInt = 5
    """Chain depth up to which acceptance is measured."""
    batch_size_per_gpu: PositiveInt = 32
    """Sequences per training step. FastRL uses 2, for sequences of thousands of tokens."""
    max_seq_len: PositiveInt = 8192
    """Longest training sequence in tokens; the rest of a longer one is not trained on."""
    max_epochs: PositiveInt = 10
    """Maximum number of times that a collected response is trained on."""
    checkpoint_path: str | None = None
    """Folder of draft checkpoints; must be null in this version, because the run's checkpoints
    contain the draft head."""
    min_workers_for_training: PositiveInt = 1
    """Number of idle workers needed before training starts."""
    collect_hidden_states_from_engine: bool = False
    """Take features from the engine's decoding. If the engine has none for a response, or features
    of more than one policy version, they come from the trainer's forward pass."""
    value_weight: NonNegativeFloat | None = None
    """Weight of the distance between predicted and true features (smooth L1); null: 1 for an EAGLE
    head. EAGLE3 does not predict features."""
    soft_weight: NonNegativeFloat = 0.5
    """Weight of the cross-entropy to the policy's distribution; FastRL and EAGLE use 0.1."""
    acceptance_weight: NonNegativeFloat = 0.0
    """Weight of -log sum min(p, q). The sum is the probability that a draft sampled from the head's
    distribution q is accepted under the policy's distribution p (LK loss, Samarin et al. 2026)."""
    topk_mass_weight: NonNegativeFloat = 0.0
    """Weight of -log of the policy's probability mass on the head's `speculative.eagle.spec_topk`
    best tokens, which are the candidates of one tree level."""
    depth: PositiveInt | None = None
    """Draft depth that a training step covers. From the second draft on, the head gets its own
    predictions as input. null: 1 for an EAGLE head, 5 for EAGLE3, which needs more than one."""
    depth_decay: NonNegativeFloat | None = None
    """Weight of each deeper draft relative to the one before; null: 1 for an EAGLE head, 0.8 for
    EAGLE3."""
    feature_noise: NonNegativeFloat = 0.0
    """Width of the uniform noise that is added to the head's input features."""
    grad_clip: PositiveFloat | None = 1.0
    """Largest gradient norm; null: no limit."""
    optim: DrafterOptimSection = field(default_factory=_following)
    """Optimizer of the draft head during RL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSection:
    """`slipstream draft`: training of a draft head for a fixed policy, in rounds of new
    responses."""

    total_training_steps: PositiveInt = 768
    """Training steps in total."""
    samples_per_round: PositiveInt = 256
    """Responses that a round trains on, one per prompt."""
    epochs_per_round: PositiveInt = 8
    """Number of passes over the responses of a round, if `steps_per_round` is null."""
    steps_per_round: PositiveInt | None = None
    """Training steps on the responses of one round; null: as set by `epochs_per_round`."""
    rollout_files: tuple[str, ...] | None = None
    """Recorded rollouts (`rollouts/N.jsonl` of a run) to train on; null: generate responses."""
    held_out_samples: PositiveInt = 128
    """Number of held-out responses, never trained on, that acceptance is measured on."""
    accept_depth: PositiveInt = 5
    """Chain depth up to which acceptance is measured."""
    save_freq: CountOrOff = 3
    """Rounds between checkpoints; -1: only after the last round."""
    patience: CountOrOff = 3
    """End the training after this many rounds in a row without a better head, measured on held-out
    responses. Rounds of the warm-up do not count, and 0 means 1. -1: never."""
    optim: DrafterOptimSection = field(default_factory=DrafterOptimSection)
    """Optimizer of the draft head for a fixed policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSection:
    """Speculative decoding and its draft head."""

    enable: bool = False
    """Decode with drafts."""
    spec_strategy: Literal["eagle", "history", "union", "quantized", "quantized_union"] = "eagle"
    """Source of drafts: `eagle`, a draft head; `history`, earlier text (the request's own, and
    other responses to its prompt); `union`, for each request the source of these two whose
    drafts were accepted more often; `quantized`, a quantized copy of the policy, which needs no
    training (CPU only); `quantized_union`, as `union`, with this copy instead of a draft head."""
    bs_threshold: NonNegativeInt | None = None
    """Draft only while at most this many requests run; 0: never; null: at every batch size where
    drafts are faster, as measured by the selector."""
    trace: bool = False
    """Record every choice of a draft plan in `speculation.jsonl` of the run folder."""
    history: HistorySection = field(default_factory=HistorySection)
    """Drafts from earlier text, without a draft head."""
    quantized: QuantizedSection = field(default_factory=QuantizedSection)
    """Drafts by a quantized copy of the policy, without a draft head."""
    eagle: EagleSection = field(default_factory=EagleSection)
    """The draft head, the shape of drafts, and how the shape is chosen."""
    train: DrafterTrainSection = field(default_factory=DrafterTrainSection)
    """How a draft head is trained, during RL or separately. Its features are hidden states of the
    policy."""
    draft: DraftSection = field(default_factory=DraftSection)
    """Training of a draft head for a fixed policy: `slipstream draft`."""

    @property
    def drafts_with_head(self) -> bool:
        """Whether a draft head drafts, alone or with history."""
        return self.enable and self.spec_strategy in ("eagle", "union")

    @property
    def drafts_from_history(self) -> bool:
        """Whether earlier text gives drafts, alone or with others."""
        return self.enable and self.spec_strategy in ("history", "union", "quantized_union")

    @property
    def drafts_with_copy(self) -> bool:
        """Whether a quantized copy of the policy drafts, alone or with history."""
        return self.enable and self.spec_strategy in ("quantized", "quantized_union")
