"""Weights in buckets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import EngineError
from slipstream.inference.servers.protocol import Server
from slipstream.inference.servers.staged import ALIGNMENT, SharedWeights, lay_out
from slipstream.inference.servers.vllm_worker import Segments, checksum
from tests.inference.helpers import make_decoder, update_from
from tests.inference.servers.test_engine import full_disk


def test_tensors_lie_in_buckets_in_their_order() -> None:
    shapes = {"a": (3,), "b": (2, 5), "c": (100,), "d": (), "e": (4,)}
    layout = lay_out(shapes, torch.float32, 150)
    assert layout.entries == [
        ["a", "float32", [3], 0, 0],
        ["b", "float32", [2, 5], 0, ALIGNMENT],
        ["c", "float32", [100], 1, 0],  # larger than a bucket
        ["d", "float32", [], 2, 0],
        ["e", "float32", [4], 2, ALIGNMENT],
    ]
    assert layout.sizes == [ALIGNMENT + 40, 400, ALIGNMENT + 16]
    # One bucket: 6, 20, 200, 2 and 8 bytes, each from the next multiple of 64 on.
    assert lay_out(shapes, torch.bfloat16, 1 << 20).sizes == [448 + 8]


class Reader:
    """A server that maps the memory as vLLM's worker does."""

    name = "the server"
    fails = False

    def __init__(self) -> None:
        self.segments = Segments()
        self.read: dict[str, torch.Tensor] = {}
        self.sources: list[Any] = []

    async def load_shared(self, source: Any) -> dict[str, int]:
        self.sources.append(source)
        self.read = dict(self.segments.tensors(source))
        if self.fails:
            raise EngineError("the server does not answer")
        return {name: checksum(tensor) for name, tensor in self.read.items()}

    async def join(self, spec: Any) -> None: ...
    async def load_sent(self, source: Any) -> Any: ...
    async def workers(self) -> int:
        return 1

    address = ("127.0.0.1", 1)


def weights(folder: Path) -> SharedWeights:
    return SharedWeights(make_decoder(0), torch.bfloat16, folder, bucket_bytes=1 << 14)


def deliver(shared: SharedWeights, reader: Reader) -> None:
    anyio.run(shared.deliver, cast(Server, reader))


def files(shared: SharedWeights) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in shared.path.iterdir()}


def test_servers_see_new_weights_in_the_same_memory(tmp_path: Path) -> None:
    shared = weights(tmp_path)
    reader: Any = Reader()
    for version in (1, 2):
        shared.prepare(update_from(make_decoder(version), version))
        deliver(shared, reader)
        for name, parameter in make_decoder(version).named_parameters():
            assert torch.equal(reader.read[name], parameter.bfloat16())
        if version == 1:
            first, seen = files(shared), dict(reader.read)
    assert len(first) > 1
    assert files(shared) == first
    assert all(reader.read[name].data_ptr() == seen[name].data_ptr() for name in seen)
    assert reader.sources[0] == reader.sources[1]
    shared.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_that_a_server_may_still_read_is_not_written(tmp_path: Path) -> None:
    shared = weights(tmp_path)
    reader: Any = Reader()
    reader.fails = True
    shared.prepare(update_from(make_decoder(1), 1))
    with pytest.raises(EngineError):
        deliver(shared, reader)
    before, late = files(shared), dict(reader.read)
    shared.prepare(update_from(make_decoder(2), 2))
    assert not before.keys() & files(shared).keys()
    assert len(before) == len(files(shared))
    for name, parameter in make_decoder(1).named_parameters():
        assert torch.equal(late[name], parameter.bfloat16())
    shared.close()


def test_other_values_than_the_trainers_are_an_error(tmp_path: Path) -> None:
    shared = weights(tmp_path)
    reader: Any = Reader()
    shared.prepare(update_from(make_decoder(1), 1))
    path = sorted(shared.path.iterdir())[0]
    with path.open("r+b") as file:
        file.write(b"\x01")
    with pytest.raises(EngineError, match=r"the server received other values of model\.embed"):
        deliver(shared, reader)
    shared.close()


def test_the_model_folder_gets_the_newest_weights_when_they_are_needed(tmp_path: Path) -> None:
    shared = weights(tmp_path)
    shared.store()
    assert not shared.file.exists()
    for version in (1, 2):
        shared.prepare(update_from(make_decoder(version), version))
        assert not shared.file.exists() or version == 2
        shared.store()
        stored = shared.file.stat().st_ino
        shared.store()
        assert shared.file.stat().st_ino == stored
        for name, tensor in load_file(shared.file).items():
            assert torch.equal(tensor, make_decoder(version).get_parameter(name).bfloat16())
    with full_disk(1 << 10):
        shared.prepare(update_from(make_decoder(3), 3))
        with pytest.raises(EngineError, match=r"version 3.*server\.transfer_dir"):
            shared.store()
    assert sorted(p.name for p in shared.path.iterdir() if p.suffix == ".new") == []
    shared.close()


def test_memory_that_was_replaced_is_made_again(tmp_path: Path) -> None:
    shared = weights(tmp_path)
    reader: Any = Reader()
    shared.prepare(update_from(make_decoder(1), 1))
    path = sorted(shared.path.iterdir())[0]
    os.replace(path, tmp_path / "moved")
    path.write_bytes((tmp_path / "moved").read_bytes())
    shared.prepare(update_from(make_decoder(2), 2))
    deliver(shared, reader)
    expected = dict(make_decoder(2).named_parameters())
    assert all(torch.equal(t, expected[name].bfloat16()) for name, t in reader.read.items())
    shared.close()
