"""The engine `fake` answers requests from a script, without a model.

It has the same asynchronous behavior as the other engines. Use it to test rollouts and training
loops, or to try a reward function without waiting for a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from slipstream.config.engines import FAKE
from slipstream.errors import EngineError, RequestError
from slipstream.inference.driver import AsyncEngine
from slipstream.inference.engine.request import Decode, Running
from slipstream.inference.protocol import EngineStats, check_request
from slipstream.sampling.noise import key_words
from slipstream.types import GenerateRequest, Generation, StopReason, WeightUpdate

Script = Callable[[GenerateRequest], Sequence[int]]
"""Returns the tokens that answer a request. They are repeated until the response ends."""


class ScriptedCore:
    """An `EngineCore` that takes one token per request and step from the script."""

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        log_prob: float = -1.0,
        decode: Decode | None = None,
    ) -> None:
        self._script = script
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos = frozenset(eos_token_ids)
        self._log_prob = log_prob
        self._decode = decode
        self._running: dict[str, tuple[Running, Sequence[int]]] = {}
        self._stats = EngineStats()

    def add(self, request: GenerateRequest) -> None:
        check_request(request, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        if request.request_id in self._running:
            raise RequestError(
                f"request {request.request_id!r}: a request with this request_id is already running"
            )
        if request.return_hidden_states:
            raise RequestError(
                f"request {request.request_id!r}: the fake engine has no hidden states; set "
                "return_hidden_states=False"
            )
        if request.params.stop and self._decode is None:
            raise RequestError(
                f"request {request.request_id!r}: stop strings need an engine with a tokenizer "
                "(its argument `decode`)"
            )
        script = self._script(request)
        if not script:
            raise RequestError(f"request {request.request_id!r}: the script is empty")
        state = Running(
            request=request,
            key=key_words(request.key.parts),
            eos_ids=self._eos,
            context=[*request.prompt_ids, *request.prior_ids],
        )
        self._running[request.request_id] = (state, script)

    def step(self) -> list[Generation]:
        ended = []
        count = len(self._running)
        for state, script in list(self._running.values()):
            offset = len(state.request.prior_ids) + len(state.token_ids)
            token = script[offset % len(script)]
            state.push(token, self._log_prob, self._log_prob, self._stats.version, self._decode)
            if state.stop_reason is not None:
                del self._running[state.request_id]
                ended.append(state.generation(self._decode))
        self._stats = replace(
            self._stats,
            finished=self._stats.finished + len(ended),
            generated_tokens=self._stats.generated_tokens + count,
            decode_steps=self._stats.decode_steps + 1,
        )
        return ended

    def has_work(self) -> bool:
        return bool(self._running)

    def interrupt(self, requested: bool) -> None:
        pass

    def abort(self, request_ids: Sequence[str] | None) -> list[Generation]:
        chosen = None if request_ids is None else set(request_ids)
        stopped = [s for s, _ in self._running.values() if chosen is None or s.request_id in chosen]
        for state in stopped:
            del self._running[state.request_id]
            state.stop_reason = StopReason.ABORT
        self._stats = replace(self._stats, aborted=self._stats.aborted + len(stopped))
        return [state.generation(self._decode) for state in stopped]

    def update_weights(self, update: WeightUpdate) -> None:
        """Accept tensors with any names. Raises EngineError if a value is not finite."""
        for name, tensor in update.tensors():
            if not tensor.isfinite().all():
                raise EngineError(
                    f"weight update to version {update.version} refused, the weights in use stay: "
                    f"tensor {name} has NaN or infinite values"
                )
        self._stats = replace(self._stats, version=update.version)

    def stats(self) -> EngineStats:
        return replace(self._stats, running=len(self._running))


class FakeEngine(AsyncEngine):
    """An `InferenceEngine` that runs a `ScriptedCore`."""

    def __init__(self, core: ScriptedCore) -> None:
        super().__init__(core, name="fake", capabilities=FAKE, slice_seconds=0.001)
