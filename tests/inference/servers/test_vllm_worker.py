"""The worker extension: checksums, and the tensors of files. The rest needs vLLM."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.inference.servers import vllm_worker
from slipstream.inference.servers.vllm_worker import ROWS, SlipstreamWorker, checksum, tensors_of

SIZES = [1, 3, 5, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", SIZES)
def test_equal_values_have_equal_checksums(dtype: torch.dtype, size: int) -> None:
    tensor = torch.arange(size).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    # The values count, not how they lie in memory.
    spread = torch.stack([tensor, tensor], 1)[:, 0]
    assert spread.stride() == (2,)
    assert checksum(spread) == checksum(tensor)
    inner = torch.cat([tensor[:1], tensor])[1:]
    assert inner.storage_offset() == 1
    assert checksum(inner) == checksum(tensor)
    assert 0 <= checksum(tensor) < 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, ROWS + 1, 3 * ROWS + 7])
def test_changed_and_swapped_values_change_the_checksum(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(size, generator=generator).to(dtype)
    sums = {checksum(tensor)}
    places = sorted({0, 1, size // 2, size - 2, size - 1})
    for place in places:
        changed = tensor.clone()
        changed.view(torch.uint8)[place * tensor.element_size()] ^= 1  # the lowest bit
        sums.add(checksum(changed))
    pairs = [(a, b) for a in places for b in places if a < b and tensor[a] != tensor[b]]
    for a, b in pairs:
        swapped = tensor.clone()
        swapped[a], swapped[b] = tensor[b], tensor[a]
        sums.add(checksum(swapped))
    assert len(sums) == 1 + len(places) + len(pairs)


def test_two_rows_that_swap_places_change_the_checksum() -> None:
    tensor = torch.randn(4, ROWS, generator=torch.Generator().manual_seed(0))
    assert checksum(tensor[[1, 0, 2, 3]]) != checksum(tensor)
    assert checksum(tensor[:, torch.arange(ROWS).flip(0)]) != checksum(tensor)


def test_tensors_are_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    first, second = torch.arange(3.0), torch.arange(4.0)
    save_file({"a": first}, tmp_path / "1.safetensors")
    save_file({"b": second}, tmp_path / "2.safetensors")
    one = dict(tensors_of(tmp_path / "2.safetensors"))
    both = dict(tensors_of(tmp_path))
    assert list(one) == ["b"]
    assert torch.equal(one["b"], second)
    assert sorted(both) == ["a", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(Exception, match="empty"):
        list(tensors_of(tmp_path / "empty"))


class Worker(SlipstreamWorker):
    """A worker whose model takes any tensors, and has one parameter more."""

    class model_runner:  # noqa: N801
        @staticmethod
        def get_model() -> None:
            return None

    def _load(self, model: object, tensors: object) -> set[str]:
        self.loaded = dict(tensors)  # type: ignore[call-overload]
        return {"z", "y"}


def test_loading_returns_the_checksum_of_each_tensor_and_what_is_missing(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 5)}
    save_file(tensors, tmp_path / "w.safetensors")
    worker = Worker()
    result = worker.slipstream_load(str(tmp_path / "w.safetensors"))
    assert result["checksums"] == {name: checksum(tensor) for name, tensor in tensors.items()}
    assert result["missing"] == ["y", "z"]
    assert all(torch.equal(worker.loaded[name], tensor) for name, tensor in tensors.items())


def test_the_module_needs_nothing_that_vllms_environment_lacks() -> None:
    tree = ast.parse(Path(vllm_worker.__file__).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    assert found - sys.stdlib_module_names == {"torch", "safetensors", "vllm"}
