"""Fuzz of model folders: odd config.json, weights, tokenizers and chat templates.

    python -m tests.fuzz.models --count 100

A folder that is accepted gives a policy that computes logits, and a tokenizer that renders prompts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from slipstream.data.datasets import PromptReader
from slipstream.data.rows import DataRow
from slipstream.data.tokenizer import load_tokenizer
from slipstream.models import save_checkpoint
from slipstream.models.critic_io import load_critic
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.files import load_draft_head, save_draft_head
from slipstream.models.hf_io import INDEX, WEIGHTS
from slipstream.models.lora import LoraConfig, add_lora
from slipstream.models.lora_io import ADAPTER_CONFIG, ADAPTER_WEIGHTS, load_adapter, save_adapter
from slipstream.models.policy import load_policy, pack, policy_config
from slipstream.run.eval_export import stored_dtype
from tests.data.helpers import char_tokenizer
from tests.fuzz.harness import Result, command, try_input
from tests.fuzz.values import as_text, odd_value
from tests.models.helpers import FAMILIES, config, make_decoder

COUNT = 100

TEMPLATES: tuple[Any, ...] = (
    "",
    "{{ 1/0 }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('no' * 100000) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(90) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "{{ 9 ** 99999999 }}",
    "{{ 'a' * 99999999999 }}",
    "{{ range(10 ** 12) | list }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages[0].content.nothing.at.all }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages[0]['content'] + 5 }}",
    "{{ '%c' % 55296 }}",
    "{{ 'a' | center(99999999999) }}",
    "{% include 'x' %}",
    "{% extends 'x' %}",
    "{% if %}",
    "{{",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if a %}" * 500 + "{% endif %}" * 500,
    "a" * 2_000_000,
    "{{ messages }}" * 3000,
    "\0",
    "\ud800",
    5,
    [],
    {"default": 3},
    [{"name": "default", "template": "{{ 1/0 }}"}],
)


class _Folders:
    """Good folders of each kind, written once and copied for each input."""

    def __init__(self, root: Path) -> None:
        self.root = root
        tokenizer = char_tokenizer()
        for family in FAMILIES:
            decoder = make_decoder(family, vocab_size=144)
            save_checkpoint(decoder, root / family, save_tokenizer=tokenizer.save_pretrained)
        save_checkpoint(
            decoder,
            root / "sharded",
            max_shard_bytes=40_000,
            save_tokenizer=tokenizer.save_pretrained,
        )
        small = GPT2Config(
            vocab_size=144, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
            eos_token_id=1,
        )  # fmt: skip
        GPT2LMHeadModel(small).save_pretrained(root / "transformers")
        tokenizer.save_pretrained(str(root / "transformers"))
        head = DraftHead(config("qwen2", vocab_size=144))
        save_draft_head(head, root / "draft")
        adapted = make_decoder("qwen2", vocab_size=144)
        add_lora(adapted, LoraConfig(rank=2, alpha=4, target_modules=("q_proj",)))
        save_adapter(adapted, root / "adapter")

    def copy(self, name: str, target: Path) -> Path:
        return Path(shutil.copytree(self.root / name, target))


def run(count: int) -> Result:
    """Try `count` folders, and return the outcomes."""
    result = Result()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folders = _Folders(root / "good")
        for number in range(count):
            _try(result, number, folders, root / f"odd-{number}")
            shutil.rmtree(root / f"odd-{number}", ignore_errors=True)
    return result


def _try(result: Result, number: int, folders: _Folders, target: Path) -> None:
    draw = random.Random(f"model {number}")
    kind = draw.choice((*FAMILIES, "sharded", "transformers", "transformers", "draft", "adapter"))
    folder = folders.copy(kind, target)
    has_tokenizer = kind not in ("draft", "adapter")
    poisons: list[Callable[[random.Random, Path], str]] = [_field, _field, _field, _file, _weights]
    if has_tokenizer:
        poisons += [_tokenizer, _tokenizer, _template, _template]
    if kind == "sharded":
        poisons += [_index] * 4
    what = draw.choice(poisons)(draw, folder)
    loads: dict[str, Callable[[Path], None]] = {"draft": _load_draft, "adapter": _load_adapter}
    load = loads.get(kind, _load)
    if kind in FAMILIES and draw.random() < 0.2:
        load = _load_critic
    name = f"{number} {kind} {load.__name__} {what}".encode("ascii", "backslashreplace").decode()
    try_input(result, name, partial(_attempt, load, folder), folder.name)


def _attempt(load: Callable[[Path], None], folder: Path) -> str:
    load(folder)
    return ""


def _load(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    reader = PromptReader(tokenizer=tokenizer, max_prompt_length=16, truncation="left")
    row = {"prompt": [{"role": "user", "content": "1+1?"}]}
    loaded = reader.read([DataRow(folder, 0, row, folder.name), DataRow(folder, 1, row, "again")])
    assert len(loaded.prompts) + len(loaded.failed) + loaded.filtered == 2
    assert sum(map(len, loaded.failed)) < 5000
    found = policy_config(folder)
    assert found.context_limit.tokens > 0
    policy = load_policy(folder)
    length = min(4, found.context_limit.tokens)
    ids = torch.arange(length)[None] % found.vocab_size
    pack(policy, torch.float32).forward(ids, torch.arange(length)[None])
    stored_dtype(folder)


def _load_critic(folder: Path) -> None:
    load_critic(folder)


def _load_draft(folder: Path) -> None:
    load_draft_head(folder, config("qwen2", vocab_size=144))


def _load_adapter(folder: Path) -> None:
    load_adapter(make_decoder("qwen2", vocab_size=144), folder)


def _field(draw: random.Random, folder: Path) -> str:
    path = folder / (ADAPTER_CONFIG if (folder / ADAPTER_CONFIG).exists() else "config.json")
    raw = json.loads(path.read_text())
    more = (
        "rope_scaling",
        "rope_parameters",
        "sliding_window",
        "layer_types",
        "quantization_config",
    )
    key = draw.choice((*sorted(raw), *more, "attention_bias", "use_sliding_window"))
    odd: Any = draw.choice(
        (None, 0, -1, 10**12, "48", [], {}, 1e400, float("nan"), True, odd_value(draw))
    )
    if key in ("rope_scaling", "rope_parameters") and draw.random() < 0.7:
        kinds = ("linear", "dynamic", "yarn", "longrope", "llama3", "default", "x", 5)
        odd = {
            "rope_type": draw.choice(kinds),
            **{
                name: draw.choice((odd, 1, 2.0, 1e308, 10**400, [1.0], 16))
                for name in ("factor", "low_freq_factor", "high_freq_factor", "rope_theta",
                             "original_max_position_embeddings", "short_factor", "long_factor")
                if draw.random() < 0.5
            },
        }  # fmt: skip
    raw[key] = odd
    if draw.random() < 0.1 and (folder / "generation_config.json").exists():
        path, raw, key = folder / "generation_config.json", {"eos_token_id": odd}, "eos_token_id"
    path.write_text(as_text(raw), encoding="utf-8", errors="surrogatepass")
    return f"{path.name} {key}={as_text(odd)[:60]}"


_CONTENTS = (
    b"", b"{", b"\0", b"\xff\xfe", b"[]", b"5", b"null", b"{}", b"\xef\xbb\xbf{}",
    b"[" * 5000 + b"]" * 5000, b'{"a": ' * 5000 + b"1" + b"}" * 5000,
    b'{"a": ' + b"9" * 6000 + b"}", b"\x80\x04K\x01.", b"PK\x03\x04", b"x" * 999,
)  # fmt: skip


def _file(draw: random.Random, folder: Path) -> str:
    """Replace a file by something else."""
    path = draw.choice(sorted(p for p in folder.iterdir() if p.is_file()))
    kind = draw.choice(
        ("content", "absent", "folder", "loop", "dangling", "device", "fifo", "torn")
    )
    data = path.read_bytes()
    path.unlink()
    if kind == "content":
        data = draw.choice(_CONTENTS)
        path.write_bytes(data)
        return f"{path.name} = {data[:20]!r}"
    if kind == "torn":
        path.write_bytes(data[: draw.randrange(len(data))])
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("/nowhere/at/all")
    elif kind == "device":
        path.symlink_to(draw.choice(("/dev/null", "/dev/zero")))
    elif kind == "fifo":
        os.mkfifo(path)
    return f"{path.name} {kind}"


def _weights(draw: random.Random, folder: Path) -> str:
    name = ADAPTER_WEIGHTS if (folder / ADAPTER_WEIGHTS).exists() else WEIGHTS
    path = folder / name
    if not path.exists():
        path = min(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    kind = draw.choice(("short", "length", "header", "flip", "longer", "pickle"))
    if kind == "short":
        data = data[: draw.randrange(len(data))]
    elif kind == "length":
        data[:8] = draw.getrandbits(draw.choice((8, 32, 64))).to_bytes(8, "little")
    elif kind == "header":
        text = data[8 : 8 + header].decode()
        odd = text.replace(*draw.choice((("F32", "I64"), ("[", "[-"), ("0", "9"), ("shape", "x"))))
        data[8 : 8 + header] = odd.encode()[:header].ljust(header)
    elif kind == "flip":
        data[draw.randrange(8 + header)] ^= 1 << draw.randrange(8)
    elif kind == "longer":
        data = data + b"x" * 10
    else:
        path.unlink()
        path = path.with_name("pytorch_model.bin")
        data = bytearray(b"\x80\x04K\x01.")
    path.write_bytes(data)
    return f"{path.name} {kind}"


def _index(draw: random.Random, folder: Path) -> str:
    path = folder / INDEX
    raw = json.loads(path.read_text())
    names = raw["weight_map"]
    file = draw.choice(
        ("../x.safetensors", "/etc/passwd", "", ".", "..", 5, None, "a" * 5000, "\0", "\ud800",
         "config.json", INDEX, "model-00001-of-99999.safetensors", ["x"], "~", "$HOME")
    )  # fmt: skip
    names[draw.choice(sorted(names))] = file
    if draw.random() < 0.3:
        raw["weight_map"] = odd_value(draw)
    path.write_text(as_text(raw), encoding="utf-8", errors="surrogatepass")
    return f"{INDEX} {as_text(file)[:40]}"


def _tokenizer(draw: random.Random, folder: Path) -> str:
    path = folder / draw.choice(
        ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    )
    raw = json.loads(path.read_text()) if path.exists() else {}
    key = draw.choice(
        (*sorted(raw), "model_max_length", "eos_token", "auto_map", "tokenizer_class")
    )
    odd = odd_value(draw)
    inner = raw.get(key)
    if isinstance(inner, dict) and inner and draw.random() < 0.6:
        key_inside = draw.choice(sorted(inner))
        inner[key_inside] = odd
        key = f"{key}.{key_inside}"
    else:
        raw[key] = odd
    path.write_text(as_text(raw), encoding="utf-8", errors="surrogatepass")
    return f"{path.name} {key}={as_text(odd)[:60]}"


def _template(draw: random.Random, folder: Path) -> str:
    template = draw.choice(TEMPLATES)
    path = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if isinstance(template, str) and draw.random() < 0.5:
        (folder / "chat_template.jinja").write_text(
            template, encoding="utf-8", errors="surrogatepass"
        )
    else:
        path.write_text(
            as_text({**json.loads(path.read_text()), "chat_template": template}),
            encoding="utf-8",
            errors="surrogatepass",
        )
    return f"template {str(template)[:60]}"


if __name__ == "__main__":
    sys.exit(command("models", COUNT, run))
