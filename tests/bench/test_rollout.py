"""The rollout benchmark with a toy model: all contenders do the same work; contents of a row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from slipstream.bench import rollout
from slipstream.bench.contenders import OURS, Workload, contender
from slipstream.bench.record import ResultRow, Spread
from slipstream.bench.shapes import BenchModel, make_decoder
from slipstream.errors import ConfigError, EngineError
from slipstream.metrics.resident import peak_rss
from slipstream.models.hf_io import save_checkpoint
from slipstream.training.compute_thread import ComputeThread

TOY = rollout.RolloutBench(
    case="mixed", batch=4, new_tokens=3, prompt_length=4, shape="tiny", temperature=0.0, rounds=2
)


@pytest.fixture(scope="module")
def rows() -> list[ResultRow]:
    return rollout.run(replace(TOY, memory=False))


def test_one_row_per_contender_with_all_fields(rows: list[ResultRow]) -> None:
    names = [row.contender for row in rows]
    assert names == [OURS, "transformers-dynamic", "transformers-static"]
    lengths = rollout.make_workload(TOY).lengths
    for row in rows:
        assert (row.benchmark, row.case, row.dtype) == ("rollout", "mixed", "float32")
        assert row.threads is not None
        assert row.seconds.n == 2
        assert row.seconds.min > 0
        assert row.settings["useful_tokens"] == sum(lengths)
        assert row.settings["longest"] == max(lengths)
        speed, step = row.values["tokens_per_second"], row.values["ms_per_step"]
        assert isinstance(speed, Spread)
        assert isinstance(step, Spread)
        assert speed.max == pytest.approx(sum(lengths) / row.seconds.min)
        assert step.min == pytest.approx(1000 * row.seconds.min / max(lengths))


def test_greedy_peers_write_the_same_tokens(rows: list[ResultRow]) -> None:
    assert [row.values["same_tokens"] for row in rows] == [1.0, 1.0, 1.0]


def test_contenders_that_choose_no_tokens_do_not_run() -> None:
    bench = replace(TOY, peer="llamacpp")
    assert bench.contenders == (OURS, "llamacpp-bfloat16", "llamacpp-q8_0")


def test_a_folder_is_measured_with_its_own_vocabulary(tmp_path: Path) -> None:
    save_checkpoint(make_decoder("tiny", max_positions=64, vocab_size=7), tmp_path)
    bench = replace(TOY, folder=tmp_path, memory=False, rounds=1)
    prompts = rollout.make_workload(bench).prompts
    assert {id for prompt in prompts for id in prompt} <= set(range(7))
    rows = rollout.run(bench)
    assert [row.settings["shape"] for row in rows] == [str(tmp_path)] * 3
    assert [row.values["same_tokens"] for row in rows] == [1.0] * 3


def test_the_speedup_is_over_the_fastest_peer(rows: list[ResultRow]) -> None:
    def with_time(row: ResultRow, seconds: float, speedup: float) -> ResultRow:
        return replace(
            row,
            seconds=Spread.of([seconds]),
            values={**row.values, "slipstream_speedup": Spread.of([speedup])},
        )

    times = [(1.0, 1.0), (3.0, 3.0), (2.0, 2.0)]
    changed = [with_time(row, *pair) for row, pair in zip(rows, times, strict=True)]
    assert rollout.best_speedup(changed).median == 2.0
    assert rollout.best_speedup(rows).min > 0


def test_every_floor_has_a_standard_size() -> None:
    assert rollout.STANDARD.keys() == rollout.FLOORS.keys()
    equal = rollout.make_workload(rollout.STANDARD["equal"])
    assert equal.lengths == (128,) * 32
    assert len(set(equal.prompts)) == 32
    mixed = rollout.make_workload(rollout.STANDARD["mixed"])
    assert len(mixed.lengths) == 64
    assert median(mixed.lengths) == 32
    assert max(mixed.lengths) >= 8 * median(mixed.lengths)
    assert list(mixed.lengths) != sorted(mixed.lengths)


def test_a_contender_with_too_few_tokens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: dict[str, list[list[int]]] = {}
    workload = Workload(name="equal", prompts=((1,), (2,)), lengths=(3, 3))
    run_once = rollout.recorded("peer", lambda _: [[1, 2, 3], [1]], outputs, workload)
    with pytest.raises(EngineError, match="peer wrote 4 of 6 tokens"):
        run_once()


def test_our_engine_samples_with_fixed_noise_unless_greedy() -> None:
    workload = rollout.make_workload(TOY)
    compute = ComputeThread()
    tiny = partial(
        contender,
        OURS,
        model=BenchModel(),
        max_positions=workload.max_positions,
        dtype=TOY.dtype,
        compute=compute,
    )
    with tiny(temperature=1.0) as ours:
        first, second = ours.generate(workload), ours.generate(workload)
    assert first == second
    with tiny(temperature=0.0) as ours:
        assert ours.generate(workload) != first
    compute.close()


def test_memory_is_measured_in_a_separate_process() -> None:
    row = rollout.RolloutBench(case="equal", batch=2, new_tokens=2, shape="tiny", rounds=1)
    peak = rollout.measure_memory(row, OURS)
    # A process that imports torch needs over 50 MB; this process is not part of the peak.
    assert 50 < peak < 4000
    assert peak_rss() > 50e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"case": "sorted"}, "unknown case 'sorted'; known: equal, mixed"),
        ({"peer": "abacus"}, "unknown peer 'abacus'; known: hf, vllm, llamacpp"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_refused_with_their_key(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TOY, **change)  # type: ignore[arg-type]
