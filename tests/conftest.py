"""Settings and fixtures for all tests: one thread, no time limits of hypothesis, and the ways to
compute (kernels or torch)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import torch

# Set before torch is imported, and inherited by the processes that tests start. Tensors of tests
# are so small that a second thread costs more than it saves; OMP_NUM_THREADS=2 overrides.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("slipstream", deadline=None, print_blob=True)
settings.load_profile("slipstream")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU if there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with torch's operations instead of the compiled kernels, as on a GPU."""
    monkeypatch.setattr("slipstream.models.numerics.kernels_supported", lambda: False)


@pytest.fixture
def whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad keys to whole chunks, as on a GPU, even if this CPU sums partial chunks in the same
    order. So recorded steps have the same shapes on all machines."""
    monkeypatch.setattr("slipstream.models.numerics.partial_chunks_are_exact", lambda: False)


@pytest.fixture(params=["float32", "bfloat16", "bfloat16-torch"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype to compute in: with the kernels, and for bfloat16 also with torch's operations."""
    import torch

    from slipstream.models.numerics import dtype_from_name

    name, *by_torch = request.param.split("-")
    if by_torch:
        request.getfixturevalue("without_kernels")
    return dtype_from_name(name, torch.device("cpu"))
