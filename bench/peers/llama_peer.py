"""llama.cpp as a process: it reads one JSON command per line from standard input, and writes one
JSON answer per line to standard output.

Runs in the environment that `make peers` makes. Slipstream starts it
(`slipstream/bench/peer_process.py`); it imports nothing from Slipstream. It computes only between a
command and its answer.

    {"op": "load", "model": FILE, "quantize": "q8_0", "max_model_len": 256, "threads": 2}
        model: a GGUF file; quantize: null, or a key of `FORMATS`, in which a new file next to FILE
        is then loaded
    -> {"ok": true, "seconds": .., "versions": {..}}
    {"op": "generate", "prompts": [[ids]], "lengths": [n], "temperature": 1.0, "sample": true}
        sample false: llama.cpp computes all logits, but chooses no tokens; they are random and do
        not depend on the logits
    -> {"ok": true, "seconds": .., "cpu_seconds": .., "busiest_cpu_seconds": ..,
        "idle_seconds": .., "idle_cpu_seconds": .., "token_ids": [[ids]]}
        idle_..: since the last answer
    {"op": "log_probs", "token_ids": [ids]}
    -> {"ok": true, "log_probs": [[nats]]}
        the log-probs of the whole vocabulary after each token
    {"op": "quit"}

An answer to a command that failed is {"ok": false, "error": ".."}. End-of-sequence tokens are
ignored. All sequences of a batch are decoded together.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

FORMATS = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}

PREFILL_TOKENS = 2048
"""The most tokens of one call of `llama_decode`: llama.cpp's default."""


def quantized(model: str, form: str, threads: int) -> str:
    """Write `model` in another format, with llama.cpp's own function. Returns the new file."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = getattr(llama_cpp, FORMATS[form])
    target = str(Path(model).with_suffix(f".{form}.gguf"))
    if llama_cpp.llama_model_quantize(model.encode(), target.encode(), ctypes.byref(params)):
        raise ValueError(f"llama.cpp could not write {model} as {form}")
    return target


class Peer:
    """A model that is loaded in llama.cpp."""

    def __init__(self, *, model: str, quantize: str | None, max_model_len: int, threads: int):
        import llama_cpp

        self._lib = llama_cpp
        llama_cpp.llama_backend_init()
        file = model if quantize is None else quantized(model, quantize, threads)
        self._model = llama_cpp.llama_model_load_from_file(
            file.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp could not load {file}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._max_model_len = max_model_len
        self._threads = threads
        self._context: Any = None
        self._sequences = 0
        self._batch = llama_cpp.llama_batch_init(PREFILL_TOKENS, 0, 1)
        self._answered = time.perf_counter(), time.process_time()

    def generate(
        self,
        *,
        prompts: list[list[int]],
        lengths: list[int],
        temperature: float,
        sample: bool,
    ) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        last_wall, last_cpu = self._answered
        self._prepare(len(prompts))
        chains = self._samplers(len(prompts), temperature) if sample else []
        source = random.Random(0)

        def choose(sequence: int, row: int) -> int:
            if sample:
                return int(self._lib.llama_sampler_sample(chains[sequence], self._context, row))
            return source.randrange(self._vocab_size)

        try:
            token_ids = self._decode(prompts, lengths, choose)
        finally:
            for chain in chains:
                self._lib.llama_sampler_free(chain)
        self._answered = time.perf_counter(), time.process_time()
        used = self._answered[1] - cpu
        return {
            "seconds": self._answered[0] - wall,
            "cpu_seconds": used,
            "busiest_cpu_seconds": used,
            "idle_seconds": wall - last_wall,
            "idle_cpu_seconds": cpu - last_cpu,
            "token_ids": token_ids,
        }

    def log_probs(self, *, token_ids: list[int]) -> dict[str, Any]:
        import numpy

        self._prepare(1)
        self._run([(token, at, 0, True) for at, token in enumerate(token_ids)])
        found = []
        for row in range(len(token_ids)):
            pointer = self._lib.llama_get_logits_ith(self._context, row)
            logits = numpy.ctypeslib.as_array(pointer, (self._vocab_size,)).astype("float64")
            logits -= logits.max()
            found.append((logits - numpy.log(numpy.exp(logits).sum())).tolist())
        return {"log_probs": found}

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        choose: Callable[[int, int], int],
    ) -> list[list[int]]:
        written: list[list[int]] = [[] for _ in prompts]
        # (token, position, sequence, whether its logits are needed)
        tokens = [
            (token, at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        for start in range(0, len(tokens), PREFILL_TOKENS):
            chunk = tokens[start : start + PREFILL_TOKENS]
            self._run(chunk)
            for row, (_, _, sequence, last) in enumerate(chunk):
                if last:
                    written[sequence].append(choose(sequence, row))
        while True:
            rows = [
                (ids[-1], len(prompt) + len(ids) - 1, sequence, True)
                for sequence, (prompt, ids, length) in enumerate(
                    zip(prompts, written, lengths, strict=True)
                )
                if len(ids) < length
            ]
            if not rows:
                return written
            self._run(rows)
            for row, (_, _, sequence, _) in enumerate(rows):
                written[sequence].append(choose(sequence, row))

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One forward pass."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise ValueError(f"llama_decode returned {status} for {len(rows)} tokens")
        self._lib.llama_synchronize(self._context)

    def _prepare(self, sequences: int) -> None:
        """An empty cache for so many sequences. A context for another number is made anew."""
        lib = self._lib
        if self._context is not None and self._sequences == sequences:
            lib.llama_memory_clear(lib.llama_get_memory(self._context), False)
            return
        if self._context is not None:
            lib.llama_free(self._context)
        params = lib.llama_context_default_params()
        params.n_ctx = self._max_model_len * sequences
        params.n_batch = PREFILL_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._sequences = sequences
        if not self._context:
            raise ValueError(f"llama.cpp could not make a context for {sequences} sequences")

    def _samplers(self, count: int, temperature: float) -> list[Any]:
        """A chain of samplers per sequence, so that each has random numbers of its own."""
        lib = self._lib
        chains = []
        for seed in range(count):
            chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
            if temperature > 0:
                lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
                lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
            else:
                lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
            chains.append(chain)
        return chains


def versions() -> dict[str, str]:
    """The version of the package, and the instructions that this build of llama.cpp uses."""
    import llama_cpp

    info = llama_cpp.llama_print_system_info().decode()
    used = [
        part.split(" = ")[0].split(":")[-1].strip() for part in info.split("|") if "= 1" in part
    ]
    return {"llama-cpp-python": version("llama_cpp_python"), "built for": " ".join(used)}


def main() -> None:
    # llama.cpp may print to standard output, too: that becomes standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer: Peer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        op = command.pop("op")
        if op == "quit":
            return
        try:
            if op == "load":
                start = time.perf_counter()
                peer = Peer(**command)
                answer = {"seconds": time.perf_counter() - start, "versions": versions()}
            elif op == "generate" and peer is not None:
                answer = peer.generate(**command)
            elif op == "log_probs" and peer is not None:
                answer = peer.log_probs(**command)
            else:
                raise ValueError(
                    f"{op!r} is not possible now; the commands are load, generate, log_probs and "
                    "quit"
                )
            answers.write(json.dumps({"ok": True, **answer}) + "\n")
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            answers.write(json.dumps({"ok": False, "error": message}) + "\n")


if __name__ == "__main__":
    main()
