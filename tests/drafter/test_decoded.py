"""Hidden states from decoding: which responses are kept, the limit in bytes, and when they drop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.drafter.buffer import BufferedSequence
from slipstream.drafter.collector import CollectorSettings, FeatureForwarder
from slipstream.drafter.decoded import DecodedFeatures
from slipstream.training.columns import train_batch
from slipstream.types import (
    GenerateRequest,
    Generation,
    SamplingParams,
    TrainRow,
    VersionSpan,
)
from tests.drafter.helpers import requests
from tests.inference.helpers import make_engine

COUNT = 6


@pytest.fixture(scope="module")
def asked() -> list[GenerateRequest]:
    return [r for r in requests(3 * COUNT) if r.params.max_tokens > 2][:COUNT]


@pytest.fixture(scope="module")
def answers(asked: list[GenerateRequest]) -> list[Generation]:
    return make_engine().run(asked)


def rows(asked: list[GenerateRequest], answers: list[Generation]) -> list[TrainRow]:
    return [
        TrainRow(
            tokens=[*request.prompt_ids, *answer.token_ids],
            loss_mask=[0.0] * len(request.prompt_ids) + [1.0] * len(answer.token_ids),
            key=request.key,
        )
        for request, answer in zip(asked, answers, strict=True)
    ]


def filled(
    asked: list[GenerateRequest], answers: list[Generation], max_bytes: int = 1 << 20
) -> DecodedFeatures:
    decoded = DecodedFeatures(max_bytes)
    decoded.begin(wanted=True)
    for request, answer in zip(asked, answers, strict=True):
        decoded.receive(request, answer)
    return decoded


def test_hidden_states_are_wanted_only_in_wanted_steps(
    asked: list[GenerateRequest], answers: list[Generation]
) -> None:
    decoded = DecodedFeatures(1 << 20)
    assert not decoded.wants(asked[0])
    decoded.begin(wanted=True)
    assert decoded.wants(asked[0])
    decoded.receive(asked[0], answers[0])
    row = rows(asked, answers)[0]
    # Another response to the prompt, of a step before.
    assert decoded.take(row.key, [*row.tokens, 1]) is None
    assert decoded.take(None, row.tokens) is None
    found = decoded.take(row.key, row.tokens)
    assert found is not None
    assert found.shape == (len(row.tokens) - 1, 32)
    assert (decoded.taken, decoded.nbytes) == (1, 0)
    assert decoded.take(row.key, row.tokens) is None
    decoded.receive(asked[0], answers[0])
    decoded.begin(wanted=False)
    assert (decoded.taken, decoded.nbytes) == (0, 0)
    assert decoded.take(row.key, row.tokens) is None
    assert not decoded.wants(asked[0])


def test_drops_responses_of_two_policy_versions(
    asked: list[GenerateRequest], answers: list[Generation]
) -> None:
    count = len(answers[0].token_ids)
    spans = [VersionSpan(1, 0, 1), VersionSpan(2, 1, count)]
    mixed = [replace(answers[0], spans=spans), *answers[1:]]
    decoded = filled(asked, mixed)
    found = [decoded.take(row.key, row.tokens) is not None for row in rows(asked, answers)]
    assert found == [False, *[True] * (COUNT - 1)]


def test_keeps_no_more_than_max_bytes(
    asked: list[GenerateRequest], answers: list[Generation]
) -> None:
    sizes = [4 * 32 * (len(row.tokens) - 1) for row in rows(asked, answers)]
    decoded = filled(asked, answers, max_bytes=sum(sizes[:3]))
    assert decoded.nbytes == sum(sizes[:3])
    assert not decoded.wants(asked[0])
    found = [decoded.take(row.key, row.tokens) is not None for row in rows(asked, answers)]
    assert found == [True] * 3 + [False] * (COUNT - 3)


def test_selects_only_rows_without_decoded_features(
    asked: list[GenerateRequest], answers: list[Generation]
) -> None:
    settings = CollectorSettings(
        params=SamplingParams(max_tokens=24), max_length=9, held_out=1, held_out_every=2
    )
    batch = train_batch(rows(asked, answers))
    plain = FeatureForwarder(settings)
    plain.begin_step(3, 2)
    wanted = plain.select(batch)
    assert len(wanted) > 3
    missing = min(wanted)
    others = [i for i in range(COUNT) if i != missing]
    decoded = filled([asked[i] for i in others], [answers[i] for i in others])
    sink = FeatureForwarder(settings, decoded)
    sink.begin_step(3, 2)
    assert sink.select(batch) == {missing}
    kept: list[BufferedSequence] = sink.take()
    assert len(kept) == len(wanted) - 1
    for one in kept:
        features = one.sequence.features_TF
        assert len(one.sequence.tokens) <= 9
        assert features.untyped_storage().nbytes() == features.nbytes
        assert (one.step, one.version) == (3, 2)
    assert torch.isfinite(kept[0].sequence.features_TF).all()


def test_a_later_turn_of_an_episode_replaces_the_earlier_one(
    asked: list[GenerateRequest], answers: list[Generation]
) -> None:
    decoded = filled(asked[:1], answers[:1])
    once = decoded.nbytes
    for _ in range(5):
        decoded.receive(asked[0], answers[0])
    assert decoded.nbytes == once
