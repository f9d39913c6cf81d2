"""Programs that try to score without solving the task, and forms of tests that they attack.

`python -m tests.rewards.scorers.hacks` runs all of them and prints counts and the highest score.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.rewards.sandbox.local import BubblewrapSandbox
from slipstream.rewards.sandbox.protocol import ProgramLimits
from slipstream.rewards.scorers.code import MAX_TESTS, compute_score

# The task: f(n) is n * n + 1, as an int; g(n) is whether n is even; h(a) sorts a list.
FORMS: list[str] = [
    "assert f(7) == 50",
    "assert 50 == f(7)",
    "assert f(7) == 7 * 7 + 1",
    "assert f(7) == sum(range(11)) - 5",
    "assert not g(7) and g(8)",
    "assert g(8) is True and g(7) is False",
    "assert math.isclose(f(7), 50)",
    "assert abs(f(7) - 50) < 1e-6",
    "assert g(7) == 0 and g(8) != 0 and g(8) is not None",
    "assert f(7) in (50, 51)",
    "assert float(f(7)) == 50.0",
    "assert sorted(h([3, 1, 2])) == [1, 2, 3] and h([2, 1]) == [1, 2]",
    "assert f(7) == 50 and f(8) == 65",
    "x = f(7)\ny = f(8)\nassert x == 50\nassert y == 65",
    "def check(candidate):\n    assert candidate(7) == 50\n    assert candidate(8) == 65\ncheck(f)",
    "assert f(7) < 51 and f(7) > 49",
    "assert str(f(7)) == '50'",
    "assert isinstance(f(7), int) and f(7) % 50 == 0 and 0 < f(7) < 100",
    "assert f(7) != 49 and not f(7) < 50 and not f(7) > 50 and f(7) == f(7)",
    "assert [f(i) for i in range(4)] == [1, 2, 5, 10]",
    "assert {f(1), f(2)} == {2, 5}",
    "assert h([3, 1]) == sorted([3, 1])",
    "a = [3, 1, 2]\nassert h(a) == sorted(a)",
    "a = [3, 1, 2]\nassert len(h(a)) == 3 and all(x <= y for x, y in zip(h(a), h(a)[1:]))",
    "assert all(f(i) == i * i + 1 for i in range(5))",
    "assert any(f(i) == 50 for i in (7,)) == True",
    "assert round(f(7), 2) == 50",
    "assert max(f(7), 0) == min(f(7), 99) == 50",
    "import math\nassert math.sqrt(f(7) - 1) == 7",
    "try:\n    f('x')\nexcept TypeError:\n    pass\nassert f(7) == 50",
]

RIGHT = "def f(n): return n * n + 1\ndef g(n): return n % 2 == 0\ndef h(a): return sorted(a)\n"
_ALL = "def f(n): return {0}\ndef g(n): return {0}\ndef h(a): return {0}\n"

_YES = """
class Yes:
    def __getattr__(self, name): return Yes()
    def __call__(self, *a, **k): return Yes()
    def __hash__(self): return 0
    def __len__(self): return 3
    def __iter__(self): return iter([])
    def __str__(self): return '50'
    __repr__ = __str__
    def __int__(self): return 50
    __index__ = __int__
    def __float__(self): return 50.0
