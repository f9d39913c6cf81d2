"""Each transport of weights, with a real vLLM server (`make peers`, `make test-peers`).

`python -m pytest -m peers -s tests/inference/servers/test_vllm_transfer.py` prints the seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from slipstream.errors import EngineError
from slipstream.inference.servers.process import ServerProcess
from slipstream.inference.servers.transfer import Transport, make_transfer
from slipstream.inference.servers.vllm import VLLMServer
from tests.inference.contract import endless
from tests.inference.helpers import EOS, trainer_log_probs, update_from
from tests.inference.servers.real import PYTHON, decoder, engine_on, launch, rpc

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: make peers"),
]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = launch(tmp_path_factory.mktemp("vllm"))
    yield running
    running.close()


@pytest.mark.parametrize("transport", Transport)
def test_a_server_computes_with_each_update(
    process: ServerProcess, transport: Transport, tmp_path: Path
) -> None:
    engine = engine_on(process)
    transfer = make_transfer(
        transport, decoder(0), torch.float32, tmp_path, bucket_bytes=1 << 16, timeout_s=60
    )
    engine._weights.close()
    engine._weights = transfer

    async def work() -> None:
        for version in (1, 2, 3):
            policy = decoder(version, eos=EOS)
            started = time.perf_counter()
            await engine.update_weights(update_from(policy, version))
            print(
                f"{transport} {version}: {time.perf_counter() - started:.3f} s",
                engine.update_seconds,
            )
            request = endless("a", 20)
            result = await engine.generate(request)
            expected = trainer_log_probs(policy, torch.float32, request, result)
            assert result.log_probs == pytest.approx(expected, abs=1e-3)

    anyio.run(work)
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_fails_leaves_the_server_in_use(process: ServerProcess, tmp_path: Path) -> None:
    server = VLLMServer(process.url)
    transfer: Any = make_transfer("shared_memory", decoder(0), torch.float32, tmp_path)

    async def work() -> None:
        transfer.prepare(update_from(decoder(1), 1))
        await transfer.deliver(server)
        for path in transfer.path.glob("weights-*"):
            path.unlink()
        with pytest.raises(EngineError, match=r"is not here.*transport=collective"):
            await transfer.deliver(server)
        transfer.prepare(update_from(decoder(2), 2))
        await transfer.deliver(server)

    anyio.run(work)
    transfer.close()
    assert rpc(process, "slipstream_probe")[0]["pid"] > 0
