"""Tests programs with assertions, which a process evaluates that the program cannot reach.

The program and the judge of its tests are two programs in two sandboxes. The judge calls the
program's functions over a pipe and gets plain values (`remote_objects`). So a program can neither
write the verdict, nor change what a test compares with, nor read the tests.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from slipstream.rewards.sandbox.protocol import Program, ProgramResult

IMPORTS = """\
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
"""Imports that solutions on programming sites may rely on."""

# The imports are for the solution; it does not offer them unless its text has their names.
_SERVE = """
import sys, types
_lines, _write = streams()
_module = sys.modules["solution"] = types.ModuleType("solution")
# Known as a module, for what looks its own up there (data classes do).
_space = vars(_module)
exec({imports!r}, _space)
_unused = {{name for name in _space if name not in {code!r}}}
exec(compile({code!r}, "solution.py", "exec"), _space)
Peer(_lines, _write, {{name: _space[name] for name in _space if name not in _unused}}).serve()
"""

_JUDGE = """
_lines, _write = streams()
judge(Peer(_lines, _write), {tests!r}, {imports!r})
"""


def serving(code: str) -> Program:
    """Return a program that loads a solution and lets a judge call its functions."""
    return Program(_remote_objects() + _SERVE.format(imports=IMPORTS, code=code))


def judging(assertions: Sequence[str]) -> Program:
    """Return the judge of some assertions. Its verdicts are lines of JSON (see `judged`)."""
    tests = [[text, sorted(_ambient().intersection(used_names(text)))] for text in assertions]
    return Program(_remote_objects() + _JUDGE.format(tests=tests, imports=IMPORTS))


@dataclass(frozen=True, slots=True)
class Judged:
    """A test's result. `held`: the assertion holds."""

    result: ProgramResult
    held: bool = False


def judged(result: ProgramResult) -> Judged:
    """Return whether a test holds, from a result of `Sandbox.converse`.

    The verdict becomes "failed" if the program raised an error or ended.
    """
    if result.verdict != "ok":
        return Judged(result)
    verdict = json.loads(result.stdout)
    held, why = bool(verdict["held"]), str(verdict["why"])
    if held or why.startswith("AssertionError"):
        return Judged(result, held)
    return Judged(replace(result, verdict="failed", stderr=why))


@cache
def _remote_objects() -> str:
    return (files(__package__) / "remote_objects.py").read_text(encoding="utf-8")


@cache
def _ambient() -> frozenset[str]:
    """Return the names that a test may use without the program: built-in and imported ones."""
    space: dict[str, object] = {}
    exec(IMPORTS, space)
    return frozenset(space) | frozenset(dir(builtins))


def used_names(assertion: str) -> list[str]:
    """Return the names in a test that belong to the program.

    A test of a function `gcd` must call the program's `gcd`, not math's. But a program that
    redefines `abs` must not change a test that compares with it. So a built-in or imported name
    belongs to the program only if the test uses no other name of the program. These are then the
    functions that the test passes to its own functions, or else the ones that it calls innermost.
    """
    try:
        tree = ast.parse(assertion)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    nodes = list(ast.walk(tree))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and _stores(node)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {a.asname or a.name for n in nodes if isinstance(n, _IMPORT) for a in n.names}
    own |= {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    if foreign := used - _ambient():
        return sorted(foreign)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    passed = {
        arg.id
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in own
        for arg in [*call.args, *(keyword.value for keyword in call.keywords)]
        if isinstance(arg, ast.Name) and arg.id not in own
    }
    return sorted(passed or {n for call in calls if (n := _innermost(call, own)) is not None})


_IMPORT = (ast.Import, ast.ImportFrom)


def _stores(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _innermost(call: ast.Call, own: set[str]) -> str | None:
    """Return the name that a call calls, if its arguments have no further call of a name."""
    if not isinstance(call.func, ast.Name) or call.func.id in own:
        return None
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    inner = (node for arg in arguments for node in ast.walk(arg) if isinstance(node, ast.Call))
    return None if any(isinstance(node.func, ast.Name) for node in inner) else call.func.id
