"""GRPO with a tool against TRL: settings, batches of episodes, TRL's side of the tool, and a whole
comparison with a scripted TRL."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import trl_tools
from bench.trl_parity import FixedBatch
from bench.trl_runs import trl_settings, write_prompts
from bench.trl_tools import batches_of, joined, tool_settings
from slipstream.bench.record import ResultRow
from slipstream.build.episodes import make_renderer
from slipstream.cli import main
from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.data.lookup import LookupTask, look_up
from slipstream.errors import ConfigError
from slipstream.rewards.lookup import compute_score
from slipstream.types import Sample, Segment
from tests.bench.test_trl_compare import SCRIPTED, peer_module
from tests.run.helpers import ROLLOUT, tiny


def quickstart(*settings: str) -> Config:
    return load_config(settings, recipe="quickstart_agent", notify=lambda _: None)


def test_trls_tool_loop_gets_the_limit_of_turns() -> None:
    # Twelve turns, the last of which is not answered.
    assert tool_settings(quickstart()) == {"max_tool_calling_iterations": 11}
    unlimited = quickstart(f"{ROLLOUT}.multi_turn.max_assistant_turns=null")
    assert tool_settings(unlimited) == {"max_tool_calling_iterations": None}


def test_trl_gets_the_settings_of_the_quickstart_with_a_tool() -> None:
    found = trl_settings(quickstart(), "lookup")
    assert (found["prompts_per_step"], found["group_size"]) == (8, 8)
    assert (found["max_completion_length"], found["lr"]) == (384, 1.5e-4)
    with pytest.raises(ConfigError, match=r"set data\.task=countdown"):
        trl_settings(quickstart())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("history=rerender", r"set .*multi_turn\.history=append"),
        ("max_user_turns=3", r"multi_turn\.max_user_turns=3 has no counterpart"),
        ("max_tool_seconds=9", r"set .*multi_turn\.max_tool_seconds=null"),
    ],
)
def test_settings_that_trls_tool_loop_lacks_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tool_settings(quickstart(f"{ROLLOUT}.multi_turn.{setting}"))


def episode(uid: str, reward: float, tool: Sequence[int] = (8, 9)) -> Sample:
    """Two turns of the policy with an answer of the tool between them."""
    turns = [Segment.given("assistant", ids, loss=1.0) for ids in ([5, 6, 2], [7, 2])]
    segments = [Segment.given("prompt", [3, 4]), turns[0], Segment.given("tool", tool), turns[1]]
    return Sample(uid=uid, reward=reward, segments=segments)


def test_batches_mask_the_tools_tokens_and_leave_out_groups_without_advantages() -> None:
    samples = [
        *(episode("a", 0.5), episode("a", 1.0, [8])),
        *(episode("equal", 1.0), episode("equal", 1.0)),
        episode("alone", 1.0),
        *(episode("b", 0.0, [8, 9, 10]), episode("b", 1.0)),
    ]
    first, second = batches_of(samples, 2)
    assert first.prompt_ids == [[3, 4], [3, 4]]
    assert first.completion_ids == [[5, 6, 2, 8, 9, 7, 2], [5, 6, 2, 8, 7, 2]]
    assert first.masks == [[1, 1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 1, 1]]
    assert second.rewards == [0.0, 1.0]
    both = joined([first, second])
    assert (both.group_size, both.rewards) == (2, [0.5, 1.0, 0.0, 1.0])
    assert both.masks == [*first.masks, *(second.masks or [])]
    assert list(map(len, both.shifts)) == list(map(len, both.completion_ids)) == [7, 6, 8, 7]
    # Only prompts of one length are compared.
    longer = replace(first, prompt_ids=[[3, 3, 4], [3, 3, 4]])
    assert joined([longer, first, second]) == both


def test_trls_tool_and_reward_are_those_of_our_environment(tmp_path: Path) -> None:
    task, file, module = LookupTask(0, cost=0.04), tmp_path / "prompts.jsonl", peer_module()
    write_prompts(task, file, 4)
    given = module.lookup(task.tokenizer)
    rows = module.read_prompts(file, task.tokenizer)
    assert [row["prompt"] for row in rows] == [task.prompt("train", i).messages for i in range(4)]
    environments, completions, expected = [], [], []
    for index, row in enumerate(rows):
        problem = task.problem("train", index)
        environment = given["environment_factory"]()
        # TRL uses an object again: `reset` must forget the calls of the episode before.
        environment.reset(**rows[0])
        environment.look_up(" ana")
        environment.reset(**row)
        messages = task.demonstration("train", index, variant=index)[1:]
        calls = 0
        for message in messages:
            for call in message.get("tool_calls", ()):
                name = call["function"]["arguments"]["name"]
                assert environment.look_up(name) == look_up(problem.table, name)
                calls += 1
        # A call with a wrong argument is an error and costs nothing.
        with pytest.raises(AttributeError):
            environment.look_up(7)
        environments.append(environment)
        completions.append(messages)
        score = compute_score("lookup", messages[-1]["content"], problem.answer)["score"]
        expected.append(score - 0.04 * calls)
    columns = {name: [row[name] for row in rows] for name in ("answer", "cost")}
    found = given["reward_funcs"](completions=completions, environments=environments, **columns)
    assert found == pytest.approx(expected)
    assert len(set(expected)) > 1


def test_trls_reward_looks_at_all_turns_of_the_policy_but_not_at_the_tool() -> None:
    given = peer_module().lookup(LookupTask(0).tokenizer)
    environment = given["environment_factory"]()
    environment.reset(table="{}")
    answered = {"role": "assistant", "content": "answer ben"}
    turns = [answered, {"role": "tool", "content": "answer dan"}, {**answered, "content": "so"}]
    found = given["reward_funcs"](
        completions=[turns, turns],
        environments=[environment, environment],
        answer=["ben", "dan"],
        cost=[0.1, 0.1],
    )
    assert found == [1.0, 0.0]


def test_transformers_finds_the_same_tool_calls_as_our_renderer() -> None:
    task = LookupTask(0)
    peer_module().lookup(task.tokenizer)
    renderer = make_renderer(quickstart(), task.tokenizer)
    turns = [
        'look up ana : <tool_call>{"name": "look_up", "arguments": {"name": " ana"}}</tool_call>',
        "so boss ben , who is ben ? answer ben",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    ]
    prefix = task.prompt("train", 0).ids
    for text in turns:
        ids = task.tokenizer(f"{text}<end>", add_special_tokens=False)["input_ids"]
        ours = renderer.parse(ids)
        theirs: dict[str, Any] = task.tokenizer.parse_response(ids, prefix=prefix)
        assert [call["function"] for call in theirs.get("tool_calls", ())] == [
            {"name": call.name, "arguments": call.arguments} for call in ours.tool_calls
        ]
        assert theirs.get("content", "").strip() == ours.content.strip()


def test_a_whole_comparison_counts_sampled_tokens_and_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, file = tmp_path / "run", tmp_path / "rows.json"
    settings = [
        *("data.task=lookup", "data.task_kwargs.max_steps=2", "data.val_size=2"),
        *("data.max_prompt_length=24", "data.max_response_length=112"),
        *("data.train_batch_size=8", f"{ROLLOUT}.n=4", "actor_rollout_ref.actor.dtype=float32"),
        *("actor_rollout_ref.model.init.hidden_size=64", f"{ROLLOUT}.dtype=float32"),
        *("actor_rollout_ref.model.init.intermediate_size=128", "sft.optim.lr=1e-2"),
        *("sft.total_training_steps=60", "sft.batch_tokens=1024"),
        *("sft.max_tokens_per_micro_batch=1024", "trainer.total_training_steps=0"),
    ]
    assert main(tiny(policy, *settings)) == 0
    compared: list[FixedBatch] = []

    def parity(
        model: Path, batch: FixedBatch, steps: Sequence[FixedBatch], *more: Any
    ) -> list[ResultRow]:
        compared.extend([batch, *steps])
        return []

    monkeypatch.setattr(trl_tools, "trl_command", lambda: (sys.executable, "-c", SCRIPTED))
    monkeypatch.setattr(trl_tools, "run_parity", parity)
    flags = ["--steps", "5", "--rounds", "2", "--threads", "1", "--json", str(file)]
    assert trl_tools.main(["--policy", str(policy), *flags]) == 0
    whole, *steps = compared
    assert len(steps) == 4
    assert all(len(step.rewards) == 4 and len(set(step.rewards)) > 1 for step in steps)
    assert whole.masks is not None
    # The policy looks up names, so there are tokens of the tool between its own.
    assert any(0 in mask and mask[0] == mask[-1] == 1 for mask in whole.masks)
    plain, peer = json.loads(file.read_text())["rows"]
    assert (plain["contender"], peer["contender"]) == ("plain", "trl-float32")
    # 32 samples of one to twelve turns; the scripted TRL says four turns and twenty tokens.
    assert 32 <= plain["values"]["turns_per_step"]["min"] <= 12 * 32
    assert peer["values"]["turns_per_step"]["median"] == 4
    assert peer["values"]["tokens_per_step"]["median"] == 20
    assert plain["values"]["step_over_ours"] == {"median": 1.0, "min": 1.0, "max": 1.0, "n": 2}
    over, per_token = (peer["values"][f"{name}_over_ours"] for name in ("step", "sampled_token"))
    assert over["n"] == per_token["n"] == 2
    assert over["min"] > 0
    assert plain["settings"]["max_tool_calling_iterations"] == "None"
    assert "trl-float32: " in capsys.readouterr().out
