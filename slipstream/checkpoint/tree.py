"""Save a nested Python value with tensors to one `.safetensors` file, and load it bit for bit.

Used for optimizer states and the like. Tensors are stored as safetensors. The structure around them
is JSON in the file's metadata, so nothing is ever unpickled. Does not know what the tree means.
Called by the training backends and the loops.

Format (metadata key `slipstream_tree`): null, booleans, integers, finite floats, strings and lists
are stored as the same JSON values. Every other node is an object with one key: `dict` (pairs, since
keys need not be strings), `tuple`, `bytes` (base64), `float` (the eight bytes of an infinity or a
NaN, in hex) or `tensor` (its name in the file).
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.reading import reading

FORMAT_VERSION = 1
_KEY = "slipstream_tree"
_VERSION_KEY = "slipstream_tree_version"
_PICKLE_SUFFIXES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64,
    torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64,
}  # fmt: skip


def save_tree(path: Path, tree: Any) -> None:
    """Write `tree` to `path` (suffix `.safetensors`), replacing an existing file.

    `tree` may contain dicts (order is kept; keys are None, bool, int, float, str, bytes or tuples
    of these), lists, tuples, dense tensors on any device, int, float (infinities, and NaN with its
    payload), bool, str, bytes and None. Loading returns an OrderedDict as a dict, a Parameter as a
    tensor, and tensors that shared memory as separate copies. Raises CheckpointError, naming the
    place in the tree, for any other type, because it could not be restored faithfully.
    """
    tree_writer(tree)(path)


def tree_writer(tree: Any) -> Callable[[Path], None]:
    """Return a function that writes `tree` as it is now. It may be called in any thread.

    Tensors are copied only if the file format requires it. So tensors that are modified in place
    before the function is called must be copies already. The function runs no torch operations
    and does not hold the Python interpreter lock.
    """
    encoder = _Encoder()
    structure = encoder.encode(tree, "tree")
    metadata = {_KEY: json.dumps(structure), _VERSION_KEY: str(FORMAT_VERSION)}

    def write(path: Path) -> None:
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path}: a tree is saved as .safetensors; rename it")
        save_file(encoder.tensors, str(path), metadata=metadata)

    return write


def load_tree(path: Path, *, mapped: bool = False) -> Any:
    """Return the tree that `save_tree` wrote. Tensors are on the CPU and contiguous.

    By default they own their memory. With `mapped` they are memory-mapped: data is read from the
    file on access, so the file must not change. That is for callers that read a part of each.

    Raises CheckpointError, naming the file, if it is missing, truncated, corrupt, written by a
    newer version, a safetensors file of another program, or a pickle.
    """
    refuse_pickle(path)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; resume from another checkpoint")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            # A mapped tensor changes with its file, and reading a truncated file kills the process.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if not mapped:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is truncated or corrupt, not a readable safetensors file ({error}); resume "
            "from another checkpoint"
        ) from error
    if _KEY not in metadata:
        raise CheckpointError(
            f"{path} is a safetensors file that save_tree did not write: its metadata has no "
            f"{_KEY!r}; read it with safetensors.torch.load_file"
        )
    try:
        version = int(metadata[_VERSION_KEY])
    except (KeyError, ValueError):
        raise CheckpointError(
            f"{path} is corrupt: its {_VERSION_KEY!r} is {metadata.get(_VERSION_KEY)!r}; resume "
            "from another checkpoint"
        ) from None
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} was written by a newer version of slipstream (tree format {version}, this "
            f"version reads up to {FORMAT_VERSION}); upgrade slipstream"
        )
    with reading(path, CheckpointError, "resume from another checkpoint"):
        return _decoded(path, metadata[_KEY], tensors)


def _decoded(path: Path, text: str, tensors: dict[str, Tensor]) -> Any:
    try:
        return _decode(json.loads(text), tensors)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path} is corrupt: its structure does not match its tensors ({error!r}); resume from "
            "another checkpoint"
        ) from error


def refuse_pickle(path: Path) -> None:
    """Raise CheckpointError if `path` is a pickle by its content or by its suffix."""
    magic = b""
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
    pickled = magic[:4] == b"PK\x03\x04" or (magic[:1] == b"\x80" and magic[1:2] in b"\2\3\4\5")
    # A safetensors file begins with its header's length; a length of 640 looks like a pickle.
    if pickled and path.suffix == ".safetensors" and _has_header(path):
        pickled = False
    if pickled or path.suffix in _PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path} looks like a pickle, and loading a pickle can run any code; if you trust its "
            "origin, convert it once: safetensors.torch.save_file(torch.load(path, "
            "weights_only=True), 'converted.safetensors'), and use that file"
        )


def _has_header(path: Path) -> bool:
    with path.open("rb") as file:
        length, first = file.read(8), file.read(1)
    return (
        len(length) == 8
        and first == b"{"
        and int.from_bytes(length, "little") <= path.stat().st_size - 8
    )


class _Encoder:
    """Collects the tensors of a tree and encodes the rest as JSON values."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def encode(self, node: Any, where: str) -> Any:
        kind = type(node)
        if node is None or kind in (bool, int, str):
            return node
        if kind is float:
            return node if math.isfinite(node) else {"float": struct.pack("<d", node).hex()}
        if kind is bytes:
            return {"bytes": base64.b64encode(node).decode("ascii")}
        if kind is list:
            return [self.encode(x, f"{where}[{i}]") for i, x in enumerate(node)]
        if kind is tuple:
            return {"tuple": [self.encode(x, f"{where}[{i}]") for i, x in enumerate(node)]}
        if kind in (dict, OrderedDict):
            pairs = []
            for key, value in node.items():
                place = f"{where}[{key!r}]"
                pairs.append([self.encode(key, f"key of {place}"), self.encode(value, place)])
            return {"dict": pairs}
        if kind in _TENSOR_TYPES:
            return {"tensor": self._add(node, where)}
        raise CheckpointError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold "
            "without pickle; turn it into a tensor, number, string, bytes, list, tuple or dict"
        )

    def _add(self, tensor: Tensor, where: str) -> str:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise CheckpointError(
                f"{where} is a {tensor.layout} tensor on {tensor.device}; only dense tensors with "
                "data can be saved: convert it to a dense one"
            )
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{where} has dtype {tensor.dtype}, which safetensors does not support; view it "
                "as, or convert it to, another dtype"
            )
        value = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if value.untyped_storage().data_ptr() in self._storages:
            value = value.clone()
        self._storages.add(value.untyped_storage().data_ptr())
        name = f"{len(self.tensors):06d}"
        self.tensors[name] = value
        return name


def _decode(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(x, tensors) for x in node]
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in value}
    if kind == "tuple":
        return tuple(_decode(x, tensors) for x in value)
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(value))[0]
    raise ValueError(f"unknown node {kind!r}")
