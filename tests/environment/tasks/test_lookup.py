"""The tool of the lookup task reads the table of its row."""

from __future__ import annotations

import anyio
import pytest

from slipstream.data.lookup import LookupTask, look_up
from slipstream.environment.tasks import registry
from slipstream.environment.tasks.lookup import LookUpTool
from slipstream.environment.tasks.registry import register_task_tools, task_tools
from slipstream.environment.tools.protocol import ToolResult, tool_name
from slipstream.errors import ConfigError


def test_a_call_reads_the_table_of_the_row_and_costs() -> None:
    task = LookupTask(3, cost=0.25)
    problem, row = task.problem("train", 1), task.prompt("train", 1)

    async def work() -> ToolResult:
        kwargs = row.extra_info["tools_kwargs"]["look_up"]["create_kwargs"]
        session = await LookUpTool().open(kwargs)
        return await session.execute({"name": problem.start})

    result = anyio.run(work)
    assert result.text == look_up(problem.table, problem.start)
    assert result.reward == -0.25


def test_tools_of_tasks_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [tool_name(tool.schema) for tool in task_tools("lookup")] == ["look_up"]
    assert not task_tools("countdown")
    assert not task_tools(None)
    with pytest.raises(ConfigError, match="lookup"):
        register_task_tools("lookup", list)
    monkeypatch.setattr(registry, "_TOOLS", dict(registry._TOOLS))
    register_task_tools("mine", lambda: [LookUpTool()])
    assert len(task_tools("mine")) == 1
