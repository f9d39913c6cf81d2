"""Faults that are planted into a real vLLM server are found by the check after an update.

`python -m pytest tests/inference/servers/test_vllm_faults.py -s` prints what the check found.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import torch

from slipstream.errors import EngineError
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.process import ServerProcess
from slipstream.inference.servers.vllm import VLLMServer
from slipstream.models import Decoder
from tests.inference.helpers import EOS, update_from
from tests.inference.servers.real import CLIENT, PYTHON, decoder, engine_on, launch, make_check, rpc

LENGTH = 400
"""Tokens of context, with room for the sequence of the check."""

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: make peers"),
]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    found = [launch(tmp_path_factory.mktemp(f"vllm{i}"), max_model_len=LENGTH) for i in range(2)]
    yield found
    for process in found:
        process.close()


@pytest.fixture
def policy() -> Decoder:
    return decoder(0, eos=EOS)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@torch.no_grad()
def step(policy: Decoder, lr: float, seed: int) -> None:
    """Move each weight by `lr` up or down, as the first step of Adam does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        signs = torch.randn(parameter.shape, generator=generator).sign()
        parameter.add_(lr * signs)


class ConstantSalt(VLLMServer):
    """A client that lets requests of all versions share cached prefixes, and keeps the cache."""

    async def pause(self) -> None:
        await self._http.post("/pause?mode=keep&clear_cache=false", timeout_s=60)

    async def log_probs(self, contexts: Any, token_ids: Any, salt: str) -> list[list[float]]:
        return await super().log_probs(contexts, token_ids, "same")


async def updated(engine: ServedEngine, policy: Decoder, lr: float, faults: Any = None) -> str:
    """Update the engine twice, and return the error of the second update. `faults` is called
    between the two."""
    for version in (1, 2):
        step(policy, lr, version)
        await engine.update_weights(update_from(policy, version))
    if faults is not None:
        faults()
    step(policy, lr, 3)
    try:
        await engine.update_weights(update_from(policy, 3))
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("lr", [1e-4, 1e-6])
@pytest.mark.parametrize("fault", ["", "forget_head", "skip_load", "stale_cache"])
def test_a_fault_is_found_within_the_update(
    processes: list[ServerProcess],
    policy: Decoder,
    executor: ThreadPoolExecutor,
    fault: str,
    lr: float,
) -> None:
    first, second = processes
    for process in processes:
        CLIENT.post(process.url + "/reset_prefix_cache").raise_for_status()
    client = ConstantSalt if fault == "stale_cache" else VLLMServer
    engine = engine_on(
        first,
        second,
        policy=policy,
        max_model_len=LENGTH,
        check=make_check(policy, max_model_len=LENGTH),
        on_compute=executor,
        client=client,
    )

    def plant() -> None:
        if fault != "stale_cache":
            rpc(second, "plant", fault)

    async def work() -> str:
        with anyio.fail_after(60):
            if fault == "stale_cache":
                # Nothing is planted: the first update finds prefixes of the old version.
                step(policy, lr, 1)
                try:
                    await engine.update_weights(update_from(policy, 1))
                except EngineError as error:
                    return str(error)
                return ""
            return await updated(engine, policy, lr, plant)

    try:
        error = anyio.run(work)
    finally:
        rpc(second, "plant", "")
        engine.close()
    print(f"{fault or 'no fault'}, lr {lr:g}: {error or 'nothing'}")
    named = [process.url for process in processes if process.url in error]
    if fault == "stale_cache":  # on both servers; the error is that of the first to fail
        assert len(named) == 1
        assert "policy version 1" in error
    else:
        assert named == ([second.url] if fault else [])
