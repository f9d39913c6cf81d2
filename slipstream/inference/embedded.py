"""The engine `embedded`: our own continuous-batching engine behind the asynchronous protocol."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import anyio.to_thread

from slipstream.config.engines import EMBEDDED
from slipstream.errors import EngineError
from slipstream.inference.driver import AsyncEngine
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.engine.request import Decode
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.selector import StrategySelector
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import load_config
from slipstream.types import PolicyVersion, WeightUpdate

_NOT_ARCHITECTURE = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "max_position_embeddings",
}


class EmbeddedEngine(AsyncEngine):
    """An `InferenceEngine` that runs `inference.engine.Engine`.

    The engine takes ownership of `decoder`: weight updates change it. If `executor` is shared with
    a trainer, create the engine on the thread of that executor.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: EngineSettings,
        *,
        decode: Decode | None = None,
        executor: ThreadPoolExecutor | None = None,
        proposer: Proposer | None = None,
        plan: DraftPlan = OFF,
        selector: StrategySelector | None = None,
    ) -> None:
        """`proposer` makes drafts; `selector` chooses the draft plan of each step, or else `plan`
        is used. The arguments are those of `Engine`."""
        embedded = Engine(
            decoder, settings, decode=decode, proposer=proposer, plan=plan, selector=selector
        )
        super().__init__(embedded, name="embedded", capabilities=EMBEDDED, executor=executor)
        self._embedded = embedded
        self._decoder = decoder
        self._config = decoder.config

    @property
    def decoder(self) -> Decoder:
        """The engine's own copy of the weights, which are in use."""
        return self._decoder

    async def update_drafter(self, update: WeightUpdate) -> None:
        async with self._between_steps():
            await self._call(lambda: self._embedded.update_drafter(update))

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """Call `lent(True)` on the compute thread when decoding frees cores, and `lent(False)`
        when it needs them again. `EngineSettings.one_thread_below` says when that happens."""
        self._embedded.lent = lent

    async def speculate(self, on: bool) -> None:
        """Switch speculation on or off for the following requests, as `Engine.speculate` does."""
        async with self._between_steps():
            await self._call(lambda: self._embedded.speculate(on))

    async def update_weights_from_checkpoint(
        self, path: Path, version: PolicyVersion | None = None
    ) -> None:
        # Equal tensor shapes do not prove an equal architecture (heads, RoPE base, epsilon).
        theirs = asdict(await anyio.to_thread.run_sync(load_config, path))
        for name, ours in asdict(self._config).items():
            if name not in _NOT_ARCHITECTURE and theirs[name] != ours:
                raise EngineError(
                    f"{path}: {name} is {theirs[name]}, but the policy of this engine has {ours}; "
                    "start an engine on that checkpoint instead"
                )
        await super().update_weights_from_checkpoint(path, version)
