"""`slipstream bench` end to end with toy models: its flags, its output and its JSON files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream import cli
from slipstream.bench import command, decode_command, flags, rollout_command
from slipstream.bench.contenders import PEERS
from slipstream.bench.peer_process import ROOT
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


def test_flags_repeat_the_names_that_the_benchmarks_know() -> None:
    # They cannot import the names, because the modules that define them import torch.
    assert set(flags.SHAPES) == set(SHAPES)
    assert set(rollout_command.CASES) == set(FLOORS)
    assert set(decode_command.PEERS) == set(PEERS)


CHECKOUT = [entry.name for entry in command.ENTRIES if entry.needs_checkout]


def test_seven_benchmarks_need_a_checkout() -> None:
    assert CHECKOUT == ["trl", "peers", "selector", "learning", "logprob", "export", "startup"]
    assert command.checkout() == ROOT


@pytest.mark.parametrize("name", CHECKOUT)
@pytest.mark.parametrize("rest", [["--help"], ["--steps", "3", "--unknown"]])
def test_without_a_checkout_they_end_with_code_2_and_the_remedy(
    name: str,
    rest: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # As in an installed wheel: a folder that holds the package, and no `bench` of ours.
    monkeypatch.setattr(slipstream, "__file__", str(tmp_path / "slipstream" / "__init__.py"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", name, *rest])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"`slipstream bench {name}` is not part of the installed package" in error
    assert "clone the repository" in error


def test_without_a_checkout_the_list_of_benchmarks_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slipstream, "__file__", str(tmp_path / "slipstream" / "__init__.py"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--help"])
    assert ended.value.code == 0
    assert "(checkout)" in capsys.readouterr().out


WITHOUT_PATH = """
import sys
sys.path.insert(0, {root!r})
from slipstream import cli
sys.path = [path for path in sys.path if path not in ("", {root!r})]
sys.exit(cli.main({line!r}))
"""


def test_benchmarks_of_the_checkout_are_found_from_any_folder(tmp_path: Path) -> None:
    # The path of the installed program `slipstream` holds neither checkout nor current folder.
    line = ["bench", "learning", "--policy", str(tmp_path)]
    code = WITHOUT_PATH.format(root=str(ROOT), line=line)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "is not a run folder" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--peer abacus", "--peer abacus: without --policy give one of hf, vllm, llamacpp"),
        ("--peer hf vllm", "--peer hf vllm: without --policy give one of hf, vllm, llamacpp"),
        ("--spread 9", "--spread needs a trained policy; add --policy"),
        ("--device cpu", "--device needs a trained policy; add --policy"),
        ("--samples 2", "--samples needs a trained policy; add --policy"),
        ("--copy-bits 4", "--copy-bits needs a trained policy; add --policy"),
        ("--policy x --samples 2 --spread 9", "--spread chooses responses, --samples takes all"),
        ("--policy x --new-tokens 9", "--new-tokens, --no-memory, --shape and --model are for"),
        ("--policy x --model y", "leave them out, or leave out --policy"),
        ("--model y --shape tiny", "leave them out, or leave out --model"),
        ("--policy x --case mixed", "leave them out, or leave out --policy"),
        ("--policy x --no-memory", "leave them out, or leave out --policy"),
        ("--policy x --shape tiny", "leave them out, or leave out --policy"),
        ("--policy x --peer hf", "unknown peer 'hf'; known: vllm-float32-compiled"),
        ("--policy x --peer llamacpp-q8_0-unsampled", "known: vllm-float32-compiled"),
        ("--policy x --spread 2", "--spread 2"),
    ],
)
def test_rollout_refuses_flags_that_do_not_go_together(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "rollout", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--plan 5_1_6 5_1_6", "--plan 5_1_6 5_1_6: name each"),
        ("--plan 0_0_1", "--plan 0_0_1"),
        ("--heads a b --plot x.png", "leave out --heads"),
        ("--heads a b --bound", "leave out --heads"),
        ("--heads a b --no-selector", "leave out --heads"),
        ("--bound --plot x.png", "leave out --bound"),
        ("--bound --plan 3_1_4", "--plan 3_1_4"),
        ("--heads a b --plan 5_1", "draft plan '5_1': expected steps_topk_verify"),
        ("--heads a a", "--heads a a: name each"),
    ],
)
def test_speculation_refuses_flags_that_do_not_go_together(
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
def test_wrong_command_lines_end_with_code_2_and_the_usage(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line)
    assert ended.value.code == 2
    assert "usage: slipstream bench" in capsys.readouterr().err
