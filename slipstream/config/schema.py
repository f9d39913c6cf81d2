"""Every option of a run: one tree of frozen, typed, documented dataclasses with all defaults.

Key names are the names that VERL and FastRL use. This module does not read files or overrides
(`load` does) and does not check rules between options (`validate` does). `slipstream.build` creates
objects from the tree. The string under each field is its documentation (`docs.describe`,
docs/config.md). Defaults may contain `${...}` interpolations, which only `load.load_config`
resolves, so create a `Config` with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.config.fields import (
    CountOrOff,
    FrozenMapping,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from slipstream.config.schema_actor import (
    ActorRolloutRefSection,
    OptimSection,
)
from slipstream.config.schema_algorithm import AlgorithmSection
from slipstream.config.schema_critic import CriticSection
from slipstream.config.schema_reward import CustomRewardFunctionSection, RewardModelSection
from slipstream.config.schema_speculative import SpeculativeSection


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomClassSection:
    """Your own data set class."""

    path: str | None = None
    """Python file that contains the class, or `pkg://module`; null: the built-in reader of
    files."""
    name: str | None = None
    """Class in that file. It is called with `data_files`, `tokenizer`, `processor`, `config` (this
    section) and `max_samples`. You can inherit from `RLHFDataset`."""
    kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Further keyword arguments for the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSection:
    """The order in which prompts are drawn."""

    class_path: str | None = None
    """Python file that contains your own sampler class, or `pkg://module`; null: a built-in
    sampler."""
    class_name: str | None = None
    """Sampler class. It is called with `data_source` and `data_config` (this section). Built in:
    `PassRateSampler`, a curriculum. null: all rows, in the order that `data.shuffle` sets."""
    kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Settings for the sampler, which it finds in its configuration. `PassRateSampler` has `floor`,
    `momentum` and `threshold`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatagenSection:
    """A generator that adds rows to the training files."""

    path: str | None = None
    """Python file that contains the generator class, or `pkg://module`."""
    name: str | None = None
    """Class in that file. It is called with this section. Its method `generate(dataset)` returns
    new rows before training and after each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Prompts: a built-in task, or files in VERL's row format."""

    task: str | None = None
    """Task that generates problems without end: `countdown`, `reasoning_gym`, or a task that the
    module in `actor_rollout_ref.model.external_lib` registers; null: read `train_files`."""
    task_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Settings of the task, passed on unchanged. `reasoning_gym` has `datasets` (one generator's
    name, or weights by name) and `system_prompt`."""
    train_files: tuple[str, ...] | None = None
    """Training files (parquet, JSONL, JSON), or folders that the library `datasets` saved: one path
    or a list."""
    val_files: tuple[str, ...] | None = None
    """Validation files or folders: one path or a list."""
    mixture_weights: tuple[PositiveFloat, ...] | None = None
    """Share of each training file in a batch, one number per file; null: in proportion to file
    length."""
    tokenizer: str | None = None
    """Folder of the tokenizer; null: the model's tokenizer, or the task's own."""
    prompt_key: str = "prompt"
    """Column that contains the prompt."""
    reward_fn_key: str = "data_source"
    """Column that selects the reward function."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens."""
    max_response_length: PositiveInt = 512
    """Longest response in tokens."""
    train_batch_size: PositiveInt = 16
    """Prompts per step; each gets `actor_rollout_ref.rollout.n` responses."""
    val_batch_size: PositiveInt | None = None
    """Validation problems that are evaluated at once; null: all."""
    val_size: PositiveInt = 256
    """Number of validation problems of a built-in task."""
    train_max_samples: CountOrOff = -1
    """Maximum number of training rows to use; -1: all."""
    val_max_samples: CountOrOff = -1
    """Maximum number of validation rows to use; -1: all."""
    shuffle: bool = True
    """Shuffle the training rows again in each epoch."""
    seed: NonNegativeInt | None = None
    """Seed for the row order and for built-in problems; null: `trainer.seed`."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt longer than `max_prompt_length`: `error` stops the run; `left`,
    `right` and `middle` cut tokens at that place."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than `max_prompt_length` before training starts."""
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Variables of the chat template, such as `enable_thinking`."""
    chat_template_date: str | None = None
    """Date (`2026-01-31`) for chat templates that write the current date, such as those of Llama
    3.1 to 3.3; null: the day on which the run starts. A resumed run keeps the date."""
    custom_cls: CustomClassSection = field(default_factory=CustomClassSection)
    """Your own data set class."""
    sampler: SamplerSection = field(default_factory=SamplerSection)
    """The order in which prompts are drawn."""
    datagen: DatagenSection = field(default_factory=DatagenSection)
    """A generator that adds rows to the training files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSection:
    """Supervised fine-tuning (SFT) before RL, or without RL."""

    total_training_steps: NonNegativeInt = 0
    """Optimizer steps of SFT; 0: no SFT."""
    train_files: tuple[str, ...] | None = None
    """Demonstration files, one path or a list; null: demonstrations of the built-in task."""
    mixture_weights: tuple[PositiveFloat, ...] | None = None
    """Share of each demonstration file, one number per file; null: in proportion to file length."""
    train_max_samples: CountOrOff = -1
    """Maximum number of rows to use, a random choice; -1: all."""
    messages_key: str = "messages"
    """Column with the whole conversation. Rows without it have a prompt and a response."""
    prompt_key: str = "prompt"
    """Column with the prompt, text or messages. `a.b` is the entry `b` of the column `a`."""
    response_key: str = "response"
    """Column with the response, named like `prompt_key`."""
    wrap_prompts: bool = False
    """Give a prompt that is plain text to the chat template as a user message. Off: text prompts
    are used without a chat template."""
    ignore_input_ids_mismatch: bool = False
    """Train on turns that are tokenized one by one if a token crosses the boundary of a turn;
    false: such a demonstration is an error."""
    train_batch_size: PositiveInt | None = None
    """Demonstrations per optimizer step; null: `batch_tokens` limits a step instead."""
    batch_tokens: PositiveInt = 16384
    """Tokens per optimizer step, unless `train_batch_size` is set."""
    max_length: PositiveInt = 2048
    """Longest demonstration in tokens, including the prompt."""
    truncation: Literal["error", "left", "right"] = "error"
    """What happens to a longer demonstration: `error` stops the run; `left` and `right` remove
    tokens on that side."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Tokens per forward pass. It does not change the update."""
    save_freq: CountOrOff = -1
    """Steps between checkpoints; -1: only after the last step."""
    test_freq: CountOrOff = -1
    """Steps between validations; -1: only after the last step."""
    optim: OptimSection = field(default_factory=lambda: OptimSection(lr=1e-5))
    """The optimizer of SFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection:
    """The run: its length, folder, logs, checkpoints and deadlines."""

    mode: Literal["auto", "sft", "rl", "sft+rl"] = "auto"
    """Which training to run; `auto`: every training that has steps and data."""
    seed: NonNegativeInt = 1
    """Seed for everything random in the run."""
    total_epochs: PositiveInt = 1
    """Passes over `data.train_files`, unless `total_training_steps` is set."""
    total_training_steps: NonNegativeInt | None = None
    """RL steps; null: `total_epochs` passes over the files; 0: no RL."""
    project_name: str = "slipstream"
    """First part of the run folder's path. It also names the project (W&B, Trackio) or experiment
    (MLflow)."""
    experiment_name: str = "run"
    """Second part of the run folder's path. It also names the run in trackers."""
    logger: tuple[str, ...] = ("console", "file")
    """Where metrics go: `console`, `file` (JSON lines in the run folder), `tensorboard`, `wandb`,
    `mlflow`, `trackio` (docs/logging.md)."""
    nnodes: PositiveInt = 1
    """Number of machines (docs/several_gpus.md). Without GPUs, number of processes."""
    n_gpus_per_node: NonNegativeInt = 0
    """GPUs to use on each machine, with one process per GPU; 0: `device` decides. With
    `device=cpu`, the number of CPU processes per machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto`: on a GPU if there is one."""
    num_threads: PositiveInt | None = None
    """CPU threads for computing; null: one per usable core. With more than four usable cores, a
    measurement at the start of the run finds the number that decodes fastest."""
    save_freq: CountOrOff = -1
    """RL steps between checkpoints; -1: only after the last step."""
    test_freq: CountOrOff = -1
    """RL steps between validations; -1: only after the last step."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Resume: `auto` from the newest checkpoint of the run folder, `disable` never, `resume_path`
    from `resume_from_path`."""
    resume_from_path: str | None = None
    """Checkpoint folder to resume from, with `resume_mode=resume_path`."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """The run folder: configuration, metrics, rollouts and checkpoints."""
    max_actor_ckpt_to_keep: PositiveInt | None = 3
    """Number of checkpoints to keep, the newest ones; null: all."""
    rollout_data_dir: str | None = None
    """Folder for recorded rollouts; null: `rollouts` in the run folder."""
    validation_data_dir: str | None = None
    """Folder for recorded validation responses; null: `validation` in the run folder."""
    sync_every: PositiveInt = 1
    """Training steps between two weight updates of the inference engine."""
    log_val_generations: NonNegativeInt = 3
    """Responses of each validation to show as text, and in the tables of loggers that support
    tables."""
    stage_timeout_s: PositiveFloat = 3600.0
    """Deadline in seconds for each stage of a step. If a stage takes longer, the run ends and names
    the stage."""
    critic_warmup: NonNegativeInt = 0
    """Step from which on the policy is updated, counted as in VERL. Before it, only the critic
    learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every option of a run."""

    data: DataSection = field(default_factory=DataSection)
    """Prompts: a built-in task, or files in VERL's row format."""
    actor_rollout_ref: ActorRolloutRefSection = field(default_factory=ActorRolloutRefSection)
    """The policy: how it is trained and sampled, and its reference."""
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    """From rewards to advantages."""
    reward_model: RewardModelSection = field(default_factory=RewardModelSection)
    """How responses are scored."""
    custom_reward_function: CustomRewardFunctionSection = field(
        default_factory=CustomRewardFunctionSection
    )
    """Your own reward function."""
    sft: SftSection = field(default_factory=SftSection)
    """Supervised fine-tuning (SFT) before RL, or without RL."""
    critic: CriticSection = field(default_factory=CriticSection)
    """The value model, which `algorithm.adv_estimator=gae` needs."""
    trainer: TrainerSection = field(default_factory=TrainerSection)
    """The run: its length, folder, logs, checkpoints and deadlines."""
    speculative: SpeculativeSection = field(default_factory=SpeculativeSection)
    """Speculative decoding and its draft head."""
