"""Rounds of fresh responses for the training of a draft head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slipstream.drafter.acceptance import HeldOut
from slipstream.drafter.sequences import DraftSequence
from slipstream.loops.draft_data import FreshResponses, Responder
from slipstream.types import Prompt, SamplingParams
from tests.inference.helpers import make_engine, shared_decoder


class Numbered:
    """Endless prompts with numbers, a `PromptFeed`."""

    def __init__(self) -> None:
        self.number = 0

    def get_prompts(self, n: int) -> list[Prompt]:
        first, self.number = self.number, self.number + n
        return [Prompt(uid=str(i), ids=[3, 4 + i % 8]) for i in range(first, first + n)]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


def responder() -> Responder:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    return Responder(engine=make_engine(shared_decoder()), params=params, seed=5)


def rounds(source: FreshResponses, count: int) -> list[DraftSequence]:
    found: list[DraftSequence] = []
    for _ in range(count):
        one = source.next_round(lambda: False)
        assert one is not None
        found += one
    return found


def same(left: list[DraftSequence], right: list[DraftSequence]) -> bool:
    return [s.tokens for s in left] == [s.tokens for s in right] and all(
        torch.equal(a.features_TF, b.features_TF) for a, b in zip(left, right, strict=True)
    )


def source(asked: Responder, feed: Numbered, known: list[HeldOut] | None = None) -> FreshResponses:
    return FreshResponses(asked, feed, samples=6, max_length=64, known=known)


def test_the_first_round_takes_known_responses_to_its_prompts() -> None:
    fresh = rounds(source(responder(), Numbered()), 2)
    known = responder().first(Numbered().get_prompts(6))
    asked = responder()
    made = source(asked, Numbered(), known)
    first = rounds(made, 1)
    assert asked.engine.stats().generated_tokens == 0
    assert same([*first, *rounds(made, 1)], fresh)
    assert asked.engine.stats().generated_tokens == 6 * 12


def test_known_responses_to_other_prompts_are_not_used() -> None:
    fresh = rounds(source(responder(), Numbered()), 2)
    known = responder().first(Numbered().get_prompts(6))
    resumed = Numbered()
    resumed.load_state_dict({"number": 6})
    assert same(rounds(source(responder(), resumed, known), 1), fresh[6:])
