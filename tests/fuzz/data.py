"""Fuzz of data files: odd Parquet and JSON files, read as by `slipstream rl`.

    python -m tests.fuzz.data --count 200

An accepted file gives prompts that can be drawn, scored and recorded.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from slipstream.build.data import make_data_buffer
from slipstream.checkpoint.files import write_text_atomic
from slipstream.config.load import load_config
from slipstream.data.sft import load_sft_samples
from tests.data.helpers import char_tokenizer
from tests.fuzz.harness import Result, command, try_input
from tests.fuzz.values import as_text, nested, odd_value

COUNT = 200

_GOOD = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
_LINE = json.dumps(_GOOD).encode()
_JSON: tuple[bytes, ...] = (
    b"",
    b"\n\n",
    b"\0",
    b"\xff\xfe" + _LINE,
    b"\xef\xbb\xbf" + _LINE,
    _LINE.decode().encode("utf-16"),
    _LINE[:40],
    _LINE + b"\n" + _LINE[:40],
    _LINE + b"\r\n" + _LINE,
    _LINE + _LINE,
    b"[" + _LINE + b"]",
    b"[]",
    b"{}",
    b"null",
    b"3",
    b'"x"',
    b"NaN",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"\\ud800": 1, "prompt": "a"}',
    b'{"prompt": "a", "x": ' + b"9" * 6000 + b"}",
    b'{"prompt": "a", "x": ' + b"9" * 4200 + b"}",
    b'{"prompt": "a", "x": 1e999, "y": NaN}',
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": "a", "x": ' + b"[" * 300 + b"]" * 300 + b"}",
    b'{"prompt": "a", "x": ' + b'{"a": ' * 80 + b"1" + b"}" * 80 + b"}",
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "\\u0000"}',
    b'{"prompt": "' + b"a" * 100_000 + b'"}',
    b'{"prompt": [{"role": "user", "content": "' + b"a" * 100_000 + b'"}]}',
    b'{"prompt": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}',
    b'{"prompt": [{"role": "user", "content": null}]}',
    b'{"prompt": [{"role": "user"}]}',
    b'{"prompt": [{"role": 3, "content": "a"}]}',
    b'{"prompt": [{"role": "assistant", "content": null, "tool_calls": 5}]}',
    b'{"prompt": "a", "reward_model": 5}',
    b'{"prompt": "a", "reward_model": {"ground_truth": {"a": [NaN]}}}',
    b'{"prompt": "a", "extra_info": [1]}',
    b'{"prompt": "a", "data_source": {"a": 1}, "ability": [1]}',
    b'{"prompt": "a", "images": [1]}',
    b'{"' + b"k" * 5000 + b'": 1}',
    b'{"": 1, "prompt": "a"}',
)


def run(count: int) -> Result:
    """Try `count` files in a temporary folder, and return the outcomes."""
    result = Result()
    with tempfile.TemporaryDirectory() as name:
        for number in range(count):
            _try(result, number, Path(name))
    return result


def _try(result: Result, number: int, folder: Path) -> None:
    draw = random.Random(f"data {number}")
    kind = draw.choice(("json", "json", "fields", "fields", "parquet", "torn", "place"))
    suffix = ".parquet" if kind in ("parquet", "torn") else draw.choice((".jsonl", ".json"))
    path = folder / f"odd-{number}{suffix}"
    what = kind
    if kind == "json":
        content = _JSON[number % len(_JSON)]
        path.write_bytes(content)
        what = repr(content[:60])
    elif kind == "fields":
        row = {**_GOOD, draw.choice((*_GOOD, "x", "images")): odd_value(draw)}
        if draw.random() < 0.5:
            row["prompt"] = [{**_GOOD["prompt"][0], draw.choice(_MESSAGE): odd_value(draw)}]  # type: ignore[index]
        if draw.random() < 0.3:
            row["reward_model"] = {"style": "rule", "ground_truth": odd_value(draw)}
        text = as_text(row)
        what = ascii(text[:90])
        path.write_text(
            f"[{text}]" if suffix == ".json" else text, encoding="utf-8", errors="surrogatepass"
        )
    elif kind == "place":
        path = _odd_place(draw, folder, path)
    else:
        _parquet(draw, path)
        if kind == "torn":
            _damage(draw, path)
    how = draw.choice((_rl, _rl, _sft))
    name = f"{number} {suffix} {what}"
    try_input(result, name, partial(how, path), path.name[:60], "data.train_files")


_MESSAGE = ("role", "content", "tool_calls", "x", "loss_mask")


def _odd_place(draw: random.Random, folder: Path, path: Path) -> Path:
    kind = draw.choice(("absent", "folder", "long", "loop", "dangling", "suffix", "device"))
    if kind == "folder":
        path.mkdir()
        if draw.random() < 0.5:
            (path / "state.json").write_text(as_text({"_data_files": odd_value(draw)}))
    elif kind == "long":
        return folder / ("a" * 5000 + ".jsonl")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to("nowhere.jsonl")
    elif kind == "suffix":
        path = path.with_suffix(draw.choice((".csv", "", ".gz")))
        path.write_bytes(_LINE)
    elif kind == "device":
        return Path("/dev/null")
    return path


def _parquet(draw: random.Random, path: Path) -> None:
    tables: tuple[Callable[[], Any], ...] = (
        lambda: pyarrow.Table.from_pylist([_GOOD]),
        lambda: pyarrow.table({}),
        lambda: pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}),
        lambda: pyarrow.table({"prompt": pyarrow.nulls(3)}),
        lambda: pyarrow.table({"prompt": [None, "a"]}),
        lambda: pyarrow.table({"prompt": [1, 2]}),
        lambda: pyarrow.table({"prompt": [b"a\xff", b"b"]}),
        lambda: pyarrow.table({"prompt": [[1], [2]]}),
        lambda: _with(pyarrow.array([2**60], pyarrow.timestamp("ms"))),
        lambda: _with(pyarrow.array([1], pyarrow.timestamp("ns"))),
        lambda: _with(pyarrow.array([2**60], pyarrow.date64())),
        lambda: _with(pyarrow.array([2**62], pyarrow.duration("s"))),
        lambda: _with(pyarrow.array([[(1, 2)]], pyarrow.map_(pyarrow.int64(), pyarrow.int64()))),
        lambda: pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"]),
        lambda: pyarrow.table([["a"], ["b"]], names=["", "prompt"]),
        lambda: pyarrow.table({"prompt": _invalid_text()}),
        lambda: pyarrow.Table.from_pylist([{"prompt": "a", "x": nested(40, "list")}]),
        lambda: pyarrow.table({"prompt": ["a"], "reward_model": ["text"]}),
        lambda: pyarrow.table({"prompt": ["a"], "extra_info": [float("nan")]}),
        lambda: pyarrow.table({"prompt": ["a"], "reward_model": [{"ground_truth": float("inf")}]}),
        lambda: pyarrow.table({"prompt": pyarrow.array(["a"]).dictionary_encode()}),
        lambda: pyarrow.table({"prompt": [[{"role": "user", "content": None}]]}),
        lambda: pyarrow.table({"prompt": [[{"role": None, "content": "a"}]]}),
    )  # fmt: skip
    pyarrow.parquet.write_table(draw.choice(tables)(), path)


def _with(column: Any) -> Any:
    return pyarrow.table({"prompt": ["a"], "x": column})


def _invalid_text() -> Any:
    """Return a text column whose bytes are not UTF-8, which Arrow writes without a check."""
    data = pyarrow.array([b"a\xff\xfe"], pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), 1, data.buffers())


def _damage(draw: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    kind = draw.choice(("short", "flip", "zeros", "other", "empty", "doubled"))
    if kind == "short":
        data = data[: draw.randrange(len(data))]
    elif kind == "flip":
        for _ in range(draw.choice((1, 5, 50))):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "zeros":
        start = draw.randrange(len(data))
        data[start : start + 30] = bytes(min(30, len(data) - start))
    elif kind == "other":
        data = bytearray(_LINE)
    elif kind == "empty":
        data = bytearray()
    else:
        data = data * 2
    path.write_bytes(data)


def _rl(path: Path) -> str:
    config = load_config(
        [
            "actor_rollout_ref.model.path=x",
            f"data.train_files=['{path}']",
            "data.max_prompt_length=512",
            "data.train_batch_size=1",
        ],
        notify=lambda text: None,
    )
    buffer = make_data_buffer(config, char_tokenizer(), None)
    for prompt in buffer.get_prompts(len(buffer)):
        record = [prompt.uid, prompt.messages, prompt.ground_truth, prompt.extra_info, prompt.ids]
        text = json.dumps([*record, prompt.data_source, prompt.ability], default=str)
        write_text_atomic(path.with_name("record.json"), text + str(prompt.ground_truth))
    return ""


def _sft(path: Path) -> str:
    load_sft_samples([path], char_tokenizer(), messages_key="prompt")
    return ""


if __name__ == "__main__":
    sys.exit(command("data", COUNT, run))
