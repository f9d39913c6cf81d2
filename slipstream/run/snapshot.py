"""A run's checkpoint: policy, optimizer, data position, and what they were made with.

Knows what must be saved for a bitwise equal continuation; atomic folders are `checkpoint`'s matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream import __version__
from slipstream.checkpoint.files import read_json
from slipstream.checkpoint.layout import published_file
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.state import (
    RunState,
    adapter_folder,
    critic_folder,
    critic_optimizer_file,
    data_file,
    huggingface_folder,
    optimizer_file,
)
from slipstream.checkpoint.tree import load_tree, save_tree
from slipstream.errors import CheckpointError
from slipstream.kernels import processor
from slipstream.training.critic import Critic
from slipstream.training.protocol import TrainingBackend
from slipstream.types import WeightUpdate

_PRODUCTS = "bf16_products"


def computed_with() -> dict[str, str]:
    """What a run's numbers depend on, beside its settings: versions, and what multiplies."""
    return {
        "slipstream": __version__,
        "torch": str(torch.__version__),
        _PRODUCTS: processor.bf16_products(),
    }


class LastPublished:
    """Keeps a copy of the weights that the engines have, next to them.

    Needed where they are not the trainer's: between two weight updates (`trainer.sync_every`).
    """

    def __init__(self) -> None:
        self.version = 0
        self.tensors: dict[str, Tensor] = {}

    async def update_weights(self, update: WeightUpdate) -> None:
        # In the host's memory: they are seldom asked for.
        self.version = update.version
        self.tensors = {name: tensor.cpu() for name, tensor in update.tensors()}

    def as_update(self) -> WeightUpdate:
        return WeightUpdate(version=self.version, buckets=[list(self.tensors.items())])


class CheckpointWriter(Protocol):
    """Co-training (`drafter.interval`), as far as a checkpoint goes."""

    def snapshot(self) -> Callable[[Path], None]:
        """Copies of what training will change; what is returned writes them into a checkpoint, on
        whatever thread. Blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Saves and restores one phase ("sft" or "rl") of a run. `base_model` is the folder whose
    weights a LoRA adapter belongs on."""

    manager: CheckpointManager
    phase: str
    config: dict[str, Any]
    save_tokenizer: Callable[[str], object]
    base_model: Path | None = None

    def save(
        self,
        step: int,
        backend: TrainingBackend,
        data: Mapping[str, Any],
        published: LastPublished | None = None,
        drafter: CheckpointWriter | None = None,
        critic: Critic | None = None,
        go_on: Callable[[], object] = lambda: None,
    ) -> Path:
        """Write `global_step_{step}`. `data` is the JSON state of all that is not tensors.

        The draft head that is in use lies in the checkpoint as `slipstream draft` leaves one.
        `go_on` is called as soon as training may go on: what remains (the draft head's part,
        checksums, flushing to disk, and the rename that makes a checkpoint of it all) reads
        nothing that it changes.

        Blocks: not for the event loop. Raises CheckpointError where `data` is no JSON or the disk
        refuses; the checkpoint before stays.
        """
        state = RunState(
            step=step,
            phase=self.phase,
            threads=torch.get_num_threads(),
            config=self.config,
            policy_version=backend.weight_version,
            versions=computed_with(),
        )
        try:
            text = json.dumps(data, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"step {step}: the position in the data cannot be written as JSON ({error}); keep "
                "only strings, finite numbers, lists and objects in extra_info and metadata"
            ) from error

        def write(folder: Path) -> None:
            backend.save_policy(huggingface_folder(folder), self.save_tokenizer)
            backend.save_adapter(adapter_folder(folder), self.base_model)
            save_tree(optimizer_file(folder), backend.state_dict())
            if critic is not None:
                critic.save(critic_folder(folder), self.save_tokenizer)
                save_tree(critic_optimizer_file(folder), critic.state_dict())
            if published is not None:
                tree = {"version": published.version, "tensors": published.tensors}
                save_tree(published_file(folder), tree)
            write_draft = None if drafter is None else drafter.snapshot()
            go_on()
            if write_draft is not None:
                write_draft(folder)
            data_file(folder).write_text(text)
            state.save(folder)

        return self.manager.save(step, write)

    def restore(
        self,
        folder: Path,
        backend: TrainingBackend,
        notify: Callable[[str], None],
        published: LastPublished | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Load the verified `folder` into `backend` and `published`.

        Returns the step and the data state. `published` stays empty where the checkpoint was made
        with every step's weights published. Raises CheckpointError where the folder is corrupt, of
        another phase or of a newer format.
        """
        state = RunState.load(folder)
        if state.phase != self.phase:
            raise CheckpointError(
                f"{folder} is a checkpoint of phase {state.phase!r}, not {self.phase!r}; start "
                f"from its weights with actor_rollout_ref.model.path={huggingface_folder(folder)}"
            )
        notify(f"going on from {folder}")
        threads = torch.get_num_threads()
        if state.threads != threads:
            notify(
                f"the checkpoint was written with {state.threads} threads and this run has "
                f"{threads}: sums are taken in another order, so numbers may differ in last bits "
                f"(trainer.num_threads={state.threads} avoids it)"
            )
        was, now = state.versions.get(_PRODUCTS), processor.bf16_products()
        if was not in (None, now):
            notify(
                f"the checkpoint was written where {was} multiplied bf16, and here {now} does: "
                "sums are taken in another order, so numbers may differ in last bits"
            )
        # Merged weights do not give the base and its adapter back, not to the bit.
        if not backend.load_training_state(optimizer_file(folder)):
            backend.load_policy(huggingface_folder(folder))
        if published is not None and published_file(folder).exists():
            tree = load_tree(published_file(folder))
            published.version, published.tensors = tree["version"], tree["tensors"]
        data = read_json(data_file(folder))
        if not isinstance(data, dict):
            raise CheckpointError(f"{data_file(folder)} is corrupt: not a JSON object")
        return state.step, data
