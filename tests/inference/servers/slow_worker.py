"""A worker extension for tests of real vLLM servers. vLLM imports it as `slow_worker`."""

from __future__ import annotations

import time
from typing import Any

import slipstream_vllm_worker  # type: ignore[import-not-found]


class SlowWorker(slipstream_vllm_worker.SlipstreamWorker):  # type: ignore[misc]
    """Adds delays and faults."""

    sound: Any
    _load: Any

    def slow_down(self, seconds: float) -> float:
        """Set the delay of each step in seconds."""
        runner: Any = self.model_runner
        if not hasattr(runner, "delay_s"):
            execute = runner.execute_model

            def slow(*args: Any, **more: Any) -> Any:
                time.sleep(runner.delay_s)
                return execute(*args, **more)

            runner.execute_model = slow
        runner.delay_s = seconds
        return seconds

    def plant(self, fault: str) -> str:
        """Plant a fault into weight updates: `forget_head` (a tied LM head keeps its packed
        weights, as in vLLM 0.32), `skip_load` (the worker acknowledges weights that it does not
        load), or none (an empty text)."""
        if not hasattr(self, "sound"):
            self.sound = slipstream_vllm_worker._repack_tied_head, self._load
        repack, load = self.sound
        slipstream_vllm_worker._repack_tied_head = repack
        self._load = load
        if fault == "forget_head":
            slipstream_vllm_worker._repack_tied_head = lambda model: None
        elif fault == "skip_load":
            self._load = lambda model, tensors: {name for name, _ in tensors if not name}
        return fault
