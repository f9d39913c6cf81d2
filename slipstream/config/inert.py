"""Rules for options of `speculative` that have no effect because of other options.

A value other than the default is an error then, so that users notice. Called by `validate`.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.config.rules import WithoutEffect
from slipstream.config.schema_speculative import EagleSection, QuantizedSection, SpeculativeSection


def options_without_effect(speculative: SpeculativeSection) -> Iterator[str]:
    """Yield a message `what has no effect; remedy` for each such option."""
    yield from _selector(speculative)
    yield from _training(speculative)
    yield from _quantized(speculative)
    defaults = SpeculativeSection()
    for name in ("train", "draft"):
        key = f"speculative.{name}.optim"
        optim, default = getattr(speculative, name).optim, getattr(defaults, name).optim
        if optim.optimizer != "Muon" and optim.muon_lr not in (None, "auto", default.muon_lr):
            yield WithoutEffect(
                f"{key}.muon_lr={optim.muon_lr} has no effect with {key}.optimizer="
                f"{optim.optimizer}; set {key}.optimizer=Muon or {key}.muon_lr=null"
            )
        if 0 < (optim.min_lr_ratio or 0) <= 1 and optim.lr_scheduler_type == "constant":
            yield WithoutEffect(
                f"{key}.min_lr_ratio={optim.min_lr_ratio:g} has no effect with "
                f"{key}.lr_scheduler_type=constant; "
                f"set {key}.lr_scheduler_type=cosine or {key}.min_lr_ratio=null"
            )
    draft = speculative.draft
    if (
        draft.steps_per_round is not None
        and draft.epochs_per_round != defaults.draft.epochs_per_round
    ):
        key = "speculative.draft"
        yield WithoutEffect(
            f"{key}.epochs_per_round={draft.epochs_per_round} has no effect with "
            f"{key}.steps_per_round={draft.steps_per_round}; set {key}.steps_per_round=null"
        )


_BANDITS = ("EG", "UCB1", "BEG")

_OPTIONS_OF = {
    "exploration": ("COST",),
    "hysteresis": ("COST",),
    "mab_configs": _BANDITS,
    "mab_bs_threshold": ("BEG",),
    "mab_epsilon": ("EG", "BEG"),
    "mab_window_size": _BANDITS,
}
"""Options of `speculative.eagle` -> the values of `tune_algorithm` that use them."""


def _selector(speculative: SpeculativeSection) -> Iterator[str]:
    eagle, defaults, key = speculative.eagle, EagleSection(), "speculative.eagle"
    if not speculative.enable:
        return
    for name, algorithms in _OPTIONS_OF.items():
        value, default = getattr(eagle, name), getattr(defaults, name)
        if eagle.tune_algorithm not in algorithms and value != default:
            shown = "" if isinstance(value, tuple) else f"={value}"
            undo = (
                f"leave {key}.{name} out"
                if isinstance(value, tuple)
                else f"set {key}.{name}={default}"
            )
            yield WithoutEffect(
                f"{key}.{name}{shown} has no effect with {key}.tune_algorithm="
                f"{eagle.tune_algorithm}; set {key}.tune_algorithm={algorithms[-1]}, or {undo}"
            )


def _quantized(speculative: SpeculativeSection) -> Iterator[str]:
    if speculative.drafts_with_copy or not speculative.enable:
        return
    for name in ("bits", "lm_head_bits"):
        default, key = getattr(QuantizedSection(), name), f"speculative.quantized.{name}"
        if (value := getattr(speculative.quantized, name)) != default:
            yield WithoutEffect(
                f"{key}={value} has no effect with speculative.spec_strategy="
                f"{speculative.spec_strategy}; set speculative.spec_strategy=quantized, or "
                f"{key}={default}"
            )


def _training(speculative: SpeculativeSection) -> Iterator[str]:
    train, eagle, key = speculative.train, speculative.eagle, "speculative.train"
    new = eagle.spec_model_path is None
    # The type of a head in spec_model_path is not known before it is read.
    depth = 1 if train.depth is None and new and eagle.spec_algorithm == "EAGLE" else train.depth
    if depth == 1 and train.depth_decay not in (None, 1):
        yield WithoutEffect(
            f"{key}.depth_decay={train.depth_decay:g} has no effect with {key}.depth=1; set "
            f"{key}.depth=2 or {key}.depth_decay=null"
        )
    if new and eagle.spec_algorithm == "EAGLE":
        name = "aux_hidden_state_layer_ids"
        if getattr(eagle, name) is not None:
            yield WithoutEffect(
                f"speculative.eagle.{name} has no effect with "
                "speculative.eagle.spec_algorithm=EAGLE; set "
                f"speculative.eagle.spec_algorithm=EAGLE3 or speculative.eagle.{name}=null"
            )
