"""Policies of other architectures: transformers' causal language models behind what a trainer asks
of a `Decoder`.

`HFPolicy` owns the parameters (fp32 master weights) under transformers' names;
`HFPolicy.pack` gives a `PackedHFPolicy`, whose forward pass yields logits in the place of hidden
states: what a model does after its last layer (biases, scales, soft caps) is its own. Rows are
padded on the right, which a causal model does not see; that it is causal is tried out when it is
loaded. Dropout is off. Not exact: last bits depend on what shares a micro-batch.

Shapes: B sequences, T tokens, V words.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import CheckpointError
from slipstream.models.config import ContextLimit
from slipstream.models.decoder import HiddenStates

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
_SAME = 1e-5
"""Logits that differ by less are the same but for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFPolicyConfig:
    """What is asked of an architecture that transformers computes. `family` is its model_type."""

    family: str
    vocab_size: int
    context_limit: ContextLimit
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


class HFPolicy(nn.Module):
    """The parameters of a causal language model of transformers, under its names."""

    def __init__(self, model: Any, config: HFPolicyConfig) -> None:
        """`model` with fp32 parameters. Raises CheckpointError where it is not causal, or its
        logits are not of the vocabulary."""
        super().__init__()
        self.model = model.eval()
        self.config = config
        _switch_dropout_off(model)
        _check_causal(self)

    @property
    def recomputes(self) -> bool:
        """Whether transformers can compute its activations again in the backward pass."""
        return bool(getattr(self.model, "supports_gradient_checkpointing", False))

    @property
    def device(self) -> torch.device:
        found = next(self.model.parameters()).device
        assert isinstance(found, torch.device)
        return found

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module`, under transformers' names."""
        found: Iterator[tuple[str, nn.Parameter]] = self.model.named_parameters(
            prefix, recurse, remove_duplicate
        )
        return found

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All that a checkpoint holds, tied weights once."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def pack(self, dtype: torch.dtype) -> PackedHFPolicy:
        """The forward pass in `dtype`."""
        return PackedHFPolicy(self, dtype)

    def copy_as(self, dtype: torch.dtype) -> Any:
        """A model of transformers of its own, with these weights in `dtype`, on the same device."""
        from transformers import AutoModelForCausalLM

        # Made anew: frequencies and the like, which stay in fp32, are no weights.
        made = AutoModelForCausalLM.from_config(self.model.config, dtype=dtype).to(self.device)
        made.load_state_dict(self.model.state_dict())
        return made.eval()

    def problems(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """What keeps `tensors` from being the weights."""
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
        """Copy `weights` in; all are checked before any is changed. Raises CheckpointError."""
        if problems := self.problems(tensors):
            raise CheckpointError(f"{source}: {'; '.join(problems[:3])}")
        for name, own in self.weights():
            own.copy_(tensors[name])

    def load_folder(self, folder: Path) -> None:
        """Copy the weights of a checkpoint in. Raises CheckpointError as `load_hf_policy`."""
        self.load_tensors(dict(load_hf_policy(folder).weights()), source=str(folder))

    def save(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        save_tokenizer: Callable[[str], object] | None = None,
    ) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, over what it holds."""
        model = self.model if dtype == torch.float32 else self.copy_as(dtype)
        model.generation_config = self.model.generation_config
        with _quiet():
            model.save_pretrained(str(folder))
        if save_tokenizer is not None:
            save_tokenizer(str(folder))


@dataclass(frozen=True, slots=True)
class PackedHFPolicy:
    """The forward pass over the parameters themselves, in `dtype` by autocast."""

    model: HFPolicy
    dtype: torch.dtype

    @property
    def head(self) -> tuple[None, None]:
        """See `PackedDecoder.head`: there is nothing left to multiply."""
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
        """Logits (B, T, V) as `HiddenStates.final`, of sequences that begin at position 0, padded
        on the right.

        Raises:
            ValueError: sequences in a row, or auxiliary layers, which it has none of.
        """
        if lengths is not None or aux_layers:
            raise ValueError(
                "transformers computes padded sequences, and hands over no auxiliary layers"
            )
        inner = self.model.model
        T = ids_BT.shape[1]
        # Where a table of positions ends there is nothing but padding.
        width = min(T, self.model.config.context_limit.tokens)
        ids = ids_BT[:, :width]
        # All of them are seen: without a mask transformers warns of padding.
        seen = torch.ones_like(ids)
        with _recomputing(inner, recompute), self._autocast(ids.device):
            logits = inner(input_ids=ids, attention_mask=seen, use_cache=False).logits
        return HiddenStates(F.pad(logits, (0, 0, 0, T - width)) if width < T else logits, None)

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)


def hf_policy_config(folder: Path) -> HFPolicyConfig:
    """What the files of `folder` say, without its weights.

    Raises CheckpointError where transformers does not know the architecture, or has no causal
    language model of it, or the weights are quantized.
    """
    return _config_of(_read_config(folder), folder)


def load_hf_policy(folder: Path, *, device: torch.device | None = None) -> HFPolicy:
    """A model with fp32 parameters from a Hugging Face folder.

    Raises CheckpointError as `hf_policy_config`, and where weights are missing, left over, not
    finite or in pickles.
    """
    from transformers import AutoModelForCausalLM

    config = hf_policy_config(folder)
    try:
        with _quiet():
            model, told = AutoModelForCausalLM.from_pretrained(
                str(folder),
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
            "leaves them out",
        ),
    ):
        if names := sorted(told[kind]):
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


def _read_config(folder: Path) -> Any:
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
        ),
        pad_token_id=text.pad_token_id,
        eos_token_ids=tuple(eos)
        if isinstance(eos, list | tuple)
        else ()
        if eos is None
        else (eos,),
    )


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"{folder}: transformers cannot load it ({type(error).__name__}: {reason}); give a folder "
        "with config.json and model.safetensors, as save_pretrained writes them"
    )


def _switch_dropout_off(model: Any) -> None:
    """Also where gradients are checkpointed, which transformers does in training mode alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@torch.no_grad()
def _check_causal(model: HFPolicy) -> None:
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
            f"logits of a {model.config.family} have shape {tuple(before.shape)} for "
            f"{ids.shape[1]} tokens and vocab_size={words}; it cannot be a policy"
        )
    if not torch.allclose(before[:, :-1], after[:, :-1], atol=_SAME, rtol=_SAME):
        raise CheckpointError(
            f"in this {model.config.family} a token changes the logits of tokens before it, so "
            "that it is no causal language model; where its config.json has is_decoder, set it to "
            "true"
        )


@contextlib.contextmanager
def _recomputing(model: Any, wanted: bool) -> Iterator[None]:
    """Gradient checkpointing in the body, which transformers does in training mode alone."""
    if not wanted:
        yield
        return
    if not model.is_gradient_checkpointing:
        # Once: each time it leaves a hook behind. By its name of now, or of older versions.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, which would tear the run's own display."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
