"""The flat lists of a sample: made once, right after each append, and no part of its state."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, replace

import torch

from slipstream.rollout.episode import extend_sample
from slipstream.rollout.train_rows import rows_of
from slipstream.types import Generation, Sample, Segment, StopReason, VersionSpan
from tests.rollout.samples import make_sample, respond

VIEWS = (
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "sampling_log_probs",
    "versions",
    "prompt_ids",
    "response_ids",
)


def views(sample: Sample) -> dict[str, list[float]]:
    return {name: list(getattr(sample, name)) for name in VIEWS}


def test_a_view_is_made_once() -> None:
    sample = make_sample(0)
    for name in VIEWS:
        assert getattr(sample, name) is getattr(sample, name)


def test_appended_tokens_are_seen() -> None:
    sample = make_sample(0, ids=[7, 8])
    assert views(sample)["tokens"] == [1, 2, 7, 8]
    sample.append(Segment.given("tool", [5]))
    assert sample.tokens == [1, 2, 7, 8, 5]
    respond(sample, [9], version=3)
    assert views(sample) == {
        "tokens": [1, 2, 7, 8, 5, 9],
        "loss_mask": [0.0, 0.0, 1.0, 1.0, 0.0, 1.0],
        "rollout_log_probs": [0.0, 0.0, -0.1, -0.2, 0.0, -0.1],
        "sampling_log_probs": [0.0, 0.0, -0.1, -0.2, 0.0, -0.1],
        "versions": [-1, -1, 0, 0, -1, 3],
        "prompt_ids": [1, 2],
        "response_ids": [7, 8, 5, 9],
    }
    assert (sample.num_tokens, sample.prompt_length, sample.response_length) == (6, 2, 4)


def test_a_sample_without_a_response_is_all_prompt() -> None:
    sample = Sample(segments=[Segment.given("prompt", [1, 2]), Segment.given("tool", [3])])
    assert sample.prompt_length == len(sample.prompt_ids) == 3
    assert sample.response_length == 0


def test_tokens_that_extend_the_last_segment_are_seen() -> None:
    sample = make_sample(0, ids=[7, 8])
    assert sample.response_ids == [7, 8]
    generation = Generation(
        request_id="r",
        token_ids=[9],
        log_probs=[-0.5],
        sampling_log_probs=[-0.25],
        spans=[VersionSpan(4, 0, 1)],
        stop_reason=StopReason.EOS,
    )
    extend_sample(sample, generation)
    assert sample.response_ids == [7, 8, 9]
    assert sample.sampling_log_probs[-1] == -0.25
    assert sample.versions == [-1, -1, 0, 0, 4]


def test_a_response_that_is_replaced_by_one_as_long_is_seen() -> None:
    sample = make_sample(0, ids=[7, 8])
    assert sample.tokens == [1, 2, 7, 8]
    del sample.segments[1:]
    respond(sample, [3, 4])
    assert sample.tokens == [1, 2, 3, 4]


def test_views_are_no_part_of_the_state() -> None:
    fresh, looked_at = make_sample(0), make_sample(0)
    views(looked_at)
    assert looked_at == fresh
    assert asdict(looked_at) == asdict(fresh)
    assert pickle.dumps(looked_at) == pickle.dumps(fresh)
    for other in (
        pickle.loads(pickle.dumps(looked_at)),
        copy.copy(looked_at),
        copy.deepcopy(looked_at),
        replace(looked_at),
    ):
        assert other == fresh
        assert views(other) == views(fresh)


def test_rows_have_the_values_of_the_views() -> None:
    talker = make_sample(0, ids=[7])
    talker.append(Segment.given("tool", [5, 5]))
    respond(talker, [8, 9], version=2)
    talker.segments[-1].sampling_log_probs = [-0.5, -0.25]
    samples = [make_sample(1), talker]
    for truncated in (False, True):
        batch = rows_of(samples, temperature=0.5, truncated=truncated)
        assert batch.temperature == 0.5
        assert batch.uids == ["p1", "p0"]
        assert batch.keys == [None, None]
        assert batch.starts == [0, 4, 11]
        assert batch.tokens.tolist() == samples[0].tokens + talker.tokens
        assert batch.loss_mask.tolist() == samples[0].loss_mask + talker.loss_mask
        name = "sampling_log_probs" if truncated else "rollout_log_probs"
        assert batch.rollout_log_probs is not None
        expected = [x for sample in samples for x in getattr(sample, name)]
        assert batch.rollout_log_probs.tolist() == torch.tensor(expected).tolist()
        if truncated:
            assert batch.rollout_log_probs.tolist()[-2:] == [-0.5, -0.25]


def test_log_probs_of_rows_need_a_version_on_each_target() -> None:
    sample = make_sample(0, ids=[7, 8])
    assert rows_of([sample]).rollout_log_probs is not None
    sample.segments[-1].spans = [VersionSpan(0, 0, 1)]
    assert rows_of([make_sample(1), sample]).rollout_log_probs is None
    # A token without a version that is no target does not matter.
    sample.segments[-1].loss_mask[1] = 0.0
    assert rows_of([make_sample(1), sample]).rollout_log_probs is not None
