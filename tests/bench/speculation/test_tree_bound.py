"""What trees could gain over chains at most, from what was measured."""

from __future__ import annotations

import json
from math import hypot
from pathlib import Path

import pytest

from slipstream import cli
from slipstream.bench.record import ResultRow, Spread, median_of, this_machine
from slipstream.bench.speculation import tree_bound
from slipstream.bench.speculation.rollout import SpeculationBench, chains
from slipstream.bench.speculation.tree_bound import (
    UNDRAFTED,
    bound_table,
    bounds,
    run_bound,
    summary,
)
from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import DraftPlan
from tests.bench.toy import with_toy


def row(case: str, name: str, takes: float, tokens: float = 1.0, error: float = 0.0) -> ResultRow:
    """Of a plan whose step takes as long as so many without drafts."""
    return ResultRow(
        benchmark="speculation",
        case=case,
        contender=name,
        dtype="float32",
        threads=1,
        seconds=Spread.of([1.0]),
        machine=this_machine(),
        values={
            "over_off": tokens / takes,
            "accept_length": tokens,
            "steps_off_error": error,
            "accept_length_error": 2 * error * tokens,
        },
        settings={},
    )


MEASURED = [
    ("off", 1.0, 1.0),
    ("3_1_4", 2.0, 3.2),
    ("5_1_6", 2.5, 3.75),
    ("3_3_8", 2.8, 3.64),
    ("5_2_12", 4.0, 5.0),
    ("3_1_4" + UNDRAFTED, 1.25, 1.0),
    ("5_1_6" + UNDRAFTED, 1.5, 1.0),
    ("7_1_8" + UNDRAFTED, 1.75, 1.0),
    ("11_1_12" + UNDRAFTED, 2.25, 1.0),
]


def test_a_tree_takes_what_a_chain_as_deep_does_and_its_further_rows() -> None:
    # With four requests everything takes twice as long but steps without drafts.
    rows = [row("batch 2", *measured) for measured in MEASURED]
    rows += [row("batch 4", name, 2 * takes, tokens) for name, takes, tokens in MEASURED]
    two, four = bounds(rows)
    assert (two.case, four.case) == ("batch 2", "batch 4")
    assert (str(two.chain.plan), two.chain.speed) == ("3_1_4", 1.6)
    assert str(two.tree.plan) == "3_3_8"
    assert two.tree.speed == pytest.approx(1.3)
    # 3.64 / (2 + 0.5) = 1.46 for the one, 5 / (2.5 + 0.75) = 1.54 for the other.
    assert str(two.possible.plan) == "5_2_12"
    assert two.possible.speed == pytest.approx(5 / 3.25)
    assert four.possible.speed == pytest.approx(5 / 6.5)
    shown = bound_table(rows).splitlines()
    assert shown[1].split() == [
        *("batch", "2", "3_1_4", "1.60", "3_3_8", "1.30", "0.81", "±0.00"),
        *("5_2_12", "1.54", "0.96", "±0.00"),
    ]
    assert [line.split()[1] for line in shown[1:]] == ["2", "4"]
    assert summary(rows)["batch 4"] == {
        "tree_over_chain": pytest.approx(1.3 / 1.6),
        "tree_at_most_over_chain": pytest.approx(5 / 3.25 / 1.6),
    }


def test_errors_are_of_times_and_of_tokens() -> None:
    rows = [row("batch 2", *measured, error=0.01) for measured in MEASURED]
    (found,) = bounds(rows)
    assert found.chain.error == pytest.approx(hypot(0.01, 0.02))
    takes = hypot(0.01 * 2.5, 0.01 * 2.25, 0.01 * 1.5) / 3.25
    assert found.possible.error == pytest.approx(hypot(takes, 0.02))


@pytest.mark.parametrize(
    ("tree", "its_rows", "further"),
    [("4_2_8", 1.1, 0.0), ("4_2_8", 1.4, 0.2), ("4_2_4", 1.1, -0.1), ("4_2_4", 1.3, 0.0)],
)
def test_more_rows_take_no_less_and_fewer_no_more(
    tree: str, its_rows: float, further: float
) -> None:
    rows = [
        row("batch 1", "4_1_5", 2.0, 3.0),
        row("batch 1", tree, 3.0, 3.5),
        row("batch 1", "4_1_5" + UNDRAFTED, 1.2),
        row("batch 1", str(DraftPlan.chain(int(tree[-1]) - 1)) + UNDRAFTED, its_rows),
    ]
    assert bounds(rows)[0].possible.speed == pytest.approx(3.5 / (2.0 + further))


def test_trees_chains_as_deep_and_rows_without_drafts_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_toy(monkeypatch, tree_bound, [(3, 4, 5 + i) for i in range(4)])
    chain, tree = DraftPlan.parse("3_1_4"), DraftPlan.parse("2_2_4")
    bench = SpeculationBench(
        policy=Path("toy"),
        rounds=1,
        batches=(2,),
        new_tokens=30,
        least_responses=2,
        plans=(chain, tree),
    )
    rows = run_bound(bench, print)
    undrafted = ["2_1_3" + UNDRAFTED, "3_1_4" + UNDRAFTED]
    assert [r.contender for r in rows] == ["off", "3_1_4", "2_2_4", "2_1_3", *undrafted]
    lengths = {r.contender: median_of(r.values["accept_length"]) for r in rows}
    assert min(lengths["2_2_4"], lengths["3_1_4"]) > 1
    # All that nobody drafts is wrong.
    assert [lengths[name] for name in undrafted] == [1.0, 1.0]
    (found,) = bounds(rows)
    assert found.tree.plan == found.possible.plan == tree
    assert found.chain.plan.topk == 1
    assert found.tree.error > 0


def test_a_tree_alone_is_compared_with_the_usual_chains_and_may_have_more_rows_than_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_toy(monkeypatch, tree_bound, [(3, 4, 5 + i) for i in range(2)])
    bench = SpeculationBench(
        policy=Path("toy"),
        rounds=1,
        batches=(1,),
        new_tokens=14,
        least_responses=1,
        plans=(DraftPlan.parse("3_3_16"),),
    )
    rows = run_bound(bench, print)
    drafted = [r.contender for r in rows if not r.contender.endswith(UNDRAFTED)]
    assert drafted == ["off", *map(str, chains()[1:]), "3_3_16"]
    assert rows[-1].contender == "15_1_16" + UNDRAFTED


def test_chains_alone_have_nothing_to_be_compared_with() -> None:
    bench = SpeculationBench(policy=Path("toy"), plans=(DraftPlan.parse("3_1_4"),))
    with pytest.raises(ConfigError, match=r"--plan 3_1_4: no tree to compare with chains; name"):
        run_bound(bench, print)


def test_the_command_prints_the_table_and_writes_what_it_comes_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [row("batch 2", *measured) for measured in MEASURED]
    asked = []

    def measured(bench: SpeculationBench, say: object) -> list[ResultRow]:
        asked.append(bench.batches)
        return rows

    monkeypatch.setattr(tree_bound, "run_bound", measured)
    out = tmp_path / "bound.json"
    flags = ["--bound", "--batch", "2", "--dtype", "float32", "--json", str(out)]
    assert cli.main(["bench", "speculation", *flags]) == 0
    assert asked == [(2,)]
    assert bound_table(rows) in capsys.readouterr().out
    written = json.loads(out.read_text())["trees_over_chains"]["batch 2"]
    assert written["tree_over_chain"] == pytest.approx(1.3 / 1.6)
