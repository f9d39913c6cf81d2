"""RL with a tool: the same tokens, log-probs and weights with drafts, at any batch limit, and after
an interruption."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.data.lookup import LookupTask, build_tokenizer
from slipstream.data.sample_file import load_samples
from slipstream.environment.protocol import InfrastructureError
from slipstream.environment.tasks.lookup import LookUpSession
from slipstream.environment.tools.protocol import ToolResult
from slipstream.metrics.loggers import read_jsonl
from slipstream.rollout.agents.verifiers import write_rows as write_verifiers_rows
from slipstream.rollout.episode import EpisodeLimits
from slipstream.user_code import load_named
from tests.docs.pages import ROOT
from tests.environment.serving import serving
from tests.run.helpers import ROLLOUT, assert_same_rl, records_of, tiny

STEPS = 3
TASK = ("data.task=lookup", "data.task_kwargs.max_steps=3")
SIZE = (
    "data.max_prompt_length=24",
    "data.max_response_length=112",
    "data.train_batch_size=3",
    "data.val_size=4",
    f"{ROLLOUT}.n=3",
    "sft.total_training_steps=60",
    "sft.batch_tokens=1024",
    "sft.max_tokens_per_micro_batch=1024",
    "sft.optim.lr=1e-2",
)
MODEL = (
    "actor_rollout_ref.model.init.hidden_size=64",
    "actor_rollout_ref.model.init.intermediate_size=128",
)


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that imitates conversations with the tool."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    assert main(tiny(folder, *TASK, *SIZE, *MODEL, "trainer.total_training_steps=0")) == 0
    return next((folder / "sft").glob("global_step_*")) / "actor" / "huggingface"


def rl(
    folder: Path,
    policy: Path,
    *overrides: str,
    steps: int = STEPS,
    data: tuple[str, ...] = TASK,
) -> int:
    return main(
        tiny(
            folder,
            *data,
            *SIZE,
            "sft.total_training_steps=0",
            "actor_rollout_ref.model.init=null",
            f"actor_rollout_ref.model.path={policy}",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=1",
            *overrides,
        )
    )


@pytest.fixture(scope="module")
def plain(sft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    assert rl(folder, sft) == 0
    return folder


def samples(folder: Path) -> list[dict[str, Any]]:
    return [record for records in records_of(folder / "rollouts").values() for record in records]


def trained(folder: Path) -> list[dict[str, float]]:
    """The metrics of the RL steps of a run."""
    return [metrics for step, metrics in read_jsonl(folder / "metrics.jsonl") if step > 0]


def test_episodes_call_the_tool_and_are_trained_on(plain: Path) -> None:
    steps = trained(plain)
    assert len(steps) == STEPS
    for metrics in steps:
        assert metrics["training/rollout_log_probs_differing"] == 0
        assert metrics["episode/turns/mean"] > 1
    calls = sum(metrics["tool_call_counts/mean"] for metrics in steps)
    assert calls > 0
    assert any("<tool>" in sample["output"] for sample in samples(plain))
    # Each look-up that was executed costs 0.03.
    assert any(metrics["reward/turn/look_up/min"] <= -0.03 for metrics in steps)


def test_tool_answers_have_no_log_probs(plain: Path) -> None:
    for sample in samples(plain):
        text, tool = sample["output"], "<tool>"
        zeros = sum(x == 0.0 for x in sample["log_probs"])
        assert (zeros > 0) == (tool in text)
        assert len(sample["log_probs"]) == len(sample["response_ids"])


def test_rollouts_become_samples_for_rl(plain: Path, tmp_path: Path) -> None:
    files = [str(path) for path in sorted((plain / "rollouts").glob("*.jsonl"))]
    output, end = tmp_path / "rl.jsonl", build_tokenizer().eos_token_id
    assert main(["data", "trajectories", *files, "--to", "rl", "--output", str(output)]) == 0
    made, written = load_samples(output), samples(plain)
    assert [one.tokens for one in made] == [r["prompt_ids"] + r["response_ids"] for r in written]
    assert [one.reward for one in made] == [record["score"] for record in written]
    # Each prompt of a step is a group of three.
    assert sorted(one.group_index or 0 for one in made) == sorted([*range(STEPS * 3)] * 3)
    several = [one for one in made if len(one.segments) > 2]
    assert several
    for one in several:
        roles = [segment.role for segment in one.segments]
        assert roles[1::2] == ["assistant"] * len(roles[1::2])
        assert roles[2::2] == ["tool"] * len(roles[2::2])
        for turn, answer in zip(one.segments[1::2], one.segments[2::2], strict=False):
            assert turn.ids[-1] == end
            assert set(turn.loss_mask) == {1.0}
            assert set(answer.loss_mask) == {0.0}


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{ROLLOUT}.max_num_seqs=1",),
        (f"{ROLLOUT}.max_num_seqs=7",),
        (f"{ROLLOUT}.max_num_seqs=64",),
        (f"{ROLLOUT}.enable_prefix_caching=false",),
        ("speculative.enable=true", "speculative.spec_strategy=history"),
    ],
    ids=["one", "seven", "sixty-four", "no prefix cache", "history"],
)
def test_tokens_and_weights_do_not_depend_on_how_they_are_computed(
    plain: Path, sft: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    assert rl(tmp_path / "run", sft, *overrides) == 0
    assert_same_rl(tmp_path / "run", plain, STEPS)


def test_a_resumed_run_equals_an_uninterrupted_one(plain: Path, sft: Path, tmp_path: Path) -> None:
    assert rl(tmp_path / "run", sft, steps=1) == 0
    assert rl(tmp_path / "run", sft) == 0
    assert_same_rl(tmp_path / "run", plain, STEPS)


def test_branches_are_trained_on_as_they_were_sampled(sft: Path, tmp_path: Path) -> None:
    rerender = f"{ROLLOUT}.multi_turn.history=rerender"
    drafts = ("speculative.enable=true", "speculative.spec_strategy=history")
    assert rl(tmp_path / "plain", sft, rerender) == 0
    steps = [m for step, m in read_jsonl(tmp_path / "plain" / "metrics.jsonl") if step > 0]
    for metrics in steps:
        assert metrics["training/rollout_log_probs_differing"] == 0
        # The space before a call is not part of the parsed text, so the template drops it.
        assert metrics["episode/branches/max"] > 1
    earlier = [one for sample in samples(tmp_path / "plain") for one in _earlier(sample)]
    assert all(len(one["log_probs"]) == len(one["response_ids"]) > 0 for one in earlier)
    assert rl(tmp_path / "run", sft, rerender, *drafts, f"{ROLLOUT}.max_num_seqs=2", steps=1) == 0
    assert rl(tmp_path / "run", sft, rerender, *drafts, f"{ROLLOUT}.max_num_seqs=2") == 0
    assert_same_rl(tmp_path / "run", tmp_path / "plain", STEPS)


def _earlier(sample: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = sample.get("episode", {}).get("earlier", [])
    return found


def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of environments are repeated at once."""
    at_once = partial(EpisodeLimits, backoff_s=0.0)
    monkeypatch.setattr("slipstream.build.episodes.EpisodeLimits", at_once)


