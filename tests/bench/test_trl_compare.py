"""GRPO against TRL: the settings of both, and a whole comparison with a scripted TRL."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import trl_command, trl_compare, trl_runs
from bench.trl_compare import check
from bench.trl_parity import Differences
from bench.trl_runs import PRECISIONS, TrlBench, trl_settings, write_prompts
from slipstream.bench.peer_process import ROOT, PeerProcess
from slipstream.bench.record import ResultRow
from slipstream.cli import main
from slipstream.config.load import load_config
from slipstream.data.countdown import CountdownTask
from slipstream.errors import ConfigError, EngineError
from slipstream.rewards.countdown import compute_score

SCRIPT = ROOT / "bench" / "peers" / "trl_peer.py"

SCRIPTED = """
import json, shutil, sys
for line in sys.stdin:
    command = json.loads(line)
    op = command.pop("op")
    answer = {"ok": True}
    if op == "quit":
        break
    elif op == "begin":
        begin = command
        prompts = [json.loads(line) for line in open(begin["prompts"])]
        assert len(prompts) == 2 * 5 * begin["settings"]["prompts_per_step"]
        answer["versions"] = {"trl": "1.16.0"}
    elif op == "step":
        parts = {"generation_seconds": 1e-4, "reward_seconds": 1e-5}
        answer |= {**parts, "tokens": 20, "turns": 4, "rewards": [0.0, 1.0]}
    elif op == "finish":
        shutil.copytree(begin["model"], command["folder"])
    print(json.dumps(answer), flush=True)
