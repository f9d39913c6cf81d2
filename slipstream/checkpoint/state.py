"""What a checkpoint says about its run, and where its files lie.

    global_step_N/
      actor/huggingface/          the policy as Hugging Face reads it (`from_pretrained`)
      actor/optimizer.safetensors
      actor/lora_adapter/         a LoRA adapter as peft reads it, where one is trained
      critic/huggingface/         a critic, where one is trained (token classification)
      critic/optimizer.safetensors
      draft/                      a draft head, where one is trained
      state.json                  `RunState`
      data.json                   where the dataset iteration stands
      manifest.json               sizes and checksums (see `manager`)

Knows nothing of how the parts are made. Called by the loops.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from slipstream.checkpoint.files import read_json, write_json
from slipstream.errors import CheckpointError

FORMAT_VERSION = 1


def huggingface_folder(checkpoint: Path) -> Path:
    """Model, configuration and tokenizer in Hugging Face's format."""
    return checkpoint / "actor" / "huggingface"


def adapter_folder(checkpoint: Path) -> Path:
    """A LoRA adapter in peft's format, on the weights that the phase started from."""
    return checkpoint / "actor" / "lora_adapter"


def critic_folder(checkpoint: Path) -> Path:
    """A critic in Hugging Face's format."""
    return checkpoint / "critic" / "huggingface"


def critic_optimizer_file(checkpoint: Path) -> Path:
    """The critic's optimizer and schedule (`save_tree`)."""
    return checkpoint / "critic" / "optimizer.safetensors"


def draft_folder(checkpoint: Path) -> Path:
    """A draft head, as `models.draft.files` writes it."""
    return checkpoint / "draft"


def optimizer_file(checkpoint: Path) -> Path:
    """Optimizer and schedule (`save_tree`). No random number generator has a state to keep: all
    draws are functions of seed and position."""
    return checkpoint / "actor" / "optimizer.safetensors"


def state_file(checkpoint: Path) -> Path:
    """The `RunState`."""
    return checkpoint / "state.json"


def data_file(checkpoint: Path) -> Path:
    """Where the dataset iteration stands (JSON, written by the loops)."""
    return checkpoint / "data.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that order, randomness and comparability depend on, except tensors.

    `step` counts finished steps of `phase` ("sft", "rl", ...); `threads` is the number of compute
    threads, on which the order of floating-point sums depends; `config` the resolved settings;
    `versions` of the packages that computed it, and what multiplied; `extra` what a loop wants back
    at resume. All values are JSON: string keys, no tuples, no NaN.
    """

    step: int
    phase: str
    threads: int
    config: dict[str, Any] = field(default_factory=dict)
    policy_version: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def save(self, checkpoint: Path) -> None:
        """Write `state.json` into the folder `checkpoint`."""
        write_json(state_file(checkpoint), asdict(self))

    @classmethod
    def load(cls, checkpoint: Path) -> RunState:
        """Read `state.json` of `checkpoint`.

        Raises CheckpointError where it is missing, corrupt, lacks a field, or is newer than this
        program.
        """
        path = state_file(checkpoint)
        raw = read_json(path)
        if not isinstance(raw, dict):
            raise CheckpointError(
                f"{path} is corrupt: it holds {type(raw).__name__}, not an object"
            )
        check_format_version(path, raw.get("format_version"), FORMAT_VERSION)
        known = {f.name for f in fields(cls)}
        required = {"step", "phase", "threads"}
        if missing := sorted(required - raw.keys()):
            raise CheckpointError(
                f"{path} is corrupt: it lacks {', '.join(missing)}; resume from another checkpoint"
            )
        if unknown := sorted(raw.keys() - known):
            raise CheckpointError(
                f"{path} holds unknown entries {', '.join(unknown)}; it was not written by this "
                "version of slipstream: resume with the version that wrote it"
            )
        for name in ("step", "threads"):
            if type(raw[name]) is not int:
                raise CheckpointError(f"{path} is corrupt: {name} is {raw[name]!r}, not an integer")
        return cls(**raw)


def check_format_version(path: Path, found: object, supported: int) -> None:
    """Raise CheckpointError unless `found` is a format version up to `supported`."""
    if type(found) is not int or found < 1:
        raise CheckpointError(
            f"{path} is corrupt or not ours: its format_version is {found!r}; resume from another "
            "checkpoint"
        )
    if found > supported:
        raise CheckpointError(
            f"{path} was written by a newer version of slipstream (format_version {found}, this "
            f"one reads up to {supported}); upgrade slipstream to read it"
        )
