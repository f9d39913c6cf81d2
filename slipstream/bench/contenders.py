"""Who generates: the embedded engine as rollouts use it, and transformers' `generate`.

Both get the same weights, prompts and lengths, ignore end-of-sequence tokens, and compute on the
same thread: with one each, OpenMP would slow both down. They know nothing about timing. Called by
`rollout` and, in a process of its own, by `memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import anyio
import torch
from anyio.from_thread import start_blocking_portal

from slipstream.bench.shapes import make_decoder
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import save_checkpoint
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import GenerateRequest, Generation, NoiseKey, SamplingParams

OURS = "slipstream"
PEERS = {"hf": ("transformers-dynamic", "transformers-static")}
"""Contenders of each peer: transformers with either of its caches, whichever is faster here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One batch: `prompts` of equal length, and how many tokens each response has."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def max_positions(self) -> int:
        return len(self.prompts[0]) + max(self.lengths)

    @property
    def useful_tokens(self) -> int:
        return sum(self.lengths)


class Generate(Protocol):
    """Generates the whole batch; the responses, cut to their lengths."""

    def __call__(self) -> list[list[int]]: ...


@contextmanager
def contender(
    name: str,
    workload: Workload,
    *,
    shape: str,
    dtype: torch.dtype,
    temperature: float,
    compute: ComputeThread,
) -> Iterator[Generate]:
    """A contender by name, ready to run on `compute`."""

    def model() -> Decoder:
        return make_decoder(shape, max_positions=workload.max_positions)

    if name == OURS:
        with _embedded(model, workload, dtype, temperature, compute) as generate:
            yield generate
    else:
        cache = name.partition("-")[2]
        generate = compute.run(lambda: _transformers(model(), workload, dtype, temperature, cache))
        yield lambda: compute.run(generate)


@contextmanager
def _embedded(
    model: Callable[[], Decoder],
    workload: Workload,
    dtype: torch.dtype,
    temperature: float,
    compute: ComputeThread,
) -> Iterator[Generate]:
    settings = EngineSettings(max_model_len=workload.max_positions, dtype=dtype)
    engine = compute.run(lambda: EmbeddedEngine(model(), settings, executor=compute.executor))
    requests = [
        GenerateRequest(
            request_id=str(index),
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True),
            key=NoiseKey(seed=0, uid=str(index)),
        )
        for index, (prompt, length) in enumerate(
            zip(workload.prompts, workload.lengths, strict=True)
        )
    ]

    async def everything() -> list[Generation]:
        done: dict[str, Generation] = {}

        async def one(request: GenerateRequest) -> None:
            done[request.request_id] = await engine.generate(request)

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(one, request)
        return [done[request.request_id] for request in requests]

    try:
        with start_blocking_portal() as portal:
            yield lambda: [generation.token_ids for generation in portal.call(everything)]
    finally:
        engine.close()


def _transformers(
    decoder: Decoder, workload: Workload, dtype: torch.dtype, temperature: float, cache: str
) -> Generate:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    with TemporaryDirectory() as folder:
        save_checkpoint(decoder, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()
    ids = torch.tensor(workload.prompts)
    seen = torch.ones_like(ids)
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        max_new_tokens=max(workload.lengths),
        use_cache=True,
        cache_implementation=cache,
        eos_token_id=None,
        pad_token_id=0,
        **(sampled if temperature > 0 else {"do_sample": False}),
    )

    def generate() -> list[list[int]]:
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=seen, generation_config=settings)
        rows: Sequence[Sequence[int]] = out[:, ids.shape[1] :].tolist()
        return [list(row[:n]) for row, n in zip(rows, workload.lengths, strict=True)]

    return generate
