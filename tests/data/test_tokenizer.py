"""Tokenizers are built, saved and loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.data.countdown import CountdownTask
from slipstream.data.tokenizer import build_tokenizer, load_tokenizer, save_tokenizer
from slipstream.errors import ConfigError, DataError
from tests.data.helpers import byte_tokenizer, metaspace_tokenizer

TEXT = "8 15 6 10 ->25 : 6 + 15 = 21 off 4 , 10 + 15 = 25 off 0 answer 10 + 15 <eos>"


def test_vocabulary_ids() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 224
    assert tokenizer.convert_tokens_to_ids(["0", "42", "99"]) == [0, 42, 99]
    assert tokenizer("+ - = , off answer :")["input_ids"] == list(range(200, 207))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        207,
        208,
        209,
    )
    assert len(build_tokenizer(256)) == 256


def test_round_trip_is_exact() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) == len(TEXT.split())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT.removesuffix(" <eos>")
    assert tokenizer("100 cats")["input_ids"] == [209, 209]


@pytest.mark.parametrize("size", [208, 224 + 8, 0])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"vocab_size {size}"):
        build_tokenizer(size)


def test_the_chat_template_joins_contents_only() -> None:
    tokenizer = build_tokenizer()
    messages = [
        {"role": "user", "content": "1 2 3 ->5 :"},
        {"role": "assistant", "content": "answer 2 + 3"},
        {"role": "user", "content": "4 5 6 ->9 :"},
    ]
    full = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert full == "1 2 3 ->5 : answer 2 + 3 <eos> 4 5 6 ->9 :"
    for count in (1, 2):
        assert full.startswith(tokenizer.apply_chat_template(messages[:count], tokenize=False))


def test_saved_tokenizers_are_loaded_unchanged(tmp_path: Path) -> None:
    save_tokenizer(build_tokenizer(), tmp_path / "tok")
    for loaded in (
        AutoTokenizer.from_pretrained(str(tmp_path / "tok")),
        load_tokenizer(tmp_path / "tok", require_chat_template=True),
    ):
        ids = loaded(TEXT)["input_ids"]
        assert ids == build_tokenizer()(TEXT)["input_ids"]
        assert loaded.decode(ids) == TEXT
        assert loaded.eos_token_id == 208
        assert loaded.chat_template == build_tokenizer().chat_template
        prompt = CountdownTask(tokenizer=loaded).prompt("train", 4)
        assert prompt.ids == CountdownTask().prompt("train", 4).ids


def test_custom_chat_template_replaces_the_default(tmp_path: Path) -> None:
    save_tokenizer(build_tokenizer(), tmp_path)
    loaded = load_tokenizer(tmp_path, custom_chat_template="{{ messages[0]['content'] }} !")
    messages = [{"role": "user", "content": "1"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "1 !"
    (tmp_path / "mine.j2").write_text("{{ messages[0]['content'] }} ?\n")
    loaded = load_tokenizer(tmp_path, custom_chat_template=str(tmp_path / "mine.j2"))
    assert loaded.apply_chat_template(messages, tokenize=False) == "1 ?"
    with pytest.raises(ConfigError, match=r"custom_chat_template=.*absent\.jinja"):
        load_tokenizer(tmp_path, custom_chat_template=str(tmp_path / "absent.jinja"))


def test_invalid_tokenizers_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist: set actor_rollout_ref\.model\.path"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer("./nothing/here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no tokenizer can be loaded.*tokenizer\.json"):
        load_tokenizer(tmp_path / "empty")
    bare = build_tokenizer()
    bare.chat_template = None
    save_tokenizer(bare, tmp_path / "bare")
    assert load_tokenizer(tmp_path / "bare").chat_template is None
    with pytest.raises(DataError, match=r"set actor_rollout_ref\.model\.custom_chat_template"):
        load_tokenizer(tmp_path / "bare", require_chat_template=True)


@pytest.mark.parametrize("content", ["[" * 5000, '{"model": ' + "9" * 6000 + "}", "\0", "5", "[]"])
def test_a_tokenizer_file_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    save_tokenizer(build_tokenizer(), tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(
        DataError, match=r"actor_rollout_ref\.model\.path must be a folder"
    ) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_pipe_in_the_folder_is_refused_without_waiting(tmp_path: Path) -> None:
    save_tokenizer(build_tokenizer(), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a regular file; remove it"):
        load_tokenizer(tmp_path)


def test_a_template_without_end_in_the_folder_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ 'a' * 99999999999 }}"
    save_tokenizer(tokenizer, tmp_path)
    with pytest.raises(DataError, match="chat_template does not end"):
        load_tokenizer(tmp_path)


MADE = {
    "words": build_tokenizer,
    "bytes": lambda: byte_tokenizer(
        ["<|im_start|>", "<|im_end|>"],
        "{{ messages[0]['content'] }}<|im_end|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        padding_side="left",
        model_max_length=77,
        additional_special_tokens=["<|im_start|>"],
    ),
    "metaspace": metaspace_tokenizer,
}

TEXTS = ["8 15 ->25 : 6", "a  b\n<|im_start|>user<|im_end|> ab", "<s>ab</s> \u00e9"]


def traits(tokenizer: Any) -> dict[str, Any]:
    """All that a tokenizer's users see of it."""
    encoded = [tokenizer(text) for text in TEXTS]
    return {
        "class": type(tokenizer),
        "backend": json.loads(tokenizer.backend_tokenizer.to_str()),
        "ids": [e["input_ids"] for e in encoded],
        "keys": [list(e) for e in encoded],
        "text": [tokenizer.decode(e["input_ids"]) for e in encoded],
        "plain": [tokenizer.decode(e["input_ids"], skip_special_tokens=True) for e in encoded],
        "special": tokenizer.special_tokens_map,
        "special ids": tokenizer.all_special_ids,
        "added": {i: repr(token) for i, token in tokenizer.added_tokens_decoder.items()},
        "template": tokenizer.chat_template,
        "sides": (tokenizer.padding_side, tokenizer.truncation_side),
        "length": tokenizer.model_max_length,
        "cleans": tokenizer.clean_up_tokenization_spaces,
        "settings": {key: repr(value) for key, value in tokenizer.init_kwargs.items()},
    }


