"""Options of real vLLM servers that users of VERL set (`make peers`, `make test-peers`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.errors import EngineError
from slipstream.inference.servers.engine import ServedEngine
from slipstream.types import Generation
from tests.inference.contract import endless
from tests.inference.helpers import EOS, make_engine, update_from
from tests.inference.servers.real import PYTHON, decoder, engine_on, launch, make_check

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: make peers"),
]

TWO_PARTS = {
    "tensor_parallel_size": 2,
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


@pytest.mark.parametrize(
    "options",
    [
        {"load_format": "dummy"},
        {"max_num_batched_tokens": 32, "max_num_seqs": 8, "enable_chunked_prefill": True},
        pytest.param(TWO_PARTS, marks=pytest.mark.slow),
    ],
    ids=["random weights at the start", "prefill in pieces", "two processes"],
)
def test_a_server_with_options_computes_each_version(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """The tokens of both versions are those of our engine, with prompts longer than a piece."""
    process = launch(tmp_path, **options)
    policy = decoder(0, eos=EOS)
    request = endless("a", 9, temperature=0.0, prompt=range(3, 53))

    async def work(engine: ServedEngine) -> list[Generation]:
        found = [await engine.generate(request)]
        policy.load_state_dict(decoder(1, eos=EOS).state_dict())
        await engine.update_weights(update_from(policy, 1))
        return [*found, await engine.generate(request)]

    with ThreadPoolExecutor(1) as executor:
        engine = engine_on(process, policy=policy, check=make_check(policy), on_compute=executor)
        try:
            results = anyio.run(work, engine)
        finally:
            engine.close()
            process.close()
    assert engine.stats().server_checks == {"new": 2}
    for seed, result in enumerate(results):
        expected = make_engine(decoder(seed, eos=EOS)).run([request])[0]
        assert result.error is None
        assert result.token_ids == expected.token_ids
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"no_such_option": 3}, "error: unrecognized arguments: --no-such-option"),
        ({"kv_cache_memory_bytes": 1000}, "ValueError: No available memory for the cache blocks"),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 64}, "max_num_batched_tokens (16) must"),
    ],
)
def test_the_message_about_a_failed_start_begins_with_the_cause(
    tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(EngineError) as error:
        launch(tmp_path, **options)
    assert complaint in str(error.value).partition("; the end of ")[0]
