"""Every command in the documentation works. Quick commands are run. The others are parsed by the
real parsers, and their settings are loaded and validated as in a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from slipstream import cli, main_fastrl, main_ppo
from slipstream.config import CONFIG_FILE, Config, load_config, sources, to_yaml
from tests.data.agent_records import with_tokens, write
from tests.docs.pages import LOG, ROOT, Shown, commands, commands_in, markdown, sentences
from tests.report.run_folders import make_run

SHOWN = [shown for page in markdown() for shown in commands(page)]
# The log has commands of earlier versions.
SHOWN += [shown for page in markdown() if LOG not in page.parents for shown in sentences(page)]
SHOWN += [
    shown
    for command in cli.COMMANDS
    for shown in commands_in(indent(command.examples, "  "), ROOT / "slipstream" / command.name)
]
"""The commands in Markdown files, and those of `slipstream COMMAND --help`."""

ELIDED = {
    "data.train_files=...": ["data.train_files=train.parquet", "actor_rollout_ref.model.path=m"],
    "...": ["--recipe", "tiny"],
}
"""Elided arguments on pages, and their replacements here."""

PARSED = {
    "train": "trains: its settings are loaded and validated, and its mode is found",
    "sft": "trains: as train",
    "rl": "trains: as train",
    "draft": "trains: its settings are loaded and validated",
    "eval": "needs the checkpoint of a run that has trained: its settings are loaded and validated",
    "export": "needs the checkpoint of a run that has trained",
    "quickstart": "trains for minutes",
    "watch": "serves until Ctrl-C",
    "bench": "measures for minutes",
    "doctor": "looks at all of this machine: tests/preflight/test_doctor.py runs it",
}
"""Commands that are only parsed, and why. Those on the run `ON_TINY` are also run."""

ON_TINY = "runs/tiny"
"""The run of the tiny recipe. Commands on it in the documentation are run."""

ROWS = [
    {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2 ="}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "solution": "4",
    }
]
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.split()[-1:] == [ground_truth])

def brevity(data_source, solution_str, ground_truth, extra_info=None, scale=1):
    return scale / len(solution_str)

"""
DUMP = {
    "input": "user: 2 + 2 =",
    "messages": ROWS[0]["prompt"],
    "output": "4",
    "text": "4",
    "gts": "4",
    "data_source": "exact_match",
    "extra_info": {"solution": "4"},
    "score": 1.0,
    "step": 1,
    "uid": "train.parquet:0",
    "status": "completed",
    "prompt_ids": [2, 102, 2, 104],
    "response_ids": [4],
    "loss_mask": [1.0],
    "log_probs": [-0.5],
    "segments": [{"role": "assistant", "tokens": 1, "spans": [[0, 1, 0]]}],
}


