"""Saves and restores the state of a run, so that a resumed run is equal bit for bit.

A checkpoint holds the policy, the optimizer, the position in the data and the versions used.
`checkpoint` makes sure that folders are written atomically.
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
    """Everything except settings that the numbers of a run depend on: versions, and the
    instructions for bf16 products."""
    return {
        "slipstream": __version__,
        "torch": str(torch.__version__),
        _PRODUCTS: processor.bf16_products(),
    }


class LastPublished:
    """Keeps a copy of the engines' weights.

    Between two weight updates (`trainer.sync_every`), they differ from the trainer's.
    """

    def __init__(self) -> None:
        self.version = 0
        self.tensors: dict[str, Tensor] = {}

    async def update_weights(self, update: WeightUpdate) -> None:
        # In host memory, because they are rarely used.
        self.version = update.version
        self.tensors = {name: tensor.cpu() for name, tensor in update.tensors()}

    def as_update(self) -> WeightUpdate:
        return WeightUpdate(version=self.version, buckets=[list(self.tensors.items())])


class CheckpointWriter(Protocol):
    """The part of co-training that a checkpoint saves (`drafter.interval`)."""

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state that training changes. Returns a function that writes the copy into a
        checkpoint folder, from any thread. Blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Saves and restores one phase ("sft" or "rl") of a run.

    `base_model` is the folder of the weights that a LoRA adapter belongs to.
    """

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
        """Write the checkpoint `global_step_{step}`. `data` is all state that is not tensors, as
        JSON.

        The current draft head is stored as `slipstream draft` stores it. `go_on` is called as soon
        as training may continue: the remaining work (draft head, checksums, flush to disk, and the
        final rename) reads nothing that training changes.

        Blocks: do not call it on the event loop. Raises CheckpointError if `data` is not valid JSON
        or writing fails; the previous checkpoint stays.
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
        """Load the verified checkpoint `folder` into `backend` and `published`.

        Returns the step and the data state. `published` stays empty if the engines had the
        trainer's weights. Raises CheckpointError if the folder is corrupt, of another phase, or in
        a newer format.
        """
        state = RunState.load(folder)
        if state.phase != self.phase:
            raise CheckpointError(
                f"{folder} is a checkpoint of phase {state.phase!r}, not {self.phase!r}; start "
                f"from its weights with actor_rollout_ref.model.path={huggingface_folder(folder)}"
            )
        notify(f"resuming from {folder}")
        threads = torch.get_num_threads()
        if state.threads != threads:
            notify(
                f"the checkpoint was written with {state.threads} threads, this run uses "
                f"{threads}: the order of sums differs, so the last bits of numbers may differ "
                f"(trainer.num_threads={state.threads} avoids it)"
            )
        was, now = state.versions.get(_PRODUCTS), processor.bf16_products()
        if was not in (None, now):
            notify(
                f"the checkpoint was written with {was} for bf16 products, this machine uses "
                f"{now}: "
                "the order of sums differs, so the last bits of numbers may differ"
            )
        # Base weights and adapter cannot be recovered from merged weights bit for bit.
        if not backend.load_training_state(optimizer_file(folder)):
            backend.load_policy(huggingface_folder(folder))
        if published is not None and published_file(folder).exists():
            tree = load_tree(published_file(folder))
            published.version, published.tensors = tree["version"], tree["tensors"]
        data = read_json(data_file(folder))
        if not isinstance(data, dict):
            raise CheckpointError(f"{data_file(folder)} is corrupt: not a JSON object")
        return state.step, data
