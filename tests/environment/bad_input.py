"""Feeds bad input to tools, servers, environments and settings, and prints what becomes of it.

`python -m tests.environment.bad_input` prints for each kind what the user or the policy is told,
and how the sample is counted. The exit status is 1 if a case has no message or another end than
expected.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.environment.bad_cases import (
    FUNCTIONS,
    KEY,
    Outcome,
    call,
    episode,
    episodes,
    file,
    hundred,
    killed,
    late,
    no_template,
    own,
    program,
    refused,
    row,
    server,
    settings,
    spoil,
    template,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of bad input. `words` must be in what was told, and `counted` in how it was counted.
    A `slow` case starts processes, or takes more than 3 s."""

    kind: str
    run: Callable[[Path], Outcome]
    counted: str
    words: Sequence[str]
    slow: bool


def case(
    kind: str, run: Callable[[Path], Outcome], counted: str, *words: str, slow: bool = False
) -> Case:
    return Case(kind, run, counted, words, slow)


def mistake(problem: str) -> str:
    """How an episode with one mistake of the policy is counted."""
    return f"status=completed calls=1 problems={{'{problem}': 1}}"


BARE = "def bare(x):\n    return x\n"
ONE_NAME = """
from slipstream.environment.tools.function import function_tool

@function_tool("look_up")
def one() -> None:
    'One.'

@function_tool("{}")
def two() -> None:
    'Two.'
"""
FILE, SERVERS, CLASSES = "function_tool_path", "mcp_config_path", "tool_config_path"
USERS, ROLLOUT = "interaction_config_path", "actor_rollout_ref.rollout"
NO_SERVER = '{"mcpServers": {"test": {"command": "no-such-program"}}}'
BASE = "slipstream.compat.verl.interactions.base.BaseInteraction"
TEACHER = f"interaction: [{{name: teacher, class_name: {BASE}}}]"
CONFIG, DATA = "the run ends: ConfigError, status 2", "the run ends: DataError, status 3"
GOOD, FAILED, GOES_ON = "status=completed calls=1 branches=1", "status=failed", "the run continues"
THOUGHT = "reasoning before a second question"
LOOKUP = ("data.task=lookup", "data.train_files=null")
UNUSED: tuple[str, ...] = ("history=rerender", "max_tool_seconds=5.0", "max_parallel_calls=4")
UNUSED += ("max_assistant_turns=3", "max_tool_response_length=99")