@pytest.mark.parametrize(
    "model",
    [
        None,
        {"model_type": "llama"},
        {"model_type": "mistral"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "llama", "_name_or_path": "deepseek-ai/deepseek-coder-x"},
        {"model_type": "nobody"},
        {"model_type": "llama", "model_name": "qwen2"},
        {"tokenizer_class": "LlamaTokenizer"},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "named",
    ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", ""],
)
@pytest.mark.parametrize("kind", MADE)
def test_tokenizers_are_those_of_auto_tokenizer(
    kind: str, named: str, model: dict[str, str] | None, tmp_path: Path
) -> None:
    save_tokenizer(MADE[kind](), tmp_path)
    file = tmp_path / "tokenizer_config.json"
    raw = {k: v for k, v in json.loads(file.read_text()).items() if k != "tokenizer_class"}
    file.write_text(json.dumps({**raw, "tokenizer_class": named} if named else raw))
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps(model))
    try:
        expected = traits(AutoTokenizer.from_pretrained(str(tmp_path)))
    except (OSError, ValueError, KeyError):
        with pytest.raises(DataError, match="no tokenizer can be loaded"):
            load_tokenizer(tmp_path)
        return
    assert traits(load_tokenizer(tmp_path)) == expected


@pytest.mark.parametrize(
    ("model", "tokenizer", "needed"),
    [
        ({"model_type": "llama"}, {}, False),
        ({"model_type": "llama"}, {"tokenizer_class": None}, True),
        ({"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}, {}, True),
        ({"model_type": "llama"}, {"auto_map": {"AutoTokenizer": ["x.Y", None]}}, True),
    ],
)
def test_class_of_the_configuration_is_imported_only_if_it_matters(
    model: dict[str, Any],
    tokenizer: dict[str, Any],
    needed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tokenizer(build_tokenizer(), tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **tokenizer}))
    (tmp_path / "config.json").write_text(json.dumps(model))

    def refuse(*_: object, **__: object) -> None:
        raise KeyError("AutoConfig is used")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    if needed:
        with pytest.raises(DataError, match="AutoConfig is used"):
            load_tokenizer(tmp_path)
    else:
        assert load_tokenizer(tmp_path)(TEXT)["input_ids"] == build_tokenizer()(TEXT)["input_ids"]


def test_the_name_of_the_folder_may_choose_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers uses the generic class for models with such names, whatever their files say.
    folder = Path("deepseek-ai/deepseek-coder-x")
    monkeypatch.chdir(tmp_path)
    save_tokenizer(MADE["bytes"](), folder)
    file = folder / "tokenizer_config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "tokenizer_class": "Qwen2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    expected = traits(AutoTokenizer.from_pretrained(str(folder)))
    assert expected["class"].__name__ == "TokenizersBackend"
    assert traits(load_tokenizer(folder)) == expected
