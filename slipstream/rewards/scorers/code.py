"""Scores code by the share of tests that it passes (APPS, TACO, CodeContests, Codeforces).

The program is the last fenced Python block of the response, or if there is none the first fenced
block. There are three kinds of tests: the output for a standard input, the return value of a
function for arguments, and assertions. Expected values are never sent to the program. Outputs and
return values are compared here (`outputs`). Assertions are evaluated in another process
(`assertions`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.rewards.sandbox.local import BubblewrapSandbox
from slipstream.rewards.sandbox.protocol import Program, ProgramResult, Sandbox
from slipstream.rewards.scorers import assertions, outputs
from slipstream.rewards.scorers.assertions import IMPORTS

MAX_TESTS = 10
"""Maximum number of tests per program; the first ones are used, as in verl."""

_FENCE = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)

_PYTHON = frozenset({"python", "python3", "py"})
_NAMES = {"c++": "cpp", "cc": "cpp", "cxx": "cpp"}


@dataclass(frozen=True, slots=True)
class Tests:
    """Tests of a program: `stdins`, and the expected output for each.

    With `function`, a standard input has the arguments, one JSON value per line. With `assertions`,
    the inputs are the assertion texts, and there are no expected outputs. `float_tolerance` is the
    row's own tolerance (see `outputs`).
    """

    stdins: tuple[str, ...]
    outputs: tuple[str, ...]
    function: str | None = None
    assertions: bool = False
    float_tolerance: float | None = None

    @property
    def names(self) -> frozenset[str]:
        """The functions and classes that the tests use."""
        if self.function is not None:
            return frozenset({self.function, "Solution"})
        used = (assertions.used_names(text) for text in self.stdins if self.assertions)
        return frozenset().union(*used)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    sandbox: Sandbox | None = None,
    float_tolerance: float | None = None,
) -> dict[str, Any]:
    """Return `score`, the share of passed tests, and counts.

    The counts are `passed`, `tests`, `timeouts`, `errors` (ended with an error), and `not_run`
    (total time exceeded, or the program did not compile). The score is 0 without code.

    `ground_truth` is a mapping or its JSON text. It has `inputs` and `outputs`, and `fn_name` if
    these are arguments and results of a function; or `assert_case`, a list of statements.
    Numbers with decimals in outputs and results may differ by `float_tolerance` times the expected
    number: None is a rounding error, 0 compares texts. A key `float_tolerance` of the ground truth
    takes precedence. `sandbox` runs the program; None is bubblewrap. Raises ValueError for other
    ground truths, and SandboxError or RewardError if programs cannot be run.
    """
    tests = read_tests(ground_truth)
    program = extract_code(solution_str, tests.names)
    if program is None:
        return _result(tests, [], 0)
    runs = sandbox or BubblewrapSandbox()
    if not runs.knows(program.language):
        return _result(
            tests, [ProgramResult("compile", stderr=f"no language: {program.language}")], 0
        )
    if tests.assertions:
        return _asserted(program, tests, runs)
    if tests.function is not None:
        program = Program(_loaded(program.code, _CALL, name=tests.function))
    ran = list(runs.run(program, tests.stdins))
    same = outputs.same_value if tests.function is not None else outputs.same_text
    tolerance = float_tolerance if tests.float_tolerance is None else tests.float_tolerance
    passed = sum(
        run.verdict == "ok" and same(run.stdout, expected, tolerance)
        for run, expected in zip(ran, tests.outputs, strict=False)
    )
    return _result(tests, ran, passed)


def _defines(code: str, name: str) -> bool:
    return (
        re.search(rf"^\s*(?:async\s+)?(?:def|class)\s+{re.escape(name)}\b", code, re.M) is not None
    )


def extract_code(response: str, names: Collection[str] = ()) -> Program | None:
    """Return the last fenced Python block, else the first fenced block; None without any.

    Blocks that define one of `names` come first.
    """
    # Only the first word of the tag is the language; the rest is formatting options.
    blocks = [((tag.lower().split() or [""])[0], code) for tag, code in _FENCE.findall(response)]
    if not blocks:
        return None
    pythons = [code for tag, code in blocks if tag in _PYTHON]
    if pythons:
        # Many responses end with a block that shows how to call the solution.
        defining = [code for code in pythons if any(_defines(code, name) for name in names)]
        return Program((defining or pythons)[-1])
    tag, code = blocks[0]
    return Program(code, _NAMES.get(tag, tag) or "python")


def read_tests(ground_truth: Any) -> Tests:
    """Return the first `MAX_TESTS` tests. Raises ValueError if the ground truth is invalid."""
    given = ground_truth
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"code: the ground truth is not JSON of tests ({error})") from error
    if not isinstance(given, Mapping):
        raise ValueError(
            f"code: the ground truth is {type(given).__name__}, not a mapping of tests"
        )
    if (statements := given.get("assert_case")) is not None:
        lines = tuple(map(str, _listed(statements, "assert_case")[:MAX_TESTS]))
        return Tests(lines, ("",) * len(lines), assertions=True)
    function = given.get("fn_name")
    of_input, of_output = (_arguments, _returned) if function else (_printed, _printed)
    inputs = tuple(map(of_input, _listed(given.get("inputs"), "inputs")))
    expected = tuple(map(of_output, _listed(given.get("outputs"), "outputs")))
    if len(inputs) != len(expected):
        raise ValueError(f"code: {len(inputs)} inputs and {len(expected)} outputs")
    return Tests(
        inputs[:MAX_TESTS],
        expected[:MAX_TESTS],
        str(function) if function else None,
        float_tolerance=_tolerance(given.get("float_tolerance")),
    )


def _tolerance(value: Any) -> float | None:
    """Return a tolerance. Raises ValueError unless it is None or a number of 0 or more."""
    if value is None:
        return None
    if not outputs.is_tolerance(value):
        raise ValueError(
            f"code: float_tolerance of the ground truth is {value!r}; set a number of 0 or more"
        )
    return float(value)


def _listed(values: Any, name: str) -> list[Any]:
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError(f"code: the ground truth has no list {name}")
    return list(listed)


def _printed(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> str:
    """Return the arguments as text, one JSON value per line."""
    return value if isinstance(value, str) else "\n".join(json.dumps(part) for part in value)


def _returned(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _result(tests: Tests, ran: list[ProgramResult], passed: int) -> dict[str, Any]:
    count = len(tests.stdins)
    return {
        "score": passed / count,
        "passed": passed,
        "tests": count,
        "timeouts": sum(run.verdict == "time" for run in ran),
        "errors": sum(run.verdict not in ("ok", "time") for run in ran),
        "not_run": count - len(ran),
    }


_LOAD = """\
import json, os, sys, types
given = sys.stdin.read()
result = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# Known as a module, for what looks its own up there (data classes do).
module = sys.modules["solution"] = types.ModuleType("solution")
space = vars(module)
exec({imports!r}, space)
exec(compile({code!r}, "solution.py", "exec"), space)
"""
"""Loads the program. Its prints go to standard error; standard output is only for the result."""

_CALL = """\
arguments = [json.loads(line) for line in given.split("\\n") if line.strip()]
function = getattr(space["Solution"](), {name!r}) if "Solution" in space else space[{name!r}]
def plain(value):
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "numerator") or hasattr(value, "as_tuple"):
        return float(value)
    raise TypeError(type(value).__name__)
result.write(json.dumps(function(*arguments), default=plain))
result.close()
"""
"""Writes the return value of a function as JSON. Arrays become lists; fractions and decimals become
numbers."""


def _loaded(code: str, then: str, **values: str) -> str:
    return _LOAD.format(imports=IMPORTS, code=code) + then.format(**values)


def _asserted(program: Program, tests: Tests, sandbox: Sandbox) -> dict[str, Any]:
    """Run assertions until each has a verdict, or the total time is up.

    One process serves all of them. If it ends or reaches a limit, the assertion of that time fails,
    and another process serves the remaining ones.
    """
    results, passed = [], 0
    for result in sandbox.converse(
        assertions.serving(program.code),
        lambda first: assertions.judging(tests.stdins[first:]),
        len(tests.stdins),
    ):
        judged = assertions.judged(result)
        passed += judged.held
        results.append(judged.result)
    return _result(tests, results, passed)
