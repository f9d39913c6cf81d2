"""Arrays of which compiled code uses only the address must be kept alive."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np

from slipstream import kernels
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import hold


@kernel
def _reuses(size: int, held: bool) -> int:
    """Return how many of five new arrays reuse the memory of the first array."""
    first = np.empty(size, np.float32)
    at = first.ctypes.data
    count = 0
    for _ in range(5):
        count += np.empty(size, np.float32).ctypes.data == at
    if held:
        hold(first)
    return count


@kernel
def _reuses_without_hold(size: int) -> int:
    at = np.empty(size, np.float32).ctypes.data
    count = 0
    for _ in range(5):
        count += np.empty(size, np.float32).ctypes.data == at
    return count


def test_hold_keeps_the_memory_of_an_array() -> None:
    assert _reuses(100, True) == 0
    # Without `hold`, new arrays reuse the memory.
    assert _reuses_without_hold(100) > 0


def test_every_array_whose_address_a_kernel_uses_is_held() -> None:
    found = 0
    for path in sorted(Path(kernels.__file__).parent.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            nodes = list(ast.walk(function))
            names = {
                node.value.value.id
                for node in nodes
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and (node.attr, node.value.attr) == ("data", "ctypes")
                and isinstance(node.value.value, ast.Name)
            }
            held = {
                node.args[0].id
                for node in nodes
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "hold"
                and isinstance(node.args[0], ast.Name)
            }
            assert names == held, f"{path.name}, {function.name}"
            found += len(names)
    assert found > 5
