"""A worker extension for tests of real vLLM servers. vLLM imports it as `slow_worker`."""

from __future__ import annotations

import time
from typing import Any

import torch

try:
    from vllm.v1.sample import rejection_sampler
except ImportError:  # the contract server
    rejection_sampler = None
else:
    # vLLM's own function, before the worker extension replaces it.
    RELEASED = rejection_sampler.expand_batch_to_tokens

import slipstream_vllm_worker  # type: ignore[import-not-found]


class SlowWorker(slipstream_vllm_worker.SlipstreamWorker):  # type: ignore[misc]
    """Adds delays and faults."""

    sound: Any
    _load: Any
    _load_draft: Any

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
        load), `skip_draft` and `random_draft` (the same for draft heads, or it loads a random
        one), `released_sampling` (drafts are verified as vLLM 0.32 does), or none (an empty
        text)."""
        if not hasattr(self, "sound"):
            self.sound = slipstream_vllm_worker._repack_tied_head, self._load, self._load_draft
        repack, load, load_draft = self.sound
        slipstream_vllm_worker._repack_tied_head = repack
        self._load, self._load_draft = load, load_draft
        if rejection_sampler is not None:
            mended = slipstream_vllm_worker.expand_batch_to_tokens
            rejection_sampler.expand_batch_to_tokens = mended
        if fault == "forget_head":
            slipstream_vllm_worker._repack_tied_head = lambda model: None
        elif fault == "skip_load":
            self._load = lambda model, tensors: {name for name, _ in tensors if not name}
        elif fault == "skip_draft":
            self._load_draft = lambda tensors: {name for name, _ in tensors if not name}
        elif fault == "random_draft":
            self._load_draft = lambda tensors: load_draft(
                [(name, torch.randn_like(tensor)) for name, tensor in tensors]
            )
        elif fault == "released_sampling":
            rejection_sampler.expand_batch_to_tokens = RELEASED
        return fault