def shown_function(page: str, name: str) -> str:
    """The source of a function on a page."""
    text = (ROOT / "docs" / page).read_text()
    found = re.search(rf"^    def {name}\(.*\n(?:        .*\n)+", text, flags=re.MULTILINE)
    assert found is not None, f"{page} shows no {name}"
    return dedent(found[0])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files, runs and data sets that commands of the documentation name."""
    folder = tmp_path_factory.mktemp("documented")
    for name in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / f"{name}.parquet")
    for name in ("train", "demonstrations"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shown = shown_function("from_trl.md", "accuracy_reward")
    (folder / "my_reward.py").write_text(REWARDS + shown)
    text = to_yaml(load_config([], recipe="tiny", notify=lambda _: None))
    for name in ("quickstart", "mine", "tiny", "one", "other", "plain", "drafted", "bench-model"):
        run = make_run(folder / "runs" / name, config=text)
        for step in (1, 20):
            (run / "rollouts" / f"{step}.jsonl").write_text(json.dumps(DUMP) + "\n")
    for checkpoint in ("checkpoints/slipstream/run/global_step_50", "global_step_50"):
        (folder / checkpoint).mkdir(parents=True)
    (folder / "checkpoints/slipstream/run" / CONFIG_FILE).write_text(text)
    (folder / "examples").mkdir()
    shutil.copytree(ROOT / "examples" / "real_model", folder / "examples" / "real_model")
    (folder / "conf").mkdir()
    for name in ("conf/mine.yaml", "my.yaml"):
        (folder / name).write_text("defaults: [tiny]\n")
    write(folder / "agent.jsonl", with_tokens())
    (folder / "dump.jsonl").write_text(json.dumps(DUMP) + "\n")
    raw = folder / "downloads"
    for name, row in {
        "gsm8k/main": {"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"},
        "gsm8k/socratic": {"question": "Two and two?", "answer": "Sum? 2 + 2 = 4\n#### 4"},
        "MATH": {"problem": "Half?", "solution": r"\boxed{\frac{1}{2}}", "level": "Level 1",
                 "type": "Algebra"},
    }.items():  # fmt: skip
        (raw / name).mkdir(parents=True)
        for split in ("train", "test"):
            (raw / name / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


class Stopped(list[tuple[Any, ...]]):
    """The arguments of calls that would have trained, measured or served."""


COMPOSE = sources._compose


@cache
def composed(recipe: Path) -> Any:
    return COMPOSE(recipe, (), ())


@pytest.fixture(autouse=True)
def recipes_are_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache composed recipes: Hydra needs half of the time to load settings, and most commands
    name the same recipe."""

    def once(path: Path, groups: Sequence[Any], search_path: Sequence[str]) -> Any:
        shared = not groups and not search_path and path.parent == sources.RECIPES
        return composed(path) if shared else COMPOSE(path, groups, search_path)

    monkeypatch.setattr(sources, "_compose", once)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Stopped:
    """Replace functions that train, measure or serve by a fake that records its arguments."""
    calls = Stopped()

    def keep(*arguments: Any, **more: Any) -> int:
        calls.append(arguments)
        return 0

    for name in (
        "slipstream.run.train.train",
        "slipstream.preflight.dry_run.dry_run",
        "slipstream.run.train.evaluate",
        "slipstream.run.train.export",
        "slipstream.run.quickstart.main",
        "slipstream.run.draft_phase.main",
        "slipstream.report.watch.serve",
        "slipstream.bench.command.run",
        "slipstream.preflight.doctor.doctor",
    ):
        monkeypatch.setattr(name, keep)
    return calls


def filled(words: Sequence[str]) -> list[str]:
    """Replace elided arguments, and run settings for GPUs on a CPU."""
    placed = any(word.startswith("trainer.n_gpus_per_node=") for word in words)
    more = ["trainer.device=cpu"] if placed else []
    return [part for word in words for part in ELIDED.get(word, [word])] + more


