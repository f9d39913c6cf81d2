"""The optimizer over named parameters, and the learning rate schedule.

It is AdamW for all parameters, or Muon for the matrices of the layers and AdamW for embeddings, LM
head, norms and biases. Its state is keyed by parameter names. It knows models only by parameter
names. The backends call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from slipstream.checkpoint.saved import REMEDY, Saved
from slipstream.errors import CheckpointError, ConfigError
from slipstream.reading import shown_path
from slipstream.training.adamw import LARGEST_STEP, AdamW
from slipstream.training.muon import BatchedMuon

OptimizerName = Literal["AdamW", "Muon"]
ScheduleName = Literal["constant", "cosine", "linear", "wsd"]

LearningRateFactor = Callable[[int], float]
"""Maps a step of the schedule, from 0, to a factor of the base learning rate."""

_NOT_MUON = ("embed_tokens.weight", "lm_head.weight", "score.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """Settings of the optimizer and the learning rate schedule.

    With `Muon`, `muon_lr` (None: `lr`) is the learning rate of the layers' matrices, and `lr` the
    rate of all other parameters. `weight_decay` is decoupled and does not apply to norms and
    biases. `warmup_steps`, `total_steps` and the fields after them are arguments of `lr_factor`.
    Raises ConfigError for impossible values.
    """

    lr: float
    optimizer: OptimizerName = "AdamW"
    muon_lr: float | None = None
    muon_momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: ScheduleName = "constant"
    min_lr_ratio: float = 0.0
    total_steps: int | None = None
    num_cycles: float = 0.5
    stable_ratio: float = 0.9
    warmup_offset: int = 1
    decay_offset: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(OptimizerName):
            raise ConfigError(
                f"unknown optimizer {self.optimizer!r}; known: {', '.join(get_args(OptimizerName))}"
            )
        if self.schedule not in get_args(ScheduleName):
            raise ConfigError(
                f"unknown schedule {self.schedule!r}; known: {', '.join(get_args(ScheduleName))}"
            )
        for name in ("lr", "muon_lr", "weight_decay", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value} must be a finite number >= 0")
        for name, ratio in (
            ("betas[0]", self.betas[0]),
            ("betas[1]", self.betas[1]),
            ("muon_momentum", self.muon_momentum),
        ):
            if not 0 <= ratio < 1:
                raise ConfigError(f"{name}={ratio} must be in [0, 1)")
        if not self.eps > 0:
            raise ConfigError(f"eps={self.eps} must be > 0")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"min_lr_ratio={self.min_lr_ratio} must be in [0, 1]")
        if not 0 <= self.stable_ratio <= 1:
            raise ConfigError(f"stable_ratio={self.stable_ratio} must be in [0, 1]")
        if not 0 <= self.num_cycles < math.inf:
            raise ConfigError(f"num_cycles={self.num_cycles} must be a finite number >= 0")
        if self.schedule != "constant" and (self.total_steps or 0) <= self.warmup_steps:
            raise ConfigError(
                f"schedule={self.schedule} needs total_steps > warmup_steps, got total_steps="
                f"{self.total_steps} and warmup_steps={self.warmup_steps}"
            )

    def factor(self, step: int) -> float:
        """The factor of the learning rate at step `step` of the schedule (`lr_factor`)."""
        return lr_factor(
            step,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
            min_lr_ratio=self.min_lr_ratio,
            num_cycles=self.num_cycles,
            stable_ratio=self.stable_ratio,
            warmup_offset=self.warmup_offset,
            decay_offset=self.decay_offset,
        )


def lr_factor(
    step: int,
    *,
    schedule: ScheduleName,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    stable_ratio: float = 0.9,
    warmup_offset: int = 1,
    decay_offset: int = 0,
) -> float:
    """The factor of the learning rate at step `step` of the schedule, counted from 0.

    Warm-up over w = `warmup_steps` is linear: the factor is (step + `warmup_offset`) / w until it
    is 1. Then `constant` stays at 1. The other schedules fall from 1 at w = step + `decay_offset`
    to `min_lr_ratio` at `total_steps`, and stay there: `cosine` (Loshchilov and Hutter 2017) with
    `num_cycles` waves (0.5: one descent); `linear`; and `wsd` (Hu et al. 2024), which stays at 1
    for a share `stable_ratio` of the steps after warm-up and then falls like `cosine`.

    The default offsets give 1/w, 2/w, ..., 1 in the first w steps, and 1 again in the next one.
    With both offsets 0 the factors are those of VERL's schedulers: 0, 1/w, 2/w, ....
    """
    warm = step + warmup_offset
    if warmup_steps and warm <= warmup_steps:
        return warm / warmup_steps
    if schedule == "constant":
        return 1.0
    assert total_steps is not None
    start = warmup_steps
    if schedule == "wsd":
        start += int((total_steps - warmup_steps) * stable_ratio)
    if start == total_steps:
        # No step is left for the decay.
        return 1.0 if step + decay_offset < total_steps else min_lr_ratio
    progress = min(max(step + decay_offset - start, 0) / (total_steps - start), 1.0)
    if schedule == "linear":
        height = 1 - progress
    else:
        height = max(0.0, (1 + math.cos(2 * math.pi * num_cycles * progress)) / 2)
    return min_lr_ratio + (1 - min_lr_ratio) * height


class PolicyOptimizer:
    """The optimizer of one model, with a state keyed by parameter names.

    `schedule` overrides the schedule of `settings`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimSettings,
        *,
        schedule: LearningRateFactor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is the run's compute dtype, used by Muon's iterations. Parameters and moments
        keep their own dtype."""
        self.settings = settings
        self.schedule = schedule or settings.factor
        self._parameters = {n: p for n, p in named_parameters if p.requires_grad}
        matrices: dict[str, nn.Parameter] = {}
        if settings.optimizer == "Muon":
            matrices = {
                n: p
                for n, p in self._parameters.items()
                if p.ndim == 2 and not n.endswith(_NOT_MUON)
            }
        self._rest = {n: p for n, p in self._parameters.items() if n not in matrices}
        self._adamw = AdamW(
            self._rest,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._matrices = matrices
        self._muon: BatchedMuon | None = None
        if matrices:
            self._muon = BatchedMuon(
                matrices,
                momentum=settings.muon_momentum,
                weight_decay=settings.weight_decay,
                dtype=dtype,
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return list(self._parameters.values())

    def learning_rates(self, step: int) -> dict[str, float]:
        """The learning rates `lr` and, with Muon, `muon_lr` at step `step` of the schedule."""
        factor = self.schedule(step)
        rates = {"lr": self.settings.lr * factor}
        if self._muon is not None:
            muon_lr = self.settings.lr if self.settings.muon_lr is None else self.settings.muon_lr
            rates["muon_lr"] = muon_lr * factor
        return rates

    def step(self, step: int) -> None:
        """Update the parameters with the learning rates at step `step` of the schedule."""
        rates = self.learning_rates(step)
        self._adamw.step(rates["lr"])
        if self._muon is not None:
            self._muon.step(rates["muon_lr"])

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: `{"optimizer": name, "adamw": {name: {...}}, "muon": {name: {...}}}`
        with parameter names as inner keys."""
        muon = {} if self._muon is None else self._muon.state_dict()
        return {
            "optimizer": self.settings.optimizer,
            "adamw": self._adamw.state_dict(),
            "muon": muon,
        }

    def gather(self) -> None:
        """Take part when another process calls `state_dict` (collective)."""
        self._adamw.gather()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`.

        Raises:
            CheckpointError: the state belongs to another optimizer or another model, or has values
                that no optimizer writes.
        """
        saved = Saved(state).fields("optimizer", "adamw", "muon")
        if saved["optimizer"].text() != self.settings.optimizer:
            raise CheckpointError(
                f"the checkpoint's optimizer is {shown_path(state['optimizer'])}, but this run's "
                f"is {self.settings.optimizer}; resume with the same optimizer, or start a new run "
                "from the saved weights"
            )
        scalar = torch.zeros(())
        adamw = _entries(
            saved["adamw"], self._rest, {"step": scalar, "exp_avg": None, "exp_avg_sq": None}
        )
        muon = _entries(saved["muon"], self._matrices, {"momentum_buffer": None})
        self._adamw.load_state_dict(adamw)
        if self._muon is not None:
            self._muon.load_state_dict(muon)

    def steps(self) -> int:
        """The largest number of updates of a parameter, as far as AdamW counts them."""
        return self._adamw.steps()

    def check_steps(self, steps: int) -> None:
        """Raise CheckpointError unless the restored state is that after `steps` updates."""
        if self._rest and (found := self.steps()) != min(steps, LARGEST_STEP):
            raise CheckpointError(
                f"the step counts of adamw are up to {found}, but {steps} updates were made; "
                f"{REMEDY}"
            )
        if self._muon is not None and self._muon.started != (steps > 0):
            amount = "a" if self._muon.started else "no"
            raise CheckpointError(f"muon has {amount} momentum after {steps} updates; {REMEDY}")


def _entries(
    saved: Saved, parameters: dict[str, nn.Parameter], kinds: Mapping[str, Tensor | None]
) -> dict[str, dict[str, Tensor]]:
    """Return the state of each parameter: one tensor per kind, by default in its form.

    The state is empty before the first step. Values are checked where they are placed, because a
    process needs only its shard of them.
    """
    found = dict(saved.items())
    if found and found.keys() != parameters.keys():
        odd = sorted(found.keys() ^ parameters.keys())[0]
        raise CheckpointError(
            f"the optimizer state and the model disagree about parameter {odd!r}: the checkpoint "
            "belongs to another model"
        )
    states = {}
    for name, entry in found.items():
        entries = entry.fields(*kinds)
        states[name] = {
            kind: entries[kind].tensor(parameters[name] if like is None else like, finite=False)
            for kind, like in kinds.items()
        }
    return states
