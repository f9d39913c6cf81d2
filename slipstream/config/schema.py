"""Every option: one frozen, typed, documented dataclass tree, and the only home of its defaults.

Key names are those that VERL and FastRL users type. Knows nothing of files, overrides or rules
between options (`load`, `validate`). Read by `build.parts`, which wires objects from it; the string
under each field is its documentation (`docs.describe`, docs/config.md). Defaults may hold `${...}`
interpolations, which `load.load_config` resolves: build a `Config` through it.
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
    ActorRolloutRefConfig,
    OptimConfig,
)
from slipstream.config.schema_algorithm import AlgorithmConfig
from slipstream.config.schema_critic import CriticConfig
from slipstream.config.schema_reward import CustomRewardFunctionConfig, RewardModelConfig
from slipstream.config.schema_speculative import SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomClassConfig:
    """A data set class of your own."""

    path: str | None = None
    """Python file that holds it, or `pkg://module`; null: the built-in reader of files."""
    name: str | None = None
    """Class in that file, called with `data_files`, `tokenizer`, `processor`, `config` (this
    section) and `max_samples`; `RLHFDataset` is one to inherit from."""
    kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Further keyword arguments of the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """The order in which prompts are drawn."""

    class_path: str | None = None
    """Python file of a sampler class of your own, or `pkg://module`; null: a built-in one."""
    class_name: str | None = None
    """The class, called with `data_source` and `data_config` (this section); built in:
    `PassRateSampler`, a curriculum; null: all rows, as `data.shuffle` says."""
    kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Settings that the class finds in its configuration; of `PassRateSampler`: `floor`,
    `momentum`, `threshold`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatagenConfig:
    """A generator that adds rows to the training files."""

    path: str | None = None
    """Python file that holds it, or `pkg://module`."""
    name: str | None = None
    """Class in that file, called with this section; its `generate(dataset)` gives new rows before
    training and after each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompts: a built-in task, or files in VERL's row format."""

    task: str | None = None
    """Task that makes problems without end: `countdown`, `reasoning_gym`, or one that the module
    named by `model.external_lib` registers; null: read `train_files`."""
    task_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Settings of the task, passed on as they are; of `reasoning_gym`: `datasets`, a generator's
    name or weights by name, and `system_prompt`."""
    train_files: tuple[str, ...] | None = None
    """Training files (parquet, JSONL, JSON), or folders that `datasets` saved: one or a list."""
    val_files: tuple[str, ...] | None = None
    """Validation files or folders: one path or a list."""
    mixture_weights: tuple[PositiveFloat, ...] | None = None
    """Share of each training file in a batch, one number per file; null: by file length."""
    tokenizer: str | None = None
    """Folder of the tokenizer; null: the model's, or the task's own."""
    prompt_key: str = "prompt"
    """Column that holds the prompt."""
    reward_fn_key: str = "data_source"
    """Column that picks the reward function."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens."""
    max_response_length: PositiveInt = 512
    """Longest response in tokens."""
    train_batch_size: PositiveInt = 16
    """Prompts per step; each gets `actor_rollout_ref.rollout.n` responses."""
    val_batch_size: PositiveInt | None = None
    """Problems validated at once; null: all."""
    val_size: PositiveInt = 256
    """Validation problems of a built-in task."""
    train_max_samples: CountOrOff = -1
    """Use only this many training rows; -1: all."""
    val_max_samples: CountOrOff = -1
    """Use only this many validation rows; -1: all."""
    shuffle: bool = True
    """Shuffle the training rows anew in each epoch."""
    seed: NonNegativeInt | None = None
    """Seed of row order and of built-in problems; null: `trainer.seed`."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a longer prompt: stop the run, or cut tokens there."""
    filter_overlong_prompts: bool = False
    """Leave out longer prompts before training starts."""
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Variables of the chat template, such as `enable_thinking`."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    """A data set class of your own."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """The order in which prompts are drawn."""
    datagen: DatagenConfig = field(default_factory=DatagenConfig)
    """A generator that adds rows to the training files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning before, or instead of, RL."""

    total_training_steps: NonNegativeInt = 0
    """Optimizer steps; 0: no supervised training."""
    train_files: tuple[str, ...] | None = None
    """Demonstration files, one path or a list; null: demonstrations of the built-in task."""
    mixture_weights: tuple[PositiveFloat, ...] | None = None
    """Share of each demonstration file, one number per file; null: by file length."""
    batch_tokens: PositiveInt = 16384
    """Tokens per optimizer step."""
    max_length: PositiveInt = 2048
    """Longest demonstration in tokens, prompt included."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Tokens per forward pass; the update is the same."""
    save_freq: CountOrOff = -1
    """Steps between checkpoints; -1: only the last one."""
    test_freq: CountOrOff = -1
    """Steps between validations; -1: only after the last step."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """The optimizer of supervised training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The run: its length, place, logs, checkpoints and deadlines."""

    mode: Literal["auto", "sft", "rl", "sft+rl"] = "auto"
    """Which training to do; `auto`: each one that has steps and data."""
    seed: NonNegativeInt = 1
    """Seed of everything random in the run."""
    total_epochs: PositiveInt = 1
    """Passes over `data.train_files`, unless `total_training_steps` is given."""
    total_training_steps: NonNegativeInt | None = None
    """RL steps; null: `total_epochs` over the files; 0: no RL."""
    project_name: str = "slipstream"
    """First part of the run folder, and the project (W&B, Trackio) or experiment (MLflow)."""
    experiment_name: str = "run"
    """Second part of the run folder, and the run in trackers."""
    logger: tuple[str, ...] = ("console", "file")
    """Where metrics go: `console`, `file` (JSON lines in the run folder), `tensorboard`, `wandb`,
    `mlflow`, `trackio` (docs/logging.md)."""
    nnodes: PositiveInt = 1
    """Machines (docs/several_gpus.md); without GPUs, processes."""
    n_gpus_per_node: NonNegativeInt = 0
    """GPUs to use on each machine, with a process for each of them; 0: leave it to `device`. With
    `device=cpu` it counts processes that compute on CPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto`: a GPU if there is one."""
    num_threads: PositiveInt | None = None
    """CPU threads that compute; null: one for each core that the process may use or, with more than
    four of them, as many as are fastest in decode steps, measured when a run begins."""
    save_freq: CountOrOff = -1
    """RL steps between checkpoints; -1: only the last one."""
    test_freq: CountOrOff = -1
    """RL steps between validations; -1: only after the last step."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Go on from the newest checkpoint of the run folder, never, or from `resume_from_path`."""
    resume_from_path: str | None = None
    """Checkpoint folder to go on from, with `resume_mode=resume_path`."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """The run folder: configuration, metrics, rollouts and checkpoints."""
    max_actor_ckpt_to_keep: PositiveInt | None = 3
    """Newest checkpoints to keep; null: all."""
    rollout_data_dir: str | None = None
    """Folder of recorded rollouts; null: `rollouts` in the run folder."""
    validation_data_dir: str | None = None
    """Folder of recorded validation responses; null: `validation` in the run folder."""
    sync_every: PositiveInt = 1
    """Training steps between two weight updates of the inference engine."""
    log_val_generations: NonNegativeInt = 3
    """Responses of each validation to show as text, and in the tables of loggers that have
    them."""
    stage_timeout_s: PositiveFloat = 3600.0
    """Deadline of each stage of a step; past it the run ends and names the stage."""
    critic_warmup: NonNegativeInt = 0
    """Step from which on the policy is updated; before it only the critic learns (VERL's count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every option of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts: a built-in task, or files in VERL's row format."""
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """The policy: how it is trained, sampled from and compared with its reference."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """From rewards to advantages."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """How responses are scored."""
    custom_reward_function: CustomRewardFunctionConfig = field(
        default_factory=CustomRewardFunctionConfig
    )
    """A reward function of your own."""
    sft: SftConfig = field(default_factory=SftConfig)
    """Supervised fine-tuning before, or instead of, RL."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model, which `algorithm.adv_estimator=gae` needs."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run: its length, place, logs, checkpoints and deadlines."""
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Speculative decoding, and the draft model that it needs."""
