"""`slipstream bench` end to end at toy size: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream import cli
from slipstream.bench import command
from slipstream.bench.contenders import PEERS
from slipstream.bench.rollout import FLOORS
from slipstream.bench.shapes import SHAPES


def test_rollout_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rollout.json"
    line = "bench rollout --case equal --shape tiny --batch 2 --new-tokens 2 --rounds 1 --no-memory"
    line += " --dtype float32"
    assert cli.main([*line.split(), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["slipstream", *PEERS["hf"]]
    assert all(row["values"]["slipstream_speedup"]["median"] > 0 for row in rows)
    text = capsys.readouterr().out
    assert "rollout, equal lengths, tiny: float32" in text
    assert "speedup over the faster peer" in text
    assert "floor 1.3" in text


def test_train_prints_a_profile_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench train --shape tiny --rows 2 --length 4 --matmul-size 8 --rounds 1 --profile"
    assert cli.main(line.split()) == 0
    text = capsys.readouterr().out
    assert "share_of_matmul" in text
    assert "aten::mm" in text


def test_startup_compares_with_an_idle_python(tmp_path: Path) -> None:
    file = tmp_path / "startup.json"
    assert cli.main(["bench", "startup", "--rounds", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["slipstream --help", "python -c pass"]
    assert rows[0]["values"]["times_python"]["median"] > 0
    assert rows[0]["threads"] is None


def test_flags_offer_what_the_benchmarks_know() -> None:
    # The flags repeat the names because the benchmarks import torch.
    assert set(command._SHAPES) == set(SHAPES)
    assert set(command._CASES) == set(FLOORS)
    assert set(command._PEERS) == set(PEERS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--peer abacus", "--peer abacus: without --policy one of hf, vllm"),
        ("--peer hf vllm", "--peer hf vllm: without --policy one of hf, vllm"),
        ("--spread 9", "--spread is of a trained policy's rollout; give --policy, too"),
        ("--policy x --new-tokens 9", "--no-memory and --shape are of models with random weights"),
        ("--policy x --case mixed", "--no-memory and --shape are of models with random weights"),
        ("--policy x --no-memory", "--no-memory and --shape are of models with random weights"),
        ("--policy x --shape tiny", "--no-memory and --shape are of models with random weights"),
        ("--policy x --peer hf", "unknown peer 'hf'; known: vllm-float32-compiled"),
        ("--policy x --spread 2", "--spread 2: a tail is long from 8 times the median"),
    ],
)
def test_what_a_rollout_cannot_be_asked_for(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "rollout", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--plan 5_1_6 5_1_6", "--plan 5_1_6 5_1_6: name each once"),
        ("--plan 0_0_1", "no drafts are measured anyway"),
        (
            "--heads a b --plot x.png",
            "--plot, --no-selector and --bound are of plans by batch size",
        ),
        ("--heads a b --bound", "--plot, --no-selector and --bound are of plans by batch size"),
        ("--bound --plot x.png", "--plot draws the whole table; leave out --bound"),
        ("--bound --plan 3_1_4", "--plan 3_1_4: no tree to compare with chains; name one"),
        ("--heads a b --plan 5_1", "draft plan '5_1': expected steps_topk_verify"),
        ("--heads a a", "--heads a a: name each once"),
    ],
)
def test_what_a_table_of_plans_or_heads_cannot_be_asked_for(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "speculation", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        ["bench"],
        ["bench", "speed"],
        ["bench", "train", "--rows", "0"],
        ["bench", "decode", "--batch", "0"],
        ["bench", "rollout", "x"],
    ],
)
def test_unusable_lines_end_with_code_2(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line)
    assert ended.value.code == 2
    assert "usage: slipstream bench" in capsys.readouterr().err
