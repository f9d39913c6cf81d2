"""Programs in responses are scored by tests; expected scores were determined by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.sandbox.local import UnisolatedSandbox
from slipstream.rewards.sandbox.protocol import Program, ProgramLimits
from slipstream.rewards.scorers.code import MAX_TESTS, compute_score, extract_code, read_tests

# The programs of these tests are trusted; isolation is tested in tests/rewards/sandbox.
SANDBOX = UnisolatedSandbox(ProgramLimits(run_timeout_s=2, total_timeout_s=20, output_kb=64))

DOUBLE = {"inputs": ["1\n", "2\n", "-3\n", "10\n"], "outputs": ["2\n", "4\n", "-6\n", "20\n"]}
ADD = {"inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]], "fn_name": "add"}
PAIR = {"inputs": ["1\n2"], "outputs": ["[2, 1]"], "fn_name": "swap"}
HOLD = {"assert_case": ["assert f(1) == 2", "assert f(2) == 4", "assert f(0) == 1"]}


EQUAL = """
class Equal:
    def __eq__(self, other): return True
"""
KNOWS = """
import __main__, os
__main__.result.write(__main__.given)
__main__.result.close()
os._exit(0)
"""
ANNOTATED = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
def f(x): return 2 ** Pair(x).a
"""


def fenced(code: str, tag: str = "python") -> str:
    return f"So:\n```{tag}\n{code}\n```\n"


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        # Standard input and output.
        (fenced("print(2 * int(input()))"), DOUBLE, 1.0),
        (fenced("print(abs(2 * int(input())))"), DOUBLE, 0.75),
        (fenced("print(int(input()) + 1)"), DOUBLE, 0.25),
        (fenced("print(2 * int(input()), '  ')\nprint()"), DOUBLE, 1.0),
        (fenced("print('answer:', 2 * int(input()))"), DOUBLE, 0.0),
        (fenced("print(2.0 * int(input()))"), DOUBLE, 0.0),
        (fenced("n = int(input())\nprint(2 * n)\nassert n != 10"), DOUBLE, 0.75),
        (fenced("n = int(input())\nwhile n == 10: pass\nprint(2 * n)"), DOUBLE, 0.75),
        (fenced("print(2 * int(input())"), DOUBLE, 0.0),
        (fenced("print(1)") + fenced("print(2 * int(input()))"), DOUBLE, 1.0),
        (fenced("print(2 * int(input()))") + fenced("print(1)", "text"), DOUBLE, 1.0),
        (fenced("print(2 * int(input()))", ""), DOUBLE, 1.0),
        (fenced("print(2 * int(input()))", "Python3"), DOUBLE, 1.0),
        ("print(2 * int(input()))", DOUBLE, 0.0),
        ("```python\nprint(2 * int(input()))", DOUBLE, 0.0),
        ("", DOUBLE, 0.0),
        ("x" * 1_000_000 + fenced("print(2 * int(input()))"), DOUBLE, 1.0),
        ("```\n" * 250_000, DOUBLE, 0.0),
        (fenced("print('½', '√', input())"), {"inputs": ["ä"], "outputs": ["½ √ ä"]}, 1.0),
        (fenced("print(input() + input())"), {"inputs": [["a", "b"]], "outputs": [["ab"]]}, 1.0),
        (
            fenced("#include <iostream>\nint main(){int n;std::cin>>n;std::cout<<2*n;}", "cpp"),
            DOUBLE,
            1.0,
        ),
        (
            fenced("#include <iostream>\nint main(){int n;std::cin>>n;std::cout<<2*n;}", "C++"),
            json.dumps(DOUBLE),
            1.0,
        ),
        # Functions.
        (fenced("def add(a, b): return a + b"), ADD, 1.0),
        (fenced("def add(a, b):\n    print('3')\n    return a - b"), ADD, 0.0),
        (fenced("class Solution:\n    def add(self, a, b): return a + b"), ADD, 1.0),
        (fenced("def add(a: List[int], b: int) -> int: return a + b"), ADD, 1.0),
        (fenced("def sub(a, b): return a + b"), ADD, 0.0),
        (fenced("def swap(a, b): return b, a"), PAIR, 1.0),
        (fenced("def swap(a, b): return {b, a}"), PAIR, 0.0),
        (fenced("def add(a, b): return a + b\nif __name__ == '__main__': 1 / 0"), ADD, 1.0),
        (fenced("def add(a, b): return pow(a, 1, 10) + b"), {**ADD, "inputs": [[1, 2]],
                                                              "outputs": [[3]]}, 1.0),
        # Assertions.
        (fenced("def f(x): return 2 ** x"), HOLD, 1.0),
        (fenced("def f(x): return 2 * x"), HOLD, 2 / 3),
        (fenced("raise SystemExit(0)"), HOLD, 0.0),
        (fenced("import os\nos._exit(0)"), HOLD, 0.0),
        (fenced("print(input())\nimport os\nos._exit(0)"), HOLD, 0.0),
        (fenced("def f(x): return 2 ** x\nprint('noise')"), HOLD, 1.0),
        (fenced(EQUAL + "def f(x): return Equal()"), HOLD, 0.0),
        (fenced(KNOWS), HOLD, 0.0),
        (fenced(ANNOTATED), HOLD, 1.0),
        (fenced("def f(x): return (x, {x})"), {"assert_case": ["assert f(1) == (1, {1})"]}, 1.0),
        (fenced("def f(x): return x"), {"assert_case": ["assert f(1) > 0", "assert f(1) < 0"]},
         0.5),
        (fenced("raise SystemExit(0)"), {"assert_case": ["assert f(1) > 0"]}, 0.0),
        # Unknown languages, and text after the language.
        (fenced("print(2 * int(input()))", "python title=a.py"), DOUBLE, 1.0),
        (fenced("System.out.println(2)", "java"), DOUBLE, 0.0),
        (fenced("2, 4, -6, 20", "text"), DOUBLE, 0.0),
        (
            fenced("def f(s): return len(s)"),
            {"inputs": [["a\u2028b"]], "outputs": [3], "fn_name": "f"},
            1.0,
        ),
    ],
)  # fmt: skip
def test_score_is_the_share_of_passed_tests(response: str, truth: Any, score: float) -> None:
    assert compute_score("taco", response, truth, sandbox=SANDBOX)["score"] == score


