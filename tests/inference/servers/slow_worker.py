"""A worker extension for tests of real vLLM servers. vLLM imports it as `slow_worker`."""

from __future__ import annotations

import time
from typing import Any

from slipstream_vllm_worker import SlipstreamWorker  # type: ignore[import-not-found]


class SlowWorker(SlipstreamWorker):  # type: ignore[misc]
    """Adds a delay to each step."""

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
