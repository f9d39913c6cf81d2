"""Weight sync from a checkpoint folder to all engines at once, as in the `rollouts` design.

The training loop does not use it: `loops.rl.publish` passes weights in memory. It works with every
engine that implements the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import anyio

from slipstream.errors import SlipstreamError
from slipstream.inference.protocol import EngineStats


class Updated(Protocol):
    """The part of an engine that a sync needs (`inference.protocol.InferenceEngine`)."""

    async def update_weights_from_checkpoint(self, path: Path, /) -> Any: ...

    def stats(self) -> EngineStats: ...


async def sync_weights_to_engines(
    engines: Sequence[Updated], checkpoint_path: str | Path
) -> list[dict[str, Any]]:
    """Load a checkpoint folder in Hugging Face format into all engines concurrently.

    Returns one record per engine, in the order of `engines`: `{"success": True, "version": N}`, or
    `{"success": False, "error": "..."}` if the engine refused the weights and keeps its old ones.
    """
    records: list[dict[str, Any]] = [{} for _ in engines]

    async def load(index: int, engine: Updated) -> None:
        try:
            await engine.update_weights_from_checkpoint(Path(checkpoint_path))
        except SlipstreamError as error:
            records[index] = {"success": False, "error": str(error)}
        else:
            records[index] = {"success": True, "version": engine.stats().version}

    async with anyio.create_task_group() as tasks:
        for index, engine in enumerate(engines):
            tasks.start_soon(load, index, engine)
    return records
