"""Paths of the parts of a checkpoint. Each function takes a checkpoint or a run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slipstream.checkpoint.manager import CheckpointManager, verify
from slipstream.checkpoint.state import adapter_folder, draft_folder, huggingface_folder


def published_file(checkpoint: Path) -> Path:
    """The engines' weights, where they may differ from the trainer's."""
    return checkpoint / "actor" / "published.safetensors"


def cotraining_file(checkpoint: Path) -> Path:
    """What co-training goes on from."""
    return checkpoint / "draft" / "cotraining.safetensors"


def policy_folder(checkpoint: Path) -> Path:
    """The Hugging Face folder of a run, of one of its checkpoints, or `checkpoint` itself.

    Of a run it is the newest RL checkpoint, else the newest of SFT. Raises CheckpointError where a
    checkpoint is corrupt.
    """
    return _part(checkpoint, huggingface_folder, sft=True)


def lora_folder(checkpoint: Path) -> Path:
    """The LoRA adapter of a run, of one of its checkpoints, or `checkpoint` itself, as
    `policy_folder`."""
    return _part(checkpoint, adapter_folder, sft=True)


def head_folder(checkpoint: Path) -> Path:
    """The draft head of a run, of one of its checkpoints, or `checkpoint` itself.

    Raises CheckpointError where a checkpoint is corrupt.
    """
    return _part(checkpoint, draft_folder)


def _part(checkpoint: Path, part: Callable[[Path], Path], *, sft: bool = False) -> Path:
    """`part` of the newest checkpoint of a run (`sft`: or of its SFT), or of one checkpoint."""
    for root in (checkpoint, checkpoint / "sft") if sft else (checkpoint,):
        latest = CheckpointManager(root, keep=None).latest() if root.is_dir() else None
        if latest is not None:
            checkpoint = latest
            break
    inner = part(checkpoint)
    if not inner.is_dir():
        return checkpoint
    verify(checkpoint)
    return inner
