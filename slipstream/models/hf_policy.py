"""Policies that run through transformers' own model classes, for architectures other than ours.

`HFPolicy` has the interface that a trainer needs from a `Decoder`. It owns the parameters (fp32
master weights) under transformers' names. `HFPolicy.pack` returns a `PackedHFPolicy`. Its forward
pass returns logits in place of hidden states, because each architecture has its own steps after the
last layer (biases, scales, soft caps).

Sequences are padded on the right, which a causal model ignores. Loading a model checks that it is
causal. Dropout is off. The results are not exact: the last bits depend on the other sequences of
the micro-batch.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import CheckpointError
from slipstream.models.config import ContextLimit
from slipstream.models.decoder import HiddenStates
from slipstream.models.hf_io import read_json, stored_bytes
from slipstream.reading import reading, shown, special_file

_SAVED = "give a folder as save_pretrained writes it"
_MOST = {"layer": 10_000, "size": 2**31, "vocab": 2**31, "heads": 2**20, "num_": 2**31, "n_": 2**31}
"""The highest number in a field of `config.json` by a part of its name."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
_SAME = 1e-5
"""Logits that differ by less than this (absolute and relative) count as equal up to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFPolicyConfig:
    """The facts about an architecture that trainer and engine need. `family` is its model_type."""

    family: str
    vocab_size: int
    context_limit: ContextLimit
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def with_end_tokens(self, ids: Sequence[int]) -> HFPolicyConfig:
        """Return these facts with `ids` as additional end-of-sequence tokens."""
        own = self.eos_token_ids
        return replace(self, eos_token_ids=own + tuple(i for i in ids if i not in own))


class HFPolicy(nn.Module):
    """A causal language model of transformers, with its own parameter names."""

    def __init__(self, model: Any, config: HFPolicyConfig) -> None:
        """`model` must have fp32 parameters.

        Raises CheckpointError if it is not causal, or if its logits do not match `vocab_size`.
        """
        super().__init__()
        self.model = model.eval()
        self.config = config
        _switch_dropout_off(model)
        _check_causal(self)

    @property
    def supports_checkpointing(self) -> bool:
        """Whether the model supports gradient checkpointing."""
        return bool(getattr(self.model, "supports_gradient_checkpointing", False))

    @property
    def device(self) -> torch.device:
        found = next(self.model.parameters()).device
        assert isinstance(found, torch.device)
        return found

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters as `nn.Module` does, under transformers' names."""
        found: Iterator[tuple[str, nn.Parameter]] = self.model.named_parameters(
            prefix, recurse, remove_duplicate
        )
        return found

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of a checkpoint by name; tied weights appear once."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def pack(self, dtype: torch.dtype) -> PackedHFPolicy:
        """Return the forward pass in `dtype`."""
        return PackedHFPolicy(self, dtype)

    def copy_as(self, dtype: torch.dtype) -> Any:
        """Return a separate transformers model with a copy of these weights in `dtype`.

        It is on the same device.
        """
        from transformers import AutoModelForCausalLM

        # Built from the configuration, because buffers such as rotary frequencies stay in fp32.
        made = AutoModelForCausalLM.from_config(self.model.config, dtype=dtype).to(self.device)
        made.load_state_dict(self.model.state_dict())
        return made.eval()

    def problems(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the reasons why `tensors` do not fit as weights; empty if they fit."""
        own = dict(self.weights())
        found = [f"tensor {name} is missing" for name in own if name not in tensors]
        for name, tensor in tensors.items():
            if name not in own:
                found.append(f"tensor {name} is not part of this model")
            elif tensor.shape != own[name].shape:
                found.append(
                    f"tensor {name} has shape {tuple(tensor.shape)}, expected "
                    f"{tuple(own[name].shape)}"
                )
            elif not tensor.isfinite().all():
                found.append(f"tensor {name} has NaN or infinite values")
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor], *, source: str) -> None:
        """Copy `tensors` into the model, after checking all of them. Raises CheckpointError."""
        if problems := self.problems(tensors):
            raise CheckpointError(f"{source}: {'; '.join(problems[:3])}")
        for name, own in self.weights():
            own.copy_(tensors[name])

    def load_folder(self, folder: Path) -> None:
        """Copy the weights of a checkpoint into the model.

        Raises CheckpointError as `load_hf_policy` does.
        """
        self.load_tensors(dict(load_hf_policy(folder).weights()), source=str(folder))

    def save(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        save_tokenizer: Callable[[str], object] | None = None,
    ) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads.

        Existing files are overwritten. `save_tokenizer` is a tokenizer's `save_pretrained`.
        """
        model = self.model if dtype == torch.float32 else self.copy_as(dtype)
        model.generation_config = self.model.generation_config
        with _quiet():
            model.save_pretrained(str(folder))
        if save_tokenizer is not None:
            save_tokenizer(str(folder))


@dataclass(frozen=True, slots=True)
class PackedHFPolicy:
    """The forward pass of an `HFPolicy`, in `dtype` by autocast. It makes no copy of weights."""

    model: HFPolicy
    dtype: torch.dtype

    @property
    def head(self) -> tuple[None, None]:
        """(None, None): the forward pass returns logits, so there is no separate LM head."""
        return None, None

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        lengths: Sequence[int] | None = None,
        aux_layers: Sequence[int] = (),
        recompute: bool = False,
    ) -> HiddenStates:
        """Return logits (B, T, V) as `HiddenStates.final`.

        Sequences start at position 0 and are padded on the right.

        Raises:
            ValueError: `lengths` or `aux_layers` are set, which transformers' models do not
                support.
        """
        if lengths is not None or aux_layers:
            raise ValueError(
                f"lengths={lengths} and aux_layers={list(aux_layers)}: a policy that runs through "
                "transformers needs padded sequences and has no auxiliary layers"
            )
        inner = self.model.model
        T = ids_BT.shape[1]
        # Positions beyond the model's limit hold only padding.
        width = min(T, self.model.config.context_limit.tokens)
        ids = ids_BT[:, :width]
        # Without a mask transformers warns about padding, which the causal mask hides anyway.
        seen = torch.ones_like(ids)
        with _recomputing(inner, recompute), self._autocast(ids.device):
            logits = inner(input_ids=ids, attention_mask=seen, use_cache=False).logits
        return HiddenStates(F.pad(logits, (0, 0, 0, T - width)) if width < T else logits, None)

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)


