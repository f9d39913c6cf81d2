"""Keeps hidden states that an engine computed during decoding, until their rows are trained on.

A `GenerationSink`: it decides before a response is generated whether to keep its hidden states. The
collector takes them by row, in the step in which the response ended. Only responses written by one
policy version are kept, and only up to a limit in bytes; for the others the trainer's forward pass
computes the features. Only `take` computes on tensors, on the trainer's compute thread.
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
    """The hidden states of one RL step's responses, at most `max_bytes` bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = self.taken = 0
        """Bytes not taken yet, and the number of responses taken since `begin`."""
        self._wanted = False
        self._found: dict[NoiseKey, _Decoded] = {}

    def begin(self, *, wanted: bool) -> None:
        """Drop everything not taken yet, and set whether new hidden states are wanted."""
        self._wanted, self.nbytes, self.taken = wanted, 0, 0
        self._found.clear()

    def wants(self, request: GenerateRequest) -> bool:
        """Whether hidden states of this request are wanted and there is room."""
        return self._wanted and self.nbytes < self.max_bytes

    def receive(self, request: GenerateRequest, generation: Generation) -> None:
        """Keep the hidden states of a response if one policy version wrote it and they fit."""
        before, after = generation.context_hidden_states, generation.hidden_states
        # With several versions, even the KV cache would be a mixture of policies.
        if before is None or after is None or len(generation.spans) != 1:
            return
        tokens = [*request.prompt_ids, *request.prior_ids, *generation.token_ids]
        one = _Decoded(tokens, (before, after))
        # Each turn of an episode has the tokens of all turns before it.
        earlier = self._found.pop(request.key, None)
        if earlier is not None:
            self.nbytes -= earlier.nbytes
        if self.nbytes + one.nbytes <= self.max_bytes:
            self._found[request.key] = one
            self.nbytes += one.nbytes

    def take(self, key: NoiseKey | None, tokens: list[int]) -> Tensor | None:
        """Remove and return the features (T - 1, D) of all `tokens` of the row of `key` except the
        last; None if there are none."""
        found = None if key is None else self._found.get(key)
        if key is None or found is None or found.tokens != tokens:
            return None
        del self._found[key]
        self.nbytes -= found.nbytes
        self.taken += 1
        return torch.cat(found.parts)
