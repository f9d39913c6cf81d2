"""The Markdown table of comparisons with other systems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import trl_compare, trl_runs
from bench.peers_table import table
from bench.trl_runs import TrlBench
from slipstream.bench import contenders
from slipstream.bench.record import Machine, ResultRow, Spread, read_rows, write_rows
from slipstream.cli import main
from slipstream.errors import ConfigError, DataError

MACHINE = Machine(
    cpu="A processor", cpu_flags=("avx2",), cores=2, system="Linux", versions={"torch": "2.13.0"}
)
TRLS = Machine(
    cpu="A processor", cpu_flags=("avx2",), cores=2, system="Linux", versions={"trl": "1.16.0"}
)


def spread(*values: float) -> Spread:
    return Spread.of(values)


def decoded(
    contender: str, dtype: str, speed: float, over: float, threads: int | None = 2
) -> ResultRow:
    return ResultRow(
        benchmark="decode",
        case="batch 8",
        contender=contender,
        dtype=dtype,
        threads=threads,
        seconds=spread(1000 / speed),
        machine=MACHINE,
        values={
            "tokens_per_second": spread(speed - 100, speed, speed + 100),
            "slipstream_speedup": spread(over),
        },
        settings={"shape": "d512x12", "batch": 8},
    )


def trained(contender: str, dtype: str, step: float, accuracy: float | None) -> ResultRow:
    found: dict[str, float | Spread] = {
        "slipstream_speedup": step / 0.5,
        "slipstream_speedup_error": 0.04,
        "tokens": spread(150000.0, 160000.0),
        "steps": spread(100.0),
    }
    if accuracy is not None:
        names = ("accuracy_mean", "accuracy_low", "accuracy_high")
        values = (accuracy, accuracy - 0.02, accuracy + 0.02)
        found |= dict(zip(names, values, strict=True))
    return ResultRow(
        benchmark="trl",
        case="grpo step",
        contender=contender,
        dtype=dtype,
        threads=2,
        seconds=spread(step / 2, step, step * 2),
        machine=TRLS if contender.startswith("trl") else MACHINE,
        values=found,
        settings={
            "rounds": 3,
            "steps": 100,
            "prompts_per_step": "4",
            "group_size": "4",
            "max_completion_length": "456",
            "loss_type": "dapo",
        },
    )


ROWS = [
    decoded("slipstream", "float32", 4000, 1.0),
    decoded("slipstream-torch", "float32", 4100, 0.98),
    decoded("transformers-dynamic", "float32", 1000, 4.0),
    decoded("transformers-static", "float32", 1250, 3.2),
    trained("plain", "bfloat16", 0.5, 0.78),
    trained("speculation", "bfloat16", 0.4, 0.78),
    trained("trl-bfloat16-autocast", "bfloat16-autocast", 2.5, 0.77),
    trained("trl-float32", "float32", 1.5, 0.79),
]


def test_the_table_has_a_line_per_system_and_notes_on_machine_and_settings() -> None:
    lines = table(ROWS).splitlines()
    assert lines[0].startswith("| measured | system | dtype | median [least .. most] |")
    assert lines[2:9] == [
        "| decoding, d512x12, batch 8: tokens/s | Slipstream | float32 "
        "| 4,000 [3,900 .. 4,100] | 1 |  |",
        "| decoding, d512x12, batch 8: tokens/s | transformers (transformers-static) | float32 "
        "| 1,250 [1,150 .. 1,350] | 3.2 |  |",
        "| GRPO step: seconds | Slipstream | bfloat16 | 0.5 [0.25 .. 1] | 1 "
        "| 0.780 [0.760 .. 0.800] |",
        "| GRPO step: seconds | Slipstream, with drafts | bfloat16 | 0.4 [0.2 .. 0.8] "
        "| 0.80 ±0.04 | 0.780 [0.760 .. 0.800] |",
        "| GRPO step: seconds | TRL | bfloat16-autocast | 2.5 [1.25 .. 5] | 5.00 ±0.04 "
        "| 0.770 [0.750 .. 0.790] |",
        "| GRPO step: seconds | TRL | float32 | 1.5 [0.75 .. 3] | 3.00 ±0.04 "
        "| 0.790 [0.770 .. 0.810] |",
        "",
    ]
    notes = lines[9:]
    # Each note appears once, although several rows have it.
    assert notes[:3] == [
        "- A processor [avx2], 2 cores, 2 threads",
        "- torch 2.13.0",
        "- trl 1.16.0",
    ]
    assert "3 seeds of 100 interleaved steps, 4 prompts of 4 completions of up to 456" in notes[3]
    assert "Slipstream 155,000 [150,000 .. 160,000] tokens in 100 steps" in notes[4]
    assert len(notes) == 5


def test_parity_is_noted_only_if_it_was_measured() -> None:
    differences = {
        "loss_difference": 1e-8,
        "advantage_difference": 0.0,
        "gradient_difference": 2e-6,
    }
    parity = ResultRow(
        benchmark="trl",
        case="parity: dapo",
        contender="trl",
        dtype="float32",
        threads=2,
        seconds=spread(1.0),
        machine=MACHINE,
        values=differences,
    )
    assert "within 2.0e-06 of TRL's in fp32 (allowed: 1e-05)" in table([parity, *ROWS])
    assert table([*ROWS]).count("of TRL's in fp32") == 0


def test_the_table_can_be_made_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, again = tmp_path / "one.json", tmp_path / "other.json", tmp_path / "again.json"
    write_rows(one, ROWS[:4])
    write_rows(other, ROWS[4:])
    assert read_rows(one) == ROWS[:4]
    line = ["bench", "peers", "--from", str(one), str(other), "--json", str(again)]
    assert main(line) == 0
    assert capsys.readouterr().out.strip() == table(ROWS)
    assert read_rows(again) == ROWS


def test_peers_that_are_not_installed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*paths: str, remedy: str) -> tuple[str, ...]:
        raise ConfigError(f"{paths[0]} does not exist; {remedy}")

    (tmp_path / "config.yaml").write_text("data:\n  task: countdown\n")
    monkeypatch.setattr(contenders, "peer_command", missing)
    monkeypatch.setattr(trl_runs, "trl_command", lambda: ("trl",))
    benches: list[TrlBench] = []

    def run(bench: TrlBench, say: object) -> list[ResultRow]:
        benches.append(bench)
        return ROWS[4:]

    monkeypatch.setattr(trl_compare, "run", run)
    flags = ["--shape", "tiny", "--batch", "2", "--decode-rounds", "1", "--dtype", "float32"]
    flags += ["--new-tokens", "96", "--steps", "7", "--precision", "float32"]
    assert main(["bench", "peers", "--policy", str(tmp_path), "--threads", "1", *flags]) == 0
    shown = capsys.readouterr()
    assert "without vLLM: .venv-vllm does not exist; run `make peers`" in shown.err
    assert "without llama.cpp: .venv-llama does not exist; run `make peers`" in shown.err
    decoding = [line for line in shown.out.splitlines() if line.startswith("| decoding, tiny")]
    assert [line.split("|")[2].split()[0] for line in decoding] == ["Slipstream", "transformers"]
    assert shown.out.count("| GRPO step: seconds |") == 4
    assert benches == [
        TrlBench(policy=tmp_path, steps=7, threads=1, dtype="float32", precisions=("float32",))
    ]


def test_a_file_without_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [{"benchmark": "decode"}]}))
    assert main(["bench", "peers", "--from", str(file)]) == 3
    assert "slipstream bench ... --json FILE" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"--from .* --json FILE"):
        table([])
