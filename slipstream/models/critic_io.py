"""Read and write critics as Hugging Face folders for token classification with one label.

`AutoModelForTokenClassification` loads these folders. This module knows files; `value_model` has
the model. Loops and training scripts call it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.errors import CheckpointError
from slipstream.models.hf_io import (
    architectures,
    check_bytes,
    load_config,
    load_tensors,
    read_tensors,
    write_model,
)
from slipstream.models.value_model import ValueModel

_ARCHITECTURES = {
    "qwen2": "Qwen2ForTokenClassification",
    "qwen3": "Qwen3ForTokenClassification",
    "llama": "LlamaForTokenClassification",
    "mistral": "MistralForTokenClassification",
}
_CAUSAL = "ForCausalLM"
_REWARD = "ForSequenceClassification"


def load_critic(
    folder: Path, *, device: torch.device | None = None, positions: int | None = None
) -> ValueModel:
    """Return a value model with fp32 parameters.

    The folder may hold a critic that `save_critic` or transformers wrote, a reward model (sequence
    classification with one label), or a language model. A language model loses its LM head and
    gets a value head whose values are all 0. `positions` replaces the `max_position_embeddings` of
    config.json.

    Raises:
        CheckpointError: as `load_checkpoint`; or the folder holds another kind of model, or a model
            with several labels.
    """
    config = load_config(folder, positions=positions)
    check_bytes(config, folder)
    tensors = dict(read_tensors(folder))
    (architecture,) = (architectures(folder) or [f"?{_CAUSAL}"])[:1]
    model = ValueModel(config)
    if architecture.endswith(_CAUSAL):
        tensors.pop("lm_head.weight", None)
        tensors.update({f"score.{n}": p.detach() for n, p in model.score.named_parameters()})
    elif architecture.endswith(_REWARD):
        # The score head of a reward model has no bias.
        tensors.setdefault("score.bias", torch.zeros(1))
    elif architecture != _ARCHITECTURES[config.family]:
        raise CheckpointError(
            f"{folder / 'config.json'}: {architecture} is no critic; give a folder with "
            f"{_ARCHITECTURES[config.family]} and one label, a reward model with one label "
            f"({_REWARD.removeprefix('For')}), or a language model to start from"
        )
    if (
        "score.weight" in tensors
        and tensors["score.weight"].ndim
        and len(tensors["score.weight"]) != 1
    ):
        raise CheckpointError(
            f"{folder}: the model has {len(tensors['score.weight'])} labels, but a critic has one, "
            "the value; start from a language model instead"
        )
    load_tensors(model, tensors, source=str(folder))
    return model.to(device) if device is not None else model


def save_critic(
    model: ValueModel,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    save_tokenizer: Callable[[str], object] | None = None,
) -> None:
    """Write a folder for `load_critic` and `AutoModelForTokenClassification.from_pretrained`.

    Existing files are overwritten. `save_tokenizer` is a tokenizer's `save_pretrained`.
    """
    raw = model.config.to_hf(dtype=str(dtype).removeprefix("torch."))
    raw |= {
        "architectures": [_ARCHITECTURES[model.config.family]],
        "num_labels": 1,
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
        "classifier_dropout": 0.0,
        "use_cache": False,
    }
    write_model(folder, raw, model, dtype=dtype)
    if save_tokenizer is not None:
        save_tokenizer(str(folder))
