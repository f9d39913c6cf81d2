"""What holds for all tests: one thread, and no verdict that depends on how busy the machine is; and
the ways to compute."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import torch

# Before torch is imported anywhere, and inherited by the processes that tests start. The tensors of
# tests are so small that a second thread costs more than it brings; OMP_NUM_THREADS=2 overrides.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("slipstream", deadline=None, print_blob=True)
settings.load_profile("slipstream")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own operations compute, as on a GPU."""
    monkeypatch.setattr("slipstream.models.numerics.kernels_supported", lambda: False)


@pytest.fixture
def whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys come in whole chunks, as on a GPU, also where this processor adds up parts of them in
    the same order: recorded steps have the same shapes on all."""
    monkeypatch.setattr("slipstream.models.numerics.partial_chunks_are_exact", lambda: False)


@pytest.fixture(params=["float32", "bfloat16", "bfloat16-torch"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What is computed in: by the kernels, and by torch's own operations."""
    import torch

    from slipstream.models.numerics import dtype_from_name

    name, *by_torch = request.param.split("-")
    if by_torch:
        request.getfixturevalue("without_kernels")
    return dtype_from_name(name, torch.device("cpu"))
