"""The worker extension: checksums, and the tensors of files. The rest needs vLLM."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from slipstream.inference.servers import vllm_worker
from slipstream.inference.servers.vllm_worker import (
    PROBES,
    ROWS,
    Process,
    SlipstreamWorker,
    _mend_discarded_draws,
    checksum,
    expand_batch_to_tokens,
    mapped,
    probe_input,
    probed,
    tensors_of,
    views,
)

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


def test_tensors_are_views_of_a_bucket() -> None:
    bucket = torch.zeros(128, dtype=torch.uint8)
    a, b = torch.arange(6.0).view(2, 3), torch.tensor(7.5)
    entries = [["a", "bfloat16", [2, 3], 0, 64], ["b", "float32", [], 0, 0]]
    found = dict(views(bucket, entries))
    found["a"].copy_(a)
    found["b"].copy_(b)
    assert torch.equal(bucket[64:76].view(torch.bfloat16).view(2, 3), a.bfloat16())
    assert float(bucket[:4].view(torch.float32)) == 7.5
    assert found["a"].data_ptr() == bucket.data_ptr() + 64


def test_mapped_memory_shows_what_others_write_and_keeps_what_this_process_writes(
    tmp_path: Path,
) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(8192))
    found = mapped(path, 8192)
    with path.open("r+b") as file:
        file.write(b"\x05")
    assert found[0] == 5
    found[4096] = 9
    assert path.read_bytes()[4096] == 0
    path.unlink()
    assert found[0] == 5
    with pytest.raises(FileNotFoundError):
        mapped(path, 8192)
    path.write_bytes(bytes(10))
    with pytest.raises(ValueError, match=rf"{path} has 10 bytes, not 8192"):
        mapped(path, 8192)


def test_memory_that_a_server_does_not_see_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    worker = Worker()
    source = {"segments": [[str(tmp_path / "gone"), 8]], "tensors": [["a", "float32", [2], 0, 0]]}
    with pytest.raises(FileNotFoundError, match=r"gone is not here.*server\.transport=collective"):
        worker.slipstream_map(source)
    assert not hasattr(worker, "loaded")


def test_weights_that_are_sent_to_another_group_are_refused() -> None:
    worker = Worker()
    with pytest.raises(RuntimeError, match="not in the process group g"):
        worker.slipstream_receive({"group": "g"})


def sleeping() -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """A process that is another run, and its description."""
    code = (
        "import json; from slipstream.inference.servers.vllm_worker import Process; "
        "print(json.dumps(Process.here()), flush=True); import time; time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_server_has_one_owner_until_it_is_released_or_ends() -> None:
    worker, here = Worker(), Process.here()
    process, other = sleeping()
    assert worker.slipstream_claim(other) == other
    assert worker.slipstream_claim(here) == other
    worker.slipstream_release(here)  # It is not the owner.
    assert worker.slipstream_claim(here) == other
    worker.slipstream_release(other)
    assert worker.slipstream_claim(here) == here
    assert worker.slipstream_claim(other) == here
    worker.slipstream_release(here)
    assert worker.slipstream_claim(other) == other
    process.kill()
    process.wait()
    assert worker.slipstream_claim(here) == here
    if process.stdout is not None:
        process.stdout.close()


def test_a_process_on_another_machine_is_not_taken_for_ended() -> None:
    here = Process.here()
    assert not Process.ended(here)
    assert not Process.ended({**here, "pid": 2**22 + 1, "machine": "another"})
    assert not Process.ended({**here, "pid": 2**22 + 1, "machine": None})
    if sys.platform == "linux":
        assert Process.ended({**here, "pid": 2**22 + 1})
        assert Process.ended({**here, "start": "1"})  # another process had this id


def test_the_module_needs_nothing_that_vllms_environment_lacks() -> None:
    tree = ast.parse(Path(vllm_worker.__file__).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    assert found - sys.stdlib_module_names == {"torch", "safetensors", "vllm"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_values_of_requests_are_repeated_for_their_drafts(dtype: torch.dtype) -> None:
    values = torch.tensor([2, 0, 5, 7], dtype=dtype)
    counts = torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    found = expand_batch_to_tokens(values, counts, 6, replace_from=0, replace_to=1)
    assert found.tolist() == [2, 2, 1, 7, 7, 7]
    assert found.dtype == dtype
    assert expand_batch_to_tokens(values, counts, 6).tolist() == [2, 2, 0, 7, 7, 7]
    half = expand_batch_to_tokens(torch.tensor([0.5, 0.0]), torch.tensor([1, 1]), 1, 0, 1)
    assert half.tolist() == [0.5]


def test_what_a_layer_gives_changes_with_each_of_its_outputs() -> None:
    outputs = torch.randn(37, generator=torch.Generator().manual_seed(0))
    found = probed(outputs)
    assert len(found) == PROBES
    assert found == probed(outputs.clone())
    for place in range(37):
        changed = outputs.clone()
        changed[place] += 1e-3
        assert max(abs(a - b) for a, b in zip(found, probed(changed), strict=True)) > 1e-5
    assert probe_input(5).abs().max() <= 1
    assert torch.equal(probe_input(9)[:5], probe_input(5))


class Drafter:
    def propose(self, num_speculative_tokens: int, tokens: list[int]) -> list[int]:
        return tokens[:num_speculative_tokens]


def test_a_drafter_is_switched_off_and_on() -> None:
    worker: Any = Worker()
    worker.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
    drafter: Any = Drafter()
    worker.model_runner = SimpleNamespace(drafter=drafter, get_draft_model=lambda: drafter)
    assert worker.slipstream_draft() == {
        "head": True,
        "version": None,
        "on": True,
        "can_stop": True,
        "unmended": None,
    }
    for on in (False, True, False, False):
        assert worker.slipstream_draft(on)["on"] is on
        drafts = drafter.propose(num_speculative_tokens=2, tokens=[7, 8, 9])
        assert drafts == ([7, 8] if on else [])
    worker.vllm_config.scheduler_config.async_scheduling = True
    worker.slipstream_draft(True)
    state = worker.slipstream_draft(False)
    assert (state["on"], state["can_stop"]) == (True, False)
    worker.model_runner = SimpleNamespace(get_draft_model=lambda: None)
    assert worker.slipstream_draft()["head"] is False


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.inner = nn.Module()
        self.inner.embed = nn.Linear(2, 2)
        self.inner.fc = nn.Linear(2, 2)


def test_a_draft_head_is_loaded_without_the_modules_of_the_policy() -> None:
    model = Model()
    shared = model.inner.embed
    own = {name: m for name, m in model.named_modules() if m is not shared}
    with vllm_worker._without_shared(model, own):
        assert shared not in list(model.modules())
        assert model.inner.fc in list(model.modules())
    assert model.inner.embed is shared


@pytest.mark.parametrize(
    ("name", "have", "fed"),
    [
        ("fc.weight", {"fc.weight"}, True),
        ("fc.weight", {"norm.weight"}, False),
        ("layers.0.qkv_proj.weight", {f"layers.0.{n}_proj.weight" for n in "qkv"}, True),
        ("layers.0.qkv_proj.weight", {f"layers.0.{n}_proj.weight" for n in "qk"}, False),
    ],
)
def test_parameters_that_got_no_weights_are_found(name: str, have: set[str], fed: bool) -> None:
    assert vllm_worker._fed(name, have) is fed
    assert vllm_worker._own_name("midlayer.fc.weight") == "layers.0.fc.weight"


class Runner:
    """The parts of vLLM's model runner that draw tokens, for requests 0 (complete) and 1."""

    def __init__(self) -> None:
        generators = {index: torch.Generator().manual_seed(index) for index in (0, 1)}
        self.input_batch = SimpleNamespace(generators=generators)
        self.discard_request_mask = SimpleNamespace(np=np.array([False, True]))

    def _sample(self) -> list[float]:
        generators = self.input_batch.generators
        return [float(torch.rand((), generator=generators[index])) for index in (0, 1)]

    def _bookkeeping_sync(self) -> list[int]:
        for index in np.nonzero(self.discard_request_mask.np)[0]:
            generator = self.input_batch.generators.get(int(index))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)
        return sorted(self.input_batch.generators)


def test_draws_for_pieces_of_prompts_are_taken_back() -> None:
    class Mended(Runner):
        _sample, _bookkeeping_sync = Runner._sample, Runner._bookkeeping_sync

    plain, runner = Runner(), Mended()
    plain._sample()
    with pytest.raises(RuntimeError, match="offset"):
        plain._bookkeeping_sync()
    _mend_discarded_draws(Mended)
    first = runner._sample()
    assert runner._bookkeeping_sync() == [0]  # the other one is out of sight meanwhile
    assert sorted(runner.input_batch.generators) == [0, 1]
    runner.discard_request_mask.np[1] = False
    second = runner._sample()
    assert runner._bookkeeping_sync() == [0, 1]
    assert second[0] != first[0]
    assert second[1] == first[1]