TEMPLATES = [
    case("template: changes turns, append", template("append"), "branches=1", THOUGHT, "keep all"),
    case("template: changes turns, rerender", template("rerender"), "branches=2", THOUGHT),
    case("template: no tool calls", no_template("{{ 1 }}<e>"), CONFIG, f"{KEY}.format"),
    case("template: none", no_template(None), CONFIG, "custom_chat_template"),
]
TOOLS = [
    case("tool: without schema", file(FILE, BARE), CONFIG, "bare", f"{KEY}.{FILE}", "type hints"),
    case(
        "tool: two of one name",
        file(FILE, ONE_NAME.format("look_up")),
        CONFIG,
        f"'look_up', of {KEY}.{FILE}",
        "rename",
    ),
    case(
        "tool: name of the task's tool",
        file(FILE, ONE_NAME.format("two"), *LOOKUP),
        CONFIG,
        "'look_up', of data.task=lookup and of",
        "rename",
    ),
    case("tool: returns None", episode(call("none")), GOOD, ""),
    case("tool: returns bytes", episode(call("raw")), GOOD, "a\N{REPLACEMENT CHARACTER}<|im_end|>"),
    case("tool: returns 10 MB", episode(call("long")), GOOD, "...(truncated)..."),
    case(
        "tool: returns 10 MB, no limit",
        episode(call("long"), settings=[FUNCTIONS, f"{KEY}.max_tool_response_length=null"]),
        "truncated_by=tokens",
        "episode/truncated/tokens",
    ),
    case("tool: is a coroutine", episode(call("later", x=1)), GOOD, "2"),
    case("tool: raises", episode(call("fail")), mistake("raised"), "LookupError: no such city"),
    case("tool: raises no Exception", episode(call("panic")), mistake("raised"), "out of bounds"),
    case("tool: hangs", episode(call("hang")), mistake("timeout"), "not answer within 0.1 s"),
    case("tool: hangs in a coroutine", episode(call("hang_later")), mistake("timeout"), "0.1 s"),
    case("tool: calls sys.exit", episode(call("leave")), mistake("raised"), "sys.exit(3)"),
    case("tool: calls os._exit", killed, "status 3", SERVERS, slow=True),
    case("tool: changes its arguments", spoil, GOOD, "4\n4"),
    case("python: os._exit", program("import os; os._exit(3)"), GOOD, "failed", slow=True),
    case("python: SIGKILL", program("import os; os.kill(0, 9)"), GOOD, "failed", slow=True),
    case("python: hangs", program("while True: pass"), GOOD, "time limit", slow=True),
]
CALLS = [
    case(
        "call: broken JSON",
        episode('<tool_call>\n{"name": good}\n</tool_call>'),
        mistake("unparsed"),
        "Error: the tool call is not valid JSON",
    ),
    case("call: no end", episode("<tool_call>\n{}"), mistake("unparsed"), "no </tool_call>"),
    case(
        "call: wrong type",
        episode(call("good", x="1")),
        mistake("wrong_arguments"),
        "'x' must be of type integer, not '1'",
    ),
    case("call: no argument", episode(call("good")), mistake("wrong_arguments"), "'x' is missing"),
    case(
        "call: unknown argument",
        episode(call("good", x=1, y=1)),
        mistake("wrong_arguments"),
        "there is no argument 'y'",
    ),
    case("call: unknown name", episode(call("go")), mistake("unknown_tool"), "tools: good, "),
    case("call: 100 at once", hundred(), "problems={'too_many': 99}", "1", "at most 1 calls"),
    case("call: 100 at once, allowed", hundred(100), "status=completed calls=100 branches", "100"),
]
SERVER = [
    case(
        "server: dies, comes back", server(call("die_once", mark="MARK")), GOOD, "back", slow=True
    ),
    case("server: dies at each call", server(call("die")), FAILED, "MCP server 'test'", slow=True),
    case(
        "server: dies, does not come back",
        server(call("add", a=1), call("die"), http=True),
        FAILED,
        "2",
        "MCP server 'test'",
        slow=True,
    ),
    case("server: does not start", file(SERVERS, NO_SERVER), CONFIG, f"{KEY}.{SERVERS}", "check"),
]
ENVIRONMENTS = [
    *(
        case(
            f"environment: never ends, {budget}",
            episode("more", "more", "more", settings=[*own("Own"), setting]),
            f"status=truncated truncated_by={budget}",
            words,
        )
        for budget, setting, words in (
            ("assistant_turns", f"{KEY}.max_assistant_turns=2", "once more"),
            ("user_turns", f"{KEY}.max_user_turns=1", "once more"),
            ("tool_seconds", f"{KEY}.max_tool_seconds=1e-6", "episode/truncated/tool_seconds"),
            ("tokens", "data.max_response_length=100", "once more"),
        )
    ),
    case(
        "environment: hangs, deadline of the episode",
        episode(settings=[*own("Hangs"), f"{ROLLOUT}.episode_timeout_s=0.2"]),
        FAILED,
        f"raise {ROLLOUT}.episode_timeout_s",
    ),
    case(
        "environment: hangs, deadline of the step",
        refused(episode(settings=[*own("Hangs"), f"{ROLLOUT}.timeout_s=0.2"])),
        "the run ends: StageTimeoutError, status 8",
        "0.0 (q)",
        f"{ROLLOUT}.timeout_s",
        f"set {ROLLOUT}.episode_timeout_s",
    ),
    case(
        "environment: crashes",
        episode(settings=own("Raises")),
        "status=truncated problems={'raised': 1} truncated_by=environment_crash",
        "environment_crash",
    ),
    case(
        "environment: answers after close",
        late,
        FAILED,
        f"raise {ROLLOUT}.episode_timeout_s",
    ),
    case(
        "environment: reward is NaN",
        episode(settings=own("NotANumber")),
        FAILED,
        "the reward 'found' of turn 1 is nan",
    ),
]
ROWS = [
    case(
        "row: no interaction_kwargs",
        row({}, interactions=TEACHER),
        DATA,
        "interaction_kwargs.name",
        "known: teacher",
        f"{KEY}.{USERS}",
    ),
    case(
        "row: unknown interaction",
        row({"interaction_kwargs": {"name": "techer"}}, interactions=TEACHER),
        DATA,
        "did you mean teacher",
    ),
    case(
        "row: tools_kwargs of no tool",
        row({"tools_kwargs": {"god": {"create_kwargs": {"x": 1}}}}, FUNCTIONS),
        GOES_ON,
        "tools_kwargs of 'god'",
        "did you mean good",
        f"{KEY}.{FILE}",
    ),
    case(
        "row: tools_kwargs without tools",
        row({"tools_kwargs": {"good": {"create_kwargs": {"x": 1}}}}),
        GOES_ON,
        f"set {KEY}.{CLASSES}",
    ),
]
CLASS_NAMES = [
    case(
        f"{setting}: {what}",
        file(setting, f"{section}: [{{class_name: {name}}}]"),
        CONFIG,
        f"{KEY}.{setting}",
        words,
        "correct class_name",
    )
    for setting, section in ((CLASSES, "tools"), (USERS, "interaction"))
    for what, name, words in (
        ("no such module", "no_module.Tool", "does not import"),
        ("no such class", "tests.environment.bad_code.Tool", "has no class 'Tool'"),
    )
]
SETTINGS = [
    case("enable, no tools", settings(f"{KEY}.enable=true"), CONFIG, FILE, f"{KEY}.enable=false"),
    case(
        "tools, not enabled",
        settings(f"{KEY}.enable=false", FUNCTIONS),
        CONFIG,
        f"set {KEY}.enable=true",
        f"{KEY}.{FILE}=null",
    ),
    *(
        case(f"{one}, no tools", settings(f"{KEY}.{one}"), CONFIG, f"{KEY}.{one} has no effect")
        for one in UNUSED
    ),
]
CASES = [*TEMPLATES, *TOOLS, *CALLS, *SERVER, *ENVIRONMENTS, *ROWS, *CLASS_NAMES, *SETTINGS]


def mistakes(case: Case, found: Outcome) -> list[str]:
    """What is missing in the outcome of a case."""
    told = "\n".join(found.told)
    missing = [word for word in case.words if word not in told]
    missing += [] if case.counted in found.counted else [case.counted]
    return missing if found.told else ["a message", *missing]


def show(found: Outcome) -> None:
    texts = list(Counter(found.told).items())
    for text, count in texts[:3] + texts[3:][-1:]:
        shown = text if len(text) <= 500 else f"{text[:200]} [...] {text[-200:]}"
        print(f"    told{f' {count} times' if count > 1 else ''}: {shown!r}")
    print(f"    counted: {found.counted}")


def main(argv: list[str]) -> int:
    if argv == ["--kill"]:
        episodes([call("kill")], FUNCTIONS)
        return 0
    wrong = 0
    for case in CASES:
        print(case.kind, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = case.run(Path(folder))
        show(found)
        if missing := mistakes(case, found):
            wrong += 1
            print(f"    WRONG: there is no {', '.join(map(repr, missing))}")
    print(f"{len(CASES)} kinds, {wrong} of them not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
