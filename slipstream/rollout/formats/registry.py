"""Call formats by name, and the choice of one by the chat template."""

from __future__ import annotations

from slipstream.errors import ConfigError, did_you_mean
from slipstream.rollout.formats.gpt_oss import GptOssFormat
from slipstream.rollout.formats.hermes import HermesFormat
from slipstream.rollout.formats.llama3_json import Llama3JsonFormat
from slipstream.rollout.formats.mistral import MistralFormat
from slipstream.rollout.formats.protocol import CallFormat
from slipstream.rollout.formats.qwen3_coder import Qwen3CoderFormat

_FORMATS: dict[str, CallFormat] = {
    found.name: found
    for found in (
        HermesFormat(),
        Qwen3CoderFormat(),
        Llama3JsonFormat(),
        MistralFormat(),
        GptOssFormat(),
    )
}
_KEY = "actor_rollout_ref.rollout.multi_turn.format"


def register_call_format(call_format: CallFormat) -> None:
    """Register a call format of your own. Raises ConfigError if its name is in use."""
    if call_format.name in _FORMATS:
        raise ConfigError(f"call format {call_format.name!r} already exists; choose another name")
    _FORMATS[call_format.name] = call_format


def call_format_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_FORMATS)


def get_call_format(name: str) -> CallFormat:
    """Return the format `name`. Raises ConfigError, with similar names, if it is unknown."""
    if name not in _FORMATS:
        raise ConfigError(
            f"{_KEY}={name} is unknown{did_you_mean(name, _FORMATS)} (known: "
            f"{', '.join(call_format_names())})"
        )
    return _FORMATS[name]


def format_of_template(template: str) -> CallFormat:
    """Return the format in which a chat template writes tool calls.

    Raises ConfigError if no format fits, or several do.
    """
    fitting = [found for found in _FORMATS.values() if found.written_by(template)]
    if len(fitting) != 1:
        which = "no known" if not fitting else " and ".join(found.name for found in fitting)
        raise ConfigError(
            f"the chat template writes tool calls in {which} format; set {_KEY} to one of "
            f"{', '.join(call_format_names())}"
        )
    return fitting[0]
