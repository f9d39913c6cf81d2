"""The files of a checkpoint, and the state of a run apart from tensors.

    global_step_N/
      actor/huggingface/          the policy in Hugging Face format (`from_pretrained`)
      actor/optimizer.safetensors
      actor/lora_adapter/         the LoRA adapter in peft format, if one is trained
      critic/huggingface/         the critic, if one is trained (token classification)
      critic/optimizer.safetensors
      draft/                      the draft head, if one is trained
      draft/newest/, draft/best/  another head of `slipstream draft`
      state.json                  `RunState`
      data.json                   position in the data set
      manifest.json               sizes and checksums (written by `manager`)

Does not know how the parts are produced. Called by the loops.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from slipstream.checkpoint.files import read_json, write_json
from slipstream.checkpoint.saved import Saved, restoring
from slipstream.errors import CheckpointError
from slipstream.reading import shown

FORMAT_VERSION = 1


def huggingface_folder(checkpoint: Path) -> Path:
    """Return the folder of model, configuration and tokenizer in Hugging Face format."""
    return checkpoint / "actor" / "huggingface"


def adapter_folder(checkpoint: Path) -> Path:
    """Return the folder of the LoRA adapter (peft format) for the phase's initial weights."""
    return checkpoint / "actor" / "lora_adapter"


def critic_folder(checkpoint: Path) -> Path:
    """Return the folder of the critic in Hugging Face format."""
    return checkpoint / "critic" / "huggingface"


def critic_optimizer_file(checkpoint: Path) -> Path:
    """Return the file of the critic's optimizer and schedule (`save_tree`)."""
    return checkpoint / "critic" / "optimizer.safetensors"


def draft_folder(checkpoint: Path) -> Path:
    """Return the folder of the draft head, as written by `models.draft.files`."""
    return checkpoint / "draft"


def other_head_folder(checkpoint: Path, which: str) -> Path:
    """Return the folder of the head that `draft_folder` does not hold: the `newest` or the
    `best`."""
    return checkpoint / "draft" / which


def optimizer_file(checkpoint: Path) -> Path:
    """Return the file of optimizer and schedule (`save_tree`).

    No random number generator state is saved: all draws are functions of seed and position.
    """
    return checkpoint / "actor" / "optimizer.safetensors"


def state_file(checkpoint: Path) -> Path:
    """Return the file of the `RunState`."""
    return checkpoint / "state.json"


def data_file(checkpoint: Path) -> Path:
    """Return the file of the position in the data set (JSON, written by the loops)."""
    return checkpoint / "data.json"


def published_file(checkpoint: Path) -> Path:
    """Return the file of the published weights, written if they may differ from the trainer's."""
    return checkpoint / "actor" / "published.safetensors"


def cotraining_file(checkpoint: Path) -> Path:
    """Return the file from which co-training resumes."""
    return checkpoint / "draft" / "cotraining.safetensors"


def state_files(checkpoint: Path) -> list[Path]:
    """Return the files of weights and states that a checkpoint has."""
    weights = (
        huggingface_folder(checkpoint),
        critic_folder(checkpoint),
        draft_folder(checkpoint),
        other_head_folder(checkpoint, "newest"),
        other_head_folder(checkpoint, "best"),
    )
    files = [
        state_file(checkpoint),
        data_file(checkpoint),
        optimizer_file(checkpoint),
        critic_optimizer_file(checkpoint),
        published_file(checkpoint),
        cotraining_file(checkpoint),
        *(file for folder in weights for file in sorted(folder.glob("model*.safetensors"))),
    ]
    return [file for file in files if file.exists()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run, apart from tensors, that determines order, randomness and comparability.

    `step` counts the finished steps of `phase` ("sft", "rl", ...). `threads` is the number of
    compute threads; the order of floating-point sums depends on it. `config` has the resolved
    settings. `versions` has the versions of packages and of the matrix product implementation.
    `extra` has what a loop needs on resume. All values are JSON: string keys, no tuples, no NaN.
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
        """Return the state read from `state.json` of `checkpoint`.

        Raises CheckpointError if the file is missing, corrupt, lacks a field, or was written by a
        newer version.
        """
        path = state_file(checkpoint)
        raw = read_json(path)
        if not isinstance(raw, dict):
            raise CheckpointError(
                f"{path} is corrupt: it contains {type(raw).__name__}, not an object"
            )
        check_format_version(path, raw.get("format_version"), FORMAT_VERSION)
        known = {f.name for f in fields(cls)}
        if missing := sorted(known - raw.keys()):
            raise CheckpointError(
                f"{path} is corrupt: it lacks {', '.join(missing)}; resume from another checkpoint"
            )
        if unknown := sorted(raw.keys() - known):
            raise CheckpointError(
                f"{path} has unknown entries {', '.join(unknown)}; it was not written by this "
                "version of slipstream: resume with the version that wrote it"
            )
        for name, kind in _TYPES.items():
            value = raw.get(name, kind())
            if type(value) is not kind:
                article = "an integer" if kind is int else "text" if kind is str else "an object"
                raise CheckpointError(
                    f"{path} is corrupt: {name} is {shown(value)}, not {article}; resume from "
                    "another checkpoint"
                )
        state = cls(**raw)
        with restoring(path):
            Saved(state.step, "step").count()
            Saved(state.threads, "threads").count(_MOST_THREADS, least=1)
            Saved(state.policy_version, "policy_version").count()
            for _, version in Saved(state.versions, "versions").items():
                version.text()
        folder = checkpoint.resolve().name
        if folder.startswith(_FOLDER) and folder != f"{_FOLDER}{state.step}":
            raise CheckpointError(
                f"{path} is corrupt: step is {state.step}, but its folder is {folder}; resume from "
                "another checkpoint"
            )
        return state


_FOLDER = "global_step_"
_MOST_THREADS = 1 << 20
"""No machine has more."""

_TYPES: dict[str, type[int] | type[str] | type[dict[str, Any]]] = {
    "step": int, "phase": str, "threads": int, "config": dict, "policy_version": int,
    "versions": dict, "extra": dict,
}  # fmt: skip


def check_format_version(path: Path, found: object, supported: int) -> None:
    """Raise CheckpointError unless `found` is a format version up to `supported`."""
    if type(found) is not int or found < 1:
        raise CheckpointError(
            f"{path} is corrupt or was not written by slipstream: its format_version is "
            f"{shown(found)}; resume from another checkpoint"
        )
    if found > supported:
        raise CheckpointError(
            f"{path} was written by a newer version of slipstream (format_version {found}, this "
            f"version reads up to {supported}); upgrade slipstream to read it"
        )
