"""Hidden states that an engine has computed while it decoded, until the trainer gets their rows.

A `GenerationSink`. Whether a response's are wanted is decided before it is generated; what has come
is taken by row, in the step in which the response ended. It keeps those of responses that one
policy version wrote, as many as fit: of the others the trainer's own pass gives them. Tensors are
only touched by `take`, on the trainer's compute thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.types import GenerateRequest, Generation, NoiseKey


@dataclass(frozen=True, slots=True)
class _Decoded:
    tokens: list[int]
    parts: tuple[Tensor, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class DecodedFeatures:
    """Those of one RL step, in at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = self.taken = 0
        """Bytes that wait, and how many responses have been taken since `begin`."""
        self._wanted = False
        self._found: dict[NoiseKey, _Decoded] = {}

    def begin(self, *, wanted: bool) -> None:
        """Forget what has not been taken; from now on they are `wanted`, or not."""
        self._wanted, self.nbytes, self.taken = wanted, 0, 0
        self._found.clear()

    def wants(self, request: GenerateRequest) -> bool:
        """See `GenerationSink`."""
        return self._wanted and self.nbytes < self.max_bytes

    def receive(self, request: GenerateRequest, generation: Generation) -> None:
        """See `GenerationSink`."""
        before, after = generation.context_hidden_states, generation.hidden_states
        # Of several versions it would be a mixture, of keys and values, too.
        if before is None or after is None or len(generation.spans) != 1:
            return
        tokens = [*request.prompt_ids, *request.prior_ids, *generation.token_ids]
        one = _Decoded(tokens, (before, after))
        if self.nbytes + one.nbytes <= self.max_bytes:
            self._found[request.key] = one
            self.nbytes += one.nbytes

    def take(self, key: NoiseKey | None, tokens: list[int]) -> Tensor | None:
        """Features (T - 1, D) of all `tokens` of the row of `key` but the last; None where none
        came."""
        found = None if key is None else self._found.get(key)
        if key is None or found is None or found.tokens != tokens:
            return None
        del self._found[key]
        self.nbytes -= found.nbytes
        self.taken += 1
        return torch.cat(found.parts)
