"""Tools written for VERL run unchanged, but for their imports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.environment.adapters.verl_tools import (
    VerlTool,
    load_verl_tools,
)
from slipstream.environment.tools.protocol import result_of, tool_name
from slipstream.errors import ConfigError

CODE = """
from slipstream.compat.verl.tools.base_tool import BaseTool
from slipstream.compat.verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

LOG = []

class CheckAnswer(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        truth = ground_truth or kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instances[instance_id] = {"truth": truth, "best": 0.0}
        LOG.append("create")
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        state = self._instances[instance_id]
        right = parameters["answer"] == state["truth"]
        state["best"] = max(state["best"], float(right))
        LOG.append("execute")
        return ToolResponse(text=f"right: {right}"), 0.25 if right else -0.05, {"tries": 1}

    async def calc_reward(self, instance_id, **kwargs):
        LOG.append("calc_reward")
        return self._instances[instance_id]["best"]

    async def release(self, instance_id, **kwargs):
        LOG.append("release")
        del self._instances[instance_id]
"""
FILE = """
tools:
  - class_name: {module}.CheckAnswer
    config: {{type: native, timeout_s: 7, max_concurrent: 3}}
    tool_schema:
      type: function
      function:
        name: check
        description: Check an answer.
        parameters:
          type: object
          properties:
            answer: {{type: string, description: The answer., minLength: 1}}
          required: [answer]
        strict: false
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "verl_style_tools.py").write_text(CODE)
    (tmp_path / "tools.yaml").write_text(FILE.format(module="verl_style_tools"))
    monkeypatch.delitem(sys.modules, "verl_style_tools", raising=False)
    return tmp_path


def test_a_tool_lives_as_long_as_the_episode(folder: Path) -> None:
    (tool,) = load_verl_tools(folder / "tools.yaml")
    log: list[str] = sys.modules["verl_style_tools"].LOG

    async def work() -> tuple[list[Any], float]:
        session = await tool.open({"ground_truth": "4"})
        results = [await session.execute({"answer": answer}) for answer in ("3", "4")]
        score = await session.score()
        await session.close()
        return results, score

    results, score = anyio.run(work)
    assert [(r.text, r.reward, r.metrics) for r in results] == [
        ("right: False", -0.05, {"tries": 1.0}),
        ("right: True", 0.25, {"tries": 1.0}),
    ]
    assert score == 1.0
    assert log == ["create", "execute", "execute", "calc_reward", "release"]


def test_schema_and_limits_come_from_the_file(folder: Path) -> None:
    (tool,) = load_verl_tools(folder / "tools.yaml")
    assert tool_name(tool.schema) == "check"
    parameters = tool.schema["function"]["parameters"]
    assert parameters["properties"]["answer"]["minLength"] == 1
    assert parameters["required"] == ["answer"]
    assert (tool.timeout_s, tool.max_concurrent, tool.parallel) == (7.0, 3, False)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("text", ("text", 0.0, {})),
        ({"a": 1}, ('{"a": 1}', 0.0, {})),
        (("text", 0.5), ("text", 0.5, {})),
        (("text", None, {"n": 2, "name": "x"}), ("text", 0.0, {"n": 2.0})),
    ],
)
def test_answers_may_have_a_reward_and_metrics(found: Any, expected: Any) -> None:
    result = result_of(found)
    assert (result.text, result.reward, result.metrics) == expected


def test_a_tuple_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="reward and metrics"):
        result_of((1, 2, 3, 4))


def test_a_tool_may_have_its_schema_in_code() -> None:
    class Own:
        tool_schema = None

        def get_openai_tool_schema(self) -> dict[str, Any]:
            return {"type": "function", "function": {"name": "own"}}

        def create(self, instance_id: str) -> str:
            return "mine"

        def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:
            return instance_id

    async def work() -> str:
        session = await VerlTool.of(Own()).open({"unknown": 1})
        return (await session.execute({})).text

    assert anyio.run(work) == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must have a list 'tools'"),
        ("tools: 3", "must have a list 'tools'"),
        ("tools: [3]", "must have a list 'tools'"),
        ("tools: [", "cannot be read"),
        ("tools: [{config: {}}]", "class_name"),
        ("tools: [{class_name: no_such_module.Tool}]", "no_such_module"),
        ("tools: [{class_name: no_such_module.Tool}]", "correct class_name, or add"),
        ("tools: [{class_name: verl_style_tools.CheckAnswr}]", "did you mean CheckAnswer"),
        ("tools: [{class_name: verl_style_tools.Nothing}]", "has no class 'Nothing'"),
        ("tools: [{class_name: verl_style_tools.CheckAnswer, config: {type: mcp}}]", "native"),
        ("tools: [{class_name: verl_style_tools.CheckAnswer}]", "tool_schema"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(folder: Path, text: str, words: str) -> None:
    path = folder / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_verl_tools(path)
    assert words in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tool_config_path"):
        load_verl_tools(tmp_path / "none.yaml")
