"""Weights from a checkpoint to all engines at once (the `rollouts` design's weight sync).

The training loop hands weights over in memory (`loops.rl.publish`); this is for engines that follow
a folder. Knows no engine's kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from slipstream.errors import SlipstreamError
from slipstream.inference.protocol import InferenceEngine


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine], checkpoint_path: str | Path
) -> list[dict[str, Any]]:
    """Load a Hugging Face folder into every engine, all at the same time.

    One record per engine, in their order: `{"success": True, "version": N}`, or `{"success": False,
    "error": "..."}` for an engine that refused it and keeps its old weights.
    """
    records: list[dict[str, Any]] = [{} for _ in engines]

    async def load(index: int, engine: InferenceEngine) -> None:
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
