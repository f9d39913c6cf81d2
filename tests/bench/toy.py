"""A small policy in the place of a trained one."""

from __future__ import annotations

from types import ModuleType

import pytest

from slipstream.bench.speculation.trained import Trained
from slipstream.models.draft.eagle1 import DraftHead
from tests.inference.helpers import shared_decoder


def with_toy(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    prompts: list[tuple[int, ...]],
    max_model_len: int = 40,
) -> Trained:
    """A policy that nobody trained, and a head: what `load_trained` of `module` gives."""
    decoder = shared_decoder()
    head = DraftHead(decoder.config)
    head.init_weights(1)
    toy = Trained(decoder=decoder, head=head, prompts=prompts, max_model_len=max_model_len)
    monkeypatch.setattr(module, "load_trained", lambda folder, device, most: toy)
    return toy
