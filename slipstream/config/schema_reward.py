"""How responses are scored: managers, functions, and where code runs. Part of `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.config.fields import FrozenMapping, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFusionConfig:
    """A Sandbox Fusion service, which runs the code of responses."""

    url: str | None = None
    """Its `/run_code`, as in `http://localhost:8080/run_code`; null: code runs on this machine, in
    isolation."""
    max_concurrent: PositiveInt = 64
    """Programs at the service at once."""
    memory_limit_mb: PositiveInt = 1024
    """Memory of a program, at the service or on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """What a program in a response may use; isolated by bubblewrap where no service is named."""

    run_timeout_s: PositiveFloat = 5.0
    """Seconds of one run, which is one test."""
    compile_timeout_s: PositiveFloat = 10.0
    """Seconds to compile it."""
    total_timeout_s: PositiveFloat | None = None
    """Seconds after which no further test of the same program is begun, so that all of it ends
    before `reward_model.timeout_s`; null: that without the time of a run and two seconds."""
    files_mb: PositiveInt = 64
    """What it may write into its folder, in memory."""
    output_kb: PositiveInt = 1024
    """What it may print in one run."""
    processes: PositiveInt = 16
    """Its processes and threads at once."""
    python: str | None = None
    """Interpreter of Python programs, whose packages they may import; null: the system's."""
    run_untrusted_code_without_isolation: bool = False
    """Run programs that a model wrote as yourself, without bubblewrap: they can read, change and
    send all that you can. For machines that hold nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRewardConfig:
    """The checkpoint of a learned reward model."""

    path: str | None = None
    """Folder of a Hugging Face model for sequence classification with one label."""
    dtype: Literal["auto", "bfloat16", "float32"] = "float32"
    """Number format that it computes in; `auto`: as the actor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """How responses are scored."""

    enable: bool = False
    """Score with the learned reward model of `reward_model.model`, instead of a function; `terms`
    add to it."""
    model: LearnedRewardConfig = field(default_factory=LearnedRewardConfig)
    """The learned reward model."""
    micro_batch_size_per_gpu: PositiveInt = 1
    """Responses that the learned model scores at once; above 1 scores may differ in their last bits
    with what else is in the batch."""
    max_length: PositiveInt | None = None
    """Longest prompt and response that the learned model reads, in tokens; null: its positions."""
    reward_manager: str = "naive"
    """Registered name of the manager that calls the reward function."""
    reward_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Settings of the manager, passed on as they are."""
    terms: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """What is added to the reward function's score, by name: a weight, or a mapping with `weight`
    and settings. Built in: `think_format`, `repetition`, `overlong`, `cosine_length`,
    `relative_length`; with `path`, a function of your own; `answer` is the reward function."""
    on_failure: Literal["zero", "drop", "stop"] = "zero"
    """What becomes of a response whose scoring failed: reward 0, left out, or the run ends."""
    timeout_s: PositiveFloat = 30.0
    """Deadline of one scoring call."""
    num_workers: PositiveInt | None = None
    """Scoring calls that run at once; null: four, and up to 256 while those that run wait for
    something and compute nothing."""
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)
    """A service that runs code."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """What code may use, and how it is isolated on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRewardFunctionConfig:
    """A reward function of your own."""

    path: str | None = None
    """Python file that holds it; null: the reward function that the data names."""
    name: str = "compute_score"
    """Function in that file: `(data_source, solution_str, ground_truth, extra_info, **kwargs)`, or
    with the parameters of VERL's batch manager or of TRL."""
    reward_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Extra keyword arguments of the call."""
