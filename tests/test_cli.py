"""The command line: parsing, calls, output and exit codes. Training is replaced by fakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream import cli, main_fastrl, main_ppo
from slipstream.config import CONFIG_FILE, Config, load_config, to_yaml
from slipstream.config.launch import program
from slipstream.errors import DataError
from tests.report.run_folders import make_run

ROOT = Path(__file__).parents[1]


class Calls(list[tuple[Any, ...]]):
    """The arguments of calls to the fakes, which return or raise `result`."""

    result: int | BaseException = 0

    def answer(self, *arguments: Any) -> int:
        self.append(arguments)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    run: Any = ModuleType("slipstream.run.train")
    run.train = lambda *arguments: made.answer("train", *arguments)
    run.evaluate = lambda *arguments: made.answer("evaluate", *arguments)
    run.export = lambda *arguments: made.answer("export", *arguments)
    quickstart: Any = ModuleType("slipstream.run.quickstart")
    quickstart.main = lambda *arguments: made.answer("quickstart", *arguments)
    draft: Any = ModuleType("slipstream.run.draft_phase")
    draft.main = lambda *arguments: made.answer("draft", *arguments)
    monkeypatch.setitem(sys.modules, "slipstream.run", ModuleType("slipstream.run"))
    monkeypatch.setitem(sys.modules, "slipstream.run.draft_phase", draft)
    monkeypatch.setitem(sys.modules, "slipstream.run.train", run)
    monkeypatch.setitem(sys.modules, "slipstream.run.quickstart", quickstart)
    return made


def test_train_derives_the_mode_from_the_settings(calls: Calls) -> None:
    assert cli.main(["train", "--recipe", "tiny", "trainer.seed=3"]) == 0
    (name, config, mode), *rest = calls
    assert (name, mode, rest) == ("train", "sft+rl", [])
    assert isinstance(config, Config)
    assert config.trainer.seed == 3


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_sft_and_rl_force_the_mode(calls: Calls, command: str) -> None:
    assert cli.main([command, "--recipe", "tiny"]) == 0
    assert calls[0][2] == command
    assert calls[0][1].trainer.mode == command


def test_flags_and_overrides_can_be_mixed(calls: Calls) -> None:
    line = [
        "train",
        "trainer.seed=3",
        "--recipe",
        "tiny",
        "+trainer.seed=4",
        "--debug",
        "data.seed=2",
    ]
    assert cli.main(line) == 0
    assert (calls[0][1].trainer.seed, calls[0][1].data.seed) == (4, 2)


def test_config_file_can_be_given_in_three_ways(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tiny]\ntrainer:\n  seed: 8\n")
    assert cli.main(["train", "--config", str(tmp_path / "mine.yaml")]) == 0
    assert cli.main(["train", f"--config-path={tmp_path}", "--config-name=mine"]) == 0
    assert cli.main(["train", "-cp", str(tmp_path), "-cn", "mine.yaml"]) == 0
    assert [call[1].trainer.seed for call in calls] == [8, 8, 8]
    assert cli.main(["train", "--config-name", "tiny"]) == 0
    assert calls[3][1].trainer.seed == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["train", "--recipe", "tiny", "--config", "a.yaml"],
            "--recipe and --config cannot be combined",
        ),
        (["train", "--config-path", "a"], "add --config-name NAME"),
        (["train", "--config", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
        (["train"], "set actor_rollout_ref.model.path=FOLDER"),
        (["train", "--recipe=tiny", "trainer.sead=1"], "did you mean trainer.seed"),
        (["config", "trainer.sead"], "did you mean trainer.seed"),
    ],
)
def test_settings_errors_are_one_line_with_exit_code_2(
    calls: Calls, capsys: pytest.CaptureFixture[str], line: list[str], message: str
) -> None:
    assert cli.main(line) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert calls == []


def test_errors_have_exit_codes_and_a_traceback_only_with_debug(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.result = DataError("no rows; give some")
    assert cli.main(["train", "--recipe", "tiny"]) == 3
    assert capsys.readouterr().err == "error: no rows; give some\n"
    assert cli.main(["train", "--recipe", "tiny", "--debug"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_status_of_the_command_is_returned(calls: Calls) -> None:
    calls.result = 5
    assert cli.main(["train", "--recipe", "tiny"]) == 5


def test_interrupt_ends_with_exit_code_130(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.result = KeyboardInterrupt()
    assert cli.main(["train", "--recipe", "tiny"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_unexpected_exceptions_are_not_caught(calls: Calls) -> None:
    calls.result = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "--recipe", "tiny"])


@pytest.mark.parametrize(
    "command", ["train", "sft", "rl", "draft", "eval", "export", "quickstart", "config", "bench"]
)
def test_help_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  slipstream {command}" in text
    assert "130  interrupted" in text or "130 interrupted" in text


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    text = capsys.readouterr().out
    assert all(f"\n  {command.name} " in text for command in cli.COMMANDS)


@pytest.mark.parametrize(
    "line",
    [
        ["trian"],
        ["train", "--recipy", "tiny"],
        ["export", "--checkpoint", ".", "--output", "x", "trainer.seed=1"],
        ["export", "--output", "x"],
        ["export", "--checkpoint", ".", "--output", "x", "--draft", "trtllm"],
        ["eval", "--checkpoint", ".", "--problems", "0"],
        ["quickstart", "--recipe", "large"],
    ],
)
def test_invalid_flags_end_with_exit_code_2(
    calls: Calls, line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line)
    assert ended.value.code == 2
    assert "usage: slipstream" in capsys.readouterr().err
    assert calls == []


def test_eval_uses_the_settings_of_the_run(calls: Calls, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "global_step_5"
    checkpoint.mkdir(parents=True)
    config = load_config(["trainer.seed=41"], recipe="tiny")
    (tmp_path / "run" / CONFIG_FILE).write_text(to_yaml(config))
    assert cli.main(["eval", "--checkpoint", str(checkpoint), "--problems", "7"]) == 0
    assert calls == [("evaluate", config, checkpoint, 7, None)]
    line = ["eval", "--checkpoint", str(checkpoint), "--output", "o.json", "--recipe", "default"]
    assert cli.main([*line, "data.seed=3"]) == 0
    assert calls[1][1].data.seed == 3
    assert calls[1][1].trainer.seed == 1
    assert calls[1][3:] == (None, Path("o.json"))


def test_eval_without_settings_or_checkpoint_is_refused(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "--checkpoint", str(tmp_path / "none")]) == 4
    assert "does not exist; check --checkpoint" in capsys.readouterr().err
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    assert cli.main(["eval", "--checkpoint", str(deep)]) == 2
    assert "add --recipe NAME" in capsys.readouterr().err
    assert calls == []


def test_draft_uses_the_settings_of_the_run_but_not_its_folder(
    calls: Calls, tmp_path: Path
) -> None:
    theirs = load_config(["trainer.seed=9", f"trainer.default_local_dir={tmp_path}"], recipe="tiny")
    (tmp_path / CONFIG_FILE).write_text(to_yaml(theirs))
    assert cli.main(["draft", "--checkpoint", str(tmp_path), "data.seed=4"]) == 0
    name, config = calls[0]
    assert (name, config.trainer.seed, config.data.seed) == ("draft", 9, 4)
    assert config.trainer.default_local_dir == str(tmp_path / "draft")
    assert config.actor_rollout_ref.model.path == str(tmp_path)
    assert config.actor_rollout_ref.model.init is None
    elsewhere = f"trainer.default_local_dir={tmp_path / 'mine'}"
    assert cli.main(["draft", "--checkpoint", str(tmp_path), elsewhere]) == 0
    assert calls[1][1].trainer.default_local_dir == str(tmp_path / "mine")


def test_draft_turns_off_the_cotraining_of_the_run(calls: Calls, tmp_path: Path) -> None:
    learns = "speculative.enable=true", "speculative.train.enable_drafter_training=true"
    theirs = load_config([*learns, f"trainer.default_local_dir={tmp_path}"], recipe="tiny")
    (tmp_path / CONFIG_FILE).write_text(to_yaml(theirs))
    few = "speculative.eagle.spec_algorithm=EAGLE3", "speculative.eagle.draft_vocab_size=16"
    assert cli.main(["draft", "--checkpoint", str(tmp_path), *few]) == 0
    speculative = calls[0][1].speculative
    assert speculative.eagle.draft_vocab_size == 16
    assert not speculative.enable
    assert not speculative.train.enable_drafter_training


def test_draft_starts_from_the_head_of_the_run(calls: Calls, tmp_path: Path) -> None:
    theirs = load_config(
        [
            "speculative.enable=true",
            "speculative.eagle.spec_model_path=runs/head",
            f"trainer.default_local_dir={tmp_path}",
        ],
        recipe="tiny",
    )
    (tmp_path / CONFIG_FILE).write_text(to_yaml(theirs))
    assert cli.main(["draft", "--checkpoint", str(tmp_path)]) == 0
    anew = "speculative.eagle.spec_model_path=null"
    assert cli.main(["draft", "--checkpoint", str(tmp_path), anew]) == 0
    begun = [config.speculative.eagle.spec_model_path for _, config, *_ in calls]
    assert begun == ["runs/head", None]


def test_draft_accepts_a_policy_from_the_settings(calls: Calls) -> None:
    line = ["draft", "actor_rollout_ref.model.path=base", "data.train_files=a.parquet"]
    assert cli.main(line) == 0
    assert calls[0][1].actor_rollout_ref.model.path == "base"


def test_export_and_quickstart_pass_their_flags(calls: Calls, tmp_path: Path) -> None:
    line = ["export", "--checkpoint", str(tmp_path), "--output", "model", "--dtype", "bfloat16"]
    assert cli.main(line) == 0
    assert cli.main([*line, "--draft", "sglang"]) == 0
    assert cli.main(["quickstart"]) == 0
    line = ["quickstart", "--output", "o", "--seed", "4", "--recipe", "quickstart_small"]
    assert cli.main([*line, "--sft-control", "--no-bf16", "--no-speculation"]) == 0
    assert cli.main([*line, "--cold-start"]) == 0
    assert cli.main(["quickstart", "--agent"]) == 0
    assert calls == [
        ("export", tmp_path, Path("model"), "bfloat16", None),
        ("export", tmp_path, Path("model"), "bfloat16", "sglang"),
        ("quickstart", Path("runs/quickstart"), 1, "auto", False, True, True, False, False),
        ("quickstart", Path("o"), 4, "quickstart_small", True, False, False, False, False),
        ("quickstart", Path("o"), 4, "quickstart_small", False, True, True, True, False),
        (
            *("quickstart", Path("runs/quickstart_agent"), 1, "auto", False),
            *(True, True, False, True),
        ),
    ]


def test_config_prints_the_tree_or_explains_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--recipe", "tiny", "trainer.seed=9"]) == 0
    assert "  seed: 9\n" in capsys.readouterr().out
    assert cli.main(["config"]) == 0
    assert capsys.readouterr().out.startswith("data:\n  task: null\n")
    assert cli.main(["config", "trainer.seed", "data.seed"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("trainer.seed\n  Seed for everything")
    assert "\n\ndata.seed\n" in text


@pytest.mark.parametrize("entry", [cli.main, main_ppo.main, main_fastrl.main])
def test_cfg_job_prints_settings_that_load_again_and_trains_nothing(
    entry: Any, calls: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = ["--cfg", "job", "--resolve", "--config-name", "tiny", "trainer.seed=6"]
    assert entry(["train", *line] if entry is cli.main else line) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_config(file=file) == load_config(["trainer.seed=6"], recipe="tiny")
    assert calls == []


@pytest.mark.parametrize("entry", [main_ppo.main, main_fastrl.main])
def test_launchers_call_train_with_notes_about_differing_defaults(
    entry: Any, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "--config-name=ppo_trainer",
        "data.train_files=a.parquet",
        "actor_rollout_ref.model.path=m",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.load_format=auto",
    ]
    assert entry(line) == 0
    (_, config, mode), *rest = calls
    assert (mode, rest) == ("rl", [])
    assert config.data.train_batch_size == 8
    notes = capsys.readouterr().err.splitlines()
    assert notes[0] == "note: --config-name ppo_trainer selects --recipe default"
    assert notes[1].startswith("note: actor_rollout_ref.rollout.load_format has no")
    assert "actor_rollout_ref.rollout.n=8 (" in notes[2]
    assert "adv_estimator" not in notes[2]
    assert "train_batch_size" not in notes[2]
    assert ("speculative.enable=false (" in notes[2]) is (entry is main_fastrl.main)


def test_main_fastrl_needs_a_draft_head_or_history(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--config-name", "tiny", "speculative.enable=True"]
    assert main_fastrl.main(line) == 2
    assert "needs a draft model; train one with `slipstream draft`" in capsys.readouterr().err
    assert main_fastrl.main([*line, "speculative.spec_strategy=history"]) == 0
    assert calls[0][1].speculative.spec_strategy == "history"


IMPORTS = """
import sys
from slipstream import {module}
try:
    status = {module}.main({line!r})
