"""Options of `actor_rollout_ref`: the model, its optimizer, the update and the rollout.

Knows names, types and defaults only; `validate` holds the rules between options. Part of the tree
in `schema`, which is what other modules import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from slipstream.config.fields import (
    CountOrOff,
    Fraction,
    FrozenMapping,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
)

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
KLEstimator = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
    "full",
    "full_forward",
]
"""From the log-probs of the tokens that were sampled, with `+` the estimator's value with the
gradient of `k2`; or `full`, the exact KL of policy and reference over the whole vocabulary, and
`full_forward`, that of reference and policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInitConfig:
    """A randomly initialised decoder, for a run that starts from nothing."""

    family: Literal["qwen3", "qwen2", "llama", "mistral"] = "qwen3"
    """Architecture, and so the Hugging Face format in which the model is saved."""
    hidden_size: PositiveInt = 192
    """Width of the residual stream."""
    num_layers: PositiveInt = 12
    """Decoder layers."""
    num_heads: PositiveInt = 6
    """Query heads."""
    num_kv_heads: PositiveInt = 2
    """Key and value heads; divides `num_heads`."""
    head_dim: PositiveInt | None = None
    """Width of a head; null: `hidden_size / num_heads`."""
    intermediate_size: PositiveInt = 512
    """Width inside the MLP."""
    max_position_embeddings: PositiveInt = 2048
    """Longest sequence, prompt and response together."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = True
    """Share the embedding matrix with the output head."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; null: as many as the tokenizer has tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy: a checkpoint folder, or a random initialisation."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint to start from."""
    implementation: Literal["auto", "slipstream", "transformers"] = "auto"
    """What computes the policy, and a reference: the built-in decoder (`slipstream`), or the
    architecture's class in `transformers`, with `rollout.name=hf`; `auto`: the decoder where it
    reads the checkpoint's `model_type`."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer; null: the one in `path`."""
    custom_chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's own."""
    external_lib: str | None = None
    """Python module (`my_package.losses`) to import first: where your own advantage estimators and
    policy losses register themselves. Found as `python -c "import ..."` would find it."""
    trust_remote_code: Literal[False] = False
    """Run Python code shipped with a checkpoint; always off in this version."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora_rank: NonNegativeInt = 0
    """Train a LoRA adapter of this rank and leave the weights as they are; 0: train all weights.
    SFT and RL each train one of their own, on the weights that they start from."""
    lora_alpha: PositiveFloat = 16.0
    """The adapter's part is multiplied by `lora_alpha / lora_rank`."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linear layers that get an adapter (`q_proj`, or the end of a dotted name); `all-linear`: all
    but the LM head."""
    exclude_modules: tuple[str, ...] = ()
    """Names among those that get none."""
    lora_adapter_path: str | None = None
    """Folder of an adapter in peft's format on `path`, or a run or checkpoint that has one, to go
    on training; its own configuration then decides rank, alpha and layers."""
    init: ModelInitConfig | None = None
    """Architecture to initialise at random instead of loading `path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """An optimizer and its learning-rate schedule."""

    optimizer: Literal["AdamW", "Muon"] = "AdamW"
    """`Muon` orthogonalises updates of the layers' matrices and leaves all else to AdamW."""
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    muon_lr: NonNegativeFloat | None = None
    """Peak learning rate of those matrices under Muon; null: `lr`."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's denominator offset."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; norms and biases have none."""
    lr_warmup_steps: CountOrOff = -1
    """Optimizer steps of linear warm-up; -1: use `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up as a share of all optimizer steps, when `lr_warmup_steps` is -1."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Share of the peak rate at which `cosine` and `linear` end."""
    total_training_steps: CountOrOff = -1
    """Optimizer steps that the schedule spans; -1: those of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """Which policy loss."""

    loss_mode: str = "vanilla"
    """Registered name of the policy loss: `vanilla` is the clipped PPO objective."""
    clip_cov_ratio: Fraction = 0.0002
    """`clip_cov`: share of tokens that are left out, with covariance between the bounds."""
    clip_cov_lb: float = 1.0
    """`clip_cov`: lower bound of the covariance."""
    clip_cov_ub: float = 5.0
    """`clip_cov`: upper bound of the covariance."""
    kl_cov_ratio: Fraction = 0.0002
    """`kl_cov`: share of tokens, those of highest covariance, that pay the penalty."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """`kl_cov`: weight of the penalty."""
    dro_beta: PositiveFloat | None = None
    """`dro`: weight of the squared log-ratio; has to be set there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """The policy update."""

    strategy: Literal["fsdp2"] = "fsdp2"
    """How several processes (`trainer.nnodes`, `trainer.n_gpus_per_node`) share the training: in
    slices, by PyTorch's FSDP2. One process has everything and cuts nothing."""
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; null: `data.train_batch_size`, one step per batch."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward pass, when `use_dynamic_bsz` is off."""
    use_dynamic_bsz: bool = True
    """Pack micro-batches by token count instead of sequence count; the update is the same."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per forward pass, when `use_dynamic_bsz` is on."""
    ppo_epochs: PositiveInt = 1
    """Passes over each rollout batch."""
    shuffle: bool = False
    """Shuffle the groups of a rollout batch before they are cut into mini-batches."""
    clip_ratio: NonNegativeFloat = 0.2
    """Clipping range of the importance ratio, on both sides."""
    clip_ratio_low: NonNegativeFloat | None = None
    """Range below 1; null: `clip_ratio`."""
    clip_ratio_high: NonNegativeFloat | None = None
    """Range above 1; null: `clip_ratio`. Larger than `clip_ratio_low` is DAPO's clip-higher."""
    clip_ratio_c: PositiveFloat = 3.0
    """Dual-clip bound on the loss of tokens with negative advantage; above 1."""
    tau_pos: PositiveFloat = 1.0
    """`sapo`: temperature of the gate where the advantage is positive."""
    tau_neg: PositiveFloat = 1.05
    """`sapo`: temperature of the gate where it is negative."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Which policy loss."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number, over the whole mini-batch."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of `seq-mean-token-sum-norm`; null: `data.max_response_length`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL term against the reference policy to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL term."""
    kl_loss_type: KLEstimator = "low_var_kl"
    """Estimator of the KL term."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm; longer gradients are scaled down to it."""
    max_nonfinite_steps: NonNegativeInt = 3
    """Consecutive steps with a NaN or infinite gradient to skip before the run stops."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of training; `auto` is bfloat16 where the device is fast in it."""
    log_prob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once when log-probabilities are computed; a multiple of 4."""
    log_prob_keep_bytes: NonNegativeInt = 600_000_000
    """Logits of a forward pass, in bytes, that are kept for the backward pass; those beyond are
    computed again there, which is slower. 0: none is kept."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The policy's optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefConfig:
    """The reference policy that KL terms compare with."""

    path: str | None = None
    """Folder of its Hugging Face checkpoint; null: the policy that RL starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValKwargsConfig:
    """Sampling during validation."""

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: CountOrOff = -1
    """Keep the k likeliest tokens; -1 or 0: all."""
    top_p: Fraction = 1.0
    """Keep the likeliest tokens up to this mass; 1: all."""
    n: PositiveInt = 1
    """Responses per problem."""
    do_sample: bool = False
    """Sample instead of taking the likeliest token."""
    by_source: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Other settings of single data sources, by name: `{aime24: {n: 32, do_sample: true,
    temperature: 1}}`; what they leave out is as above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Generation of responses."""

    name: str = "embedded"
    """Inference engine: `embedded` (built in), `hf` (transformers), `fake` (scripted, tests), or
    one that `model.external_lib` registers (`inference.register_engine`)."""
    n: PositiveInt = 8
    """Responses per prompt: the group size."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature."""
    top_k: CountOrOff = -1
    """Keep the k likeliest tokens; -1 or 0: all."""
    top_p: Fraction = 1.0
    """Keep the likeliest tokens up to this mass; 1: all."""
    min_p: Fraction = 0.0
    """Drop tokens below this share of the likeliest token's probability; 0: none."""
    do_sample: bool = True
    """Sample instead of taking the likeliest token."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end a response, next to end-of-sequence."""
    ignore_eos: bool = False
    """Generate past end-of-sequence, up to the length limit."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of generation; `auto` is the actor's."""
    max_num_seqs: PositiveInt = 256
    """Responses that decode together."""
    kv_cache_bytes: PositiveInt | None = None
    """Memory for keys and values of the embedded engine; null: a share of what is free. Responses
    beyond it wait."""
    gpu_memory_utilization: Fraction = 0.5
    """That share, also on CPUs: of the memory that is free when the embedded engine is made."""
    max_num_batched_tokens: Annotated[int, Range(low=4)] = 8192
    """Tokens of one prefill of the embedded engine; a longer context is prefilled in pieces, with
    decode steps of running responses in between."""
    enable_prefix_caching: bool = False
    """Keep keys and values of ended responses, where the budget has room and until the next weight
    update, for prompts that begin as theirs did: conversations of several turns."""
    free_cache_engine: bool | None = None
    """Give the memory of the embedded engine's keys and values back after each rollout; null: on a
    GPU, where training needs it, and with `enable_prefix_caching`, which needs room in the budget.
    On a CPU getting it again takes up to a tenth of a rollout's time."""
    enforce_eager: bool = False
    """On a GPU, start every operation of a decode step by itself instead of replaying recorded
    steps (CUDA graphs): slower, with less memory."""
    one_thread_below: NonNegativeInt = 0
    """While so many responses or fewer are left, the embedded engine decodes on one thread of a
    CPU: a small model is hardly slower so, and the other cores are free, for a draft model that
    learns (`speculative.train.mode=opportunistic`). 0: never."""
    max_model_len: PositiveInt | None = None
    """Longest sequence, prompt and response; null: the sum of the two length limits of `data`."""
    over_sample_rate: NonNegativeFloat = 0.0
    """Extra prompts to start, as a share of the batch; the slowest groups are then cut off, so that
    which ones are trained on depends on timing."""
    partial_rollout: bool = False
    """Carry responses that were cut off over to the next step instead of dropping them."""
    timeout_s: PositiveFloat | None = None
    """Deadline of one step's rollout; null: `trainer.stage_timeout_s`."""
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)
    """Sampling during validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRolloutRefConfig:
    """The policy: how it is trained, sampled from and compared with its reference."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy: a checkpoint folder, or a random initialisation."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy update."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference policy that KL terms compare with."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation of responses."""
