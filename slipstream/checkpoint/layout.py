"""Find the parts of a checkpoint. Each function accepts a checkpoint folder or a run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slipstream.checkpoint.manager import CheckpointManager, verify
from slipstream.checkpoint.state import adapter_folder, draft_folder, huggingface_folder


def policy_folder(checkpoint: Path) -> Path:
    """Return the Hugging Face folder of the policy.

    `checkpoint` is a run folder, a checkpoint folder, or a Hugging Face folder, which is returned
    unchanged. For a run folder the newest RL checkpoint is used, else the newest SFT checkpoint.
    Raises CheckpointError if the checkpoint is corrupt.
    """
    return _part(checkpoint, huggingface_folder, sft=True)


def lora_folder(checkpoint: Path) -> Path:
    """Return the folder of the LoRA adapter. `checkpoint` is resolved as in `policy_folder`."""
    return _part(checkpoint, adapter_folder, sft=True)


def head_folder(checkpoint: Path) -> Path:
    """Return the folder of the draft head, of a run, of a checkpoint, or `checkpoint` itself.

    Raises CheckpointError if the checkpoint is corrupt.
    """
    return _part(checkpoint, draft_folder)


def _part(checkpoint: Path, part: Callable[[Path], Path], *, sft: bool = False) -> Path:
    """Return `part` of the newest checkpoint of a run, or of one checkpoint.

    With `sft`, SFT checkpoints of the run are searched after its RL checkpoints. `~` is the user's
    home folder.
    """
    checkpoint = checkpoint.expanduser()
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
