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
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.saved import MOST_PER_STEP, REMEDY, Saved, drawn_from, restoring
from slipstream.checkpoint.state import (
    RunState,
    adapter_folder,
    cotraining_file,
    critic_folder,
    critic_optimizer_file,
    data_file,
    huggingface_folder,
    optimizer_file,
    published_file,
    state_file,
)
from slipstream.checkpoint.tree import load_tree, save_tree
from slipstream.config.tree import from_dict
from slipstream.data.data_buffer import DataBuffer
from slipstream.errors import CheckpointError
from slipstream.kernels import processor
from slipstream.loops.rl_batch import KLInReward
from slipstream.loops.sft import SampleStream
from slipstream.reading import shown
from slipstream.rollout.manager import AsyncRolloutManager
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

    def restore(self, state: Any, backend: TrainingBackend) -> None:
        """Restore the weights and their version from a tree.

        Raises CheckpointError if they are not those of an earlier version of the backend's policy.
        """
        saved = Saved(state).fields("version", "tensors")
        version = saved["version"].count(backend.weight_version)
        found = dict(saved["tensors"].items())
        names = set()
        for name, like in backend.publish(advance=False).tensors():
            saved["tensors"].field(name).tensor(like)
            names.add(name)
        if more := sorted(found.keys() - names):
            raise CheckpointError(f"tensors.{more[0]} is not a weight of the policy; {REMEDY}")
        self.version = version
        self.tensors = {name: tensor.value for name, tensor in found.items()}

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
        with restoring(optimizer_file(folder)):
            has_weights = backend.load_training_state(optimizer_file(folder))
            if backend.weight_version != state.policy_version:
                raise CheckpointError(
                    f"counts.weight_version is {backend.weight_version}, but policy_version in "
                    f"{state_file(folder).name} is {state.policy_version}; {REMEDY}"
                )
            Saved(state.policy_version, "policy_version").count((1 + state.step) * MOST_PER_STEP)
        if not has_weights:
            with restoring(huggingface_folder(folder)):
                backend.load_policy(huggingface_folder(folder))
        if published is not None and published_file(folder).exists():
            with restoring(published_file(folder)):
                published.restore(load_tree(published_file(folder)), backend)
        data = read_json(data_file(folder))
        if not isinstance(data, dict):
            raise CheckpointError(
                f"{data_file(folder)} is corrupt: it contains {shown(data)}, not an object; "
                f"{REMEDY}"
            )
        return state.step, data


def restore_sft(
    snapshots: Snapshots,
    folder: Path,
    backend: TrainingBackend,
    stream: SampleStream,
    notify: Callable[[str], None],
) -> int:
    """Load a verified checkpoint of SFT into `backend` and `stream`, and return its step.

    Raises CheckpointError if it is corrupt, and DataError if it was made with other samples.
    """
    step, data = snapshots.restore(folder, backend, notify)
    with restoring(data_file(folder)):
        position = Saved(data).fields("stream")["stream"]
        with restoring(position.place):
            stream.load_state_dict(position.value)
            if (drawn := drawn_from(stream)) is not None:
                Saved(drawn, "the number of samples drawn").count(step * MOST_PER_STEP, least=step)
    return step


def restore_rl(
    snapshots: Snapshots,
    folder: Path,
    backend: TrainingBackend,
    data: DataBuffer,
    rollouts: AsyncRolloutManager,
    notify: Callable[[str], None],
    *,
    kl: KLInReward | None = None,
    published: LastPublished | None = None,
) -> int:
    """Load a verified checkpoint of RL into the parts of a run, and return its step.

    Co-training and the critic restore themselves. Raises CheckpointError if the checkpoint is
    corrupt, and DataError if it was made with other data.
    """
    step, state = snapshots.restore(folder, backend, notify, published)
    check_complete(folder, state)
    with restoring(data_file(folder)):
        saved = Saved(state).fields("data_buffer", "rollouts", optional=("kl_in_reward",))
        with restoring("data_buffer"):
            data.load_state_dict(saved["data_buffer"].value)
        with restoring("rollouts"):
            rollouts.load_state_dict(saved["rollouts"].value)
            Saved(rollouts.started, "next_group").count(step * MOST_PER_STEP, least=step)
            newest = Saved(rollouts.newest_version, "the largest version of spans")
            newest.count(backend.weight_version, least=-1)
        if data.drawn is not None and data.drawn != rollouts.started:
            raise CheckpointError(
                f"data_buffer is at prompt {data.drawn}, but rollouts.next_group is "
                f"{rollouts.started}; {REMEDY}"
            )
        # Missing if the earlier run had no KL penalty.
        if "kl_in_reward" in saved and kl is not None:
            with restoring("kl_in_reward"):
                kl.load_state_dict(saved["kl_in_reward"].value)
    return step


def check_complete(folder: Path, data: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a part is missing that the settings of the saved run demand."""
    config, problems = from_dict(RunState.load(folder).config)
    if problems:
        return
    for demands, there, part in (
        (config.trainer.sync_every > 1, published_file(folder).exists(), published_file(folder)),
        (
            config.speculative.train.enable_drafter_training,
            cotraining_file(folder).exists(),
            cotraining_file(folder),
        ),
        (
            config.algorithm.use_kl_in_reward,
            "kl_in_reward" in data,
            f"{data_file(folder)}: entry 'kl_in_reward'",
        ),
    ):
        if demands and not there:
            raise CheckpointError(f"{part} is missing; {REMEDY}")
