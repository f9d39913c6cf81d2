"""Workloads of trained policies, and the table by depth and batch size."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from slipstream.bench.speculation import rollout as speculation_rollout
from slipstream.bench.speculation import trained
from slipstream.bench.speculation.rollout import (
    AGAIN,
    CHAINS,
    FLOORS,
    ORACLE,
    PLAIN,
    RIGHT_HEAD,
    UNTRAINED,
    SpeculationBench,
    gains,
    most_possible,
    run_rollout,
)
from slipstream.bench.speculation.trained import (
    Responses,
    Trained,
    cut_to,
    load_trained,
    long_tailed,
)
from slipstream.errors import ConfigError
from slipstream.inference.engine import Engine
from slipstream.models.draft.eagle1 import DraftHead
from tests.inference.helpers import make_request, shared_decoder


def responses(lengths: list[int]) -> Responses:
    requests = [make_request(f"r{i}", max_tokens=500) for i in range(len(lengths))]
    return Responses(requests, [[*range(length)] for length in lengths])


def test_a_long_tail_is_chosen_from_natural_lengths() -> None:
    rng = random.Random(0)
    natural = responses([1 + round(20 * math.exp(0.8 * rng.gauss(0, 1))) for _ in range(2000)])
    chosen = long_tailed(natural, 64, 8.2)
    assert len({r.request_id for r in chosen.requests}) == 64
    by_id = dict(zip((r.request_id for r in natural.requests), natural.lengths, strict=True))
    assert [by_id[r.request_id] for r in chosen.requests] == chosen.lengths
    assert max(chosen.lengths) == max(natural.lengths)
    assert 8 * median(chosen.lengths) <= max(chosen.lengths) < 9 * median(chosen.lengths)
    with pytest.raises(ConfigError, match="no long tail; take another policy"):
        long_tailed(responses([30] * 100), 64, 8.2)


def test_a_longer_tail_is_one_of_shorter_responses() -> None:
    natural = responses(4 * list(range(1, 500)))
    chosen = long_tailed(natural, 64, 16.0)
    assert max(chosen.lengths) == 499
    assert median(chosen.lengths) == pytest.approx(499 / 16, abs=1)
    with pytest.raises(ConfigError, match="a tail is long from 8 times the median"):
        SpeculationBench(policy=Path("run"), spread=4.0)


def test_responses_are_cut_to_one_length() -> None:
    cut = cut_to(responses([5, 12, 9, 30, 10]), 3, 9)
    assert [r.request_id for r in cut.requests] == ["r1", "r2", "r3"]
    assert {r.params.max_tokens for r in cut.requests} == {9}
    assert cut.tokens == [[*range(9)]] * 3
    with pytest.raises(ConfigError, match="only 1 of 5 responses have 20 tokens, and 3 are needed"):
        cut_to(responses([5, 12, 9, 30, 10]), 3, 20)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`make bench-model` makes runs/bench-model"):
        load_trained(tmp_path)


def test_the_rollout_says_what_any_drafter_could_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = shared_decoder(eos=5)
    head = DraftHead(decoder.config)
    head.init_weights(1)
    prompts = [(3, 4, 5 + i) for i in range(40)]
    toy = Trained(decoder=decoder, head=head, prompts=prompts, max_model_len=400)
    monkeypatch.setattr(speculation_rollout, "load_trained", lambda folder, device, most: toy)
    engines: list[Engine] = []

    def made(*args: object, **settings: object) -> Engine:
        engines.append(trained.make_engine(*args, **settings))  # type: ignore[arg-type]
        return engines[-1]

    monkeypatch.setattr(speculation_rollout, "make_engine", made)
    rows = run_rollout(SpeculationBench(policy=Path("toy"), rounds=1, batch=12), print)
    drafting = [UNTRAINED, CHAINS, "eagle", "history", "union", RIGHT_HEAD, ORACLE]
    assert [row.contender for row in rows] == [PLAIN, AGAIN, *drafting]
    for right in (engine.stats() for engine in engines[-2:]):
        # A draft that ends its response is not counted as accepted.
        assert 0 <= right.draft_tokens - right.accepted_tokens <= right.finished
        assert right.draft_tokens > 0
    assert engines[-1].stats().accepted_tokens > 10 * engines[-1].stats().finished
    found = gains(rows)
    over: Any = found["speculative_over_plain"]
    assert list(over) == list(found["accept_length"]) == [PLAIN, AGAIN, *drafting]  # type: ignore[call-overload]
    assert over[PLAIN] == {"whole": 1.0, "tail": 1.0}
    assert over[ORACLE]["whole"] == rows[-1].values["speculative_over_plain"].median  # type: ignore[union-attr]
    assert {row.benchmark for row in rows} == {"rollout"}
    most = most_possible(rows)
    assert most.keys() == {*FLOORS, "right_head", "roofline"}
    least = [rows[i].values["least_seconds"].median for i in (0, -1)]  # type: ignore[union-attr]
    assert most["roofline"] == least[0] / least[1] > 1
    assert most["whole"] == rows[-1].values["speculative_over_plain"].median  # type: ignore[union-attr]