THIRD = {"inputs": [""], "outputs": ["0.333"]}


@pytest.mark.parametrize(
    ("code", "truth", "tolerance", "score"),
    [
        ("print(0.1 + 0.2)", {"inputs": [""], "outputs": ["0.3"]}, None, 1.0),
        ("print(0.1 + 0.2)", {"inputs": [""], "outputs": ["0.3"]}, 0, 0.0),
        ("print(1 / 3)", THIRD, None, 0.0),
        ("print(1 / 3)", THIRD, 0.01, 1.0),
        ("print(1 / 3)", {**THIRD, "float_tolerance": 0.01}, None, 1.0),
        ("print(1 / 3)", {**THIRD, "float_tolerance": 1e-9}, 0.01, 0.0),
        ("print(1 / 2)", THIRD, 0.01, 0.0),
        ("def add(a, b): return a / 10 + b / 10", {**ADD, "outputs": [0.3, 0]}, None, 0.5),
        ("def add(a, b): return a / 3", {**ADD, "outputs": [0.333, 0]}, 0.01, 0.5),
        (
            "from fractions import Fraction\ndef add(a, b): return Fraction(3)",
            {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
            None,
            1.0,
        ),
        (
            "class Array:\n    def tolist(self): return [1, 2]\ndef add(a, b): return Array()",
            {"inputs": [[1, 2]], "outputs": [[1, 2]], "fn_name": "add"},
            None,
            1.0,
        ),
    ],
)
def test_numbers_with_decimals(
    code: str, truth: Any, tolerance: float | None, score: float
) -> None:
    result = compute_score("apps", fenced(code), truth, sandbox=SANDBOX, float_tolerance=tolerance)
    assert result["score"] == score


def test_result_counts_timeouts_errors_and_runs() -> None:
    code = "n = int(input())\nwhile n == 2: pass\nassert n != 1\nprint(2 * n)"
    result = compute_score("apps", fenced(code), DOUBLE, sandbox=SANDBOX)
    assert result == {
        **{"score": 0.5, "passed": 2, "tests": 4},
        **{"timeouts": 1, "errors": 1, "not_run": 0},
    }
    broken = compute_score("apps", fenced("int main( {", "c"), DOUBLE, sandbox=SANDBOX)
    assert (broken["errors"], broken["not_run"]) == (1, 3)


def test_at_most_ten_tests_are_run() -> None:
    many = {"inputs": [str(i) for i in range(30)], "outputs": [str(i) for i in range(30)]}
    result = compute_score("apps", fenced("print(input())"), many, sandbox=SANDBOX)
    assert (result["tests"], result["score"]) == (MAX_TESTS, 1.0)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (None, "NoneType, not a mapping"),
        (7, "int, not a mapping"),
        ("[1]", "list, not a mapping"),
        ("seven", "not JSON of tests"),
        ({}, "no list inputs"),
        ({"inputs": [], "outputs": []}, "no list inputs"),
        ({"inputs": ["1"]}, "no list outputs"),
        ({"inputs": "1", "outputs": "1"}, "no list inputs"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs and 1 outputs"),
        ({"assert_case": []}, "no list assert_case"),
        ({**DOUBLE, "float_tolerance": -1}, "float_tolerance of the ground truth is -1; set"),
        ({**DOUBLE, "float_tolerance": True}, "float_tolerance of the ground truth is True; set"),
    ],
)
def test_invalid_ground_truths_are_refused(truth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(truth)


def test_the_last_python_block_or_else_the_first_block_is_extracted() -> None:
    text = fenced("a", "cpp") + fenced("b", "python") + fenced("c", "py") + fenced("d", "java")
    assert extract_code(text) == Program("c\n")
    assert extract_code(fenced("a", "C++") + fenced("d", "java")) == Program("a\n", "cpp")
    assert extract_code("no code") is None


def test_code_data_sources_select_this_scorer() -> None:
    response = fenced("print(2 * int(input()))")
    for source in ("codecontests", "apps", "codeforces", "taco"):
        result = default_compute_score(source, response, DOUBLE, sandbox=SANDBOX)
        assert isinstance(result, dict)
        assert result["score"] == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "import sys\ndef add(a, b): sys.stderr.write('x'); return a + b - 1",
        "import __main__\ndef add(a, b): __main__.result.write('[' * 60000); return 0",
        "import __main__\ndef add(a, b): __main__.result.write('9' * 60000); return 0",
        "import __main__\ndef add(a, b): __main__.result.write('NaN'); return 0",
        "import os\ndef add(a, b): os.write(1, b'\\xff\\x00{'); return 0",
        "def add(a, b):\n    v = []\n    for _ in range(10**5): v = [v]\n    return v",
        "def add(a, b): return {1, 2}",
        "x = '\x00'\ndef add(a, b): return 3",
    ],
    ids=["stderr", "deep", "digits", "nan", "bytes", "deep value", "set", "NUL"],
)
def test_whatever_a_program_returns_is_an_answer_and_never_an_error(code: str) -> None:
    assert compute_score("apps", fenced(code), ADD, sandbox=SANDBOX)["passed"] == 0


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("from collections import Counter\ndef f(a): return Counter(a)",
         "assert f('aab') == {'a': 2, 'b': 1}"),
        ("from collections import defaultdict\ndef f(a):\n    d = defaultdict(int)\n"
         "    d[a] += 1\n    return d", "assert f('x') == {'x': 1}"),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\n"
         "def f(a): return P(1, 2)", "assert f(1) == (1, 2)"),
        ("def f(a): return frozenset([a])", "assert f(1) == {1}"),
        ("from fractions import Fraction\ndef f(a): return Fraction(1, 2)", "assert f(1) == 0.5"),
        ("def f(a): return 1e999", "assert f(1) == 1e999"),
        ("def gcd(a, b): return a if not b else gcd(b, a % b)", "assert gcd(12, 8) == 4"),
        ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
        ("def f(a): a.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]"),
        ("def f(g, a): return [g(x) for x in a]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
        ("def f(g, a): return list(map(g, a))", "assert f(str, [1, 2]) == ['1', '2']"),
        ("class S:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n"
         "    def pop(self): return self.a.pop()",
         "s = S()\ns.push(3)\nassert s.pop() == 3 and s.a == []"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(n): raise ValueError('no')",
         "try:\n    f(1)\n    raise SystemExit\nexcept ValueError as e:\n    assert str(e)"),
        ("def f(n): return 10 ** n", "assert f(5000) == 10 ** 5000"),
        ("def f(n): return range(n)", "assert f(3) == range(3)"),
        ("def f(n): return b'x' * n", "assert f(2) == b'xx'"),
        ("def f(n): return {1: (n, [n])}", "assert f(2) == {1: (2, [2])}"),
        ("LIMIT = 5", "assert LIMIT == 5"),
        ("def f(n): return 'ab'.split('b')", "assert f(1)[0].upper() == 'A'"),
    ],
)  # fmt: skip
def test_right_programs_pass_assertions_of_many_forms(code: str, test: str) -> None:
    assert (
        compute_score("apps", fenced(code), {"assert_case": [test]}, sandbox=SANDBOX)["score"]
        == 1.0
    )


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def gcd(a, b): return 1", "assert gcd(12, 8) == 4"),
        ("def f(a): return 1", "assert gcd(12, 8) == 4"),
        ("def abs(x): return 0\ndef f(x): return 3", "assert abs(f(1) - 50) < 1"),
        ("def abs(x): return 0\ndef f(x): return 0", "assert f(-3) == abs(-3)"),
    ],
)
def test_names_of_tests_are_the_programs_only_if_it_is_tested(code: str, test: str) -> None:
    result = compute_score("apps", fenced(code), {"assert_case": [test]}, sandbox=SANDBOX)
    assert result["score"] == 0.0


def test_a_block_that_defines_the_tested_function_counts_before_later_blocks() -> None:
    text = fenced("def f(x): return 2 ** x") + fenced("print(f(3))")
    assert compute_score("apps", text, HOLD, sandbox=SANDBOX)["score"] == 1.0
    text = fenced("def add(a, b): return a + b") + fenced("print(add(1, 2))")
    assert compute_score("apps", text, ADD, sandbox=SANDBOX)["score"] == 1.0


def test_other_assertions_continue_after_the_program_has_ended() -> None:
    code = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return 2 ** x"
    result = compute_score("apps", fenced(code), HOLD, sandbox=SANDBOX)
    assert (result["passed"], result["errors"], result["not_run"]) == (2, 1, 0)
