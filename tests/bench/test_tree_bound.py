"""What trees could gain over chains at most, from what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.bench import tree_bound
from slipstream.bench.record import Row, Spread, median_of, this_machine
from slipstream.bench.speculation import SpeculationBench
from slipstream.bench.tree_bound import UNDRAFTED, bound_table, bounds, run_bound
from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import DraftPlan
from tests.bench.toy import with_toy


def row(case: str, name: str, over_off: float, accept_length: float = 1.0) -> Row:
    return Row(
        benchmark="speculation",
        case=case,
        contender=name,
        dtype="float32",
        threads=1,
        seconds=Spread.of([1.0]),
        machine=this_machine(),
        values={"over_off": over_off, "accept_length": accept_length},
        settings={},
    )


def test_a_tree_takes_what_a_chain_as_deep_does_and_its_further_rows() -> None:
    rows = [
        row("batch 2", "off", 1.0),
        row("batch 2", "3_1_4", 1.6, 3.2),  # 2 steps without drafts
        row("batch 2", "5_1_6", 1.5, 3.75),  # 2.5
        row("batch 2", "3_3_8", 1.2, 3.6),  # 3
        row("batch 2", "5_2_12", 1.25, 5.0),  # 4
        row("batch 2", "3_1_4" + UNDRAFTED, 1 / 1.25),
        row("batch 2", "5_1_6" + UNDRAFTED, 1 / 1.5),
        row("batch 2", "7_1_8" + UNDRAFTED, 1 / 1.75),
        row("batch 2", "11_1_12" + UNDRAFTED, 1 / 2.25),
    ]
    (found,) = bounds(rows)
    assert found.case == "batch 2"
    assert (str(found.chain), found.chain_speed) == ("3_1_4", 1.6)
    assert (str(found.tree), found.tree_speed) == ("5_2_12", 1.25)
    # 3.6 / (2 + 0.5) = 1.44 for the one, 5 / (2.5 + 0.75) = 1.54 for the other.
    assert str(found.possible) == "5_2_12"
    assert found.possible_speed == pytest.approx(5 / 3.25)
    assert bound_table(rows).splitlines()[1].split() == [
        *("batch", "2", "3_1_4", "1.60", "5_2_12", "1.25", "0.78", "5_2_12", "1.54", "0.96")
    ]


def test_rows_that_seem_to_take_no_time_are_free() -> None:
    rows = [
        row("batch 1", "2_1_3", 1.5, 3.0),
        row("batch 1", "2_2_4", 1.0, 3.5),
        row("batch 1", "2_1_3" + UNDRAFTED, 1 / 1.2),
        row("batch 1", "3_1_4" + UNDRAFTED, 1 / 1.1),
    ]
    assert bounds(rows)[0].possible_speed == pytest.approx(3.5 / 2.0)


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
    assert found.tree == found.possible == tree
    assert found.chain.topk == 1


def test_chains_alone_have_nothing_to_be_compared_with() -> None:
    bench = SpeculationBench(policy=Path("toy"), plans=(DraftPlan.parse("3_1_4"),))
    with pytest.raises(ConfigError, match=r"--plan 3_1_4: no tree to compare with chains; name"):
        run_bound(bench, print)
