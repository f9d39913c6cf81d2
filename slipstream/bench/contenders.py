"""The contenders: the embedded engine as rollouts use it, transformers' `generate`, vLLM and
llama.cpp.

All get the same weights, prompts and lengths and ignore end-of-sequence tokens. Our engine and
transformers compute on the same thread: with one thread each, OpenMP would slow both down. vLLM and
llama.cpp compute in separate processes. This module does not time anything. Used by `rollout` and
`decode` and, in a separate process, by `memory`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import torch
from anyio.from_thread import start_blocking_portal

from slipstream.bench.gguf import write_gguf
from slipstream.bench.peer_process import LLAMA_REMEDY, PEERS_REMEDY, PeerProcess, peer_command
from slipstream.bench.shapes import BenchModel
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import load_checkpoint, save_checkpoint
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import GenerateRequest, Generation, NoiseKey, SamplingParams

OURS = "slipstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of vLLM. `threads` None: the benchmark's number of threads. With `defaults`, vLLM
    chooses processes and cores, and `threads` is ignored. `speculative` is vLLM's
    `speculative_config`. With `gaps`, answers contain the log-prob of each token minus that of the
    next most likely one."""

    dtype: str
    eager: bool = False
    threads: int | None = None
    defaults: bool = False
    speculative: Mapping[str, object] | None = None
    gaps: bool = False

    @property
    def given_threads(self) -> int | None:
        """The number of threads that vLLM is told to use; None if it chooses."""
        return None if self.defaults else self.threads or torch.get_num_threads()


