"""Runs cases of bad input: real configurations, tools, servers and episodes of the rollout manager.

Only the turns of the policy are scripted.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from slipstream.build.data import make_data_buffer
from slipstream.build.episodes import (
    changed_turns,
    make_episodes,
    make_renderer,
    make_tools,
    tool_schemas,
)
from slipstream.config import Hardware, load_config
from slipstream.config.schema import Config
from slipstream.data.data_buffer import DataBuffer
from slipstream.environment.tools.mcp import close_servers
from slipstream.errors import SlipstreamError
from slipstream.inference.fake import FakeEngine, ScriptedCore
from slipstream.rewards.protocol import Score
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.types import GenerateRequest, Prompt, Sample, SamplingParams
from tests.data.helpers import char_tokenizer
from tests.docs.pages import DOCS, ROOT
from tests.environment import bad_code
from tests.environment.serving import serving
from tests.rollout.tool_templates import tool_tokenizer

KEY = "actor_rollout_ref.rollout.multi_turn"
FUNCTIONS = f"{KEY}.function_tool_path={bad_code.__file__}"
ENVIRONMENT = (f"{KEY}.environment.path=pkg://{bad_code.__name__}", f"{KEY}.environment.name")
SERVER = "tests.environment.tools.mcp_server"
BOUND: dict[str, Any] = {"tools_kwargs": {"spoil": {"create_kwargs": {"seen": [1]}}}}
"""What a row gives to the tool `spoil`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the user or the policy was told, and how the sample was counted."""

    told: Sequence[str]
    counted: str = ""


def config_of(*overrides: str) -> Config:
    line = ["data.train_files=[train.jsonl]", "actor_rollout_ref.model.path=model"]
    line += [f"data.max_{part}_length=20000" for part in ("prompt", "response")]
    line += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100000", *overrides]
    return load_config(overrides=line, hardware=Hardware(gpus=0), notify=lambda _: None)


class Scorer:
    """Gives every sample the score 0."""

    async def score_sample(self, sample: Sample) -> Score:
        return Score(0.0)

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(0.0) for _ in samples]


def call(name: str, /, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def episodes(
    turns: Sequence[str],
    *overrides: str,
    family: str = "qwen25",
    extra: dict[str, Any] | None = None,
    samples: int = 1,
) -> list[Sample]:
    """Run episodes in which the policy writes `turns`, and the last one from then on."""
    tokenizer = tool_tokenizer(family)
    config = config_of(*overrides)
    messages = [{"role": "user", "content": "question"}]
    ids = make_renderer(config, tokenizer).prompt(messages, tool_schemas(config) or [])

    row = Prompt(uid="q", ids=ids, messages=messages, extra_info=extra or BOUND)

    def script(request: GenerateRequest) -> Sequence[int]:
        text = tokenizer.decode([*request.prompt_ids, *request.prior_ids])
        number = text.count("<|im_start|>assistant\n") - 1
        turn = turns[min(number, len(turns) - 1)] + tokenizer.eos_token
        before = [0] * len(request.prior_ids)
        return [*before, *tokenizer.encode(turn, add_special_tokens=False)]

    rollout = config.actor_rollout_ref.rollout
    core = ScriptedCore(
        script,
        vocab_size=len(tokenizer),
        max_model_len=10**8,
        eos_token_ids=[tokenizer.eos_token_id],
    )
    manager = AsyncRolloutManager(
        [FakeEngine(core)],
        DataBuffer([row], shuffle=False),
        Scorer(),
        RolloutSettings(
            batch_size=1,
            n=samples,
            seed=7,
            params=SamplingParams(max_tokens=config.data.max_response_length),
            timeout_s=rollout.timeout_s or 60.0,
            episode_timeout_s=rollout.episode_timeout_s,
        ),
        episodes=make_episodes(config, tokenizer),
    )

    async def work() -> list[Sample]:
        (group,) = await manager.generate_batch()
        await manager.close()
        return group.samples

    try:
        return anyio.run(work)
    finally:
        close_servers(make_tools(config))


def outcome(sample: Sample, family: str = "qwen25") -> Outcome:
    """What the policy was told in an episode, and how the episode was counted."""
    tokenizer, told = tool_tokenizer(family), list[str]()
    for segment in (one for branch in sample.branches for one in branch.segments[1:]):
        text = str(tokenizer.decode(segment.ids))
        if segment.role == "tool":
            told += re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)
        elif segment.role != "assistant":
            told += re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)
    record = sample.episode
    assert record is not None
    counted = {
        "status": sample.status.value,
        "calls": record.calls,
        "problems": {str(name): count for name, count in record.problems.items()},
        "truncated_by": record.truncated_by,
        "branches": len(sample.branches),
    }
    if sample.failure:
        told.append(sample.failure)
    if record.truncated_by and not told:
        told.append(f"(metric episode/truncated/{record.truncated_by})")
    return Outcome(told, " ".join(f"{name}={value}" for name, value in counted.items() if value))


def episode(
    *turns: str, settings: Sequence[str] = (FUNCTIONS,), family: str = "qwen25"
) -> Callable[[Path], Outcome]:
    """The case of an episode."""

    def run(folder: Path) -> Outcome:
        (sample,) = episodes([*turns, "done"], *settings, family=family)
        return outcome(sample, family)

    return run


def refused(work: Callable[[Path], Any]) -> Callable[[Path], Outcome]:
    """The case of an error that ends the run, or of warnings."""

    def run(folder: Path) -> Outcome:
        with warnings() as told:
            try:
                work(folder)
            except SlipstreamError as error:
                kind = type(error).__name__
                return Outcome([str(error)], f"the run ends: {kind}, status {error.exit_code}")
        return Outcome(told, "the run continues" if told else "")

    return run


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The warnings that are logged."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slipstream").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("slipstream").removeHandler(handler)


def settings(*overrides: str) -> Callable[[Path], Outcome]:
    return refused(lambda _: config_of(*overrides))


def file(setting: str, text: str, *more: str) -> Callable[[Path], Outcome]:
    """The case of a file of tools, servers or interactions."""

    def work(folder: Path) -> None:
        path = folder / "given.py"
        path.write_text(text)
        make_episodes(config_of(f"{KEY}.{setting}={path}", *more), tool_tokenizer("qwen25"))

    return refused(work)


def row(
    extra: dict[str, Any], *overrides: str, interactions: str = ""
) -> Callable[[Path], Outcome]:
    """The case of a row of the training data."""

    def work(folder: Path) -> None:
        path, users = folder / "train.jsonl", folder / "users.yaml"
        message = {"role": "user", "content": "question"}
        path.write_text(json.dumps({"prompt": [message], "extra_info": extra}))
        more = list(overrides)
        if interactions:
            users.write_text(interactions)
            more.append(f"{KEY}.interaction_config_path={users}")
        make_data_buffer(
            config_of(*more, f"data.train_files={path}"), tool_tokenizer("qwen25"), None
        )

    return refused(work)


def template(history: str) -> Callable[[Path], Outcome]:
    """The case of a chat template that drops earlier reasoning: the note, and an episode."""

    def run(folder: Path) -> Outcome:
        line = [*own("Own"), f"{KEY}.history={history}", f"{KEY}.max_assistant_turns=2"]
        note = changed_turns(config_of(*line), tool_tokenizer("qwen3"))
        (sample,) = episodes(["<think>\nwhy\n</think>\n\nyes"], *line, family="qwen3")
        found = outcome(sample, "qwen3")
        return Outcome([note or "", *found.told], found.counted)

    return run


def no_template(text: str | None) -> Callable[[Path], Outcome]:
    return refused(
        lambda _: make_episodes(config_of(FUNCTIONS), char_tokenizer(chat_template=text))
    )


def own(name: str) -> list[str]:
    """The settings of an environment."""
    return [ENVIRONMENT[0], f"{ENVIRONMENT[1]}={name}"]


def hundred(most: int = 1) -> Callable[[Path], Outcome]:
    """The case of 100 calls in one turn, of which `most` are executed."""
    turn = "\n".join(call("good", x=number) for number in range(100))
    return episode(turn, settings=[FUNCTIONS, f"{KEY}.max_parallel_calls={most}"])


def program(code: str) -> Callable[[Path], Outcome]:
    """The case of a program in the sandbox."""
    line = (f"{KEY}.python_tool=true", "reward_model.sandbox.run_timeout_s=1")
    return episode(call("python", code=code), settings=line)


def spoil(folder: Path) -> Outcome:
    """Two samples of one row, whose tool changes its arguments. The chat template renders what was
    recorded: changed arguments would begin a new branch."""
    turns = [call("spoil", items=[1]), "done"]
    one, other = episodes(turns, FUNCTIONS, f"{KEY}.history=rerender", samples=2)
    return Outcome([*outcome(one).told, *outcome(other).told], outcome(other).counted)


def late(folder: Path) -> Outcome:
    """An environment that answers after its deadline, when it is closed."""
    line = [*own("Late"), "actor_rollout_ref.rollout.episode_timeout_s=0.2"]
    (sample,) = episodes(["done"], *line)
    assert bad_code.Late.answered.wait(10.0)
    return outcome(sample)


def killed(folder: Path) -> Outcome:
    """A function that ends the process: this program, in a process of its own."""
    line = [sys.executable, "-m", "tests.environment.bad_input", "--kill"]
    status = subprocess.run(line, cwd=ROOT, check=False).returncode
    paragraphs = (DOCS / "tools.md").read_text(encoding="utf-8").split("\n\n")
    told = [" ".join(text.split()) for text in paragraphs if "`os._exit`" in text]
    return Outcome([f"docs/tools.md: {text}" for text in told], f"the run ends: status {status}")


def server(*turns: str, http: bool = False) -> Callable[[Path], Outcome]:
    """The case of an MCP server, over standard input and output or HTTP. MARK in a turn is a path
    that does not exist."""

    def run(folder: Path) -> Outcome:
        path, command = folder / "mcp.json", {"command": sys.executable, "args": ["-m", SERVER]}

        def work(target: dict[str, Any]) -> Outcome:
            path.write_text(json.dumps({"mcpServers": {"test": target}}))
            written = [turn.replace("MARK", str(folder / "mark")) for turn in [*turns, "done"]]
            (sample,) = episodes(written, f"{KEY}.mcp_config_path={path}")
            return outcome(sample)

        if not http:
            return work({**command, "cwd": str(ROOT)})
        with serving(SERVER) as (address, _):
            return work({"url": f"{address}/mcp"})

    return run
