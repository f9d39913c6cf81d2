"""Code, run against tests (APPS, TACO, CodeContests, Codeforces): the share that it passes.

The program is the response's last Python block in a fence, else its first block. Tests are of one
of three kinds: what a program prints for a standard input, what a function returns for arguments,
and assertions. What is expected is compared here, and is not where the program runs: of
`assert f(1) == 2` the program is asked for `f(1)`. An assertion of another form runs in the
program's process, which can deceive it.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.rewards.sandbox.local import BubblewrapSandbox
from slipstream.rewards.sandbox.protocol import Program, ProgramResult, Sandbox

MOST_TESTS = 10
"""Of a program's tests so many are run, the first ones (VERL's)."""

_FENCE = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)

_PYTHON = frozenset({"python", "python3", "py"})
_NAMES = {"c++": "cpp", "cc": "cpp", "cxx": "cpp"}


@dataclass(frozen=True, slots=True)
class Tests:
    """`stdins` and what is expected for each; for a function the arguments, one JSON value a line;
    for assertions their text, and nothing is expected."""

    stdins: tuple[str, ...]
    outputs: tuple[str, ...]
    function: str | None = None
    assertions: bool = False


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    sandbox: Sandbox | None = None,
) -> dict[str, Any]:
    """`score`: the share of the tests that pass, with `passed` and `tests`, and how many ran out of
    time (`timeouts`), ended with an error (`errors`), or were not run, for the total time was up or
    the program did not compile (`not_run`). 0 without code.

    `ground_truth`: a mapping, or JSON of one, with `inputs` and `outputs`, and `fn_name` where they
    are arguments and results of a function; or with `assert_case`, a list of statements. `sandbox`:
    where to run it; bubblewrap by default. Raises ValueError for other ground truths, SandboxError
    and RewardError where programs cannot be run.
    """
    tests = read_tests(ground_truth)
    program = extract_code(solution_str)
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
    same = _same_value if tests.function is not None else _same_text
    passed = sum(
        run.verdict == "ok" and same(run.stdout, expected)
        for run, expected in zip(ran, tests.outputs, strict=False)
    )
    return _result(tests, ran, passed)


def extract_code(response: str) -> Program | None:
    """The last Python block, else the first block of another language; None without any."""
    # What follows the language is for whoever shows the block.
    blocks = [((tag.lower().split() or [""])[0], code) for tag, code in _FENCE.findall(response)]
    if not blocks:
        return None
    pythons = [code for tag, code in blocks if tag in _PYTHON]
    if pythons:
        return Program(pythons[-1])
    tag, code = blocks[0]
    return Program(code, _NAMES.get(tag, tag) or "python")


def read_tests(ground_truth: Any) -> Tests:
    """The first `MOST_TESTS` of a ground truth. Raises ValueError, saying what is wrong with it."""
    given = ground_truth
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"code: the ground truth is no JSON of tests ({error})") from error
    if not isinstance(given, Mapping):
        raise ValueError(
            f"code: the ground truth is {type(given).__name__}, not a mapping of tests"
        )
    if (statements := given.get("assert_case")) is not None:
        lines = tuple(map(str, _listed(statements, "assert_case")[:MOST_TESTS]))
        return Tests(lines, ("",) * len(lines), assertions=True)
    function = given.get("fn_name")
    of_input, of_output = (_arguments, _returned) if function else (_printed, _printed)
    inputs = tuple(map(of_input, _listed(given.get("inputs"), "inputs")))
    outputs = tuple(map(of_output, _listed(given.get("outputs"), "outputs")))
    if len(inputs) != len(outputs):
        raise ValueError(f"code: {len(inputs)} inputs and {len(outputs)} outputs")
    return Tests(inputs[:MOST_TESTS], outputs[:MOST_TESTS], str(function) if function else None)


def _listed(values: Any, name: str) -> list[Any]:
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError(f"code: the ground truth has no list of {name}")
    return list(listed)


def _printed(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> str:
    """One JSON value a line."""
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


def _same_text(stdout: str, expected: str) -> bool:
    """Line by line, but for white space at the ends of lines and of the text."""
    return _trimmed(stdout) == _trimmed(expected)


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_value(stdout: str, expected: str) -> bool:
    """As values: 1.0 is 1, and white space does not matter. APPS wraps some results into a list."""
    try:
        got = json.loads(stdout)
    except ValueError:
        return False
    try:
        wanted = json.loads(expected)
    except ValueError:
        return bool(got == expected)
    return bool(got == wanted or [got] == wanted)


_IMPORTS = """\
import bisect, collections, copy, functools, heapq, itertools, math
import operator, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, groupby, permutations, product
from math import ceil, comb, factorial, floor, gcd, inf, lcm, sqrt
from typing import *
"""
"""What solutions on such sites may use without saying so."""

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
"""What a program prints goes to standard error; standard output is for what is asked of it."""

_CALL = """\
arguments = [json.loads(line) for line in given.split("\\n") if line.strip()]
function = getattr(space["Solution"](), {name!r}) if "Solution" in space else space[{name!r}]
result.write(json.dumps(function(*arguments)))
result.close()
"""
"""Prints what a function returns."""

_VALUE = """\
result.write(repr(eval(compile({expression!r}, "test.py", "eval"), space)))
result.close()
"""

_ASSERT = """\
exec(compile({assertion!r}, "test.py", "exec"), space)
result.write(given)
result.close()
"""
"""Says the word that it was given where the assertion holds."""


def _loaded(code: str, then: str, **values: str) -> str:
    return _LOAD.format(imports=_IMPORTS, code=code) + then.format(**values)


def _compared(assertion: str) -> tuple[str, Any] | None:
    """Of `assert EXPRESSION == LITERAL` the expression and the value; None for another one."""
    try:
        (statement,) = ast.parse(assertion.strip()).body
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
            test = statement.test
            if len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
                return ast.unparse(test.left), ast.literal_eval(test.comparators[0])
    except (ValueError, SyntaxError):
        pass
    return None


def _is(stdout: str, value: Any) -> bool:
    try:
        return bool(ast.literal_eval(stdout) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _asserted(program: Program, tests: Tests, sandbox: Sandbox) -> dict[str, Any]:
    ran: list[ProgramResult] = []
    passed = 0
    for assertion in tests.stdins:
        word = secrets.token_hex(16)
        if (compared := _compared(assertion)) is not None:
            expression, value = compared
            text = _loaded(program.code, _VALUE, expression=expression)
        else:
            text = _loaded(program.code, _ASSERT, assertion=assertion)
        for run in sandbox.run(Program(text), [word]):
            ran.append(run)
            held = run.stdout == word if compared is None else _is(run.stdout, value)
            passed += run.verdict == "ok" and held
    return _result(tests, ran, passed)
