"""Training data for a draft head, in rounds: fresh responses of the policy, or recorded ones.

A round depends only on the policy, the settings and a position that can be restored. So a resumed
training sees the same batches. Runs on the compute thread.
"""

from __future__ import annotations

import glob
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.checkpoint.saved import Saved, drawn_from, restoring
from slipstream.drafter.acceptance import HeldOut
from slipstream.drafter.sequences import DraftSequence, policy_features
from slipstream.errors import DataError, EngineError
from slipstream.inference.engine import Engine
from slipstream.models.decoder import PackedDecoder
from slipstream.reading import reading
from slipstream.types import (
    GenerateRequest,
    Generation,
    NoiseKey,
    Prompt,
    SamplingParams,
    StopReason,
)

State = dict[str, Any]
Stop = Callable[[], bool]

_NAME = "draft"
"""The noise namespace of the responses to train on."""


class SequenceSource(Protocol):
    """Endless rounds of sequences; the position can be saved and restored."""

    def next_round(self, stop: Stop) -> list[DraftSequence] | None:
        """The sequences of one round; None if `stop` became true. Do not save the position after
        None."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PromptFeed(Protocol):
    """Source of prompts (`data.data_buffer.DataBuffer`)."""

    def get_prompts(self, n: int) -> list[Prompt]: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Responder:
    """Generates one response per prompt with the policy."""

    engine: Engine
    params: SamplingParams
    seed: int

    def respond(
        self, prompts: Sequence[Prompt], namespace: str, stop: Stop = lambda: False
    ) -> list[HeldOut] | None:
        """One response per prompt, with hidden states; None if `stop` became true.

        Raises EngineError if a response fails.
        """
        requests = self._requests(prompts, namespace)
        for request in requests:
            self.engine.add(request)
        done: dict[str, Generation] = {}
        while self.engine.has_work():
            if stop():
                self.engine.abort()
                return None
            done.update((g.request_id, g) for g in self.engine.step())
        answers = []
        for request in requests:
            answer = done[request.request_id]
            before, after = answer.context_hidden_states, answer.hidden_states
            if answer.stop_reason is StopReason.ERROR or before is None or after is None:
                raise EngineError(f"a response to train the draft head on failed: {answer.error}")
            prompt_length = len(request.prompt_ids)
            sequence = DraftSequence(
                tokens=[*request.prompt_ids, *answer.token_ids],
                features_TF=torch.cat([before, after]),
                loss_mask=[0.0] * prompt_length + [1.0] * len(answer.token_ids),
            )
            answers.append(HeldOut(sequence=sequence, key=request.key, params=self.params))
        return answers

    def first(self, prompts: Sequence[Prompt]) -> list[HeldOut]:
        """The responses that the first round of `FreshResponses` gives to its prompts."""
        answers = self.respond(prompts, _NAME)
        assert answers is not None, "nothing stops it"
        return answers

    def keys(self, prompts: Sequence[Prompt], namespace: str) -> list[NoiseKey]:
        """The noise keys of the responses to `prompts`."""
        return [
            NoiseKey(seed=self.seed, namespace=namespace, epoch=prompt.epoch, uid=prompt.uid)
            for prompt in prompts
        ]

    def _requests(self, prompts: Sequence[Prompt], namespace: str) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                request_id=f"{namespace}/{index}",
                prompt_ids=tuple(prompt.ids),
                params=self.params,
                key=key,
                return_hidden_states=True,
            )
            for index, (prompt, key) in enumerate(
                zip(prompts, self.keys(prompts, namespace), strict=True)
            )
        ]


class FreshResponses:
    """A `SequenceSource` that generates responses to the next prompts in every round."""

    def __init__(
        self,
        responder: Responder,
        prompts: PromptFeed,
        *,
        samples: int,
        max_length: int,
        known: Sequence[HeldOut] | None = None,
    ) -> None:
        """`known` are responses to the first prompts, if there are any already."""
        self._known = known
        self._responder = responder
        self._prompts = prompts
        self._samples = samples
        self._max_length = max_length

    def next_round(self, stop: Stop) -> list[DraftSequence] | None:
        """The sequences of the next round, as `SequenceSource` defines it."""
        prompts = self._prompts.get_prompts(self._samples)
        known, self._known = self._known, None
        if known is not None and [a.key for a in known] == self._responder.keys(prompts, _NAME):
            return usable([answer.sequence for answer in known], self._max_length)
        answers = self._responder.respond(prompts, _NAME, stop)
        if answers is None:
            return None
        return usable([answer.sequence for answer in answers], self._max_length)

    @property
    def drawn(self) -> int | None:
        """The number of prompts drawn so far; None if it is unknown."""
        return drawn_from(self._prompts)

    def state_dict(self) -> State:
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        prompts = Saved(state, error=DataError).fields("prompts")["prompts"]
        with restoring(prompts.place):
            self._prompts.load_state_dict(prompts.value)


class RecordedResponses:
    """A `SequenceSource` over the recorded rollouts of a run.

    The policy computes their hidden states again, with its current weights. Every epoch has a
    shuffled order.
    """

    def __init__(
        self,
        policy: PackedDecoder,
        records: Sequence[tuple[list[int], list[int]]],
        *,
        samples: int,
        max_length: int,
        seed: int,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        """`records` are pairs of prompt ids and response ids; `aux_layers` are the head's."""
        self._policy, self._aux_layers = policy, aux_layers
        self._records = records
        self._samples = samples
        self._max_length = max_length
        self._seed = seed
        self._taken = 0
        self._epoch = -1
        self._order: list[int] = []

    def next_round(self, stop: Stop) -> list[DraftSequence] | None:
        """The sequences of the next round, as `SequenceSource` defines it."""
        chosen = [self._record(self._taken + i) for i in range(self._samples)]
        self._taken += self._samples
        if stop():
            return None
        texts = [[*prompt, *response][: self._max_length] for prompt, response in chosen]
        limit = max(8192, self._max_length + 16)
        features = policy_features(
            self._policy, texts, aux_layers=self._aux_layers, max_tokens=limit
        )
        return usable(
            [
                DraftSequence(
                    tokens=text,
                    features_TF=states,
                    loss_mask=[float(i >= len(prompt)) for i in range(len(text))],
                )
                for text, states, (prompt, _) in zip(texts, features, chosen, strict=True)
            ],
            self._max_length,
        )

    @property
    def drawn(self) -> int:
        return self._taken

    def state_dict(self) -> State:
        return {"taken": self._taken, "count": len(self._records)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = Saved(state, error=DataError).fields("taken", "count")
        if saved["count"].count() != len(self._records):
            raise DataError(
                f"the checkpoint was made with {state['count']} recorded rollouts, now there are "
                f"{len(self._records)}; resume with the same speculative.draft.rollout_files"
            )
        self._taken = saved["taken"].count()

    def _record(self, number: int) -> tuple[list[int], list[int]]:
        epoch, place = divmod(number, len(self._records))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._records)))
            random.Random(f"draft/{self._seed}/{epoch}").shuffle(self._order)
        return self._records[self._order[place]]