"""
"""A fake TRL that trains nothing, with twenty tokens per step."""


def peer_module() -> Any:
    """`bench/peers/trl_peer.py` as a module; only some of its functions work without TRL."""
    spec = importlib.util.spec_from_file_location("trl_peer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trl_gets_the_settings_of_the_quickstart() -> None:
    assert trl_settings(load_config(recipe="quickstart", notify=lambda _: None)) == {
        "prompts_per_step": 4,
        "group_size": 4,
        "max_completion_length": 456,
        "lr": 1.5e-4,
        "warmup_steps": 5,
        "betas": [0.9, 0.99],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip": 1.0,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "scale_rewards": "group",
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.adv_estimator=rloo", "set algorithm.adv_estimator=grpo"),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", r"entropy_coeff=0\.01 has no counterpart"),
        ("actor_rollout_ref.rollout.temperature=0.7", r"set .*\.temperature=1$"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "set .*ppo_mini_batch_size=4"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-sum", "one of .*token-mean"),
    ],
)
def test_settings_without_a_counterpart_in_trl_are_refused(setting: str, message: str) -> None:
    config = load_config([setting], recipe="quickstart", notify=lambda _: None)
    with pytest.raises(ConfigError, match=message):
        trl_settings(config)


def test_loss_agg_modes_are_translated_to_trls_loss_types() -> None:
    agg = "actor_rollout_ref.actor.loss_agg_mode="
    settings = [f"{agg}seq-mean-token-mean", "algorithm.norm_adv_by_std_in_grpo=false"]
    found = trl_settings(load_config(settings, recipe="quickstart", notify=lambda _: None))
    assert (found["loss_type"], found["scale_rewards"]) == ("grpo", "none")
    constant = [f"{agg}seq-mean-token-sum-norm", "actor_rollout_ref.actor.loss_scale_factor=100"]
    with pytest.raises(ConfigError, match=r"set .*loss_scale_factor=456"):
        trl_settings(load_config(constant, recipe="quickstart", notify=lambda _: None))


def test_different_losses_are_an_error() -> None:
    same = Differences(loss=1e-7, advantages=0.0, gradient=1e-6, tensor=1e-3)
    check("dapo", same)
    with pytest.raises(EngineError, match=r"case dapo: .* gradients 2\.0e-05"):
        check("dapo", Differences(loss=0.0, advantages=0.0, gradient=2e-5, tensor=2e-5))
    with pytest.raises(EngineError, match="in the case dapo"):
        check("dapo", Differences(loss=float("nan"), advantages=0.0, gradient=0.0, tensor=0.0))


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("data:\n  task: countdown\n")
    return folder


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 3}, "steps=3: .* give at least 4"),
        ({"rounds": 0}, "rounds"),
        ({"problems": -1}, "problems=-1 must be at least 0"),
        ({"precisions": ("float16",)}, "unknown precision 'float16' of TRL; known: bfloat16-auto"),
    ],
)
def test_impossible_settings_are_refused_with_their_key(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrlBench(policy=a_run(tmp_path), **given)


def test_a_folder_that_is_not_a_run_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`make quickstart` makes"):
        TrlBench(policy=tmp_path)


@pytest.mark.parametrize("kind", ["trl", "peers"])
def test_a_missing_trl_is_refused_with_the_remedy(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*paths: str, remedy: str) -> tuple[str, ...]:
        raise ConfigError(f"{paths[0]} does not exist; {remedy}")

    monkeypatch.setattr(trl_runs, "peer_command", missing)
    assert main(["bench", kind, "--policy", str(a_run(tmp_path)), "--threads", "1"]) == 2
    assert ".venv-trl does not exist; run `make peers`" in capsys.readouterr().err


def test_flags_offer_all_precisions_of_trl() -> None:
    assert set(trl_command.PRECISIONS) == {name for names in PRECISIONS.values() for name in names}
    assert set(trl_command.PRECISIONS) == set(peer_module().PRECISIONS)


def test_the_peer_scores_answers_as_slipstream_does() -> None:
    score = peer_module().load_scorer()
    task = CountdownTask(0)
    for index in range(20):
        problem = task.problem("train", index)
        truth = {"numbers": list(problem.numbers), "target": problem.target}
        texts = [
            str(task.demonstration("train", index, variant=v)[-1]["content"]) for v in range(4)
        ]
        texts += ["", "answer", f"{texts[0]} <eos> more", texts[0].replace("answer", "anser")]
        found = [score(problem.numbers, problem.target, text) for text in texts]
        assert found == [compute_score("countdown", text, truth) for text in texts]


def test_the_peer_reads_our_prompts_and_refuses_other_token_ids(tmp_path: Path) -> None:
    task = CountdownTask(0)
    file = tmp_path / "prompts.jsonl"
    write_prompts(task, file, 3)
    rows = peer_module().read_prompts(file, task.tokenizer)
    assert [row["target"] for row in rows] == [task.problem("train", i).target for i in range(3)]
    assert rows[0]["prompt"] == task.prompt("train", 0).messages
    entry = json.loads(file.read_text().splitlines()[0])
    file.write_text(json.dumps({**entry, "ids": [1, *entry["ids"]]}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: the ids of the prompt are \["):
        peer_module().read_prompts(file, task.tokenizer)


def test_the_peer_refuses_a_wrong_command_and_names_the_right_ones() -> None:
    with PeerProcess("trl", [sys.executable, str(SCRIPT)]) as process:
        with pytest.raises(
            EngineError, match="'step' is not possible now; the commands are parity, updates, begin"
        ):
            process.ask("step")
        # It still answers after an error.
        with pytest.raises(EngineError, match="KeyError: 'threads'"):
            process.ask("begin")


def test_a_whole_comparison_equalizes_tokens_and_writes_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    tiny = ["--recipe", "tiny", f"trainer.default_local_dir={run}", "trainer.num_threads=1"]
    assert main(["sft", *tiny]) == 0
    monkeypatch.setattr(trl_compare, "trl_command", lambda: (sys.executable, "-c", SCRIPTED))
    no_parity: Callable[..., list[ResultRow]] = lambda *given: []  # noqa: E731
    monkeypatch.setattr(trl_compare, "run_parity", no_parity)
    # In this process, because a process for each evaluation would take seconds to start.
    monkeypatch.setattr(trl_compare, "run_line", lambda line, say: main(line[3:]))
    file = tmp_path / "trl.json"
    flags = ["--steps", "5", "--rounds", "1", "--problems", "4", "--threads", "1"]
    line = ["bench", "trl", "--policy", str(run), *flags, "--json", str(file)]
    # Status 1: the fake TRL does nothing, so it is faster.
    assert main(line) == 1
    written = json.loads(file.read_text())
    assert written["fastest_peer"] == "trl-float32"
    plain, peer = written["rows"]
    assert (plain["contender"], peer["contender"]) == ("plain", "trl-float32")
    assert plain["values"]["steps"]["median"] == 5
    # TRL steps until it has the same number of tokens.
    budget = plain["values"]["tokens"]["median"]
    assert budget > 20 * 5
    steps = peer["values"]["steps"]["median"]
    assert steps == min(10, -(-budget // 20))
    assert plain["seconds"]["n"] == peer["seconds"]["n"] == 2
    assert peer["machine"]["versions"] == {"trl": "1.16.0"}
    assert 0 <= plain["values"]["accuracy_low"] <= plain["values"]["accuracy_mean"] <= 1
    assert "GRPO against TRL" in capsys.readouterr().out
