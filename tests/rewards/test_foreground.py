"""`slipstream reward` calls a reward function on the responses of a dump."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import cli
from slipstream.errors import ConfigError, DataError
from slipstream.rewards.foreground import load_function, main, read_dump, score_line

MINE = """
import threading

def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    assert threading.current_thread() is threading.main_thread()
    if solution_str == "bad":
        raise ValueError("bad")
    return {"score": scale * (solution_str == ground_truth), "length": len(solution_str)}

async def later(completions, ground_truth, hint):
    return [float(c == g) + len(h) for c, g, h in zip(completions, ground_truth, hint)]
"""


def dump(folder: Path, *rows: dict[str, Any], name: str = "1.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return dump(
        tmp_path,
        {"output": "5<eos>", "text": "5", "gts": "5", "score": 1.0, "extra_info": {"hint": "ab"}},
        {"output": "6", "gts": "5", "score": 1.0, "extra_info": {"hint": ""}},
        {"output": "bad", "gts": "5", "score": 0.0, "extra_info": {"hint": ""}},
        {"output": "bad", "gts": "5", "extra_info": {"hint": ""}},
    )


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def report(*arguments: Any, status: int, **options: Any) -> list[str]:
    out = io.StringIO()
    assert main(*arguments, out=out, **options) == status
    return out.getvalue().splitlines()


def test_the_report_has_scores_failures_times_and_differences(
    rows: Path, mine: str, tmp_path: Path
) -> None:
    output = tmp_path / "scores.jsonl"
    lines = report(rows, mine, kwargs={"scale": 2.0}, output=output, status=6)
    assert lines[0] == "compute_score: 4 responses, 2 failed"
    assert lines[1] == "  score          mean 1.0000, min 0, max 2"
    assert lines[2] == "  length         mean 1.0000 of 2"
    assert lines[3].startswith("  time           ")
    assert lines[4:] == [
        "  failed 2x: ValueError: bad (first in line 3)",
        "  as in the dump 0 of 2",
        "  line 1: 2, in the dump 1",
        "  line 2: 0, in the dump 1",
    ]
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(w["line"], w["score"], w["failure"]) for w in written] == [
        (1, 2.0, None),
        (2, 0.0, None),
        (3, None, "ValueError: bad"),
        (4, None, "ValueError: bad"),
    ]
    assert written[0]["parts"] == {"length": 1.0}


def test_async_trl_functions_are_awaited(rows: Path, mine: str) -> None:
    lines = report(rows, f"{mine}:later", limit=2, status=0)
    assert lines[:2] == [
        "later: 2 responses, 0 failed",
        "  score          mean 1.5000, min 0, max 3",
    ]


def test_trl_functions_get_messages_if_the_prompt_is_messages(tmp_path: Path) -> None:
    (tmp_path / "chat.py").write_text(
        "def chat(completions, prompts):\n"
        "    return [float(c[0]['content'] == '5' and p[0]['role'] == 'user')"
        " for c, p in zip(completions, prompts)]\n"
    )
    messages = [{"role": "user", "content": "2 + 3?"}]
    path = dump(tmp_path, {"input": "user: 2 + 3?", "messages": messages, "output": "5"})
    function = load_function(f"{tmp_path / 'chat.py'}:chat")
    (line,) = read_dump(path)
    assert score_line(function, line, reraise=True).score.value == 1.0


def test_built_in_functions_are_selected_by_data_source(tmp_path: Path) -> None:
    path = dump(
        tmp_path,
        {"output": "#### 5", "gts": "5", "data_source": "gsm8k", "score": 1.0},
        {"output": "6", "gts": "6", "data_source": "exact_match", "score": 1.0},
    )
    assert "  as in the dump 2 of 2" in report(path, status=0)
    lines = report(path, data_source="exact_match", status=0)
    assert "  line 1: 0, in the dump 1" in lines


def test_reraise_propagates_the_functions_error(rows: Path, mine: str) -> None:
    with pytest.raises(ValueError, match="bad"):
        main(rows, mine, reraise=True, out=io.StringIO())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no responses"),
        ("{", "line 1: .*; give a dump of responses"),
        ("[" * 100_000, "line 1: .*; give a dump of responses"),
        ('{"output": "a", "score": ' + "9" * 6_000 + "}", "line 1: .*; give a dump of responses"),
        ('{"output": "a", "score": "high"}', "line 1: .*; give a dump of responses"),
        ('{"output": "a", "response_ids": 5}', "line 1: .*; give a dump of responses"),
        ('{"output": "a"}\n[1]', r"line 2 has no text in `output` \(list\)"),
        ('{"input": "a", "score": 1}', r"line 1 has no text in `output` \(input, score\)"),
        ('{"output": 5}', "line 1 has no text in `output`"),
        ('{"output": "a", "extra_info": 5}', "line 1: extra_info is int, not a mapping"),
        (b"\xff", "cannot be read"),
    ],
)
def test_invalid_dumps_are_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        main(path, out=io.StringIO(), data_source="exact_match")


def test_a_missing_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read_dump(tmp_path / "no.jsonl"))


def test_kwargs_without_a_function_are_refused() -> None:
    with pytest.raises(ConfigError, match="add --fn"):
        load_function(None, {"scale": 1})


def test_the_command_prints_a_report_and_refuses_bad_arguments(
    rows: Path, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["reward", str(rows), "--fn", mine, "--kwargs", '{"scale": 2}', "--limit", "2"]
    assert cli.main(line) == 0
    assert "compute_score: 2 responses, 0 failed" in capsys.readouterr().out
    assert cli.main(["reward", str(rows), "--fn", "nowhere.py"]) == 2
    assert "'nowhere.py' is not a file" in capsys.readouterr().err
    assert cli.main(["reward", str(rows)]) == 6
    assert "no built-in reward function for data_source ''" in capsys.readouterr().err
    for bad in ("[1]", "{"):
        with pytest.raises(SystemExit):
            cli.main(["reward", str(rows), "--kwargs", bad])
    assert "is not valid JSON" in capsys.readouterr().err
