"""The engine `hf` runs transformers' `generate`, for models that `embedded` does not support.

Our keyed sampler chooses the tokens; it is called as a logits processor. So a response depends only
on its own noise key, as with the embedded engine. Log-probs can differ from those of the embedded
engine in their last bits, because transformers pads on the left.

All waiting requests form one batch, which runs to its end unless it is interrupted. Interrupted
requests continue from their tokens, and their keys and values are computed again. So a weight
update always recomputes the KV cache, whatever its `KVPolicy`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.config.engines import HF, engines_with
from slipstream.errors import EngineError, RequestError
from slipstream.inference.driver import AsyncEngine
from slipstream.inference.engine.batch_sampling import sampling_rows
from slipstream.inference.engine.request import Decode, Running
from slipstream.inference.protocol import EngineStats, check_request
from slipstream.sampling.choose import choose
from slipstream.sampling.noise import key_words
from slipstream.types import GenerateRequest, Generation, StopReason, WeightUpdate


class HFCore:
    """An `EngineCore` that generates with a transformers model."""

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int,
        max_num_seqs: int = 256,
        eos_token_ids: Sequence[int] = (),
        decode: Decode | None = None,
    ) -> None:
        """`model` is an `AutoModelForCausalLM`; the engine takes ownership of it.

        Its generation defaults (repetition penalty, sampling) are dropped, because each request
        has its own sampling parameters.
        """
        from transformers import GenerationConfig

        self._model = model.eval()
        self._model.generation_config = GenerationConfig()
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._eos = frozenset(eos_token_ids)
        self._decode = decode
        self._requests: dict[str, Running] = {}
        self._running = 0
        self._interrupt = threading.Event()
        self._stats = EngineStats()

    def add(self, request: GenerateRequest) -> None:
        name = request.request_id
        vocab = int(self._model.config.get_text_config().vocab_size)
        check_request(request, vocab_size=vocab, max_model_len=self._max_model_len)
        if name in self._requests:
            raise RequestError(
                f"request {name!r}: a request with this request_id is already running"
            )
        if request.params.stop and self._decode is None:
            raise RequestError(
                f"request {name!r}: stop strings need an engine with a tokenizer "
                "(its argument `decode`)"
            )
        if request.return_hidden_states:
            raise RequestError(
                f"request {name!r}: the hf engine has no hidden states; set "
                f"{engines_with(lambda engine: engine.hidden_states)}"
            )
        self._requests[name] = Running(
            request=request,
            key=key_words(request.key.parts),
            eos_ids=self._eos,
            context=[*request.prompt_ids, *request.prior_ids],
        )

    @torch.no_grad()
    def step(self) -> list[Generation]:
        """Generate one batch of the oldest requests, until all have ended or it is interrupted."""
        states = list(self._requests.values())[: self._max_num_seqs]
        if not states:
            return []
        started = time.perf_counter()
        self._running = len(states)
        try:
            self._generate(states)
        finally:
            self._running = 0
        ended = [s for s in states if s.stop_reason is not None]
        for state in ended:
            del self._requests[state.request_id]
        self._stats = replace(
            self._stats,
            finished=self._stats.finished + len(ended),
            decode_seconds=self._stats.decode_seconds + time.perf_counter() - started,
        )
        return [s.generation(self._decode) for s in ended]

    def has_work(self) -> bool:
        return bool(self._requests)

    def interrupt(self, requested: bool) -> None:
        if requested:
            self._interrupt.set()
        else:
            self._interrupt.clear()

    def abort(self, request_ids: Sequence[str] | None) -> list[Generation]:
        chosen = None if request_ids is None else set(request_ids)
        stopped = [s for name, s in self._requests.items() if chosen is None or name in chosen]
        for state in stopped:
            del self._requests[state.request_id]
            state.stop_reason = StopReason.ABORT
        self._stats = replace(self._stats, aborted=self._stats.aborted + len(stopped))
        return [s.generation(self._decode) for s in stopped]

    @torch.no_grad()
    def update_weights(self, update: WeightUpdate) -> None:
        own = self._model.state_dict()
        new = dict(update.tensors())
        # A tied LM head shares the memory of the embedding, so the update may omit it.
        sent = {own[name].data_ptr() for name in new if name in own}
        problems = [f"tensor {n} is missing" for n, t in own.items() if t.data_ptr() not in sent]
        for name, tensor in new.items():
            here = own.get(name)
            if (
                here is None
                or here.shape != tensor.shape
                or not tensor.to(here.dtype).isfinite().all()
            ):
                problems.append(f"tensor {name} is unknown, misshapen or not finite")
        if problems:
            raise EngineError(
                f"weight update to version {update.version} refused, the weights in use stay: "
                + "; ".join(problems[:3])
            )
        for name, tensor in new.items():
            own[name].copy_(tensor)
        self._stats = replace(self._stats, version=update.version)

    def stats(self) -> EngineStats:
        running = self._running
        return replace(self._stats, running=running, waiting=len(self._requests) - running)

    def _generate(self, states: list[Running]) -> None:
        device = self._model.device
        width = max(s.length for s in states)
        ids = torch.zeros(len(states), width, dtype=torch.int64, device=device)
        attention = torch.zeros_like(ids)
        for row, state in enumerate(states):
            ids[row, width - state.length :] = torch.tensor(state.context)
            attention[row, width - state.length :] = 1
        rows = sampling_rows(states, device)
        version = self._stats.version

        def keyed_choice(_: Tensor, logits: Tensor) -> Tensor:
            """Logits processor: sample with keyed noise and return scores that are finite only at
            the sampled token."""
            positions = torch.tensor([s.length for s in states], device=device)
            choice = choose(logits.float(), positions, rows)
            tokens = choice.tokens.tolist()
            log_probs = choice.log_probs.tolist()
            sampling_log_probs = choice.sampling_log_probs.tolist()
            active = sum(s.stop_reason is None for s in states)
            for i, state in enumerate(states):
                if state.stop_reason is None:
                    state.push(
                        tokens[i], log_probs[i], sampling_log_probs[i], version, self._decode
                    )
            self._stats = replace(
                self._stats,
                generated_tokens=self._stats.generated_tokens + active,
                decode_steps=self._stats.decode_steps + 1,
                decode_tokens=self._stats.decode_tokens + active,
                max_batch=max(self._stats.max_batch, active),
            )
            scores = torch.full_like(logits, float("-inf"))
            return scores.scatter(1, choice.tokens[:, None], 0.0)

        def has_ended(_: Tensor, __: Tensor, **___: Any) -> Tensor:
            """Stopping criterion: whether each row has ended."""
            interrupted = self._interrupt.is_set()
            stop = [interrupted or s.stop_reason is not None for s in states]
            return torch.tensor(stop, device=device)

        self._model.generate(
            input_ids=ids,
            attention_mask=attention,
            do_sample=False,
            max_new_tokens=max(s.request.params.max_tokens - len(s.token_ids) for s in states),
            pad_token_id=0,
            logits_processor=[keyed_choice],
            stopping_criteria=[has_ended],
        )


class HFEngine(AsyncEngine):
    """An `InferenceEngine` that runs an `HFCore`."""

    def __init__(self, core: HFCore, *, executor: ThreadPoolExecutor | None = None) -> None:
        super().__init__(core, name="hf", capabilities=HF, executor=executor)
