"""`rollouts.training.weight_sync`: brings a checkpoint into running servers.

`sync_weights_to_engines` also takes engines of Slipstream (`inference.protocol.InferenceEngine`).
Needs an event loop of asyncio.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import anyio

from slipstream.errors import CheckpointError, EngineError
from slipstream.inference.protocol import EngineStats
from slipstream.inference.servers.sglang import SGLangServer
from slipstream.inference.servers.vllm import VLLMServer
from slipstream.inference.servers.vllm_worker import checksum, tensors_of
from slipstream.inference.sync import sync_weights_to_engines
from slipstream.reading import reason

__all__ = ["SGLangEngine", "VLLMEngine", "sync_weights_to_engines"]


class _Engine:
    """A running server. Subclasses name the client."""

    client: ClassVar[type[VLLMServer] | type[SGLangServer]]

    def __init__(self, base_url: str, timeout: float = 300.0, *, api_key: str | None = None):
        """`timeout` limits the time of a weight update in seconds."""
        self._server = self.client(base_url, update_s=timeout, api_key=api_key)
        self._version = 0

    async def update_weights_from_checkpoint(
        self, checkpoint_path: str | Path, version: int | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint folder in Hugging Face format, which the server must see under the same
        path. Running requests wait meanwhile, and continue with the new weights.

        Without `version`, the new version is the one before plus 1. Returns `{"success": True,
        "version": N}`. Raises CheckpointError if the folder cannot be read, and EngineError, which
        names the server, if it cannot load it.
        """
        server = self._server
        path, config, sums = await anyio.to_thread.run_sync(_read, Path(checkpoint_path))
        await server.check()
        if isinstance(server, VLLMServer):
            await server.check_shapes(config)
        await server.pause()
        try:
            # SGLang's client gets a file of the folder.
            received = await server.load(
                path if isinstance(server, VLLMServer) else path / "model.safetensors"
            )
            if received is not None and received != sums:
                raise EngineError(f"{server.name} received other values than the checkpoint's")
        except EngineError as error:
            raise EngineError(
                f"{error}; the server is paused, and its weights may be mixed: update it again, or "
                "start it again"
            ) from error
        await server.forget()
        self._version = self._version + 1 if version is None else version
        await server.set_version(self._version)
        await server.resume()
        return {"success": True, "version": self._version}

    def stats(self) -> EngineStats:
        """The version of the weights; the server's other counters are not known."""
        return EngineStats(version=self._version)


class VLLMEngine(_Engine):
    """A running vLLM server with Slipstream's worker extension (see `docs/servers.md`)."""

    client = VLLMServer

    def __init__(
        self, base_url: str = "http://localhost:30001", timeout: float = 300.0, **more: Any
    ) -> None:
        super().__init__(base_url, timeout, **more)


class SGLangEngine(_Engine):
    """A running SGLang server. It cannot say whether the checkpoint has the shapes of its model."""

    client = SGLangServer

    def __init__(
        self, base_url: str = "http://localhost:30000", timeout: float = 300.0, **more: Any
    ) -> None:
        super().__init__(base_url, timeout, **more)


def _read(path: Path) -> tuple[Path, Mapping[str, Any], dict[str, int]]:
    """The absolute path of a checkpoint, its configuration, and the checksum of each tensor."""
    path = path.absolute()
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return path, config, {name: checksum(tensor) for name, tensor in tensors_of(path)}
    except Exception as error:  # safetensors has exceptions of its own
        raise CheckpointError(
            f"{path} cannot be read ({reason(error)}); give a folder with config.json and "
            "safetensors files"
        ) from error