def usable(sequences: Sequence[DraftSequence], max_length: int) -> list[DraftSequence]:
    """The sequences with at least one token to draft, cut to `max_length` tokens.

    Raises DataError if none is left.
    """
    cut = [
        s
        if len(s.tokens) <= max_length
        else replace(
            s,
            tokens=s.tokens[:max_length],
            features_TF=s.features_TF[:max_length],
            loss_mask=s.loss_mask[:max_length],
        )
        for s in sequences
    ]
    kept = [s for s in cut if s.slots]
    if not kept:
        raise DataError(
            f"none of {len(sequences)} responses has a token to draft within its first "
            f"{max_length} tokens: the responses have fewer than two tokens, or "
            f"speculative.train.max_seq_len={max_length} is shorter than the prompts; raise it, or "
            "look at the policy's responses"
        )
    return kept


def read_rollouts(patterns: Sequence[str], *, vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and response ids of recorded rollouts, without failed samples.

    `patterns` are files or glob patterns. Raises DataError with file and line.
    """
    found: list[tuple[list[int], list[int]]] = []
    for pattern in patterns:
        files = sorted(glob.glob(pattern, recursive=True))
        if not files:
            raise DataError(
                f"speculative.draft.rollout_files={pattern} matches no file; give a run's "
                "rollouts/N.jsonl, or a pattern such as 'runs/mine/rollouts/*.jsonl'"
            )
        for file in files:
            with reading(file, DataError, "give a run's rollouts/N.jsonl"):
                lines = Path(file).read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, 1):
                record = _record(line, f"{file}, line {number}", vocab_size)
                if record is not None:
                    found.append(record)
    if not found:
        raise DataError(
            f"speculative.draft.rollout_files={','.join(patterns)} contain no response; give "
            f"other files"
        )
    return found


def _record(line: str, where: str, vocab_size: int) -> tuple[list[int], list[int]] | None:
    try:
        raw = json.loads(line)
        if raw["status"] == "failed" or not raw["response_ids"]:
            return None
        prompt, response = raw["prompt_ids"], raw["response_ids"]
        fits = all(type(i) is int and 0 <= i < vocab_size for i in [*prompt, *response])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{where}: not a recorded rollout with prompt_ids and response_ids ({error!r}); "
            "record rollouts with this version of slipstream, or set "
            "speculative.draft.rollout_files=null"
        ) from error
    if not prompt or not fits:
        raise DataError(
            f"{where}: ids outside this policy's vocabulary of {vocab_size} tokens, or an empty "
            "prompt; give rollouts of this policy"
        )
    return prompt, response
