"""The state of one request: its tokens, log-probs and versions, and when its response ends."""

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
"""Number of hidden states of a prompt that are kept for a draft head. With 20 or more it drafts as
well as with all of them (measured in `docs/log/overhead.md`)."""

_MARGIN = 8
"""Stop strings are searched in a decoded tail of the response. The tail is longer than the longest
stop string by this number of tokens and characters, because its first characters may be wrong
(split characters, dropped spaces)."""


@dataclass(slots=True, eq=False)
class Running:
    """The state of one request, from its arrival to its end, whether it runs or waits.

    `token_ids` are the tokens sampled for this request. `context` has prompt, prior and sampled
    tokens. `key` is the hashed noise key.
    """

    request: GenerateRequest
    key: tuple[int, int]
    eos_ids: frozenset[int]
    context: list[int]
    arrival: int = 0
    """Number of the request in the order of arrival. The scheduler sets it."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampling_log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[PolicyVersion, int]] = field(default_factory=list)
    """Each policy version that sampled tokens, with the index of its first token."""
    hidden: list[Tensor] = field(default_factory=list)
    """For each sampled token, the hidden state it was sampled from, if the request asks for hidden
    states."""
    context_hidden: Tensor | None = None
    """Hidden states of prompt and prior tokens but the last, if the request asks for them."""
    kv_weights: set[int] = field(default_factory=set)
    """The weights that computed its keys and values. Weights are numbered by loads, because version
    numbers may repeat."""
    prompt_features: list[Tensor] = field(default_factory=list)
    """Hidden states (T, D) of the last tokens of its prompt, for drafts or hidden states of other
    samples of this prompt. Empty if they are not needed."""
    drafted: list[int] = field(default_factory=list)
    """Indices of the accepted draft tokens in `token_ids`."""
    stop_reason: StopReason | None = None
    text: str = ""
    error: str | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def length(self) -> int:
        """Tokens of context. Keys and values of the last one are not cached yet."""
        return len(self.context)

    @property
    def wants_context(self) -> bool:
        """Whether its first prefill must compute the hidden states of the whole context."""
        return self.request.return_hidden_states and not self.token_ids

    def keep_features(self, features_TD: Tensor, *, for_drafts: bool) -> None:
        """Store hidden states after the first prefill.

        `features_TD` are the states of the last T tokens of its context, or of all tokens if
        `wants_context`. In that case, all but the last are stored in `context_hidden`. With
        `for_drafts` or `wants_context`, those of the prompt are stored in `prompt_features`.
        """
        # Copied, because a view would keep the states of all contexts of the prefill in memory.
        whole, after = self.wants_context, self.length - len(self.request.prompt_ids)
        if whole:
            features_TD = features_TD.clone()
            self.context_hidden = features_TD[:-1]
        of_prompt = features_TD[: max(0, len(features_TD) - after)]
        if not whole:
            of_prompt = of_prompt[-PROMPT_FEATURES:].clone()
        self.prompt_features = [of_prompt] if len(of_prompt) and (whole or for_drafts) else []

    def push(
        self,
        token: int,
        log_prob: float,
        sampling_log_prob: float,
        version: PolicyVersion,
        decode: Decode | None,
    ) -> None:
        """Append a sampled token and set `stop_reason` if the response ends with it.

        If the log-prob is not finite, the response ends as an error, without the token.
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
            assert decode is not None, "the engine refuses stop strings without `decode`"
            if self._ends_in_stop_string(decode):
                return StopReason.STOP_STRING
        if len(self.token_ids) >= params.max_tokens:
            return StopReason.LENGTH
        return None

    def _ends_in_stop_string(self, decode: Decode) -> bool:
        """Whether the last token completes a stop string. If so, `text` is set to the text before
        the stop string.

        A stop string may begin in the prior tokens. All tokens are decoded only if a stop string is
        found in the decoded tail.
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
        # A match that ends in the prior tokens does not count.
        starts = [full.find(stop, max(0, before - len(stop) + 1)) for stop in stops]
        found = [start for start in starts if start >= 0]
        if found:
            self.text = full[before : min(found)]
        return bool(found)

    def _new_text(self, decode: Decode) -> str:
        """The text of the sampled tokens."""
        prior = list(self.request.prior_ids)
        if not prior:
            return decode(self.token_ids)
        # Decoded after the prior tokens, because some tokenizers drop a space at the start.
        before, full = decode(prior), decode([*prior, *self.token_ids])
        return full[len(before) :] if full.startswith(before) else decode(self.token_ids)

    def generation(self, decode: Decode | None) -> Generation:
        """The result of an ended or aborted request."""
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
