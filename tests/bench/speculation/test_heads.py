"""Draft heads, interleaved: a row per head, plan and batch size, and the time of their training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.speculation import heads
from slipstream.bench.speculation.grid import SELECTOR
from slipstream.bench.speculation.heads import Training, heads_table, run_heads, training_of
from slipstream.bench.speculation.rollout import PLAIN, SpeculationBench
from slipstream.bench.speculation.trained import Trained
from slipstream.errors import CheckpointError, ConfigError
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.files import save_draft_head
from slipstream.models.draft.model import DraftModel
from tests.inference.helpers import make_decoder


def bench(**more: Any) -> SpeculationBench:
    return SpeculationBench(
        policy=Path("toy"), rounds=1, batches=(1, 2), new_tokens=20, least_responses=2, **more
    )


def test_heads_have_a_row_for_each_plan_and_the_selector(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decoder = make_decoder(num_layers=3)
    first, third = DraftHead(decoder.config), Eagle3Head(decoder.config, (0, 1, 2))
    made: dict[str, DraftModel] = {"first": first, "third": third}
    for name, head in made.items():
        head.init_weights(1, decoder)
        save_draft_head(head, tmp_path / name)
    lines = [{"step": step, "data": {"draft/loss": 1.0, "timing_s/step": 1.5}} for step in (1, 2)]
    (tmp_path / "third" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    prompts = [(3, 4, 5 + i) for i in range(4)]
    toy = Trained(decoder=decoder, head=first, prompts=prompts, max_model_len=40)
    monkeypatch.setattr(heads, "load_trained", lambda folder, device, most: toy)
    plans = [DraftPlan.chain(2), DraftPlan.parse("2_2_4")]
    rows = run_heads(bench(), [tmp_path / "first", tmp_path / "third"], print, plans)
    wanted: list[tuple[str, str | None]] = [(PLAIN, None)]
    for name in made:
        wanted += [(str(tmp_path / name), how) for how in ("2_1_3", "2_2_4", SELECTOR)]
    assert [(row.contender, row.settings.get("plan")) for row in rows] == 2 * wanted
    assert [row.case for row in rows] == ["batch 1"] * 7 + ["batch 2"] * 7
    values: list[Any] = [row.values for row in rows]
    assert values[0]["over_plain"].median == values[0]["accept_length"].median == 1.0
    # Drafts use the noise of the policy, so even an untrained head has some accepted.
    assert 1.0 < values[1]["accept_length"].median <= 3.0
    assert all(v["over_plain"].median > 0 for v in values)
    # Acceptance does not depend on the other requests of a batch.
    assert values[1]["accept_length"] == values[8]["accept_length"]
    table = heads_table(rows).splitlines()
    assert table[0].endswith("first: EAGLE, training not recorded")
    assert table[6].endswith("third: EAGLE3, 2 steps of training in 3 s")
    assert table[1].split() == ["2_1_3", "2_2_4", SELECTOR]
    labels = [line.split("  ")[2] for line in table[2:6]]
    assert labels == [
        "tokens/verification, 1",
        "tokens/verification, 2",
        "over plain, 1",
        "over plain, 2",
    ]
    assert f"{values[1]['accept_length'].median:.2f}" == table[2].split()[2]


def test_the_training_of_a_head_is_read_from_its_folder_or_its_runs_folder(tmp_path: Path) -> None:
    assert training_of(tmp_path) is None
    (tmp_path / "draft").mkdir()
    record = tmp_path / "draft" / "metrics.jsonl"
    measured = {"step": 0, "data": {"draft/accept_length_1": 1.0}}
    step = {"step": 1, "data": {"draft/loss": 1.0, "timing_s/step": 0.25}}
    record.write_text(f"{json.dumps(measured)}\n{json.dumps(step)}\n")
    assert training_of(tmp_path) == training_of(record.parent) == Training(steps=1, seconds=0.25)
    # Steps of RL do not count as training of a head.
    record.write_text(json.dumps({"step": 1, "data": {"timing_s/step": 9.0}}) + "\n")
    assert training_of(tmp_path) is None
    record.write_text("[]\n")
    with pytest.raises(CheckpointError, match="remove the line"):
        training_of(tmp_path)


def test_heads_and_plans_that_are_named_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--heads .*: name each only once"):
        run_heads(bench(), [tmp_path, tmp_path], print)
    with pytest.raises(ConfigError, match="--plan 0_0_1 0_0_1: name each only once"):
        run_heads(bench(), [tmp_path], print, [OFF, OFF])