except SystemExit as ended:
    status = ended.code
heavy = [name for name in ("torch", "transformers", "numpy", "hydra") if name in sys.modules]
print("status", status, "heavy", heavy)
"""


@pytest.mark.parametrize(
    ("module", "line", "end"),
    [
        ("cli", ["--help"], "status 0 heavy []"),
        ("cli", ["train", "--help"], "status 0 heavy []"),
        ("cli", ["config", "trainer.seed"], "status 0 heavy []"),
        ("cli", ["bench", "--help"], "status 0 heavy []"),
        ("cli", ["bench", "rollout", "--help"], "status 0 heavy []"),
        ("cli", ["bench", "speculation", "--help"], "status 0 heavy []"),
        ("cli", ["bench", "trl", "--help"], "status 0 heavy []"),
        ("cli", ["bench", "logprob", "--help"], "status 0 heavy []"),
        ("cli", ["train", "trainer.sead=1"], "status 2 heavy ['hydra']"),
        ("cli", ["train", "--recipe", "tiny", "--cfg", "job"], "status 0 heavy ['hydra']"),
        ("main_ppo", ["--help"], "status 0 heavy []"),
        ("sft_trainer", ["--help"], "status 0 heavy []"),
        ("main_fastrl", ["trainer.seed=x"], "status 2 heavy ['hydra']"),
    ],
)
def test_help_and_settings_errors_do_not_import_torch(
    module: str, line: list[str], end: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(module=module, line=line)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == end


def test_closed_output_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m slipstream.cli config | head -n 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("data:\n", "")


def test_characters_outside_the_terminal_encoding_are_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "é")
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli", "report", folder],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("report ")
    assert "/\\xe9/report.html (" in done.stdout


def test_program_name_works_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "venv/bin/slipstream"
    beside.parent.mkdir(parents=True)
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(beside.with_name("python")))
    monkeypatch.setenv("PATH", str(beside.parent))
    assert program() == "slipstream"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == str(beside)
    monkeypatch.chdir(tmp_path)
    assert program() == "venv/bin/slipstream"
    beside.unlink()
    assert program() == "slipstream"


def test_printed_settings_load_again_with_an_ascii_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "slipstream.cli", "sft", "--recipe", "tiny", "--cfg", "job"),
            "trainer.default_local_dir='runs/é'",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    (tmp_path / "back.yaml").write_text(done.stdout)
    back = load_config([], file=tmp_path / "back.yaml", notify=lambda _: None)
    assert back.trainer.default_local_dir == "runs/é"


@pytest.mark.parametrize("port", ["0", "65536", "99999999", "-1", "x", "²", "9" * 6000])
def test_ports_out_of_range_are_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["watch", "runs/none", f"--port={port}"])
    assert caught.value.code == 2
    assert "is not a port from 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 5000, "9" * 6000, "5", "{"])
def test_odd_keyword_arguments_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["reward", "dump.jsonl", "--kwargs", text])
    assert caught.value.code == 2
    assert "JSON" in capsys.readouterr().err


def test_a_path_that_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--checkpoint", "a" * 5000]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: aaa")
    assert "File name too long; check the path" in message
    assert message.count("\n") == 1
