"""Options of `actor_rollout_ref`: the model, its optimizer, the update and the rollout.

This module has names, types and defaults only; `validate` checks rules between options. Other
modules import the tree from `schema`.
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
"""KL estimators. All except the last two use the log-probs of the sampled tokens; with `+`, the
value is the estimator's and the gradient is that of `k2`. `full` is the exact KL(policy ||
reference) over the whole vocabulary, `full_forward` is KL(reference || policy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInitSection:
    """A randomly initialized decoder, for a run that trains from scratch."""

    family: Literal["qwen3", "qwen2", "llama", "mistral"] = "qwen3"
    """Architecture. It also determines the Hugging Face format of saved models."""
    hidden_size: PositiveInt = 192
    """Width of the residual stream."""
    num_layers: PositiveInt = 12
    """Number of decoder layers."""
    num_heads: PositiveInt = 6
    """Number of query heads."""
    num_kv_heads: PositiveInt = 2
    """Number of key and value heads; must divide `num_heads`."""
    head_dim: PositiveInt | None = None
    """Width of a head; null: `hidden_size / num_heads`."""
    intermediate_size: PositiveInt = 512
    """Width inside the MLP."""
    max_position_embeddings: PositiveInt = 2048
    """Longest sequence, prompt and response together."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = True
    """Use the embedding matrix as the LM head too."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; null: the tokenizer's number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideConfigSection:
    """Values that replace those in the `config.json` of the checkpoint at `path`."""

    max_position_embeddings: PositiveInt | None = None
    """Longest sequence, prompt and response together; null: the checkpoint's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The policy: a checkpoint folder, or a random initialization."""

    path: str | None = None
    """Folder of the Hugging Face checkpoint to start from."""
    implementation: Literal["auto", "slipstream", "transformers"] = "auto"
    """Code that computes the policy and a reference: the built-in decoder (`slipstream`), or the
    architecture's class in `transformers`, with `rollout.name=hf`; `auto`: the decoder if it reads
    the checkpoint's `model_type`, otherwise transformers."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer; null: the tokenizer in `path`."""
    custom_chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's own, or the path of a file with one. The
    run records the template, not the path."""
    external_lib: str | None = None
    """Python module (`my_package.losses`) to import first. It can register your own advantage
    estimators and policy losses. It must be importable with `python -c "import ..."`."""
    trust_remote_code: Literal[False] = False
    """Run Python code from a checkpoint; always off in this version."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. This saves memory and needs about a third more
    time."""
    lora_rank: NonNegativeInt = 0
    """Rank of a LoRA adapter to train while the base weights stay fixed; 0: train all weights. SFT
    and RL each train their own adapter, on the weights that they start from."""
    lora_alpha: NonNegativeFloat = 16.0
    """The adapter's output is multiplied by `lora_alpha / lora_rank`; above 0 with an adapter."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linear layers with an adapter (`q_proj`, or the end of a dotted name); `all-linear`: all
    except the LM head."""
    exclude_modules: tuple[str, ...] = ()
    """Names among `target_modules` that get no adapter."""
    lora_adapter_path: str | None = None
    """Adapter to continue training: a folder in peft's format for the model at `path`, a run, or a
    checkpoint. Its own configuration then sets rank, alpha and layers."""
    override_config: OverrideConfigSection = field(default_factory=OverrideConfigSection)
    """Values that replace those in the `config.json` of the checkpoint at `path`."""
    init: ModelInitSection | None = None
    """Architecture to initialize at random instead of loading `path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSection:
    """An optimizer and its learning-rate schedule."""

    optimizer: Literal["AdamW", "Muon"] = "AdamW"
    """`Muon` orthogonalizes the updates of the layers' matrices and uses AdamW for all other
    parameters."""
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    muon_lr: NonNegativeFloat | None = None
    """Peak learning rate of the layers' matrices with Muon; null: `lr`."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Small number that AdamW adds to its denominator."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; not applied to norms and biases."""
    lr_warmup_steps: CountOrOff = -1
    """Steps of linear warm-up; -1: use `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up as a share of all steps, if `lr_warmup_steps` is -1."""
    lr_scheduler_type: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Schedule of the learning rate after warm-up; `wsd`: constant, then cosine."""
    min_lr_ratio: Fraction = 0.0
    """Share of the peak learning rate at which `cosine`, `linear` and `wsd` end."""
    num_cycles: NonNegativeFloat = 0.5
    """Periods of the cosine of `cosine` and `wsd`; 0.5: half a period, from the peak to the end."""
    lr_wsd_stable_steps_ratio: Fraction = 0.9
    """`wsd`: share of the steps after warm-up before the learning rate falls."""
    total_training_steps: CountOrOff = -1
    """Steps that the schedule covers; -1: all steps of the run."""
    zero_indexed_step: bool = False
    """true: VERL's warm-up, 0, 1/w, 2/w, ...: the first step does not change the weights. false:
    1/w, 2/w, ..., 1, for a warm-up of w steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOptimSection(OptimSection):
    """An optimizer and its learning-rate schedule in RL."""

    lr_schedule_unit: Literal["rl_step", "optimizer_step"] = "rl_step"
    """What warm-up and schedule count: RL steps, as in VERL, or optimizer steps. An RL step may
    have several optimizer steps."""
    zero_indexed_step: bool = True
    """true: VERL's warm-up, 0, 1/w, 2/w, ...: the first step does not change the weights. false:
    1/w, 2/w, ..., 1, for a warm-up of w steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSection:
    """The policy loss."""

    loss_mode: str = "vanilla"
    """Registered name of the policy loss; `vanilla` is the clipped PPO objective."""
    clip_cov_ratio: Fraction = 0.0002
    """`clip_cov`: share of tokens without gradient, drawn from those with a covariance between the
    bounds."""
    clip_cov_lb: float = 1.0
    """`clip_cov`: lower bound of the covariance."""
    clip_cov_ub: float = 5.0
    """`clip_cov`: upper bound of the covariance."""
    kl_cov_ratio: Fraction = 0.0002
    """`kl_cov`: share of tokens with the penalty: those with the highest covariance."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """`kl_cov`: weight of the penalty."""
    dro_beta: PositiveFloat | None = None
    """`dro`: weight of the squared log-ratio; required for this loss."""
    gspo_uses_loss_agg_mode: bool = False
    """`gspo`: aggregate with `actor.loss_agg_mode`, as VERL 0.9.1 does. Off: always with
    `seq-mean-token-mean`, as in the paper and in VERL 0.7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSection:
    """The policy update."""

    strategy: Literal["fsdp2"] = "fsdp2"
    """How several processes (`trainer.nnodes`, `trainer.n_gpus_per_node`) share the training:
    PyTorch's FSDP2 shards it. A single process does not shard."""
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; null: `data.train_batch_size`, so one optimizer step per
    batch."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward pass, if `use_dynamic_bsz` is off."""
    use_dynamic_bsz: bool = True
    """Fill micro-batches by token count instead of sequence count. It does not change the
    update."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per forward pass, if `use_dynamic_bsz` is on."""
    use_prefix_grouper: bool = True
    """Compute a prompt once for all of its responses in a forward pass of an update, if that saves
    a fifth of the tokens or more. It changes the gradient by rounding only. It has an effect on a
    CPU, in a single process, with the built-in decoder."""
    ppo_epochs: PositiveInt = 1
    """Passes over each rollout batch."""
    shuffle: bool = False
    """Shuffle the groups of a rollout batch before splitting it into mini-batches."""
    clip_ratio: NonNegativeFloat = 0.2
    """Clip range of the importance ratio, on both sides of 1."""
    clip_ratio_low: NonNegativeFloat | None = None
    """Clip range below 1; null: `clip_ratio`."""
    clip_ratio_high: NonNegativeFloat | None = None
    """Clip range above 1; null: `clip_ratio`. A value larger than `clip_ratio_low` is DAPO's
    clip-higher."""
    clip_ratio_c: PositiveFloat = 3.0
    """Dual-clip bound on the loss of tokens with a negative advantage; must be above 1."""
    tau_pos: PositiveFloat = 1.0
    """`sapo`: temperature of the gate for positive advantages."""
    tau_neg: PositiveFloat = 1.05
    """`sapo`: temperature of the gate for all other advantages."""
    policy_loss: PolicyLossSection = field(default_factory=PolicyLossSection)
    """The policy loss."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses are combined into one number, over the whole mini-batch."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor for `seq-mean-token-sum-norm`; null: `data.max_response_length`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL term against the reference policy to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL term."""
    kl_loss_type: KLEstimator = "low_var_kl"
    """Estimator of the KL term."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    max_nonfinite_steps: NonNegativeInt = 3
    """Number of consecutive steps with a NaN or infinite gradient that are skipped before the run
    stops."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype of training; `auto`: bfloat16 on devices with fast bfloat16 arithmetic,
    otherwise float32."""
    log_prob_chunk_tokens: PositiveInt = 1024
    """Number of tokens whose logits exist at once when log-probs are computed; must be a multiple
    of 4."""
    log_prob_keep_bytes: NonNegativeInt = 600_000_000
    """Bytes of logits that a forward pass keeps for the backward pass. The backward pass computes
    all other logits again, which is slower. 0: keep none."""
    optim: RLOptimSection = field(default_factory=RLOptimSection)
    """The policy's optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefSection:
    """The reference policy of KL terms."""

    path: str | None = None
    """Folder of its Hugging Face checkpoint; null: the policy that RL starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValKwargsSection:
    """Sampling during validation."""

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: CountOrOff = -1
    """Sample from the k likeliest tokens; -1 or 0: from all."""
    top_p: Fraction = 1.0
    """Sample from the likeliest tokens whose probabilities sum to this value; 1: from all."""
    n: PositiveInt = 1
    """Responses per problem."""
    do_sample: bool = False
    """Sample, instead of taking the likeliest token."""
    by_source: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Other settings for single data sources, by name: `{aime24: {n: 32, do_sample: true,
    temperature: 1}}`. Settings that are not given keep the values of `val_kwargs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSection:
    """A class whose objects answer the policy: of TRL's `environment_factory`, of gymnasium, of
    tinker-cookbook, a client of OpenEnv, or with the methods of
    `slipstream.environment.protocol.Environment`."""

    path: str | None = None
    """Python file with the class, or `pkg://package.module`."""
    name: str = "Environment"
    """Name of the class; or of a function: `load_environment` returns an environment or taskset of
    verifiers, any other name an environment of tinker-cookbook."""
    kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Arguments of the class or function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurnSection:
    """Episodes of several turns, with tools."""

    enable: bool | None = None
    """Run episodes of several turns; null: if there are tools, interactions or an environment."""
    function_tool_path: str | None = None
    """Python file with tools: the functions that `slipstream.environment.tools.function_tool`
    decorates, or all public functions if there are none."""
    tool_config_path: str | None = None
    """YAML file with tools that are classes derived from VERL's `BaseTool`."""
    python_tool: bool = False
    """Let the policy run Python programs, with the tool `python`. They run in the sandbox of
    `reward_model.sandbox`, with its limits."""
    mcp_config_path: str | None = None
    """JSON file with MCP servers whose tools the policy can call:
    `{"mcpServers": {NAME: {"command": PROGRAM, "args": []}}}`, or `"url"` instead of
    `"command"`."""
    interaction_config_path: str | None = None
    """YAML file with classes derived from VERL's `BaseInteraction`, which answer the turns without
    tool calls. Rows choose one by `extra_info.interaction_kwargs.name`."""
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    """A class or function that answers the policy. Do not set tools or interactions as well."""
    format: str | None = None
    """How the policy writes tool calls: `hermes`, `qwen3_coder`, `llama3_json`, `mistral`,
    `gpt-oss`, or a registered format; null: as the chat template does."""
    history: Literal["append", "rerender"] = "append"
    """What the context of a later turn is. `append`: the tokens of earlier turns as they were
    sampled. `rerender`: the chat template's rendering of the conversation. If it does not begin
    with the earlier tokens, a new branch of the episode begins with it. Each sampled token is
    trained on once."""
    max_assistant_turns: PositiveInt | None = None
    """Maximum number of turns of the policy; null: no limit."""
    max_user_turns: PositiveInt | None = None
    """Maximum number of answers of tools and users; null: no limit."""
    max_tool_seconds: PositiveFloat | None = None
    """Maximum time in tools, in seconds per episode; null: no limit."""
    max_parallel_calls: PositiveInt = 1
    """Tool calls of one turn that are executed. The policy is told that the others were not."""
    max_tool_response_length: PositiveInt | None = 256
    """Maximum length of a tool's answer in characters; null: no limit."""
    max_tool_response_tokens: PositiveInt | None = None
    """Maximum length of a tool's answer in tokens; null: no limit."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """The side of a longer answer that is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSection:
    """Agent loops: users' code that decides what the policy reads and when it writes."""

    default_agent_loop: str | None = None
    """The loop of rows without `agent_name`: `single_turn_agent`, `tool_agent`, `custom_generate`,
    or the name of a class derived from VERL's `AgentLoopBase`; null: the first that exists of
    `custom_generate`, `tool_agent` (tools, interactions or an environment) and
    `single_turn_agent`."""
    agent_loop_config_path: str | None = None
    """YAML file with a list of such classes: `[{name: my_agent, _target_: package.module.Class}]`.
    Other keys of an entry are arguments of the class."""
    custom_generate_function_path: str | None = None
    """A function written for slime's `--custom-generate-function-path`, as
    `package.module.function`. It is the loop `custom_generate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSection:
    """Servers of the engines `vllm` and `sglang`. The run starts them, or uses running ones."""

    urls: tuple[str, ...] = ()
    """Addresses of running servers, such as `http://host:8000`; empty: the run starts its own."""
    replicas: PositiveInt = 1
    """Number of servers to start. Each holds all weights, on `tensor_model_parallel_size` GPUs."""
    python: str | None = None
    """Python interpreter of the environment with vLLM or SGLang; null: the environment variable
    SLIPSTREAM_VLLM_PYTHON or SLIPSTREAM_SGLANG_PYTHON, or the interpreter of the run."""
    startup_timeout_s: PositiveFloat = 600.0
    """Deadline in seconds for the start of a server."""
    update_timeout_s: PositiveFloat = 300.0
    """Deadline in seconds for a weight update of a server, and for each request of its check."""
    stall_timeout_s: PositiveFloat = 600.0
    """Seconds without a computed token after which a server that has requests is started again."""
    transport: Literal["file", "shared_memory", "collective"] = "file"
    """How servers get new weights: `file` (safetensors in `transfer_dir`), `shared_memory` (servers
    on this machine map the run's memory), or `collective` (broadcasts of NCCL, or gloo if the
    trainer has no GPU)."""
    transfer_dir: str | None = None
    """Folder for new weights; null: memory (`/dev/shm`). It needs room for two copies of the
    weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    """Generation of responses."""

    name: str = "embedded"
    """Inference engine: `embedded` (built in), `hf` (transformers), `vllm` or `sglang` (servers in
    an environment of their own), `fake` (scripted, tests), or one that `model.external_lib`
    registers (`inference.register_engine`)."""
    server: ServerSection = field(default_factory=ServerSection)
    """Servers that generate, with `rollout.name=vllm` or `sglang`."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Command line options of servers, by engine: `engine_kwargs.vllm.block_size=32` is vLLM's
    `--block-size 32`. They override the options that follow from other settings."""
    n: PositiveInt = 8
    """Responses per prompt: the group size."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature."""
    top_k: CountOrOff = -1
    """Sample from the k likeliest tokens; -1 or 0: from all."""
    top_p: Fraction = 1.0
    """Sample from the likeliest tokens whose probabilities sum to this value; 1: from all."""
    min_p: Fraction = 0.0
    """Drop tokens below this share of the likeliest token's probability; 0: drop none."""
    do_sample: bool = True
    """Sample, instead of taking the likeliest token."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end a response, in addition to end-of-sequence."""
    ignore_eos: bool = False
    """Generate past end-of-sequence, up to the length limit."""
    tensor_model_parallel_size: PositiveInt | None = None
    """Number of GPUs over which each server splits the weights; null: 1. On a CPU, number of
    processes that divide the cores of a server. For engines with servers (`rollout.server`)."""
    load_format: str | None = None
    """How a server gets its first weights: `auto` or `safetensors` from the run's files; `dummy`:
    it begins with random ones, and the run sends the policy's before the first request; null:
    `auto`. For engines with servers."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype of generation; `auto`: the actor's."""
    max_num_seqs: PositiveInt = 256
    """Maximum number of responses that decode together."""
    kv_cache_bytes: PositiveInt | None = None
    """KV cache memory of the embedded engine in bytes; null: a share of the free memory
    (`gpu_memory_utilization`). Responses that do not fit wait."""
    gpu_memory_utilization: Fraction = 0.5
    """KV cache memory as a share of the memory that is free when the embedded engine is created, on
    CPUs too; used if `kv_cache_bytes` is null."""
    max_num_batched_tokens: Annotated[int, Range(low=4)] = 8192
    """Maximum number of tokens in one prefill of the embedded engine. A longer context is prefilled
    in pieces, with decode steps of running responses in between."""
    enable_chunked_prefill: bool | None = None
    """Let servers prefill long contexts in pieces of `max_num_batched_tokens`; null: the server's
    default. The embedded engine always does."""
    enable_prefix_caching: bool | None = None
    """Keep the KV cache of finished responses for prompts with the same beginning, such as
    conversations of several turns; null: with tools, for the next turn of an episode. An entry
    stays until the next weight update, as long as the memory budget has room."""
    free_cache_engine: bool | None = None
    """Free the embedded engine's KV cache memory after each rollout; null: yes on a GPU, where
    training needs the memory, and with `enable_prefix_caching`, which needs room in the budget. On
    a CPU, allocating it again takes up to a tenth of the rollout time."""
    enforce_eager: bool = False
    """On a GPU, launch every operation of a decode step separately instead of replaying recorded
    steps (CUDA graphs). This is slower and needs less memory."""
    one_thread_below: NonNegativeInt = 0
    """On a CPU, the embedded engine decodes on one thread while at most this many responses are
    left; 0: never. A small model is hardly slower on one thread, and a draft head can train on the
    free cores (`speculative.train.mode=opportunistic`)."""
    max_model_len: PositiveInt | None = None
    """Longest sequence, prompt and response together; null: the sum of `data.max_prompt_length` and
    `data.max_response_length`."""
    over_sample_rate: NonNegativeFloat = 0.0
    """Extra prompts to start, as a share of the batch. The slowest groups are then cut off, so
    timing decides which groups are trained on."""
    partial_rollout: bool = False
    """Instead of dropping responses that were cut off, continue them in the next step."""
    timeout_s: PositiveFloat | None = None
    """Deadline in seconds for the rollout of one step; null: `trainer.stage_timeout_s`."""
    episode_timeout_s: PositiveFloat | None = None
    """Deadline in seconds for each response or episode in the rollout of one step; null: none.
    A sample that is late fails: its environment is closed, it is not trained on, and the run
    continues."""
    max_failed_share: Fraction = 0.5
    """End the run if the engine or tools failed for more than this share of the samples of three
    steps in a row, for example because a tool server does not answer; 1: never. Failures of the
    reward function do not count (`reward_model.on_failure`)."""
    val_kwargs: ValKwargsSection = field(default_factory=ValKwargsSection)
    """Sampling during validation."""
    multi_turn: MultiTurnSection = field(default_factory=MultiTurnSection)
    """Episodes of several turns, with tools."""
    agent: AgentSection = field(default_factory=AgentSection)
    """Agent loops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRolloutRefSection:
    """The policy: how it is trained and sampled, and its reference."""

    model: ModelSection = field(default_factory=ModelSection)
    """The policy: a checkpoint folder, or a random initialization."""
    actor: ActorSection = field(default_factory=ActorSection)
    """The policy update."""
    ref: RefSection = field(default_factory=RefSection)
    """The reference policy of KL terms."""
    rollout: RolloutSection = field(default_factory=RolloutSection)
    """Generation of responses."""
