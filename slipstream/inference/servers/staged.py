"""Weights in buckets of memory, each written in place by every update: the transport
`shared_memory`, and what `collective` has in common with it.

FOLDER/weights-0, weights-1, ...     the buckets, if they are shared
FOLDER/model.safetensors             written only for a server that is started again
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.errors import EngineError
from slipstream.inference.servers.protocol import Server
from slipstream.inference.servers.transfer import direct
from slipstream.inference.servers.vllm_worker import checksum, views
from slipstream.inference.servers.weights import KEY, WeightFolder, check_received
from slipstream.inference.weights import checked_tensors
from slipstream.reading import reason
from slipstream.types import WeightUpdate

log = logging.getLogger(__name__)

ALIGNMENT = 64
"""Tensors begin at multiples of this number of bytes."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies: `sizes` of the buckets in bytes, and the `entries` of the tensors
    (see `vllm_worker.Entry`)."""

    sizes: list[int]
    entries: list[list[Any]]


def lay_out(shapes: Shapes, dtype: torch.dtype, bucket_bytes: int) -> Layout:
    """Put tensors of these shapes into buckets, in their order. A bucket is larger than
    `bucket_bytes` only if it has one tensor."""
    name_of_dtype = str(dtype).removeprefix("torch.")
    layout = Layout([], [])
    for name, shape in shapes.items():
        size = dtype.itemsize
        for length in shape:
            size *= length
        offset = layout.sizes[-1] if layout.sizes else 0
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        if not layout.sizes or (offset and offset + size > bucket_bytes):
            layout.sizes.append(0)
            offset = 0
        layout.sizes[-1] = offset + size
        entry = [name, name_of_dtype, list(shape), len(layout.sizes) - 1, offset]
        layout.entries.append(entry)
    return layout


class StagedWeights(WeightFolder):
    """A model folder, and the newest weights in buckets."""

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, parent: Path | None, *, bucket_bytes: int
    ) -> None:
        super().__init__(module, dtype, parent)
        self._bucket_bytes = bucket_bytes
        self._shapes: Shapes = {}
        self._layout = Layout([], [])
        self._buckets: list[Tensor] = []
        self._checksums: dict[str, int] = {}
        self._version = 0
        self._saved = True
        self._readers: set[str] = set()
        """Servers that were told to read the buckets, and have not answered."""
        self._writing = threading.Lock()

    def prepare(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        tensors = checked_tensors(self._module, update, self._dtype, what="weight update")
        with self._writing:
            try:
                self._reserve({name: tuple(tensor.shape) for name, tensor in tensors.items()})
            except OSError as error:
                raise EngineError(
                    f"weight update to version {update.version} refused, the weights in use stay: "
                    f"there is no room for it in {self.path} ({reason(error)}); set {KEY} to a "
                    "folder in memory with room for two copies of the model"
                ) from error
            self._saved, self._version = False, update.version
            for name, target in self._views():
                target.copy_(tensors[name].detach())
                self._checksums[name] = checksum(target)
            return dict(self._views())

    async def deliver(self, server: Server) -> None:
        self._readers.add(server.name)
        received = await self._send(server)
        self._readers.discard(server.name)
        check_received(server, self._checksums, received)

    def store(self) -> None:
        with self._writing:
            if self._saved:
                return
            new = self.file.with_suffix(".new")
            try:
                save_file(dict(self._views()), new)
                os.replace(new, self.file)
            except Exception as error:  # safetensors has exceptions of its own
                new.unlink(missing_ok=True)
                raise EngineError(
                    f"the weights of version {self._version} cannot be written to {self.path} "
                    f"({reason(error)}); set {KEY} to a folder with room for two copies of the "
                    "model"
                ) from error
            self._saved = True

    async def _send(self, server: Server) -> Mapping[str, int]:
        """Bring the buckets into a server. Returns the checksums of what it received."""
        raise NotImplementedError

    def _allocate(self, sizes: list[int]) -> list[Tensor]:
        """Make buckets of these sizes in bytes. Raises OSError if there is no room for them."""
        raise NotImplementedError

    def _usable(self) -> bool:
        """Whether the buckets of the last update can be written again."""
        return not self._readers

    def _reserve(self, shapes: Shapes) -> None:
        """Make buckets, unless there are some that can be written again."""
        if shapes == self._shapes and self._usable():
            return
        layout = lay_out(shapes, self._dtype, self._bucket_bytes)
        self._buckets = self._allocate(layout.sizes)
        self._shapes, self._layout = shapes, layout
        self._checksums.clear()
        self._readers.clear()

    def _views(self) -> list[tuple[str, Tensor]]:
        found = list[tuple[str, Tensor]]()
        for entry in self._layout.entries:
            found += views(self._buckets[entry[3]], [entry])
        return found


class SharedWeights(StagedWeights):
    """The transport `shared_memory`: the buckets are files in memory, which the servers map."""

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, parent: Path | None, *, bucket_bytes: int
    ) -> None:
        super().__init__(module, dtype, parent, bucket_bytes=bucket_bytes)
        self._files: list[tuple[Path, int]] = []
        """Path and inode of each bucket."""
        self._made = 0

    async def _send(self, server: Server) -> Mapping[str, int]:
        paths = [str(path) for path, _ in self._files]
        segments = list(zip(paths, self._layout.sizes, strict=True))
        source = {"segments": segments, "tensors": self._layout.entries}
        return await direct(server).load_shared(source)

    def _usable(self) -> bool:
        for path, inode in self._files:
            try:
                if path.stat().st_ino == inode:
                    continue
            except OSError:
                pass
            log.warning("%s was removed by something else than this run; it is made again", path)
            return False
        return super()._usable()

    def _allocate(self, sizes: list[int]) -> list[Tensor]:
        # Servers that still read the old buckets keep them. New ones never have their names.
        old = [path for path, _ in self._files]
        files, buckets = list[tuple[Path, int]](), list[Tensor]()
        try:
            for number, size in enumerate(sizes):
                path = self.path / f"weights-{self._made}-{number}"
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    files.append((path, os.fstat(descriptor).st_ino))
                    if sys.platform == "darwin":
                        os.ftruncate(descriptor, size)
                    else:
                        # Without it, a write to memory that is not there would end the process.
                        os.posix_fallocate(descriptor, 0, size)
                    buckets.append(torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8))
                finally:
                    os.close(descriptor)
        except OSError:
            for path, _ in files:
                path.unlink(missing_ok=True)
            raise
        for path in old:
            path.unlink(missing_ok=True)
        self._files, self._made = files, self._made + 1
        return buckets
