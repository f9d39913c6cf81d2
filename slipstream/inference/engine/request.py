"""One response under way: its tokens, log-probs, versions, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.types import GenerateRequest, Generation, PolicyVersion, StopReason, VersionSpan

Decode = Callable[[list[int]], str]

PROMPT_FEATURES = 64
"""Hidden states of a prompt that are kept: a draft head that knows so many drafts as well as with
all of them (it does with twenty: `docs/log/overhead.md`)."""

_MARGIN = 8
"""Tokens and characters by which the text that stop strings are looked for in is longer than the
stop string: the first characters of a decoded tail may differ (cut characters, dropped spaces)."""


@dataclass(slots=True, eq=False)
class Running:
    """State of one request. `token_ids` are new tokens; `context` is everything the model sees."""

    request: GenerateRequest
    key: tuple[int, int]
    eos_ids: frozenset[int]
    context: list[int]
    arrival: int = 0
    """Place in the order of requests, from the scheduler."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampling_log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[PolicyVersion, int]] = field(default_factory=list)
    """Each policy version that sampled, with the index of its first token."""
    hidden: list[Tensor] = field(default_factory=list)
    context_hidden: Tensor | None = None
    """Hidden states of the context that it began with, less the last one, where they are wanted."""
    kv_weights: set[int] = field(default_factory=set)
    """Which of the engine's weights, counted by loads, computed its keys and values."""
    prompt_features: list[Tensor] = field(default_factory=list)
    """Hidden states (T, D) of the last tokens of its prompt, where somebody drafts from them: for
    other samples of it."""
    drafted: list[int] = field(default_factory=list)
    """Indices of the tokens that were drafted before they were chosen."""
    stop_reason: StopReason | None = None
    text: str = ""
    error: str | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def length(self) -> int:
        """Tokens of context; the last one's keys and values are not cached yet."""
        return len(self.context)

    @property
    def wants_context(self) -> bool:
        """Whether the hidden states of its whole context are wanted, once it begins."""
        return self.request.return_hidden_states and not self.token_ids

    def keep_features(self, features_TD: Tensor, *, for_drafts: bool) -> None:
        """Of the hidden states of the last tokens of its context: all but the last one, where they
        are wanted, which must be of the whole context then; and `for_drafts`, or for siblings of
        which they are wanted, too, those of its prompt."""
        # Copied: they would hold on to the states of all contexts of the prefill.
        wanted, after = self.wants_context, self.length - len(self.request.prompt_ids)
        if wanted:
            features_TD = features_TD.clone()
            self.context_hidden = features_TD[:-1]
        of_prompt = features_TD[: max(0, len(features_TD) - after)]
        if not wanted:
            of_prompt = of_prompt[-PROMPT_FEATURES:].clone()
        self.prompt_features = [of_prompt] if len(of_prompt) and (wanted or for_drafts) else []

    def push(
        self,
        token: int,
        log_prob: float,
        sampling_log_prob: float,
        version: PolicyVersion,
        decode: Decode | None,
    ) -> None:
        """Append a sampled token, then see whether the response ends with it.

        A log-prob that is not finite ends it as an error, without the token.
        """
        if not math.isfinite(log_prob):
            self.stop_reason = StopReason.ERROR
            self.error = (
                f"the logits at position {self.length} are not finite under policy version "
                f"{version}; the weights or the activations overflowed"
            )
            return
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.token_ids)))
        self.context.append(token)
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.sampling_log_probs.append(sampling_log_prob)
        self.stop_reason = self._stop_reason(token, decode)

    def _stop_reason(self, token: int, decode: Decode | None) -> StopReason | None:
        params = self.request.params
        if token in self.eos_ids and not params.ignore_eos:
            return StopReason.EOS
        if token in params.stop_token_ids:
            return StopReason.STOP_TOKEN
        if params.stop:
            assert decode is not None, "checked when the request was added"
            if self._ends_in_stop_string(decode):
                return StopReason.STOP_STRING
        if len(self.token_ids) >= params.max_tokens:
            return StopReason.LENGTH
        return None

    def _ends_in_stop_string(self, decode: Decode) -> bool:
        """Whether the last token completes a stop string; if so `text` is what stands before it.

        A stop string may begin in the tokens of an earlier attempt. Only the last few tokens are
        decoded, unless a stop string is among them.
        """
        stops = self.request.params.stop
        ids = [*self.request.prior_ids, *self.token_ids]
        reach = max(map(len, stops)) + _MARGIN
        count = reach
        while count < len(ids) and len(decode(ids[-count:-1])) < reach:
            count *= 2
        tail = decode(ids[-count:])
        if not any(stop in tail for stop in stops):
            return False
        full, before = decode(ids), len(decode(list(self.request.prior_ids)))
        # A match that ends within the earlier tokens was there before this request.
        starts = [full.find(stop, max(0, before - len(stop) + 1)) for stop in stops]
        found = [start for start in starts if start >= 0]
        if found:
            self.text = full[before : min(found)]
        return bool(found)

    def _new_text(self, decode: Decode) -> str:
        prior = list(self.request.prior_ids)
        if not prior:
            return decode(self.token_ids)
        # In context: some tokenizers drop a space at the beginning of a text.
        before, full = decode(prior), decode([*prior, *self.token_ids])
        return full[len(before) :] if full.startswith(before) else decode(self.token_ids)

    def generation(self, decode: Decode | None) -> Generation:
        """The result, complete or partial."""
        assert self.stop_reason is not None
        marks = [*self.versions, (0, len(self.token_ids))]
        text = self.text
        if self.stop_reason is not StopReason.STOP_STRING and decode is not None:
            text = self._new_text(decode)
        return Generation(
            request_id=self.request_id,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            sampling_log_probs=self.sampling_log_probs,
            spans=[VersionSpan(v, start, end) for (v, start), (_, end) in pairwise(marks)],
            stop_reason=self.stop_reason,
            text=text,
            hidden_states=torch.stack(self.hidden) if self.hidden else None,
            context_hidden_states=self.context_hidden,
            error=self.error,
            drafted=self.drafted,
        )
