"""Options of `speculative`: FastRL's tree for speculative decoding and draft-model co-training.

Knows names, types and defaults only. Part of the tree in `schema`.
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
"""Most tokens of a level that a draft tree follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Shape of the draft and its tuning."""

    spec_model_path: str | None = None
    """Folder of the draft model, or of a run of `slipstream draft`; training goes on from it, as
    what it is: EAGLE or EAGLE3."""
    spec_algorithm: Literal["EAGLE", "EAGLE3"] = "EAGLE"
    """What a new draft model is: `EAGLE` (1 and 2) goes on from the policy's final hidden states
    and uses its LM head; `EAGLE3` from those of three layers, with an LM head of its own."""
    draft_vocab_size: PositiveInt | None = None
    """Tokens that a new draft model of EAGLE3 can draft: the most frequent ones of the responses
    that `slipstream draft` begins with; null: all."""
    aux_hidden_state_layer_ids: tuple[NonNegativeInt, ...] | None = None
    """Three layers of the policy, counted from 0, whose inputs a new draft model of EAGLE3 goes on
    from; null: 2, half the number of layers, and the last but two."""
    spec_steps: PositiveInt = 7
    """Tokens drafted one after another, at most; how many is chosen by `tune_algorithm`."""
    spec_topk: PositiveInt = 1
    """1: chains; 2 to 8: trees, of which so many tokens of each level are followed, and each gives
    as many of the next."""
    spec_verify_tokens: PositiveInt | None = None
    """Tokens of a request that the policy checks in one pass, the last known one included: of trees
    the most promising of the whole batch, so many on average. null: all of a chain,
    `spec_steps` + 1."""
    tune_algorithm: Literal["COST", "PREDEFINED", "EG", "UCB1", "BEG"] = "COST"
    """How the number of drafts is chosen, step by step: `COST` from measured step times and
    acceptance, among chains and trees up to the options above, and plain decoding; `PREDEFINED`
    always takes the shape that they give; FastRL's bandits take what has earned most tokens a
    second: of `mab_configs` and that shape, `EG` (epsilon-greedy) and `UCB1` any, `BEG` one of
    those for the batch size."""
    exploration: Fraction = 0.005
    """Share of the time that looking at other numbers of drafts may lose, beyond the first looks,
    where `tune_algorithm` is COST; what epsilon is to a bandit."""
    hysteresis: NonNegativeFloat = 0.02
    """Share by which another number of drafts must be faster to be switched to, likewise."""
    mab_configs: tuple[str, ...] = ("8_4_32", "8_4_16", "8_4_8")
    """Shapes that a bandit picks from, as `steps_topk_tokens`; `0_0_1`: no drafts."""
    mab_bs_threshold: tuple[PositiveInt, ...] = (1, 2, 5, 21)
    """Batch sizes from which on `BEG` takes shapes of fewer tokens to verify: one for each of these
    numbers, the one of `spec_verify_tokens` among them."""
    mab_epsilon: Fraction = 0.1
    """How often `EG` and `BEG` take any of their shapes."""
    mab_window_size: PositiveInt = 300
    """Steps of a shape, at one batch size, from which a bandit learns: the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """Drafts from what was written before, without a draft model."""

    match_tokens: PositiveInt = 3
    """Last tokens of a context that must agree with an earlier text."""
    max_tokens: PositiveInt = 1048576
    """Tokens of finished responses to remember, some 300 bytes each; the oldest go first."""
    stagger_samples: bool = False
    """While more requests wait than can run, let the samples of a prompt run one after the other,
    so that the later ones can be drafted for from the earlier ones; each then pays for its own
    prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptimConfig:
    """An optimizer of the draft model.

    Names are FastRL's, the defaults are not: its rate of 1e-6 with 1000 steps of warm-up suits a
    head that has been trained on millions of tokens before. These train a new head in half a
    minute (docs/log.md).
    """

    optimizer: Literal["AdamW", "Muon"] = "Muon"
    """`Muon` for the layer's matrices and AdamW for its norms, or AdamW for all."""
    lr: NonNegativeFloat = 1e-3
    """Peak learning rate of AdamW's parameters."""
    muon_lr: NonNegativeFloat | None = 0.05
    """Peak learning rate of the matrices where `optimizer` is Muon; null: `lr`."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment; FastRL's and EAGLE's."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices."""
    lr_warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""
    min_lr_ratio: NonNegativeFloat | None = None
    """Share of the peak rate at which the schedule ends; null: 0."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "linear"
    """Course of the learning rate after warm-up."""


def _following() -> DrafterOptimConfig:
    """For a head that is trained and follows the policy, for as long as RL goes on."""
    return DrafterOptimConfig(lr=1e-4, muon_lr=0.003, lr_scheduler_type="constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTrainConfig:
    """How a draft model is trained, by itself or while the policy learns."""

    enable_drafter_training: bool = False
    """Train the draft model during RL."""
    mode: Literal["interval", "opportunistic"] = "interval"
    """When the draft model learns: `interval`, between two RL steps, in their time and to the same
    bits in every run; or `opportunistic`, in a process of its own, whenever a core is idle, or lent
    by decoding (`actor_rollout_ref.rollout.one_thread_below`)."""
    training_interval_steps: PositiveInt = 10
    """RL steps between two trainings where `mode` is interval."""
    updates_per_training: PositiveInt = 8
    """Training steps of one training, fewer where the collected responses have been used up."""
    ema_decay: BelowOne = 0.95
    """What is published is the moving average of the weights, of which each training step keeps
    this share (at first less: their mean); 0: the newest weights."""
    buffer_bytes: PositiveInt = 268435456
    """What features of collected responses may take."""
    lookback_steps: PositiveInt = 2
    """Responses of so many RL steps are trained on, the newest first."""
    long_share: NonNegativeFloat = 0.25
    """Share of `buffer_bytes` in which the longest responses stay until they are too old."""
    held_out_samples: PositiveInt = 32
    """Responses that a new version is measured on before it is published, never trained on."""
    held_out_every: PositiveInt = 8
    """The responses to one prompt in so many are held out."""
    accept_depth: PositiveInt = 5
    """Drafts in a row up to which acceptance is measured."""
    batch_size_per_gpu: PositiveInt = 32
    """Sequences per training step. FastRL's 2 are of thousands of tokens."""
    max_seq_len: PositiveInt = 8192
    """Longest training sequence in tokens; what follows in a longer one is not trained on."""
    max_epochs: PositiveInt = 10
    """How often a collected response is trained on at most."""
    checkpoint_path: str | None = None
    """Folder of draft checkpoints; only null in this version: they are part of the run's."""
    min_workers_for_training: PositiveInt = 1
    """Idle workers needed before training starts."""
    collect_hidden_states_from_engine: bool = False
    """Take features from the engine's decoding; of responses that it has none of, or of more than
    one policy version, from the trainer's forward pass."""
    value_weight: NonNegativeFloat | None = None
    """Weight of the distance between predicted and true features (smooth L1); null: 1 of an EAGLE
    head. EAGLE3 predicts none."""
    soft_weight: NonNegativeFloat = 0.5
    """Weight of the cross-entropy to the policy's distribution; FastRL's and EAGLE's is 0.1."""
    acceptance_weight: NonNegativeFloat = 0.0
    """Weight of -log sum min(p, q), the probability that a draft sampled from the head's q is
    accepted under the policy's p (LK loss, Samarin et al. 2026)."""
    topk_mass_weight: NonNegativeFloat = 0.0
    """Weight of -log of the policy's mass on the head's `speculative.eagle.spec_topk` best tokens,
    which a tree's level has for candidates."""
    depth: PositiveInt | None = None
    """Drafts in a row that a step trains: from the second on the head is given its own
    predictions; null: 1 of an EAGLE head, 5 of EAGLE3, which needs more than one."""
    depth_decay: NonNegativeFloat | None = None
    """What each deeper draft counts, relative to the one before; null: 1 of an EAGLE head, 0.8 of
    EAGLE3."""
    feature_noise: NonNegativeFloat = 0.0
    """Width of the uniform noise on the features that the head is given."""
    grad_clip: PositiveFloat | None = 1.0
    """Largest norm of the gradient; null: no limit."""
    optim: DrafterOptimConfig = field(default_factory=_following)
    """Optimizer of the draft model during RL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """`slipstream draft`: training of a draft model for a policy that stands still, in rounds of
    fresh responses."""

    total_training_steps: PositiveInt = 480
    """Training steps in all."""
    steps_per_round: PositiveInt = 80
    """Training steps on the responses of one round."""
    samples_per_round: PositiveInt = 256
    """Responses that a round trains on, one to each prompt."""
    rollout_files: tuple[str, ...] | None = None
    """Recorded rollouts (`rollouts/N.jsonl` of a run) to train on; null: generate responses."""
    held_out_samples: PositiveInt = 128
    """Responses that acceptance is measured on, never trained on."""
    accept_depth: PositiveInt = 5
    """Drafts in a row up to which acceptance is measured."""
    save_freq: CountOrOff = 3
    """Rounds between checkpoints, each with a measurement; -1: only the last one."""
    optim: DrafterOptimConfig = field(default_factory=DrafterOptimConfig)
    """Optimizer of the draft model while the policy stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding, and the draft model that it needs."""

    enable: bool = False
    """Decode with a draft model."""
    spec_strategy: Literal["eagle", "history", "union"] = "eagle"
    """Who drafts: a draft model, earlier text (the request's own and finished responses to its
    prompt), or for each request the one whose drafts have been accepted more often."""
    bs_threshold: PositiveInt | None = None
    """Speculate only while at most this many requests run; null: at any batch size where drafts
    pay, as the selector measures."""
    trace: bool = False
    """Record every decision in `speculation.jsonl` of the run folder."""
    history: HistoryConfig = field(default_factory=HistoryConfig)
    """Drafts from what was written before."""
    eagle: EagleConfig = field(default_factory=EagleConfig)
    """Shape of the draft and its tuning."""
    train: DrafterTrainConfig = field(default_factory=DrafterTrainConfig)
    """How a draft model is trained, by itself or while the policy learns."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    """Training of a draft model for a policy that stands still: `slipstream draft`."""