def hf_policy_config(folder: Path, *, positions: int | None = None) -> HFPolicyConfig:
    """Return the configuration in `folder`, without loading weights.

    `positions` replaces the longest sequence in its config.json.
    Raises CheckpointError if transformers does not know the architecture or has no causal language
    model for it, or if the weights are quantized.
    """
    with reading(folder, CheckpointError, _SAVED):
        if folder.is_dir() and (odd := special_file(folder)):
            raise CheckpointError(f"{odd} is not a regular file; {_SAVED}")
        _check_sizes(read_json(folder / "config.json"), folder / "config.json")
        return _config_of(_read_config(folder, positions), folder)


def _check_sizes(raw: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError for sizes that no model has, since building it would not end."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            _check_sizes(value, path)
        most = next((n for part, n in _MOST.items() if part in key), None)
        if most is not None and isinstance(value, int | float) and not value <= most:
            raise CheckpointError(
                f"{path}: {key}={shown(value)} must be at most {most}; set it to the value that "
                "the model was trained with"
            )


def load_hf_policy(
    folder: Path, *, device: torch.device | None = None, positions: int | None = None
) -> HFPolicy:
    """Return a model with fp32 parameters from a Hugging Face folder.

    `positions` replaces the longest sequence in its config.json.
    Raises CheckpointError as `hf_policy_config` does, and if weights are missing, unexpected, not
    finite or stored in pickle files.
    """
    with reading(folder, CheckpointError, _SAVED):
        return _load(folder, device, positions)


def _load(folder: Path, device: torch.device | None, positions: int | None) -> HFPolicy:
    from transformers import AutoModelForCausalLM

    config = hf_policy_config(folder, positions=positions)
    _check_bytes(folder)
    try:
        with _quiet():
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=_read_config(folder, positions),
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unreadable(folder, error) from error
    for kind, remedy in (
        ("missing_keys", "they would be drawn at random; give a whole checkpoint"),
        (
            "unexpected_keys",
            "they would be lost; load and save the model once with AutoModelForCausalLM, which "
            "drops them",
        ),
    ):
        if names := sorted(loading_info[kind]):
            raise CheckpointError(
                f"{folder}: {kind.removesuffix('_keys')} weights {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if names[3:] else ''}; {remedy}"
            )
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise CheckpointError(f"{folder}: tensor {name} has NaN or infinite values")
    try:
        made = HFPolicy(model, config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return made.to(device) if device is not None else made


def _check_bytes(folder: Path) -> None:
    """Raise CheckpointError if the embedding or the layers cannot be in the weights' files."""
    text = _read_config(folder).get_text_config()
    stored = stored_bytes(folder.glob("*.safetensors"))
    hidden = getattr(text, "hidden_size", 1)
    for key in ("vocab_size", "num_hidden_layers"):
        needed = getattr(text, key, 1) * hidden
        if stored and needed > stored:
            raise CheckpointError(
                f"{folder}: config.json has {key}={getattr(text, key)} and hidden_size={hidden}, "
                f"which need {needed:,} parameters, but the weights have {stored:,} bytes; give "
                "the config.json of these weights"
            )


def _read_config(folder: Path, positions: int | None = None) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        raw = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(folder, error) from error
    if raw.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers has no causal language model of model_type "
            f"{raw.model_type!r}; a policy needs one"
        )
    if getattr(raw, "quantization_config", None):
        raise CheckpointError(
            f"{folder / 'config.json'}: quantized checkpoints are not supported; save the model in "
            "bf16 or fp32"
        )
    if positions is not None:
        text = raw.get_text_config()
        setattr(
            text, next((key for key in _POSITIONS if hasattr(text, key)), _POSITIONS[0]), positions
        )
    return raw


def _config_of(raw: Any, folder: Path) -> HFPolicyConfig:
    from transformers import GenerationConfig

    text = raw.get_text_config()
    positions = next((n for key in _POSITIONS if (n := getattr(text, key, None))), None)
    eos = None
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
    if eos is None:
        eos = text.eos_token_id
    return HFPolicyConfig(
        family=raw.model_type,
        vocab_size=int(text.vocab_size),
        context_limit=ContextLimit(
            sys.maxsize if positions is None else int(positions),
            f"the model has max_position_embeddings={positions}",
            of_config=True,
        ),
        pad_token_id=text.pad_token_id,
        eos_token_ids=tuple(eos)
        if isinstance(eos, list | tuple)
        else ()
        if eos is None
        else (eos,),
    )


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"{folder}: transformers cannot load it ({type(error).__name__}: {first[:400]}); give a "
        "folder with config.json and model.safetensors, as save_pretrained writes them"
    )


