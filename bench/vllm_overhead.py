"""Time that `ServedEngine.generate` adds to requests to a vLLM server.

    SLIPSTREAM_VLLM_PYTHON=.venv-vllm/bin/python python -m bench.vllm_overhead \\
        [--shape d256x8] [--dtype bfloat16] [--requests 32] [--tokens 64] [--rounds 15]

In each round three clients send the same requests to the same server, all at once, in changing
order: our engine; the smallest loop that posts them and reads ids and log-probs; and the client of
`vllm bench serve`, which streams completions without token ids or versions. The benchmark prints
medians, and medians of the ratios within rounds. Floor: our engine takes at most 5 % more than the
smallest loop.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx2

from bench.vllm_update import make_engine
from slipstream.bench.shapes import make_decoder
from slipstream.config.engines import VLLM_PYTHON
from slipstream.inference.servers.engine import ServedEngine, _seed
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

FLOOR = 1.05
"""Most time of our engine over that of the smallest loop."""

PROMPT = 32
"""Tokens of a prompt."""


def requests_of(count: int, tokens: int, vocab_size: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{number}",
            prompt_ids=tuple((number * 31 + i * 7) % (vocab_size - 3) + 3 for i in range(PROMPT)),
            params=SamplingParams(max_tokens=tokens, ignore_eos=True),
            key=NoiseKey(seed=0, uid=f"r{number}"),
        )
        for number in range(count)
    ]


async def ours(engine: ServedEngine, requests: Sequence[GenerateRequest]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in requests]

    async def one(index: int) -> None:
        result = await engine.generate(requests[index])
        assert result.error is None, result.error
        found[index] = result.token_ids

    async with anyio.create_task_group() as tasks:
        for index in range(len(requests)):
            tasks.start_soon(one, index)
    return found


async def smallest(
    client: httpx2.AsyncClient, url: str, requests: Sequence[GenerateRequest]
) -> list[list[int]]:
    """Post each request, and read its ids and log-probs."""
    found: list[list[int]] = [[] for _ in requests]

    async def one(index: int) -> None:
        request = requests[index]
        body = {
            "request_id": f"s{index}-{time.monotonic_ns()}",
            "token_ids": list(request.prompt_ids),
            "sampling_params": {
                "max_tokens": request.params.max_tokens,
                "temperature": 1.0,
                "seed": _seed(request, 0),
                "logprobs": 0,
                "ignore_eos": True,
                "detokenize": False,
            },
        }
        answer = (await client.post(f"{url}/inference/v1/generate", json=body)).json()
        choice = answer["choices"][0]
        log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert len(log_probs) == len(choice["token_ids"])
        found[index] = choice["token_ids"]

    async with anyio.create_task_group() as tasks:
        for index in range(len(requests)):
            tasks.start_soon(one, index)
    return found


class TheirClient:
    """vLLM's benchmark client, in a process of its own."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("peers") / "vllm_client.py"
        self._process = subprocess.Popen(
            [os.environ[VLLM_PYTHON], str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def measure(self, url: str, requests: Sequence[GenerateRequest]) -> float:
        """Return the seconds of all requests. Raises RuntimeError if one failed."""
        task = {
            "url": url,
            "model": "policy",
            "prompts": [list(request.prompt_ids) for request in requests],
            "tokens": requests[0].params.max_tokens,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return float(answer["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError("vLLM's client ended")


async def measure(
    engine: ServedEngine, requests: Sequence[GenerateRequest], rounds: int
) -> dict[str, list[float]]:
    """Seconds by client, one entry per round."""
    (replica,) = engine._replicas
    url = replica.server._http.url  # type: ignore[attr-defined]
    theirs = TheirClient()
    # The server closes connections that were idle for some seconds.
    limits = httpx2.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
    )
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, list[list[int]]] = {}
    async with httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:

        async def timed(name: str, work: Callable[[], Awaitable[list[list[int]]]]) -> float:
            started = time.perf_counter()
            found = await work()
            taken = time.perf_counter() - started
            assert tokens.setdefault(name, found) == found, "the same requests, other tokens"
            return taken

        clients: list[tuple[str, Callable[[], Awaitable[float]]]] = [
            ("ours", lambda: timed("ours", lambda: ours(engine, requests))),
            ("smallest", lambda: timed("smallest", lambda: smallest(client, url, requests))),
            ("vLLM's", lambda: anyio.to_thread.run_sync(theirs.measure, url, requests)),
        ]
        for number in range(-2, rounds):  # The first two rounds are warm-up.
            for name, run in clients[number % 3 :] + clients[: number % 3]:
                taken = await run()
                if number >= 0:
                    seconds.setdefault(name, []).append(taken)
    theirs.close()
    same = tokens["ours"] == tokens["smallest"]
    print(f"ours and the smallest loop got {'the same' if same else 'other'} tokens")
    return seconds


def main(shape: str, dtype: str, count: int, tokens: int, rounds: int) -> None:
    policy = make_decoder(shape, max_positions=2048 + 64)
    requests = requests_of(count, tokens, policy.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(policy, dtype, "file", Path(folder))
        try:
            seconds = anyio.run(measure, engine, requests, rounds)
        finally:
            engine.close()
    print(f"{shape} in {dtype}, {count} requests of {tokens} tokens, medians of {rounds} rounds")
    for name in ("ours", "smallest", "vLLM's"):
        values = seconds[name]
        print(
            f"{name:<9} {statistics.median(values):.3f} s  ({min(values):.3f} to {max(values):.3f})"
        )
    for other in ("smallest", "vLLM's"):
        ratios = [a / b for a, b in zip(seconds["ours"], seconds[other], strict=True)]
        middle = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4)
        floor = f"; floor {FLOOR:g}x" if other == "smallest" else ""
        print(f"ours over {other}: {middle:.3f}x (quartiles {low:.3f} to {high:.3f}{floor})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="d256x8")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    main(args.shape, args.dtype, args.requests, args.tokens, args.rounds)