"""
_OPERATORS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "mod"),
    *("rmod", "floordiv", "truediv", "pow", "neg", "bool", "contains", "getitem", "round", "trunc"),
)
_EQUAL = _YES + "".join(f"    def __{name}__(self, *a): return True\n" for name in _OPERATORS)
_ZERO = _YES + "    def __sub__(self, o): return 0\n    def __abs__(self): return 0\n"


def _subclass(kind: str, value: str) -> str:
    methods = "".join(
        f"    def __{name}__(self, *a): return True\n"
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "contains", "bool")
        if not (kind in ("int", "float") and name == "contains")
    )
    return f"class K({kind}):\n    def __hash__(self): return 0\n{methods}" + _ALL.format(
        f"K({value})"
    )


_FORGED = """'{"verdict": 0, "held": true, "why": "", "ended": false}\\n'"""
WRONG = _ALL.format("None")

HACKS: dict[str, str] = {
    # Objects that agree with everything.
    "equal object": _EQUAL + _ALL.format("Yes()"),
    "equal class": _EQUAL + _ALL.format("Yes"),
    "metaclass": "class M(type):\n    def __eq__(c, o): return True\n"
    "    def __hash__(c): return 0\n"
    "    def __bool__(c): return True\n    def __lt__(c, o): return True\n"
    "class C(metaclass=M): pass\n" + _ALL.format("C"),
    "difference zero": _ZERO + _ALL.format("Yes()"),
    "int subclass": _subclass("int", "0"),
    "float subclass": _subclass("float", "0"),
    "str subclass": _subclass("str", "'x'"),
    "list subclass": _subclass("list", "()"),
    "dict subclass": _subclass("dict", "()"),
    "tuple subclass": _subclass("tuple", "()"),
    "set subclass": _subclass("set", "()"),
    "bytes subclass": _subclass("bytes", "b''"),
    "complex subclass": _subclass("complex", "0"),
    "infinite generator": "import itertools\n" + _ALL.format("itertools.count()"),
    "unittest.mock.ANY": "from unittest.mock import ANY\n" + _ALL.format("ANY"),
    "MagicMock": "from unittest.mock import MagicMock\n" + _ALL.format("MagicMock()"),
    "equal module": "import sys\n" + _ALL.format("sys"),
    "nan": _ALL.format("float('nan')"),
    "infinity": _ALL.format("float('inf')"),
    "function": _ALL.format("(lambda *a: True)"),
    "generator of equals": _EQUAL + _ALL.format("(Yes() for _ in range(3))"),
    "list of equals": _EQUAL + _ALL.format("[Yes(), Yes(), Yes()]"),
    "dict of equals": _EQUAL + _ALL.format("{Yes(): Yes()}"),
    "Decimal nan": "from decimal import Decimal\n" + _ALL.format("Decimal('nan')"),
    "__class__ property": "class C:\n    __class__ = property(lambda self: int)\n"
    "    def __eq__(self, o): return True\n    def __hash__(self): return 50\n"
    + _ALL.format("C()"),
    # Patches of what the tests use.
    "patched builtins": "import builtins\n"
    "for name in ('abs', 'all', 'any', 'len', 'sorted', 'float', 'str', 'round', 'max', 'min', "
    "'isinstance', 'sum', 'range'):\n"
    "    setattr(builtins, name, lambda *a, **k: True)\n" + WRONG,
    "patched isclose": "import math\nmath.isclose = lambda *a, **k: True\n"
    "math.sqrt = lambda x: 7\n" + WRONG,
    "patched AssertionError": "import builtins\nbuiltins.AssertionError = type('A', (), {})\n"
    + WRONG,
    "names like builtins": "def abs(x): return 0\ndef sorted(x): return x\n"
    "def float(x): return 50.0\ndef str(x): return '50'\ndef all(x): return True\n"
    "def any(x): return True\ndef isinstance(a, b): return True\ndef round(*a): return 50\n"
    "def max(*a): return 50\ndef min(*a): return 50\ndef len(x): return 3\n"
    "def sum(x): return 5\n"
    "class math:\n    isclose = lambda *a: True\n    sqrt = lambda x: 7\n" + WRONG,
    "names like the test's": "def check(c): pass\ndef candidate(n): return 50\n"
    "def x(): return 50\n" + WRONG,
    "patched json": "import json\njson.dumps = lambda *a, **k: " + _FORGED + "\n" + WRONG,
    "patched encoder": "import __main__\n"
    "__main__.Peer.encode = lambda self, v: {'t': 'builtin', 'v': 'all'}\n" + WRONG,
    "patched answer": "import __main__\n"
    "def answer(self, r): self._write(" + _FORGED + ".strip())\n"
    "__main__.Peer.answer = answer\n" + WRONG,
    "patched compile": "import builtins\nbuiltins.compile = builtins.exec = lambda *a: None\n"
    + WRONG,
    # Verdicts written by the program.
    "verdict on standard output": "print(" + _FORGED + ")\n" + WRONG,
    "verdict on all descriptors": "import os\nfor fd in range(64):\n"
    "    try: os.write(fd, " + _FORGED + ".encode())\n    except OSError: pass\n" + WRONG,
    "verdict in a call": "import os\ndef f(n):\n    for fd in range(64):\n"
    "        try: os.write(fd, "
    + _FORGED
    + ".encode())\n        except OSError: pass\ng = h = f\n",
    "verdict at exit": "import atexit, os\n"
    "atexit.register(lambda: [os.write(fd, " + _FORGED + ".encode()) for fd in (1, 2, 3, 4)])\n"
    "raise SystemExit(0)\n",
    "verdict as a message": "import __main__, json\n"
    "def f(n):\n    __main__._write(" + _FORGED + ".strip())\n    return 50\n"
    "g = h = f\n",
    "verdict in an exception": "def f(n): raise ValueError(" + _FORGED + ")\ng = h = f\n",
    "verdict in a text": _ALL.format("'\\n' + " + _FORGED),
    "word at exit": "import __main__, os\n"
    "try: __main__.result.write(__main__.given)\nexcept Exception: pass\nos._exit(0)\n",
    # Ends that look like success.
    "exit 0": "raise SystemExit(0)\n",
    "os._exit(0)": "import os\nos._exit(0)\n",
    "exit in the call": "import os\ndef f(n): os._exit(0)\ng = h = f\n",
    "exit by exception": "def f(n): raise SystemExit(0)\ng = h = f\n",
    "AssertionError caught": "def f(n): raise AssertionError\ng = h = f\n",
    "StopIteration": "def f(n): raise StopIteration\ng = h = f\n",
    "GeneratorExit": "def f(n): raise GeneratorExit\ng = h = f\n",
    "KeyboardInterrupt": "def f(n): raise KeyboardInterrupt\ng = h = f\n",
    "exec of another program": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', "
    "'print(1)'])\n",
    # Reading the tests, and reaching the judge.
    "reads the test file": "import glob\nfor p in glob.glob('/box/*') + glob.glob('/tmp/**/*.py', "
    "recursive=True):\n    try: text = open(p).read()\n    except OSError: continue\n"
    "    if 'f(7) == 50' in text.replace('f(7) == ' + '50', '', 1):\n"
    "        def f(n): return {7: 50, 8: 65}[n]\n" + WRONG,
    "reads other processes": "import os\nfound = ''\nfor p in os.listdir('/proc'):\n"
    "    try: found += open('/proc/%s/cmdline' % p).read()\n    except OSError: pass\n"
    "if 'assert ' + 'f(7)' in found:\n    def f(n): return n * n + 1\nelse:\n    f = None\n"
    "g = h = f\n",
    "kills all processes": "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\n" + WRONG,
    "kills its parent": "import os\ndef f(n): os.kill(os.getppid(), 9)\ng = h = f\n",
    "looks up frames": "import sys\ndef f(n):\n    frame = sys._getframe()\n"
    "    while frame:\n        for name in ('held', 'value'):\n"
    "            if name in frame.f_locals: frame.f_locals[name] = True\n"
    "        frame = frame.f_back\ng = h = f\n",
    "garbage collector": "import gc\ndef f(n):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict) and 'held' in o: o['held'] = True\ng = h = f\n",
    "trace function": "import sys\n"
    "def trace(frame, event, arg):\n    frame.f_locals['held'] = True\n    return trace\n"
    "sys.settrace(trace)\n" + WRONG,
    "imports the judge": "import __main__\n__main__.judge = __main__.Names = lambda *a: None\n"
    + WRONG,
    # Changes of the test's own values.
    "empties its argument": "def h(a):\n    del a[:]\n    return a\ndef f(n): return None\ng = f\n",
    "returns its argument": _ALL.format("0").replace("h(a): return 0", "h(a): return a"),
    "changes and returns nothing": "def h(a): a[:] = []\nf = g = h\n",
    "calls back": "def f(*a): return [x() for x in a if callable(x)]\ng = h = f\n",
    # Messages that are no values.
    "unknown tag": "import __main__\n"
    "__main__.Peer.encode = lambda self, v: {'t': 'yours', 'v': 0}\n" + WRONG,
    "evaluated text": _ALL.format("\"__import__('os')._exit(0)\""),
    "deep value": "def f(n):\n    v = []\n    for _ in range(100000): v = [v]\n    return v\n"
    "g = h = f\n",
    "deep message": "import __main__\n"
    "def answer(self, r): self._write('[' * 100000)\n__main__.Peer.answer = answer\n" + WRONG,
    "huge integer": _ALL.format("10 ** 100000"),
    "huge text": _ALL.format("'x' * 10**7"),
    "binary message": "import __main__, os\ndef f(n): os.write(1, bytes(range(256)) * 9)\n"
    "g = h = f\n",
    "no message": "import time\ndef f(n): time.sleep(0.01)\ng = h = f\n",
    "attributes of text": _ALL.format("'50'.join"),
    "builtin objects": _ALL.format("max"),
    "builtin exit": _ALL.format("exit"),
    "types": _ALL.format("int"),
    "NotImplemented": _ALL.format("NotImplemented"),
    "Ellipsis": _ALL.format("..."),
    "date": "import datetime\n" + _ALL.format("datetime.date.max"),
    "fraction of equals": "from fractions import Fraction\n"
    "class F(Fraction):\n    def __eq__(self, o): return True\n    __hash__ = Fraction.__hash__\n"
    + _ALL.format("F(1, 3)"),
    "deque of equals": "import collections\n"
    "class D(collections.deque):\n    def __eq__(self, o): return True\n" + _ALL.format("D()"),
    "range subclass": _ALL.format("range(10**9)"),
    "enum of equals": "import enum\nclass E(enum.IntEnum):\n    a = 3\n"
    "    def __eq__(self, o): return True\n    def __hash__(self): return 0\n" + _ALL.format("E.a"),
    "Counter of equals": "import collections\nclass C(collections.Counter):\n"
    "    def __eq__(self, o): return True\n    def __missing__(self, k): return 50\n"
    "    __hash__ = None\n" + _ALL.format("C(a=1)"),
    "OrderedDict of equals": "import collections\nclass C(collections.OrderedDict):\n"
    "    def __eq__(self, o): return True\n" + _ALL.format("C(a=1)"),
    "default of equals": _EQUAL
    + "import collections\n"
    + _ALL.format("collections.defaultdict(lambda: Yes(), a=Yes())"),
    "named tuple of equals": "import collections\n"
    "class N(collections.namedtuple('N', 'count index')):\n"
    "    def __eq__(self, o): return True\n    def __len__(self): return 2\n"
    "    def __float__(self): return 50.0\n" + _ALL.format("N(50, 50)"),
    "names of fields": "class N(tuple):\n"
    "    _fields = ('__eq__', '__class__', 'x) or True #', 'sort')\n"
    "N.__name__ = '__eq__'\n" + _ALL.format("N((1, 2, 3, 50))"),
    "wrapped by collections": "import collections\n"
    "class L(collections.UserList):\n    def __eq__(self, o): return True\n"
    "class S(collections.UserString):\n    def __eq__(self, o): return True\n"
    "def f(n): return S('x')\ndef g(n): return S('')\ndef h(a): return L()\n",
    "mapping of equals": "import collections\nclass M(collections.UserDict):\n"
    "    def __eq__(self, o): return True\n    def __hash__(self): return 50\n"
    + _ALL.format("M(a=1)"),
    "views of equals": "import collections.abc\nclass K(collections.abc.KeysView):\n"
    "    def __init__(self): pass\n    def __iter__(self): return iter([1, 2, 3])\n"
    "    def __len__(self): return 3\n    def __eq__(self, o): return True\n" + _ALL.format("K()"),
    "values of a dict": _ALL.format("dict(enumerate([1, 2, 5, 10])).values()"),
    "time difference of equals": "import datetime\nclass D(datetime.timedelta):\n"
    "    def __eq__(self, o): return True\n    def __hash__(self): return 50\n"
    + _ALL.format("D(50)"),
    "numpy-like": "class A:\n    dtype = 'int64'\n    def tolist(self): return [self]\n"
    "    def __eq__(self, o): return True\n" + _ALL.format("A()"),
    "dataclass of equals": "import dataclasses\n@dataclasses.dataclass(eq=False)\nclass D:\n"
    "    x: int = 0\n    def __eq__(self, o): return True\n" + _ALL.format("D()"),
}


LIMITS = ProgramLimits(run_timeout_s=0.5, total_timeout_s=30.0)


def passed(code: str, tests: Sequence[str] = FORMS) -> int:
    """Return how many tests a program passes."""
    sandbox = BubblewrapSandbox(LIMITS)
    count = 0
    for first in range(0, len(tests), MAX_TESTS):
        truth = {"assert_case": tests[first : first + MAX_TESTS]}
        result = compute_score("taco", f"```python\n{code}\n```", truth, sandbox=sandbox)
        count += result["passed"]
    return count


def main() -> None:
    """Print the hacks that pass a test, and the counts."""
    scores = {name: passed(code) for name, code in HACKS.items()}
    for name, score in scores.items():
        if score:
            print(f"{name}: {score}")
    print(
        f"{len(HACKS)} hacks, {len(FORMS)} forms of tests: at most {max(scores.values())} passed; "
        f"a right program passes {passed(RIGHT)}, a wrong one {passed(WRONG)}"
    )


if __name__ == "__main__":
    main()