def _switch_dropout_off(model: Any) -> None:
    """Set all dropout rates to 0.

    Evaluation mode is not enough: gradient checkpointing runs the model in training mode.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@torch.no_grad()
def _check_causal(model: HFPolicy) -> None:
    """Raise CheckpointError if logits depend on later tokens or have another shape than (B, T, V).

    The check changes the last of a few tokens and compares the logits before it.
    """
    words, limit = model.config.vocab_size, model.config.context_limit.tokens
    ids = (torch.arange(min(8, limit), device=model.device)[None] + 3) % words
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % words
    before, after = (
        model.pack(torch.float32).forward(x, torch.arange(x.shape[1])[None]).final
        for x in (ids, changed)
    )
    if before.shape != (1, ids.shape[1], words):
        raise CheckpointError(
            f"the logits of this {model.config.family} model have shape {tuple(before.shape)} for "
            f"{ids.shape[1]} tokens and vocab_size={words}; it cannot be a policy"
        )
    if not torch.allclose(before[:, :-1], after[:, :-1], atol=_SAME, rtol=_SAME):
        raise CheckpointError(
            f"in this {model.config.family} model a token changes the logits of earlier tokens, so "
            "it is not a causal language model; if its config.json has is_decoder, set it to true"
        )


@contextlib.contextmanager
def _recomputing(model: Any, enabled: bool) -> Iterator[None]:
    """Turn on gradient checkpointing in the body, if `enabled`.

    transformers does it only in training mode.
    """
    if not enabled:
        yield
        return
    if not model.is_gradient_checkpointing:
        # Only once, because each call adds a hook. Older versions of transformers use the second
        # name.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars in the body, because they break the run's own display."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
