"""Old import paths of the documented API work, and a warning names the new path."""

from __future__ import annotations

import importlib
import sys

import pytest

MOVED = {
    "slipstream.environment.countdown": ("slipstream.data.countdown", "CountdownTask"),
    "slipstream.environment.data_buffer": ("slipstream.data.data_buffer", "DataBuffer"),
    "slipstream.environment.registry": ("slipstream.data.registry", "register_task"),
    "slipstream.environment.rlhf_dataset": ("slipstream.data.rlhf_dataset", "RLHFDataset"),
    "slipstream.environment.samplers": ("slipstream.data.samplers", "PassRateSampler"),
    "slipstream.environment.sft": ("slipstream.data.sft", "conversation_sample"),
    "slipstream.environment.tokenizer": ("slipstream.data.tokenizer", "build_tokenizer"),
    "slipstream.loops.run": ("slipstream.run.train", "train"),
}


@pytest.mark.parametrize("old", MOVED)
def test_old_path_has_the_same_objects_and_warns_with_the_new_path(old: str) -> None:
    new, name = MOVED[old]
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=new.replace(".", r"\.")):
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(new), name)
