"""Options of `reward_model` and `custom_reward_function`: how responses are scored.

They select managers and functions, and where code in responses runs. Other modules import the tree
from `schema`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.config.fields import FrozenMapping, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFusionSection:
    """A Sandbox Fusion service, which runs the code in responses."""

    url: str | None = None
    """Address of the service's `/run_code`, for example `http://localhost:8080/run_code`; null:
    code runs on this machine, isolated."""
    max_concurrent: PositiveInt = 64
    """Maximum number of programs that run at the service at once."""
    memory_limit_mb: PositiveInt = 1024
    """Memory limit of a program in MB, at the service or on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSection:
    """Limits for a program in a response. Without a service, bubblewrap isolates it."""

    run_timeout_s: PositiveFloat = 5.0
    """Time limit of one run in seconds; one run is one test."""
    compile_timeout_s: PositiveFloat = 10.0
    """Time limit for compiling in seconds."""
    total_timeout_s: PositiveFloat | None = None
    """Seconds after which no further test of a program starts, so that all tests end before
    `reward_model.timeout_s`; null: that deadline minus the time of one run and two seconds."""
    files_mb: PositiveInt = 64
    """Size limit in MB of the in-memory folder that a program can write to."""
    output_kb: PositiveInt = 1024
    """Limit in KB of the output of one run."""
    processes: PositiveInt = 16
    """Maximum number of processes and threads of a program at once."""
    python: str | None = None
    """Interpreter for Python programs, which can import its packages; null: the system's."""
    run_untrusted_code_without_isolation: bool = False
    """Run model-written programs as your own user, without bubblewrap. They can then read, change
    and send everything that you can. Use it only on machines that hold nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRewardSection:
    """The checkpoint of a learned reward model."""

    path: str | None = None
    """Folder of a Hugging Face model for sequence classification with one label."""
    dtype: Literal["auto", "bfloat16", "float32"] = "float32"
    """Compute dtype; `auto`: the actor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSection:
    """How responses are scored."""

    enable: bool = False
    """Score with the learned reward model of `reward_model.model` instead of a function. `terms`
    are added to its score."""
    model: LearnedRewardSection = field(default_factory=LearnedRewardSection)
    """The learned reward model."""
    micro_batch_size_per_gpu: PositiveInt = 1
    """Responses that the learned model scores at once. Above 1, the last bits of a score may depend
    on the other responses in the micro-batch."""
    max_length: PositiveInt | None = None
    """Longest prompt and response together, in tokens, that the learned model reads; null: its
    number of positions."""
    reward_manager: str = "naive"
    """Registered name of the manager that calls the reward function."""
    reward_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Settings of the manager, passed on unchanged."""
    compute_score_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Options of the built-in reward functions. `method`: `strict` (default) or `flexible`, for
    gsm8k. `float_tolerance`, for programs: the largest difference of a printed or returned number
    from the expected one, relative to it; null allows rounding errors only, 0 compares texts."""
    terms: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Terms that are added to the reward function's score, by name: a weight, or a mapping with
    `weight` and settings. Built in: `think_format`, `repetition`, `overlong`, `cosine_length`,
    `relative_length`. A term with `path` is your own function. `answer` is the reward function."""
    skip_special_tokens: bool = False
    """Remove all special tokens from a response before it is scored, as VERL does; false: only the
    token that ended the response, so that tags that are special tokens of the tokenizer count."""
    on_failure: Literal["zero", "drop", "stop"] = "zero"
    """What happens if scoring a response fails: `zero` gives reward 0, `drop` leaves the response
    out, `stop` ends the run."""
    timeout_s: PositiveFloat = 30.0
    """Deadline in seconds for one scoring call."""
    num_workers: PositiveInt | None = None
    """Scoring calls that run at once; null: four, and up to 256 while the running calls only wait
    and compute nothing."""
    sandbox_fusion: SandboxFusionSection = field(default_factory=SandboxFusionSection)
    """A service that runs code."""
    sandbox: SandboxSection = field(default_factory=SandboxSection)
    """Limits for code, and its isolation on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRewardFunctionSection:
    """Your own reward function."""

    path: str | None = None
    """Python file that contains the function; null: the reward function that the data names."""
    name: str = "compute_score"
    """Function in that file: `(data_source, solution_str, ground_truth, extra_info, **kwargs)`, or
    with the parameters of VERL's batch manager or of TRL."""
    reward_kwargs: Mapping[str, Any] = field(default_factory=FrozenMapping)
    """Further keyword arguments for the function."""