def call(words: Sequence[str]) -> int:
    """Run a command line in this process and return its exit status, also if it exits."""
    given = list(words)
    if given[0] == "slipstream":
        program, arguments = cli.main, given[1:]
    else:
        name = given[given.index("-m", len(given) - given[::-1].index("-m") - 1) + 1]
        programs = {
            "slipstream.main_ppo": main_ppo.main,
            "slipstream.main_fastrl": main_fastrl.main,
            "slipstream.cli": cli.main,
        }
        program, arguments = programs[name], given[given.index(name) + 1 :]
    try:
        return program(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def kind(words: Sequence[str]) -> str:
    """The sub-command: `train` for launchers, and `make` for make."""
    for program in ("slipstream", "slipstream.cli"):
        if program in words:
            return words[words.index(program) + 1]
    return "train" if "-m" in words else "make"


def place(shown: Shown) -> str:
    return f"{shown.page.relative_to(ROOT)}:{shown.line}"


def of(*kinds: str) -> list[Shown]:
    """The shown commands of the given kinds, without duplicates."""
    unique = {shown.words: shown for shown in SHOWN if kind(shown.words) in kinds}
    return list(unique.values())


def helps(words: Sequence[str]) -> bool:
    return words[-1] == "--help" or "--cfg" in words


PROGRAMS = {shown.words: shown for shown in SHOWN if shown.words[0] != "make"}
QUICK = [s for s in PROGRAMS.values() if kind(s.words) not in PARSED or helps(s.words)]
LONG = [s for s in PROGRAMS.values() if kind(s.words) in PARSED and not helps(s.words)]


def test_documentation_shows_every_kind_of_command() -> None:
    assert len(SHOWN) > 100
    known = {command.name for command in cli.COMMANDS}
    shown = {kind(words) for words in PROGRAMS} - {"--help"}
    assert shown <= known
    assert {"train", "rl", "sft", "draft", "eval", "export", "report", "watch"} <= shown
    assert set(PARSED) <= known


@pytest.mark.parametrize("shown", QUICK, ids=place)
def test_quick_commands_run(here: Path, shown: Shown) -> None:
    assert call(filled(shown.words)) == 0


@pytest.mark.parametrize("shown", LONG, ids=place)
def test_long_commands_are_parsed_and_validated(here: Path, stopped: Stopped, shown: Shown) -> None:
    assert call(filled(shown.words)) == 0
    (arguments,) = stopped
    if kind(shown.words) in ("train", "sft", "rl", "draft", "eval"):
        assert isinstance(arguments[0], Config)


def test_commands_of_the_tiny_recipe_run(here: Path) -> None:
    shutil.rmtree(here / ON_TINY)
    done = [
        shown.words
        for shown in SHOWN
        if shown.page.name == "getting_started.md" and any(ON_TINY in word for word in shown.words)
    ]
    assert [kind(words) for words in done] == ["train", "train", "eval", "export", "report"]
    for words in done:
        assert call(words) == 0
    assert (here / ON_TINY / "global_step_2").is_dir()
    assert (here / ON_TINY / CONFIG_FILE).is_file()
    assert (here / "my-model" / "model.safetensors").is_file()
    assert (here / ON_TINY / "report.html").stat().st_size > 50_000


@pytest.mark.parametrize("shown", of("make"), ids=place)
def test_make_targets_exist_and_their_commands_parse(
    here: Path, stopped: Stopped, shown: Shown
) -> None:
    target, *rest = [word for word in shown.words[1:] if not word.startswith("TORCH_INDEX")]
    # `make test ARGS=...` passes its own variables on through these.
    inherited = ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")
    env = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target, *rest],
        cwd=ROOT, capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace("\\\n", " ")
    for line in re.findall(r"^\S*/(slipstream .*)$", text, flags=re.MULTILINE):
        assert call(line.split()) == 0, line


# These start another program; tests/run/test_gsm8k.py runs their dry runs.
TRIED = {"grpo_7B.sh", "grpo_32B_multi_nodes.sh"}


@pytest.mark.parametrize(
    "name", sorted({path.name for path in (ROOT / "examples").glob("*.sh")} - TRIED)
)
def test_commands_of_example_scripts_are_validated(
    here: Path, stopped: Stopped, name: str, tmp_path: Path
) -> None:
    script = ROOT / "examples" / name
    program, told = tmp_path / "slipstream", tmp_path / "told"
    program.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" >"{told}"\n')
    program.chmod(0o755)
    # Arguments of the user come last.
    more = "--rounds=3" if name == "bench_sd.sh" else "trainer.seed=3"
    own = ("RUN", "MODEL", "TRAIN", "VAL", "OUT")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run([script, more], env=environment, check=True)
    words = told.read_text().split("\0")[:-1]
    assert words[-1] == more
    assert call(["slipstream", *words]) == 0
    (arguments,) = stopped
    if name == "bench_sd.sh":
        assert arguments[0].rounds == 3
    else:
        assert arguments[0].trainer.seed == 3
        assert arguments[0].speculative.eagle.spec_algorithm == "EAGLE3"


def test_scripts_named_on_pages_exist() -> None:
    named = {
        name
        for page in markdown()
        if LOG not in page.parents
        for name in re.findall(r"python (-m bench\.\w+|bench/[\w/]+\.py)", page.read_text())
    }
    files = {re.sub(r"^-m bench\.(\w+)$", r"bench/\1.py", name) for name in named}
    assert len(files) >= 5
    missing = [name for name in files if not (ROOT / name).is_file()]
    assert missing == []
