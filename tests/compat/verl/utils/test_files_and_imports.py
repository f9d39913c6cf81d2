"""verl's helpers for files, tokenizers, imports and dictionaries."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.compat.verl.utils import hf_processor, hf_tokenizer
from slipstream.compat.verl.utils.fs import copy_to_local, is_non_local
from slipstream.compat.verl.utils.hdfs_io import copy, exists, makedirs
from slipstream.compat.verl.utils.import_utils import load_extern_object, load_extern_type
from slipstream.compat.verl.utils.py_functional import append_to_dict, union_two_dict
from slipstream.compat.verl.utils.ray_utils import get_event_loop
from slipstream.data.tokenizer import build_tokenizer, save_tokenizer
from slipstream.errors import ConfigError, DataError


def test_local_paths_stay_and_hdfs_is_refused(tmp_path: Path) -> None:
    assert copy_to_local(str(tmp_path), cache_dir="x", verbose=True) == str(tmp_path)
    assert copy_to_local("Qwen/Qwen3-0.6B", use_shm=True) == "Qwen/Qwen3-0.6B"
    assert (is_non_local("hdfs://a"), is_non_local("/a")) == (True, False)
    for call in (copy_to_local, exists, makedirs):
        with pytest.raises(DataError, match=r"hdfs://a is on HDFS.*copy it to a local disk"):
            call("hdfs://a")


def test_folders_and_copies(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    makedirs(str(folder))
    makedirs(str(folder))
    (folder / "x.txt").write_text("1")
    assert copy(src=str(folder), dst=str(tmp_path / "c"))
    assert copy(folder / "x.txt", tmp_path / "y.txt")
    assert ((tmp_path / "c" / "x.txt").read_text(), (tmp_path / "y.txt").read_text()) == ("1", "1")
    assert (exists(str(folder)), exists(str(tmp_path / "none"))) == (True, False)
    with pytest.raises(DataError, match="on HDFS"):
        copy(str(folder), "hdfs://a")


def test_hf_tokenizer_sets_the_padding_token(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.pad_token = None
    save_tokenizer(tokenizer, tmp_path)
    assert hf_tokenizer(str(tmp_path), correct_pad_token=False).pad_token_id is None
    loaded = hf_tokenizer(str(tmp_path), trust_remote_code=False)
    assert loaded.pad_token_id == loaded.eos_token_id is not None
    assert hf_processor(str(tmp_path), use_fast=True) is None
    with pytest.raises(DataError):
        hf_tokenizer(tmp_path / "none")


def test_objects_of_files_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class A: pass\ndef f(): return 5\n")
    assert load_extern_object(str(path), "f")() == 5
    assert load_extern_type(str(path), "A").__name__ == "A"
    assert load_extern_object("pkg://json", "dumps")([1]) == "[1]"
    with pytest.raises(ConfigError, match="object_name 'g' is not in"):
        load_extern_object(str(path), "g")


def test_dictionaries_are_united_and_appended() -> None:
    one: dict[str, Any] = {"a": torch.tensor([1.0])}
    assert union_two_dict(one, {"a": torch.tensor([1.0]), "b": 2}) is one
    assert one["b"] == 2
    with pytest.raises(ValueError, match="'b', but its values differ"):
        union_two_dict(one, {"b": 3})
    lists: dict[str, Any] = {"x/loss": [1]}
    append_to_dict(lists, {"loss": 2, "kl": [3]}, prefix="x/")
    assert lists == {"x/loss": [1, 2], "x/kl": [[3]]}


def test_the_event_loop_is_the_running_one() -> None:
    async def same() -> bool:
        return get_event_loop() is asyncio.get_running_loop()

    assert asyncio.run(same())
    loop = get_event_loop()
    try:
        assert loop.run_until_complete(same())
    finally:
        loop.close()
        asyncio.set_event_loop(None)