VLLM = {
    "vllm-float32-compiled": VllmSettings(dtype="float32"),
    "vllm-float32-eager": VllmSettings(dtype="float32", eager=True),
    "vllm-float32-one-thread": VllmSettings(dtype="float32", threads=1),
    "vllm-float32-defaults": VllmSettings(dtype="float32", defaults=True),
    "vllm-bfloat16-compiled": VllmSettings(dtype="bfloat16"),
    "vllm-bfloat16-eager": VllmSettings(dtype="bfloat16", eager=True),
    "vllm-bfloat16-one-thread": VllmSettings(dtype="bfloat16", threads=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """Settings of llama.cpp. `form` is the format of the weights: bfloat16, or one that llama.cpp
    computes from bf16. Without `sample`, it computes all logits but chooses no tokens: they are
    random, as in llama.cpp's own `llama-bench`."""

    form: str
    sample: bool = True


LLAMA = {
    "llamacpp-bfloat16": LlamaSettings(form="bfloat16"),
    "llamacpp-bfloat16-unsampled": LlamaSettings(form="bfloat16", sample=False),
    "llamacpp-q8_0": LlamaSettings(form="q8_0"),
    "llamacpp-q8_0-unsampled": LlamaSettings(form="q8_0", sample=False),
}

UNSAMPLED = tuple(name for name, settings in LLAMA.items() if not settings.sample)
"""Contenders that choose no tokens. They show what sampling costs, and never count as the best."""

PEERS = {
    "hf": ("transformers-dynamic", "transformers-static"),
    "vllm": tuple(VLLM),
    "llamacpp": tuple(LLAMA),
}
"""Contenders of each peer; the fastest one counts. transformers runs with either of its caches.
vLLM runs in both dtypes, compiled or eager, in one process with all threads (its best on few
cores), with one thread, and with its defaults. llama.cpp runs with bf16 and with 8-bit weights."""

SEPARATE = (*VLLM, *LLAMA)
"""Contenders that compute in separate processes."""

SPECULATING = {
    f"vllm-{dtype}-ngram": VllmSettings(
        dtype=dtype,
        speculative={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 4,
        },
    )
    for dtype in ("float32", "bfloat16")
}
"""vLLM's own speculation. It is not compared with plain decoding, and runs greedily only: at
temperatures above 0, vLLM 0.32 on a CPU does not sample from the model's distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One batch: `prompts` of equal length, and the number of tokens of each response."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def max_positions(self) -> int:
        return len(self.prompts[0]) + max(self.lengths)

    @property
    def useful_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(slots=True, kw_only=True)
class Contender:
    """A generator that has loaded the model."""

    generate: Callable[[Workload], list[list[int]]]
    """Generates the whole batch and returns the responses, cut to their lengths."""
    dtype: str
    threads: int | None
    """None if the contender chooses."""
    cpu_clock: Callable[[], float] = time.process_time
    """Returns the CPU seconds that its processes have used so far."""
    versions: Mapping[str, str] | None = None
    """Versions of its packages, if it runs in another environment."""
    answers: list[Mapping[str, Any]] = field(default_factory=list)
    """Reports of its process, one per call of `generate`."""


@contextmanager
def contender(
    name: str,
    *,
    model: BenchModel,
    max_positions: int,
    dtype: torch.dtype,
    temperature: float,
    compute: ComputeThread,
) -> Iterator[Contender]:
    """The contender `name`, ready for workloads of up to `max_positions` tokens. Our engine and
    transformers run on `compute`. Raises ConfigError if vLLM or llama.cpp is needed and not
    installed."""

    def load() -> Decoder:
        return model.decoder(max_positions)

    dtype_name = str(dtype).removeprefix("torch.")
    if name == OURS:
        with (
            embedded(load, max_positions, dtype, compute) as engine,
            start_blocking_portal() as portal,
        ):
            yield Contender(
                generate=lambda w: portal.call(_generate, engine, w, temperature),
                dtype=dtype_name,
                threads=torch.get_num_threads(),
            )
    elif name in VLLM:
        with _vllm(name, load, max_positions, temperature, compute) as peer:
            yield peer
    elif name in LLAMA:

        def write(file: Path) -> None:
            # On this thread, this would leave OpenMP threads that slow down ours.
            compute.run(lambda: write_gguf(file, load()))

        with llama_of(name, write, max_positions, temperature) as peer:
            yield peer
    else:
        cache = name.partition("-")[2]
        generate = compute.run(lambda: _transformers(load(), dtype, temperature, cache))
        yield Contender(
            generate=lambda w: compute.run(lambda: generate(w)),
            dtype=dtype_name,
            threads=torch.get_num_threads(),
        )


@contextmanager
def embedded(
    model: Callable[[], Decoder], max_positions: int, dtype: torch.dtype, compute: ComputeThread
) -> Iterator[EmbeddedEngine]:
    """The embedded engine, which is made and runs on `compute`."""
    settings = EngineSettings(max_model_len=max_positions, dtype=dtype, free_cache_engine=False)
    engine = compute.run(lambda: EmbeddedEngine(model(), settings, executor=compute.executor))
    try:
        yield engine
    finally:
        engine.close()


def requests(workload: Workload, temperature: float) -> list[GenerateRequest]:
    """The workload as requests to the embedded engine."""
    pairs = zip(workload.prompts, workload.lengths, strict=True)
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True),
            key=NoiseKey(seed=0, uid=str(index)),
        )
        for index, (prompt, length) in enumerate(pairs)
    ]


async def _generate(
    engine: EmbeddedEngine, workload: Workload, temperature: float
) -> list[list[int]]:
    done: dict[str, Generation] = {}

    async def one(request: GenerateRequest) -> None:
        done[request.request_id] = await engine.generate(request)

    async with anyio.create_task_group() as tasks:
        for request in requests(workload, temperature):
            tasks.start_soon(one, request)
    return [done[str(index)].token_ids for index in range(len(workload.prompts))]


def _transformers(
    decoder: Decoder, dtype: torch.dtype, temperature: float, cache: str
) -> Callable[[Workload], list[list[int]]]:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    with TemporaryDirectory() as folder:
        save_checkpoint(decoder, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

    def generate(workload: Workload) -> list[list[int]]:
        ids = torch.tensor(workload.prompts)
        settings = GenerationConfig(
            max_new_tokens=max(workload.lengths),
            use_cache=True,
            cache_implementation=cache,
            eos_token_id=None,
            pad_token_id=0,
            **(sampled if temperature > 0 else {"do_sample": False}),
        )
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
        rows: Sequence[Sequence[int]] = out[:, ids.shape[1] :].tolist()
        return [list(row[:n]) for row, n in zip(rows, workload.lengths, strict=True)]

    return generate


@contextmanager
def _vllm(
    name: str,
    model: Callable[[], Decoder],
    max_positions: int,
    temperature: float,
    compute: ComputeThread,
) -> Iterator[Contender]:
    """vLLM with the weights of `model`, which are written to a temporary folder."""
    with TemporaryDirectory() as parent:
        # On this thread, making the model would leave OpenMP threads that slow down ours.
        decoder = compute.run(model)
        c = decoder.config
        folder = Path(parent) / f"{c.hidden_size}x{c.num_layers}-{c.vocab_size}-{max_positions}"
        save_checkpoint(decoder, folder)
        with peer_contender(name, folder, max_positions, temperature) as peer:
            yield peer


@contextmanager
def peer_contender(
    name: str, folder: Path, max_positions: int, temperature: float
) -> Iterator[Contender]:
    """vLLM or llama.cpp with the settings called `name`, on the policy in a Hugging Face folder.
    Raises ConfigError if it is not installed."""
    if name in LLAMA:

        def write(file: Path) -> None:
            write_gguf(file, load_checkpoint(folder))

        with llama_of(name, write, max_positions, temperature) as peer:
            yield peer
    else:
        settings = (VLLM | SPECULATING)[name]
        with vllm_of(name, settings, folder, max_positions, temperature) as peer:
            yield peer


def vllm_command() -> tuple[str, ...]:
    """The command that starts vLLM's process. Raises ConfigError if vLLM is not installed."""
    return peer_command(".venv-vllm", "bench/peers/vllm_peer.py", remedy=PEERS_REMEDY)


@contextmanager
def vllm_of(
    name: str, settings: VllmSettings, folder: Path, max_positions: int, temperature: float
) -> Iterator[Contender]:
    """vLLM with the given settings. `name` is the name of its process in errors."""
    with PeerProcess(name, vllm_command()) as process:
        loaded = process.ask(
            "load",
            model=str(folder.resolve()),
            dtype=settings.dtype,
            eager=settings.eager,
            max_model_len=max_positions,
            threads=settings.given_threads,
            speculative=settings.speculative,
        )
        yield _answering(
            process,
            {"temperature": temperature, "gaps": settings.gaps},
            dtype=settings.dtype,
            threads=settings.given_threads,
            versions=loaded["versions"],
        )


def llama_command() -> tuple[str, ...]:
    """The command that starts llama.cpp's process. Raises ConfigError if it is not installed."""
    return peer_command(".venv-llama", "bench/peers/llama_peer.py", remedy=LLAMA_REMEDY)


@contextmanager
def llama_of(
    name: str, write: Callable[[Path], None], max_positions: int, temperature: float
) -> Iterator[Contender]:
    """llama.cpp with the settings called `name`. `write` writes the model to a GGUF file in bf16.

    Raises ConfigError if llama.cpp is not installed.
    """
    settings = LLAMA[name]
    command = llama_command()
    with TemporaryDirectory() as folder, PeerProcess(name, command) as process:
        file = Path(folder) / "model.gguf"
        write(file)
        loaded = process.ask(
            "load",
            model=str(file),
            quantize=None if settings.form == "bfloat16" else settings.form,
            max_model_len=max_positions,
            threads=torch.get_num_threads(),
        )
        yield _answering(
            process,
            {"temperature": temperature, "sample": settings.sample},
            dtype=settings.form,
            threads=torch.get_num_threads(),
            versions=loaded["versions"],
        )


def _answering(
    process: PeerProcess,
    arguments: Mapping[str, object],
    *,
    dtype: str,
    threads: int | None,
    versions: Mapping[str, str],
) -> Contender:
    """A process that has loaded the model. `arguments` are those of `generate` besides the
    workload."""
    answers: list[Mapping[str, Any]] = []

    def generate(workload: Workload) -> list[list[int]]:
        given = {"prompts": workload.prompts, "lengths": workload.lengths, **arguments}
        answers.append(process.ask("generate", **given))
        return [list(ids) for ids in answers[-1]["token_ids"]]

    return Contender(
        generate=generate,
        dtype=dtype,
        threads=threads,
        versions=versions,
        cpu_clock=lambda: sum(answer["cpu_seconds"] for answer in answers),
        answers=answers,
    )
