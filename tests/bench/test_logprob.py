"""`slipstream bench logprob` at toy size, and what it says of rows that miss its floors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import logprob
from slipstream import cli
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.errors import ConfigError


def test_prints_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "logprob.json"
    threads = torch.get_num_threads()
    line = "bench logprob --tokens 1100 --vocab 300 --hidden 16 --keep-megabytes 1 --rounds 1"
    status = cli.main([*line.split(), "--threads", str(threads), "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["plain", "chunked", "kept"]
    for row in rows:
        assert row["settings"]["tokens"] == 1100
        assert row["threads"] == threads
        assert row["seconds"]["n"] == 1
        assert row["values"]["peak_megabytes"] >= 0
        assert row["values"]["largest_gradient_difference"] <= logprob.GRADIENT_FLOOR
    assert rows[0]["values"]["times_plain"]["median"] == 1
    assert rows[0]["values"]["share_of_plain_memory"] == 1
    text = capsys.readouterr().out
    assert "log-probs, forward and backward: float32" in text
    assert "floor: no slower than plain" in text
    # At this size how long a pass takes says nothing; the status is what is printed.
    assert status == int("missed" in text)


def row(contender: str, times_plain: float, share: float, apart: float) -> ResultRow:
    one = Spread.of([times_plain])
    return ResultRow(
        benchmark="logprob",
        case="",
        contender=contender,
        dtype="float32",
        threads=1,
        seconds=one,
        machine=this_machine(),
        values={
            "times_plain": one,
            "share_of_plain_memory": share,
            "largest_gradient_difference": apart,
        },
    )


def test_what_misses_a_floor_is_named() -> None:
    plain, chunked = row("plain", 1.0, 1.0, 0.0), row("chunked", 1.2, 0.1, 1e-6)
    kept = row("kept", 0.9, 0.2, 1e-6)
    assert logprob.missed([plain, chunked, kept]) == []
    slow = replace(kept, values={**kept.values, "times_plain": 1.1})
    assert logprob.missed([plain, chunked, slow]) == ["kept takes 1.10 times as long as plain"]
    assert logprob.missed([plain, row("chunked", 1.0, 0.5, 1e-3), kept]) == [
        "chunked takes 50% of plain's memory",
        "chunked's gradients are 0.001 off",
    ]


def test_negative_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="--keep-megabytes -1: give at least 0"):
        logprob.LogprobBench(keep_megabytes=-1)
