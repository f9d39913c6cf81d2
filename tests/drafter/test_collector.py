"""The feature collector: which rows it selects, and features bitwise equal to the engine's."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch

from slipstream.drafter.buffer import BufferSettings, DraftBuffer
from slipstream.drafter.collector import CollectorSettings, FeatureCollector
from slipstream.errors import ConfigError
from slipstream.models import Decoder
from slipstream.training.columns import train_batch
from slipstream.training.optim import OptimSettings
from slipstream.training.single import SingleProcessBackend
from slipstream.types import SamplingParams, TrainBatch, TrainRow
from tests.drafter.helpers import requests, responses
from tests.inference.helpers import shared_decoder


def collector(**settings: Any) -> FeatureCollector:
    values: dict[str, Any] = {"max_length": 100, "held_out": 4, "held_out_every": 1000, **settings}
    params = SamplingParams(max_tokens=24)
    return FeatureCollector(
        DraftBuffer(BufferSettings(lookback_steps=1)),
        CollectorSettings(params=params, **values),
    )


def batch_of(decoder: Decoder, count: int) -> TrainBatch:
    rows = [
        TrainRow(
            tokens=list(r.sequence.tokens),
            loss_mask=list(r.sequence.loss_mask),
            advantages=[1.0] * len(r.sequence.tokens),
            key=r.key,
        )
        for r in responses(decoder, requests(count))
    ]
    return train_batch(rows)


def collected(sink: FeatureCollector, batch: TrainBatch) -> None:
    decoder = Decoder(shared_decoder().config)
    decoder.load_state_dict(shared_decoder().state_dict())
    backend = SingleProcessBackend(decoder, optim=OptimSettings(lr=0.0))
    backend.compute_log_probs(batch, sink=sink).wait()
    backend.close()


def test_trainer_features_equal_the_engine_features() -> None:
    decoder = shared_decoder()
    sink = collector()
    sink.begin_step(3, 0, wanted=True)
    collected(sink, batch_of(decoder, 12))
    theirs = {r.key: r.sequence for r in responses(decoder, requests(12)) if r.sequence.slots}
    found = sink.buffer.state_dict()["kept"]
    assert len(found) == len(theirs) > 8
    by_key = {tuple(one["key"]): one for one in found}
    for key, sequence in theirs.items():
        ours = by_key[astuple(key)]
        assert ours["tokens"] == list(sequence.tokens)
        assert ours["loss_mask"] == list(sequence.loss_mask)
        assert ours["step"] == 3
        # The engine has no features of the last token.
        assert torch.equal(ours["features"][: len(sequence.features_TF)], sequence.features_TF)


def test_selects_nothing_in_unwanted_steps() -> None:
    sink = collector()
    batch = batch_of(shared_decoder(), 6)
    assert sink.select(batch) == set()
    sink.begin_step(1, 0, wanted=False)
    assert sink.select(batch) == set()
    sink.begin_step(2, 0, wanted=True)
    assert sink.select(batch)


def test_skips_rows_without_noise_key_or_without_a_token_to_draft() -> None:
    sink = collector(max_length=8)
    sink.begin_step(1, 0, wanted=True)
    key = requests(1)[0].key
    rows = [
        TrainRow(tokens=[1, 2, 3, 4], loss_mask=[0.0, 0.0, 1.0, 1.0], key=key),
        TrainRow(tokens=[1, 2, 3, 4], loss_mask=[0.0, 0.0, 1.0, 1.0]),
        TrainRow(tokens=[1, 2], loss_mask=[0.0, 1.0], key=key),
        TrainRow(tokens=[1] * 12, loss_mask=[0.0] * 9 + [1.0] * 3, key=key),
    ]
    assert sink.select(train_batch(rows)) == {0}


def test_all_responses_to_a_held_out_prompt_are_held_out() -> None:
    sink = collector(held_out_every=3, held_out=5, max_length=6)
    sink.begin_step(1, 0, wanted=True)
    batch = batch_of(shared_decoder(), 24)
    collected(sink, batch)
    assert len(sink.held_out) == 5
    trained_on = {tuple(one["key"])[3] for one in sink.buffer.state_dict()["kept"]}
    assert not trained_on & {one.key.uid for one in sink.held_out}
    assert max(len(one.sequence.tokens) for one in sink.held_out) <= 6
    for one in sink.held_out:
        features = one.sequence.features_TF
        assert features.untyped_storage().nbytes() == features.nbytes
    other = collector(held_out_every=3, held_out=5, max_length=6)
    other.load_state_dict(sink.state_dict())
    assert [one.key for one in other.held_out] == [one.key for one in sink.held_out]
    assert len(other.buffer) == len(sink.buffer)


@pytest.mark.parametrize(
    ("name", "value"), [("max_length", 1), ("held_out", 0), ("held_out_every", 1)]
)
def test_rejects_impossible_settings(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"collector of the draft head: {name}={value}"):
        collector(**{name: value})
