"""The selection of trajectories, and the command that converts them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.data.convert_trajectories import group_indices, select
from slipstream.data.lookup import build_tokenizer
from slipstream.data.sample_file import load_samples
from slipstream.data.trajectories import read_trajectory
from slipstream.errors import DataError
from tests.data.agent_records import record, with_tokens, write

COMMAND = ["data", "trajectories"]


def rewards(*groups: tuple[str, float]) -> list[Any]:
    return [read_trajectory(record(group=group, reward=value)) for group, value in groups]


def test_the_best_of_each_group_are_kept_in_order() -> None:
    given = rewards(("a", 0.0), ("b", 0.5), ("a", 1.0), ("b", 0.5), ("a", 0.5))
    chosen = select(given, best_of_group=1)
    assert chosen.kept == [given[1], given[2]]
    assert chosen.dropped == {"not among the best 1 of the group": 3}
    assert select(given, best_of_group=2).kept == given[1:]
    chosen = select(given, best_of_group=2, min_reward=0.75)
    assert chosen.kept == [given[2]]
    assert chosen.dropped["reward below 0.75"] == 4


def test_failed_aborted_and_truncated_trajectories_are_dropped() -> None:
    statuses = ("completed", "truncated", "aborted", "failed")
    given = [read_trajectory(record(status=status)) for status in statuses]
    chosen = select(given)
    assert chosen.kept == given[:1]
    assert chosen.dropped == {"truncated": 1, "aborted": 1, "failed": 1}
    assert select(given, truncated="keep").kept == given[:2]


def test_filters_need_rewards_and_groups() -> None:
    lacking = [read_trajectory(record(reward=None, group="a"), "f:3")]
    with pytest.raises(DataError, match="f:3: --min-reward needs a 'reward'; add it, or leave"):
        select(lacking, min_reward=0.0)
    with pytest.raises(DataError, match="f:3: --best-of-group needs a 'reward'; add it, or"):
        select(lacking, best_of_group=1)
    with pytest.raises(DataError, match="f:4: --best-of-group needs a 'group'; give all traj"):
        select([read_trajectory(record(), "f:4")], best_of_group=1)
    assert select(lacking).kept == lacking


def test_groups_are_numbered_as_they_appear() -> None:
    given = [*rewards(("b", 0), ("a", 0), ("b", 0)), read_trajectory(record())]
    assert group_indices(given) == [(0, 0), (1, 0), (0, 1), (None, 0)]


def test_the_command_writes_rows_for_sft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    low, cut = record(reward=0.25, group="b"), record(status="truncated", group="b")
    first = write(tmp_path / "a.jsonl", record(group="a"), low, cut)
    second = write(tmp_path / "b.jsonl", record(group="a", reward=2.0))
    output = tmp_path / "out" / "sft.jsonl"
    line = [*COMMAND, str(first), str(second), "--to", "sft", "--output", str(output)]
    more = ["--min-reward", "0.5", "--best-of-group", "1"]
    assert main([*line, *more, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "       4 trajectories read",
        "       1 dropped: reward below 0.5",
        "       1 dropped: truncated",
        "       1 dropped: not among the best 1 of the group",
        f"       1 rows for sft.train_files  {output}",
        # The call has 5 tokens, and the answer 2; each turn ends with a token.
        "       9 tokens with loss",
    ]
    (row,) = map(json.loads, output.read_text().splitlines())
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"name": " ana"}
    assert main([*line, "--truncated", "keep"]) == 0
    assert len(output.read_text().splitlines()) == 4


def test_the_command_writes_samples_for_rl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branched, lone = with_tokens(), with_tokens()
    branched["messages"][3]["prompt_token_ids"] = [9]
    del lone["group"]
    failed, cut = with_tokens(status="failed"), with_tokens(status="truncated")
    source = write(tmp_path / "a.jsonl", branched, cut, lone, failed)
    output = tmp_path / "rl.jsonl"
    assert main([*COMMAND, str(source), "--to", "rl", "--output", str(output)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "       4 trajectories read",
        "       1 dropped: failed",
        f"       3 samples  {output}",
        "       9 tokens with loss",
        "       1 groups",
        "       1 further branches of samples",
        "       1 trajectories have no 'group', which GRPO needs",
    ]
    samples = load_samples(output)
    found = [(s.group_index, s.index, len(s.branches)) for s in samples]
    assert found == [(0, 0, 2), (0, 1, 1), (None, 0, 1)]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "slipstream data trajectories needs --to sft or --to rl"),
        (["--to", "rl", "--min-reward", "1"], 2, "--min-reward and --best-of-group cannot be comb"),
        (["--to", "rl", "--best-of-group", "1"], 2, "leave them out, or use --to sft"),
        (["--to", "sft", "--min-reward", "nan"], 2, "--min-reward nan must be a finite number; le"),
        (["--to", "rl"], 3, "a.jsonl:1: no assistant message has 'token_ids'"),
        (["--to", "sft", "--min-reward", "2"], 3, "no trajectory is left of 1 (1 dropped: reward"),
        (["--to", "sft", "--tokenizer", "none"], 3, "--tokenizer: "),
    ],
)
def test_errors_have_a_remedy_and_write_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    message: str,
) -> None:
    source, output = write(tmp_path / "a.jsonl", record()), tmp_path / "out.jsonl"
    assert main([*COMMAND, str(source), "--output", str(output), *flags]) == code
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_samples_are_checked_with_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    made = with_tokens()
    made["messages"][3]["token_ids"] = [len(tokenizer)]
    source = write(tmp_path / "a.jsonl", with_tokens(), made)
    line = [*COMMAND, str(source), "--output", str(tmp_path / "out"), "--to"]
    checked = ["--tokenizer", str(tmp_path / "tokenizer")]
    assert main([*line, "rl", *checked]) == 3
    size = len(tokenizer)
    message = f"a.jsonl:2: the token id {size} is outside the vocabulary of {size} tokens; give the"
    assert message in capsys.readouterr().err
    assert main([*line, "rl"]) == 0
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert main([*line, "sft", *checked]) == 3
    assert re.search(r"a\.jsonl:1: .*template does not render", capsys.readouterr().err)


def test_output_must_not_replace_the_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a.jsonl", record())
    assert main([*COMMAND, str(source), "--to", "sft", "--output", str(source)]) == 2
    assert "is one of the files to read; give another name" in capsys.readouterr().err
    assert json.loads(source.read_text()) == record()


def test_flags_of_trajectories_are_refused_for_data_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["data", "gsm8k", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main([*line, "--best-of-group", "2"]) == 2
    assert "--best-of-group has no effect on gsm8k; remove it" in capsys.readouterr().err
    assert main([*line[:3], str(tmp_path), *line[3:]]) == 2
    assert "gsm8k takes one SOURCE, got 2; give a folder" in capsys.readouterr().err