def test_a_tool_server_that_refuses_some_calls_changes_nothing(
    plain: Path, sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, draws, refused = LookUpSession.execute, random.Random(1), list[str]()

    async def sometimes(self: LookUpSession, arguments: Mapping[str, Any]) -> ToolResult:
        if draws.random() < 0.15:
            refused.append(str(arguments))
            raise InfrastructureError("503")
        return await execute(self, arguments)

    monkeypatch.setattr(LookUpSession, "execute", sometimes)
    without_waiting(monkeypatch)
    assert rl(tmp_path / "run", sft) == 0
    assert refused
    assert_same_rl(tmp_path / "run", plain, STEPS)


def test_samples_whose_tool_server_is_down_are_not_trained_on(
    plain: Path, sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = LookUpSession.execute
    first = {s["uid"]: s for s in samples(plain) if s["step"] == 1 and s["episode"]["calls"]}
    down = min(first)

    async def sometimes(self: LookUpSession, arguments: Mapping[str, Any]) -> ToolResult:
        table = first[down]["extra_info"]["tools_kwargs"]["look_up"]["create_kwargs"]["table"]
        if self.table == table:
            raise InfrastructureError("503")
        return await execute(self, arguments)

    monkeypatch.setattr(LookUpSession, "execute", sometimes)
    without_waiting(monkeypatch)
    assert rl(tmp_path / "run", sft, steps=1) == 0
    found = {(s["uid"], s["index"]): s for s in samples(tmp_path / "run")}
    for before in (s for s in samples(plain) if s["step"] == 1):
        now = found[before["uid"], before["index"]]
        if before["uid"] == down and before["episode"]["calls"]:
            assert (now["status"], "503" in now["failure"]) == ("failed", True)
        else:
            assert now == before
    ((_, metrics),) = [(n, m) for n, m in read_jsonl(tmp_path / "run" / "metrics.jsonl") if n == 1]
    failed = [s for s in found.values() if s["status"] == "failed"]
    assert metrics["training/num_failed_rewards"] == len(failed) > 0
    assert metrics["training/rollout_log_probs_differing"] == 0


def test_a_run_without_its_tools_is_a_single_turn(sft: Path, tmp_path: Path) -> None:
    assert rl(tmp_path / "run", sft, f"{ROLLOUT}.multi_turn.enable=false", steps=1) == 0
    assert not any("<tool>" in sample["output"] for sample in samples(tmp_path / "run"))


TOOL = """
from slipstream.compat.verl.tools.base_tool import BaseTool, ToolResponse


class LookUp(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self._tables = {}

    async def create(self, instance_id=None, table=None, **kwargs):
        self._tables[instance_id] = table
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        record = self._tables[instance_id].get(parameters["name"])
        if record is None:
            return ToolResponse(text="no such name"), -0.5, {}
        text = " , ".join(f"{relation} {name}" for relation, name in record.items())
        return ToolResponse(text=text), 0.25, {"known": 1}

    async def release(self, instance_id, **kwargs):
        del self._tables[instance_id]
"""
TOOLS = """
tools:
  - class_name: verl_look_up.LookUp
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: look_up
        description: Look up a person.
        parameters:
          type: object
          properties: {name: {type: string, description: The name.}}
          required: [name]
"""
USER = """
from slipstream.compat.verl.interactions.base import BaseInteraction


class DoubtfulInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, doubts=1, **kwargs):
        self.left = {**getattr(self, "left", {}), instance_id: doubts}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        assert messages[-1]["role"] == "assistant"
        self.left[instance_id] -= 1
        return self.left[instance_id] < 0, "who is ana ?", 0.125, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.left[instance_id]
"""
LOOP = """
from slipstream.compat.verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase, AgentLoopOutput, register,
)


@register("twice")
class Twice(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = self.tokenizer.apply_chat_template(
            row["raw_prompt"], add_generation_prompt=True, return_dict=False
        )
        more = self.tokenizer.encode("<user>who is ana ?<end><assistant>")
        ids, mask = [], []
        for turn in range(2):
            output = await self.server_manager.generate(
                request_id="one", prompt_ids=prompt + ids, sampling_params=sampling_params
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            if turn == 0:
                ids, mask = ids + more, mask + [0] * len(more)
        limit = self.config.data.max_response_length
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids[:limit], response_mask=mask[:limit], num_turns=4,
            metrics={},
        )
"""


TRL = '''
class People:
    def reset(self, tools_kwargs=None, **row):
        self.table, self.calls = tools_kwargs["look_up"]["create_kwargs"]["table"], 0
        return " "

    def look_up(self, name: str) -> str:
        """Look up a person.

        Args:
            name: The name.
        """
        self.calls += 1
        return " , ".join(f"{r} {n}" for r, n in self.table[name].items())

    def get_reward(self) -> float:
        return self.calls / 8
'''
GYM = """
import gymnasium


class Twice(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(512)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 1
        return " ", {}

    def step(self, action):
        self.left -= 1
        return "who is ana ?", len(action) / 100, self.left < 0, False, {"length": len(action)}
"""
SLIME = """
import copy

from slipstream.compat.slime.rollout.sglang_rollout import GenerateState
from slipstream.compat.slime.utils.http_utils import post
from slipstream.compat.slime.utils.types import Sample

MORE = "<user>who is ana ?<end><assistant>"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    for turn in range(2):
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        found = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in found],
            log_probs=[item[0] for item in found],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if output["meta_info"]["finish_reason"]["type"] == "length":
            break
        if turn == 0:
            more = state.tokenizer(MORE, add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=more, trainable=False, text=MORE)
    sample.reward = sample.response_length / 100
    return sample


async def ask_another(args, sample: Sample, sampling_params) -> list[Sample]:
    other = copy.deepcopy(sample)
    sample = await generate(args, sample, sampling_params)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    ids = GenerateState(args).tokenizer(MORE, add_special_tokens=False)["input_ids"]
    output = await post(url, {"input_ids": ids, "sampling_params": sampling_params})
    other.tokens = ids + output["output_ids"]
    other.response_length, other.reward = len(output["output_ids"]), 0.0
    return [sample, other]
"""
TINKER = """
from types import SimpleNamespace


class ModelInput:
    def __init__(self, ints):
        self.ints = list(ints)

    def to_ints(self):
        return self.ints


class Twice:
    def __init__(self, prompt, tokenizer):
        self.tokenizer, self.left = tokenizer, 2
        self.ints = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
        self.stop = [tokenizer.eos_token]

    async def initial_observation(self):
        return ModelInput(self.ints), self.stop

    async def step(self, action, *, extra=None):
        self.left -= 1
        more = self.tokenizer.encode("<user>who is ana ?<end><assistant>")
        self.ints = [*self.ints, *action, *more]
        return SimpleNamespace(
            reward=len(action) / 100,
            episode_done=self.left == 0,
            next_observation=ModelInput(self.ints),
            next_stop_condition=self.stop,
            metrics={"length": len(action)},
            logs={},
        )
"""
KINDS = ["tool", "interaction", "agent loop", "trl", "gymnasium", "slime", "two agents", "tinker"]


def write_rows(folder: Path, **more: Any) -> Path:
    """Questions of the lookup task as a data file."""
    task, path = LookupTask(0), folder / "rows.jsonl"
    lines = []
    for number in range(8):
        prompt = task.prompt("train", number)
        table = prompt.extra_info["tools_kwargs"]["look_up"]["create_kwargs"]["table"]
        row = {
            "data_source": "lookup",
            "prompt": prompt.messages,
            "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
            "extra_info": {
                "index": number,
                "tools_kwargs": {"look_up": {"create_kwargs": {"table": table}}},
                "interaction_kwargs": {"name": "doubtful", "doubts": 1},
            },
            **more,
        }
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_code_written_for_other_libraries_trains(
    kind: str, sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("slipstream.rollout.agents.verl._LOOPS", {})
    (tmp_path / "verl_look_up.py").write_text(TOOL)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "verl_user.py").write_text(USER)
    user = "interaction: [{class_name: verl_user.DoubtfulInteraction}]"
    (tmp_path / "user.yaml").write_text(user)
    (tmp_path / "verl_loop.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text("[{name: twice, _target_: verl_loop.Twice}]")
    (tmp_path / "people.py").write_text(TRL)
    (tmp_path / "twice.py").write_text(GYM)
    (tmp_path / "slime_twice.py").write_text(SLIME)
    (tmp_path / "tinker_twice.py").write_text(TINKER)
    rows = write_rows(tmp_path, **({"agent_name": "twice"} if kind == "agent loop" else {}))
    setting = {
        "tool": f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path}/tools.yaml",
        "interaction": f"{ROLLOUT}.multi_turn.interaction_config_path={tmp_path}/user.yaml",
        "agent loop": f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        "trl": f"{ROLLOUT}.multi_turn.environment={{path: {tmp_path}/people.py, name: People}}",
        "gymnasium": f"{ROLLOUT}.multi_turn.environment={{path: {tmp_path}/twice.py, name: Twice}}",
        "slime": f"{ROLLOUT}.agent.custom_generate_function_path=slime_twice.generate",
        "two agents": f"{ROLLOUT}.agent.custom_generate_function_path=slime_twice.ask_another",
        "tinker": f"{ROLLOUT}.multi_turn.environment="
        f"{{path: {tmp_path}/tinker_twice.py, name: Twice}}",
    }[kind]
    files = ("data.task=null", f"data.train_files=[{rows}]")
    assert rl(tmp_path / "run", sft, setting, steps=2, data=files) == 0
    for step, metrics in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        if step > 0:
            assert metrics["training/rollout_log_probs_differing"] == 0
            assert metrics["episode/turns/mean"] > 1
            assert metrics["episode/branches/mean"] == (2 if kind == "two agents" else 1)
    texts = [sample["output"] for sample in samples(tmp_path / "run")]
    mark = "<tool>" if kind in ("tool", "trl") else "<user>who is ana ?<end><assistant>"
    if kind == "two agents":  # the text is that of the last branch, which has one turn
        mark = "<end>"
    assert sum(mark in text for text in texts) >= len(texts) / 6


@pytest.mark.parametrize("over", ["standard input and output", "HTTP"])
def test_tools_of_an_mcp_server_train(over: str, sft: Path, tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp")
    module = "tests.environment.tools.mcp_people"
    files = ("data.task=null", f"data.train_files=[{write_rows(tmp_path, extra_info={})}]")
    servers = tmp_path / "mcp.json"
    setting = f"{ROLLOUT}.multi_turn.mcp_config_path={servers}"
    with ExitStack() as stack:
        target: dict[str, Any] = {"command": sys.executable, "args": ["-m", module]}
        target["cwd"] = str(ROOT)
        if over == "HTTP":
            address, _ = stack.enter_context(serving(module))
            target = {"url": f"{address}/mcp"}
        servers.write_text(json.dumps({"mcpServers": {"people": target}}))
        assert rl(tmp_path / "run", sft, setting, steps=2, data=files) == 0
    trained = [m for step, m in read_jsonl(tmp_path / "run" / "metrics.jsonl") if step > 0]
    assert len(trained) == 2
    for metrics in trained:
        assert metrics["training/rollout_log_probs_differing"] == 0
        assert metrics["tool_call_counts/mean"] > 0
    assert max(metrics["actor/grad_norm"] for metrics in trained) > 0
    texts = [sample["output"] for sample in samples(tmp_path / "run")]
    answer = "friend ana , boss paul , teacher will , neighbor noah"
    assert sum(answer in text for text in texts) >= len(texts) / 6


OPENENV = """
from openenv.core import GenericEnvClient


class Twice(GenericEnvClient):
    def reset(self, **columns):
        return super().reset(most=3, **columns)

    def action_from_text(self, text):
        return {"message": str(len(text) % 4)}

    def text_from_observation(self, observation):
        return "who is ana ?" if observation["tries"] else ""
"""


def test_sessions_of_an_openenv_server_train(sft: Path, tmp_path: Path) -> None:
    pytest.importorskip("openenv", reason="needs openenv, which excludes `mcp`: make openenv")
    (tmp_path / "client.py").write_text(OPENENV)
    files = ("data.task=null", f"data.train_files=[{write_rows(tmp_path)}]")
    with serving("tests.environment.adapters.openenv_server") as (url, _):
        setting = f"{ROLLOUT}.multi_turn.environment={{path: {tmp_path}/client.py, name: Twice, "
        setting += f'kwargs: {{base_url: "{url}"}}}}'
        assert rl(tmp_path / "run", sft, setting, steps=2, data=files) == 0
    steps = trained(tmp_path / "run")
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["training/rollout_log_probs_differing"] == 0
        assert metrics["episode/turns/mean"] > 1
    assert max(metrics.get("reward/turn/environment/max", 0.0) for metrics in steps) == 1.0


VERIFIERS = """
import json

import verifiers as vf
from datasets import Dataset


def look_up(name: str) -> str:
    \"\"\"Look up a person.

    Args:
        name: The name.
    \"\"\"
    return f"{name} : boss dan , friend ben"


def length(completion):
    return len(completion[-1].content) / 100


def load_environment(path, tools):
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    data = Dataset.from_list([{"prompt": row["prompt"], "answer": "dan"} for row in rows])
    rubric = vf.Rubric(funcs=[length])
    if tools:
        return vf.ToolEnv(tools=[look_up], max_turns=4, dataset=data, rubric=rubric)
    return vf.SingleTurnEnv(dataset=data, rubric=rubric)
"""


@pytest.mark.parametrize("tools", [True, False], ids=["tools", "single turn"])
def test_environments_of_verifiers_train(tools: bool, sft: Path, tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="needs verifiers, which excludes `mcp`: make verifiers")
    source, rows = tmp_path / "people.py", tmp_path / "train.jsonl"
    source.write_text(VERIFIERS)
    kwargs = {"path": str(write_rows(tmp_path)), "tools": tools}
    made = load_named(source, "load_environment", path_key="", name_key="", what="")(**kwargs)
    assert write_verifiers_rows(made, rows) == 8
    setting = f"{ROLLOUT}.multi_turn.environment={{path: {source}, name: load_environment, "
    setting += f'kwargs: {{path: "{kwargs["path"]}", tools: {tools}}}}}'
    files = ("data.task=null", f"data.train_files=[{rows}]", "data.max_prompt_length=40")
    assert rl(tmp_path / "run", sft, setting, steps=2, data=files) == 0
    steps = trained(tmp_path / "run")
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["training/rollout_log_probs_differing"] == 0
        assert metrics["training/num_failed_rewards"] == 0
        assert metrics["episode/num_turns"] == metrics["episode/turns/mean"]
        assert metrics["critic/score/mean"] == pytest.approx(metrics["episode/length"])
        assert (metrics["episode/turns/mean"] > 1) == tools
    if tools:
        assert any("<tool>" in sample["output"] for sample in samples(tmp_path / "run"))


def test_a_taskset_of_verifiers_trains(sft: Path, tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="needs verifiers, which excludes `mcp`: make verifiers")
    source, rows = Path(__file__).parents[1] / "rollout/agents/people_taskset.py", tmp_path / "rows"
    make = load_named(source, "load_environment", path_key="", name_key="", what="")
    assert write_verifiers_rows(make(), rows.with_suffix(".jsonl")) == 3
    setting = f"{ROLLOUT}.multi_turn.environment={{path: {source}, name: load_environment}}"
    files = (f"data.train_files=[{rows}.jsonl]", "data.max_prompt_length=40")
    assert rl(tmp_path / "run", sft, setting, steps=2, data=("data.task=null", *files)) == 0
    steps = trained(tmp_path / "run")
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["training/rollout_log_probs_differing"] == 0
        assert metrics["training/num_failed_rewards"] == 0
        assert metrics["episode/turns/mean"] > 1
        # The metric counts the turns that the library recorded.
        assert metrics["episode/turns"] == metrics["episode/turns/mean"]
        rewards = metrics["episode/right"] + metrics["episode/length"]
        assert metrics["critic/score/mean"] == pytest.approx(rewards)
    assert any("<tool>" in sample["output"] for sample in samples(tmp_path / "run"))
