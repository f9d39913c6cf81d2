"""Trees are restored bit for bit; unsupported values and damaged files are refused."""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slipstream.checkpoint.tree import load_tree, save_tree
from slipstream.errors import CheckpointError


def round_trip(tmp_path: Path, tree: Any) -> Any:
    path = tmp_path / "tree.safetensors"
    save_tree(path, tree)
    return load_tree(path)


def same(a: Any, b: Any) -> bool:
    """Return whether two trees have equal types, values and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        flat = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.bool,
        torch.complex64,
    ],
)
def test_tensors_of_every_dtype_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    assert same(round_trip(tmp_path, tensor), tensor)


def test_nan_payloads_empty_and_scalar_tensors_round_trip(tmp_path: Path) -> None:
    odd = torch.tensor([0x7FC00001, -1, 0x7F800000, -0x80000000], dtype=torch.int32)
    tree = [odd.view(torch.float32), torch.zeros(0, 3), torch.tensor(2.5), torch.tensor(True)]
    assert same(round_trip(tmp_path, tree), tree)


def test_python_values_round_trip(tmp_path: Path) -> None:
    payload_nan = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
    tree = {
        "floats": [0.1, -0.0, 1e308, 5e-324, float("inf"), float("-inf"), payload_nan, 3.0],
        "ints": (2**200, -1, 0),
        "flags": [True, False, None],
        "text": 'quotes " \\ newline \n snowman ☃ lone surrogate \ud800',
        "bytes": b"\x00\xff",
        7: {"int key": 1},
        (1, "a"): {1.5: None, None: (), True: {}},
        "looks like a node": {"tensor": "000000", "dict": []},
    }
    assert same(round_trip(tmp_path, tree), tree)


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary()
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, database=None)
@given(tree=trees)
def test_random_trees_round_trip(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    assert same(round_trip(tmp_path_factory.mktemp("tree"), tree), tree)


def test_adamw_continues_exactly_from_a_loaded_state(tmp_path: Path) -> None:
    def step(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (weight.square().sum() * torch.rand(())).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    step(weight, optimizer)
    state = {
        "weight": weight.detach().clone(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    saved = round_trip(tmp_path, state)
    step(weight, optimizer)

    again = torch.nn.Parameter(saved["weight"])
    optimizer = torch.optim.AdamW([again], lr=0.5)
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    step(again, optimizer)
    assert torch.equal(again, weight)


def test_views_and_parameters_are_loaded_as_separate_tensors(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tree = OrderedDict(
        a=base,
        b=base,
        row=base.view(2, 3)[1],
        column=base.view(2, 3)[:, 0],
        p=torch.nn.Parameter(base),
    )
    back = round_trip(tmp_path, tree)
    assert type(back) is dict
    assert back["row"].tolist() == [3.0, 4.0, 5.0]
    assert back["column"].tolist() == [0.0, 3.0]
    assert type(back["p"]) is torch.Tensor
    back["a"][0] = 9.0
    assert back["b"][0] == 0.0
    assert (tmp_path / "tree.safetensors").stat().st_size < 2000


def test_a_view_is_saved_without_its_base(tmp_path: Path) -> None:
    view = torch.arange(100_000.0)[5:8]
    assert same(round_trip(tmp_path, view), view)
    assert (tmp_path / "tree.safetensors").stat().st_size < 1000


def test_loaded_tensors_own_their_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_tree(path, torch.arange(1000))
    tensor = load_tree(path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(tensor, torch.arange(1000))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, {2}]}, r"tree\['a'\]\[1\] is a builtins.set"),
        ({"a": Path("x")}, r"tree\['a'\] is a pathlib"),
        ([torch.zeros(2, dtype=torch.complex128)], r"tree\[0\] has dtype torch.complex128"),
        ([torch.zeros(2).to_sparse()], r"tree\[0\] is a torch.sparse_coo tensor"),
        ([torch.zeros(2, device="meta")], r"tree\[0\] .*on meta"),
    ],
)
def test_unsupported_values_are_refused_with_their_path(
    tmp_path: Path, tree: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_tree(tmp_path / "t.safetensors", tree)
    assert not (tmp_path / "t.safetensors").exists()


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rename it"):
        save_tree(tmp_path / "t.json", {})


def test_truncated_files_are_refused_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_tree(path, {"a": torch.arange(3), "b": 1})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"t\.safetensors"):
            load_tree(path)


def test_invalid_structures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    for structure in (
        "{",
        '{"tensor": "1"}',
        '{"what": 1}',
        "{}",
        '{"float": "00"}',
        '{"dict": 3}',
    ):
        metadata = {"slipstream_tree": structure, "slipstream_tree_version": "1"}
        save_file({}, path, metadata=metadata)
        with pytest.raises(CheckpointError, match="structure does not"):
            load_tree(path)


def test_newer_foreign_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({}, path, metadata={"slipstream_tree": "1", "slipstream_tree_version": "2"})
    with pytest.raises(CheckpointError, match=r"newer version of slipstream.*upgrade"):
        load_tree(path)
    save_file({"w": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"read it with safetensors\.torch\.load_file"):
        load_tree(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tree(tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_pickles_are_refused(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / name
    torch.save({"a": torch.zeros(1)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"looks like a pickle.*weights_only=True"):
        load_tree(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_pickles_are_refused(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(pickle.dumps({"a": 1}, protocol=protocol))
    with pytest.raises(CheckpointError, match="looks like a pickle"):
        load_tree(path)


def test_a_header_length_like_pickle_magic_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    for size in range(400, 700):
        save_tree(path, "x" * size)
        if path.read_bytes()[:2] == b"\x80\x02":
            assert load_tree(path) == "x" * size
            return
    pytest.fail("no header of 640 bytes was produced")
