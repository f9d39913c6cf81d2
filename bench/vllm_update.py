"""Time of a weight update of a vLLM server while requests run, by transport.

    SLIPSTREAM_VLLM_PYTHON=.venv-vllm/bin/python python -m bench.vllm_update \\
        [--shape smollm2-135m] [--dtype bfloat16] [--rounds 7] [--requests 8] \\
        [--transport file shared_memory collective] [--logs FOLDER]

For each transport, a server is started. In each round, the engine updates it, and then it reloads a
file with the same weights by itself (vLLM's `reload_weights`, from memory-backed storage), both
while `--requests` responses are being generated. The benchmark prints the medians, the parts of our
update, and the median of the ratios of the rounds. A reload of vLLM reads the file and loads it.
Our update also checks and writes the new weights, compares checksums and log-probs, and keeps the
LM head right.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import httpx2
import torch

from slipstream.bench.shapes import make_decoder
from slipstream.build.engine import EngineSetup
from slipstream.build.servers import make_vllm
from slipstream.config import load_config
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.transfer import Transport
from slipstream.models import Decoder
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams, WeightUpdate

TOKENS = 2000
"""Length of the responses that run during the updates."""


def make_engine(policy: Decoder, dtype: str, transport: str, folder: Path) -> ServedEngine:
    """An engine on one vLLM server, whose log is in `folder`."""
    config = load_config(
        overrides=[
            "data.task=countdown",
            "actor_rollout_ref.model.path=unused",
            "actor_rollout_ref.rollout.name=vllm",
            f"actor_rollout_ref.rollout.dtype={dtype}",
            f"actor_rollout_ref.rollout.server.transport={transport}",
            "actor_rollout_ref.rollout.max_num_seqs=64",
            f"actor_rollout_ref.rollout.max_model_len={TOKENS + 40}",
            f"trainer.default_local_dir={folder}",
            "trainer.device=cpu",
        ],
        notify=lambda _: None,
    )
    compute = ComputeThread()
    engine = compute.run(
        lambda: make_vllm(
            EngineSetup(
                config=config,
                policy=policy,
                trained=True,
                decode=lambda ids: " ".join(map(str, ids)),
                compute=compute,
                notify=None,
            )
        )
    )
    assert isinstance(engine, ServedEngine)
    return engine


def request(name: str, tokens: int, prompt: int = 32) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(range(3, 3 + prompt)),
        params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        key=NoiseKey(seed=0, uid=name),
    )


@torch.no_grad()
def step(policy: Decoder) -> None:
    """Change all weights a little."""
    for parameter in policy.parameters():
        parameter.mul_(1 + 1e-3)


WORKER: dict[str, float] = {}
"""Seconds of the parts of the last installation."""


def watch(server: Any) -> None:
    """Record the time of each call of an installation."""

    def timed(part: str, call: Any) -> Any:
        async def run(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return await call(*args)
            finally:
                WORKER[f"- {part}"] = time.perf_counter() - started

        return run

    names = ("pause", "load", "load_shared", "load_sent", "forget", "set_version", "resume")
    for name in names:
        setattr(server, name, timed(name, getattr(server, name)))


async def measure(
    engine: ServedEngine, policy: Decoder, rounds: int, requests: int
) -> tuple[list[dict[str, float]], list[float], list[float]]:
    """Return our parts, our seconds and vLLM's seconds, one entry per round."""
    parts, ours, theirs = list[dict[str, float]](), list[float](), list[float]()
    (replica,) = engine._replicas
    watch(replica.server)
    url, path = replica.server._http.url, str(engine._weights.path)  # type: ignore[attr-defined]
    async with httpx2.AsyncClient(timeout=None) as client, anyio.create_task_group() as tasks:
        for number in range(requests):
            tasks.start_soon(engine.generate, request(f"r{number}", TOKENS))
        await anyio.sleep(2)
        for version in range(1, rounds + 1):
            step(policy)
            named = [(n, p.detach()) for n, p in policy.named_parameters()]
            started = time.perf_counter()
            await engine.update_weights(WeightUpdate(version=version, buckets=[named]))
            ours.append(time.perf_counter() - started)
            parts.append({**engine.update_seconds, **WORKER})
            # The transport writes the file only for a server that is started again.
            await anyio.to_thread.run_sync(engine._weights.store)
            body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            started = time.perf_counter()
            (await client.post(f"{url}/collective_rpc", json=body)).raise_for_status()
            theirs.append(time.perf_counter() - started)
        running = engine.stats().running
        await engine.abort()
    print(f"{running} of {requests} requests were running at the end")
    return parts, ours, theirs


def main(
    shape: str, dtype: str, rounds: int, requests: int, transports: list[str], logs: Path
) -> None:
    policy = make_decoder(shape, max_positions=TOKENS + 64)
    count = sum(p.numel() for p in policy.parameters())
    print(f"{shape}: {count / 1e6:.0f}M parameters, {dtype}, medians of {rounds} rounds")
    for transport in transports:
        engine = make_engine(policy, dtype, transport, logs / transport)
        try:
            parts, ours, theirs = anyio.run(measure, engine, policy, rounds, requests)
        finally:
            engine.close()
        report(transport, parts, ours, theirs)


def report(
    transport: str, parts: list[dict[str, float]], ours: list[float], theirs: list[float]
) -> None:
    middle = statistics.median
    print(f"{transport}")
    print(f"  our update     {middle(ours):.3f} s  ({min(ours):.3f} to {max(ours):.3f})")
    for name in parts[0]:
        print(f"    {name:<12} {middle([part[name] for part in parts]):.3f} s")
    print(f"  vLLM's reload  {middle(theirs):.3f} s  ({min(theirs):.3f} to {max(theirs):.3f})")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    loads = [part["install"] / b for part, b in zip(parts, theirs, strict=True)]
    low, high = min(ratios), max(ratios)
    print(f"  ours over vLLM's: {middle(ratios):.2f}x ({low:.2f} to {high:.2f})", end="; ")
    print(f"install alone: {middle(loads):.2f}x", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--transport", nargs="+", default=list(Transport), choices=list(Transport))
    parser.add_argument("--logs", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        main(args.shape, args.dtype, args.rounds, args.requests, args.transport, logs)
