"""Builds the countdown task's word-level tokenizer, and loads Hugging Face tokenizers.

Knows nothing of models or data sets. Called by the tasks, the data set loaders and the loops.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from slipstream.data.chat_template import check_chat_template
from slipstream.errors import ConfigError, DataError
from slipstream.reading import jinja_text, reading, shown_path, special_file

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

NUM_NUMBERS = 100
SYMBOLS = ("+", "-", "=", ",", "off", "answer", ":")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCAB_MULTIPLE = 16

_CUSTOM_TEMPLATE = "actor_rollout_ref.model.custom_chat_template"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

# The separator is written before a message. So the text of a conversation is a prefix of every
# longer one, and no token can span two messages.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ ' ' }}{% endif %}"
    "{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)


def build_tokenizer(vocab_size: int = 224) -> PreTrainedTokenizerBase:
    """Return the countdown tokenizer: number n has id n, target `->n` has id 100 + n, then symbols.

    A target is a single word, so that comparing it with a sum needs one attention step, not two; a
    small model learns that from far fewer tokens. `<pad>`, `<eos>`, `<unk>` follow. The other ids
    up to `vocab_size` (a multiple of 16, for matrix kernels) are unused tokens. Words are separated
    by white space; `decode(encode(text)) == text` for words joined by single spaces.
    """
    numbers = [str(n) for n in range(NUM_NUMBERS)]
    targets = [f"->{n}" for n in range(NUM_NUMBERS)]
    words = [*numbers, *targets, *SYMBOLS, PAD, EOS, UNKNOWN]
    if vocab_size < len(words) or vocab_size % VOCAB_MULTIPLE:
        raise ConfigError(
            f"vocab_size {vocab_size} is not usable: the countdown tokenizer needs a multiple of "
            f"{VOCAB_MULTIPLE} of at least {len(words)}, for example 224"
        )
    words += [f"<unused_{i}>" for i in range(vocab_size - len(words))]
    backend = Tokenizer(
        WordLevel(vocab={word: i for i, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Write the tokenizer's files into the folder `path`, readable by `AutoTokenizer`."""
    tokenizer.save_pretrained(str(path))


def _is_dir(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:  # such as a name that is too long
        return False


def load_tokenizer(
    path: str | Path,
    *,
    require_chat_template: bool = False,
    custom_chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder, or by its Hugging Face name.

    `custom_chat_template` replaces the tokenizer's own; it is a Jinja template, or the path of a
    file with one. Raises ConfigError if it cannot be read, and DataError if there is no tokenizer,
    or if `require_chat_template` and it has none.
    """
    name = str(path)
    folder = Path(name).expanduser()
    if not _is_dir(folder) and (isinstance(path, Path) or not _HUB_NAME.fullmatch(name)):
        raise DataError(
            f"tokenizer folder {name!r} does not exist: set actor_rollout_ref.model.path to a "
            "folder with tokenizer files or to a Hugging Face model name"
        )
    remedy = (
        "actor_rollout_ref.model.path must be a folder with tokenizer.json and "
        "tokenizer_config.json, or a Hugging Face model name"
    )
    with reading(name, DataError, remedy, noun="tokenizer "):
        if _is_dir(folder) and (odd := special_file(folder)):
            raise DataError(f"{odd} is not a regular file; remove it, or give another folder")
        try:
            tokenizer = _load(folder if folder.is_dir() else None, name, trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            first = (str(error).splitlines() or [""])[0].rstrip(" :")
            raise DataError(
                f"no tokenizer can be loaded from {name!r} ({type(error).__name__}: {first}): "
                f"{remedy}"
            ) from error
        # For a known architecture without tokenizer files, transformers returns an empty tokenizer.
        empty = len(tokenizer) <= len(set(tokenizer.all_special_ids))
    if empty:
        raise DataError(
            f"{name!r} has no tokenizer files: copy tokenizer.json and tokenizer_config.json into "
            "it, or set actor_rollout_ref.model.tokenizer_path to a folder that has them"
        )
    if custom_chat_template is not None:
        tokenizer.chat_template = jinja_text(custom_chat_template, key=_CUSTOM_TEMPLATE)
    check_chat_template(tokenizer.chat_template, f"tokenizer {shown_path(name)}")
    if require_chat_template and not tokenizer.chat_template:
        raise DataError(
            f"tokenizer {name!r} has no chat template, but the prompts are lists of messages: set "
            "actor_rollout_ref.model.custom_chat_template to a Jinja template, or use the "
            "tokenizer of an instruction-tuned model"
        )
    return tokenizer


def _load(folder: Path | None, name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`, or the one that the Hub calls `name` if it is None."""
    # Imported here because a run whose tokenizer is built, not loaded, does not need it.
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if folder is not None and (config := _class_hints(folder)) is not None:
        options["config"] = config
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        name if folder is None else str(folder), **options
    )
    return found


_HINTS = ("model_type", "model_name", "tokenizer_class")
"""The keys of config.json by which `AutoTokenizer` chooses the tokenizer's class."""


def _class_hints(folder: Path) -> PreTrainedConfig | None:
    """What `AutoTokenizer` needs of a model's config.json, without the configuration class.

    The class of a model's configuration imports modules for training and generation, which takes
    longer than the tokenizer itself. Returns None where the class matters: without a
    config.json that is a JSON object, or if the folder has code of its own, or if
    tokenizer_config.json does not name the tokenizer's class.
    """
    from transformers import PreTrainedConfig

    model = _json_object(folder / "config.json")
    tokenizer = _json_object(folder / "tokenizer_config.json")
    if not model or not isinstance(tokenizer.get("tokenizer_class"), str):
        return None
    if "auto_map" in model or "auto_map" in tokenizer:
        return None
    hints = PreTrainedConfig(name_or_path=str(folder))  # which it reads, too
    for key in _HINTS:
        if key in model:
            setattr(hints, key, model[key])
    return hints


def _json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none. `AutoTokenizer` gives the better error."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def vocabulary_in(
    folder: Path, *, source: str, needed: bool = False, trust_remote_code: bool = False
) -> dict[str, int] | None:
    """Return tokens and ids of the tokenizer in a model's folder.

    None if there is no tokenizer and it is not `needed`. Raises DataError, naming `source`, if it
    cannot be loaded.
    """
    if not needed and not (folder / "tokenizer_config.json").exists():
        return None
    try:
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    except DataError as error:
        raise DataError(
            f"{source}: the tokenizer in {folder} cannot be loaded, so it cannot be compared with "
            f"the policy's; fix it, or remove its tokenizer_config.json"
        ) from error
    found: dict[str, int] = tokenizer.get_vocab()
    return found
