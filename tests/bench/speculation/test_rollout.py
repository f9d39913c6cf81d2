"""Workloads of trained policies, and the long-tailed rollout with its upper bounds."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

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
    natural_floor,
    run_rollout,
    upper_bounds,
)
from slipstream.bench.speculation.trained import (
    Responses,
    Trained,
    _place_of_head,
    as_written,
    cut_to,
    load_trained,
    long_tailed,
    natural_responses,
)
from slipstream.checkpoint.manager import MANIFEST, TRACKER
from slipstream.errors import CheckpointError, ConfigError
from slipstream.inference.engine import Engine
from slipstream.inference.protocol import BATCH_LIMITS
from slipstream.models.digest import weights_digest
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
    with pytest.raises(ConfigError, match="no long tail; give another --policy"):
        long_tailed(responses([30] * 100), 64, 8.2)


def test_a_larger_spread_chooses_shorter_responses() -> None:
    natural = responses(4 * list(range(1, 500)))
    chosen = long_tailed(natural, 64, 16.0)
    assert max(chosen.lengths) == 499
    assert median(chosen.lengths) == pytest.approx(499 / 16, abs=1)
    with pytest.raises(ConfigError, match=r"--spread 4 .* at least 8"):
        SpeculationBench(policy=Path("run"), spread=4.0)


def test_responses_are_cut_to_the_same_length() -> None:
    cut = cut_to(responses([5, 12, 9, 30, 10]), 3, 9)
    assert [r.request_id for r in cut.requests] == ["r1", "r2", "r3"]
    assert {r.params.max_tokens for r in cut.requests} == {9}
    assert cut.tokens == [[*range(9)]] * 3
    with pytest.raises(ConfigError, match="only 1 of 5 responses have 20 tokens, and 3 are needed"):
        cut_to(responses([5, 12, 9, 30, 10]), 3, 20)


def test_a_folder_without_a_head_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`make bench-model` makes runs/bench-model"):
        load_trained(tmp_path)


def test_a_head_trained_for_the_newest_policy_comes_first(tmp_path: Path) -> None:
    assert _place_of_head(tmp_path) == tmp_path / "draft"
    checkpoint = tmp_path / "global_step_3"
    checkpoint.mkdir()
    (checkpoint / MANIFEST).write_text("{}")
    (tmp_path / TRACKER).write_text("3")
    assert _place_of_head(tmp_path) == tmp_path / "draft"
    (checkpoint / "draft").mkdir()
    assert _place_of_head(tmp_path) == checkpoint
    # A head that `slipstream draft` trained for this policy, and one for another.
    policy, after = shared_decoder(), tmp_path / "draft" / "global_step_9"
    assert _place_of_head(tmp_path, policy) == checkpoint
    after.mkdir(parents=True)
    (after / MANIFEST).write_text("{}")
    (tmp_path / "draft" / TRACKER).write_text("9")
    for digest, place in ((weights_digest(policy), tmp_path / "draft"), ("0" * 32, checkpoint)):
        (after / "data.json").write_text(json.dumps({"policy": digest}))
        assert _place_of_head(tmp_path, policy) == place
    (after / "data.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"data\.json.*'policy' is missing"):
        _place_of_head(tmp_path, policy)


def test_the_rollout_has_all_contenders_and_upper_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = shared_decoder(eos=5)
    head = DraftHead(decoder.config)
    head.init_weights(1)
    prompts = [(3, 4, 5 + i) for i in range(40)]
    toy = Trained(decoder=decoder, head=head, prompts=prompts, max_model_len=400)
    monkeypatch.setattr(
        speculation_rollout,
        "load_trained",
        lambda folder, device, most: replace(toy, prompts=prompts[:most]),
    )
    engines: list[Engine] = []

    def made(*args: object, **settings: object) -> Engine:
        engines.append(trained.make_engine(*args, **settings))  # type: ignore[arg-type]
        return engines[-1]

    monkeypatch.setattr(speculation_rollout, "make_engine", made)
    rows = run_rollout(SpeculationBench(policy=Path("toy"), rounds=1, batch=12), print)
    drafting = [UNTRAINED, CHAINS, "eagle", "history", "union", RIGHT_HEAD, ORACLE]
    assert [row.contender for row in rows] == [PLAIN, AGAIN, *drafting]
    for right in (engine.stats() for engine in engines[-2:]):
        # A draft that ends its response does not count as accepted.
        assert 0 <= right.draft_tokens - right.accepted_tokens <= right.finished
        assert right.draft_tokens > 0
    assert engines[-1].stats().accepted_tokens > 10 * engines[-1].stats().finished
    found = gains(rows)
    over: Any = found["speculative_over_plain"]
    assert list(over) == list(found["accept_length"]) == [PLAIN, AGAIN, *drafting]  # type: ignore[call-overload]
    assert over[PLAIN] == {"whole": 1.0, "tail": 1.0}
    assert over[ORACLE]["whole"] == rows[-1].values["speculative_over_plain"].median  # type: ignore[union-attr]
    assert {row.benchmark for row in rows} == {"rollout"}
    most = upper_bounds(rows)
    assert most.keys() == {*FLOORS, "right_head", "roofline"}
    least = [rows[i].values["least_seconds"].median for i in (0, -1)]  # type: ignore[union-attr]
    assert most["roofline"] == least[0] / least[1] > 1
    assert most["whole"] == rows[-1].values["speculative_over_plain"].median  # type: ignore[union-attr]
    shares = [value for name, value in rows[0].values.items() if name.startswith("share_")]
    assert len(shares) == len(BATCH_LIMITS) + 1
    assert sum(shares) == pytest.approx(1)  # type: ignore[arg-type]

    # Three responses to each of the first two prompts, as they were written.
    natural = SpeculationBench(policy=Path("toy"), rounds=1, batch=6, samples=3, copy_bits=8)
    engines.clear()
    rows = run_rollout(natural, print)
    copies = ["quantized", "quantized_union"]
    names = [*drafting[:-2], *copies, *drafting[-2:]]
    assert [row.contender for row in rows] == [PLAIN, AGAIN, *names]
    assert {row.settings["batch"] for row in rows} == {6}
    assert {row.settings["samples"] for row in rows} == {3}


@pytest.mark.parametrize(("right_head", "floor"), [(1.4, 1.3), (2.5, 1.5)])
def test_floor_of_responses_as_written(
    right_head: float, floor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = {"right_head": right_head}
    monkeypatch.setattr(speculation_rollout, "upper_bounds", lambda rows: bounds)
    assert natural_floor([]) == pytest.approx(floor)


def test_a_rollout_may_have_no_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    # No token ends a response, so all end together.
    decoder = shared_decoder()
    head = DraftHead(decoder.config)
    head.init_weights(1)
    toy = Trained(decoder=decoder, head=head, prompts=[(3, 4), (3, 6)], max_model_len=40)
    monkeypatch.setattr(speculation_rollout, "load_trained", lambda folder, device, most: toy)
    bench = SpeculationBench(policy=Path("toy"), rounds=1, batch=12, samples=6)
    rows = run_rollout(bench, print)
    assert upper_bounds(rows).keys() == {"whole", "right_head", "roofline"}
    over: Any = gains(rows)["speculative_over_plain"]
    assert over[PLAIN] == {"whole": 1.0}


def test_samples_of_a_prompt_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = shared_decoder(eos=5)
    head = DraftHead(decoder.config)
    toy = Trained(decoder=decoder, head=head, prompts=[(3, 4), (3, 6)], max_model_len=60)
    written = natural_responses(toy, 1.0, torch.float32, samples=3)
    assert [r.prompt_ids for r in written.requests] == [(3, 4)] * 3 + [(3, 6)] * 3
    assert len(set(map(tuple, written.tokens))) == 6
    assert max(written.lengths) > 7
    short = natural_responses(replace(toy, max_response_length=7), 1.0, torch.float32, samples=3)
    assert short.tokens == [tokens[:7] for tokens in written.tokens]
    fixed = as_written(written)
    assert [r.params.max_tokens for r in fixed.requests] == written.lengths
    with pytest.raises(ConfigError, match=r"--samples 4 .*--batch 6"):
        SpeculationBench(policy=Path("run"), batch=6, samples=4)
