"""The model folder from which servers load weights, in memory-backed storage.

FOLDER/config.json, generation_config.json      of the policy
FOLDER/model.safetensors                        weights, replaced atomically

`WeightFolder` is the transport `file`. `staged.py` has the other ones.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.errors import ConfigError, EngineError
from slipstream.inference.servers import guard
from slipstream.inference.servers.protocol import Server
from slipstream.inference.servers.vllm_worker import checksum
from slipstream.inference.weights import checked_tensors
from slipstream.reading import reason
from slipstream.types import WeightUpdate

KEY = "actor_rollout_ref.rollout.server.transfer_dir"
MEMORY = Path("/dev/shm")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights in a safetensors file, with the checksum of each tensor. `tensors` are the same
    values on the CPU."""

    path: Path
    checksums: Mapping[str, int]
    tensors: Mapping[str, Tensor]


class WeightFolder:
    """A model folder whose weights are replaced by each update."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, parent: Path | None = None) -> None:
        """`module` gives the names and shapes that an update must have. Weights are stored as
        `dtype`. `parent` is the folder to make it in; None: memory-backed storage.

        Raises ConfigError if the folder cannot be made.
        """
        self._module, self._dtype = module, dtype
        self._stored: StoredWeights | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        if parent is None:
            parent = MEMORY
            if not os.access(MEMORY, os.W_OK):
                parent = Path(tempfile.gettempdir())
                log.warning(
                    "%s is not writable, so new weights go to servers through %s, which may be a "
                    "disk; set %s to a folder in memory",
                    MEMORY,
                    parent,
                    KEY,
                )
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix="slipstream-", dir=parent))
        except OSError as error:
            raise ConfigError(
                f"{KEY}: no folder can be made in {parent} ({reason(error)}); set {KEY} to a "
                "folder with room for two copies of the model"
            ) from error

    @property
    def file(self) -> Path:
        return self.path / "model.safetensors"

    def write(self, update: WeightUpdate) -> StoredWeights:
        """Check the tensors of an update and store them. Raises EngineError if they do not fit the
        policy, or if there is no room for them; the old file stays then."""
        what = "weight update"
        tensors = checked_tensors(self._module, update, self._dtype, what=what)
        new = self.file.with_suffix(".new")
        try:
            stored = {name: self._ready(tensor) for name, tensor in tensors.items()}
            save_file(stored, new)
            os.replace(new, self.file)
        except Exception as error:  # safetensors has exceptions of its own
            new.unlink(missing_ok=True)
            raise EngineError(
                f"weight update to version {update.version} refused, the weights in use stay: it "
                f"cannot be written to {self.path} ({reason(error)}); set {KEY} to a folder with "
                "room for two copies of the model"
            ) from error
        return StoredWeights(self.file, {name: checksum(t) for name, t in stored.items()}, stored)

    def prepare(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """Make an update ready for `deliver`, and return its tensors. Raises EngineError as `write`
        does."""
        self._stored = self.write(update)
        return self._stored.tensors

    async def deliver(self, server: Server) -> None:
        """Bring the prepared weights into a server, which is paused. Raises EngineError if it did
        not get them as they are."""
        assert self._stored is not None, "prepare an update first"
        received = await server.load(self._stored.path)
        if received is not None:
            check_received(server, self._stored.checksums, received)

    def store(self) -> None:
        """Bring the prepared weights into the model folder, for a server that is started again.
        Raises EngineError if there is no room for them."""

    def guard(self) -> None:
        """Have the folder removed if this process is killed. Servers that a run starts do that, too
        (`process.Launch.folder`)."""
        if self._guard is None:
            self._guard = subprocess.Popen(
                [sys.executable, guard.__file__, str(self.path)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )

    def close(self) -> None:
        """Remove the folder."""
        process, self._guard = self._guard, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        shutil.rmtree(self.path, ignore_errors=True)

    def _ready(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", self._dtype).contiguous()


def check_received(
    server: Server, checksums: Mapping[str, int], received: Mapping[str, int]
) -> None:
    """Raise EngineError unless a server received tensors with these checksums."""
    wrong = [name for name, value in checksums.items() if received.get(name) != value]
    if wrong:
        raise EngineError(f"{server.name} received other values of {', '.join(wrong[:3])}")
