"""Parity of TRL's GRPO and ours: loss and gradients of one batch, and weights after several
optimizer steps, from the same weights and in fp32.

`CASES` pairs settings of TRL with ours. The batch of `make_batch` consists of demonstrations of the
countdown task, both correct and incorrect ones. Used by `trl_compare` and `trl_tools`, and by tests
with recorded answers of TRL.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.algorithms.advantages.grpo import grpo
from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.settings import PolicyLossConfig
from slipstream.bench.peer_process import PeerProcess
from slipstream.data.countdown import CountdownTask
from slipstream.data.sft import tokenize_conversation
from slipstream.models.hf_io import load_checkpoint
from slipstream.training import OptimSettings, SingleProcessBackend
from slipstream.training.columns import rows_of_column, train_batch
from slipstream.training.losses import policy_loss_fn
from slipstream.types import TrainRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRL_EPS = 1e-4
"""The number that TRL adds to a group's standard deviation; our runs add 1e-6 (`GRPO_EPS`)."""

TOLERANCE = 1e-5
"""Largest allowed value of `Differences`. Both sum fp32 products in different orders, forward and
backward through a dozen layers."""

UPDATE_TOLERANCE = 1e-3
"""Largest allowed value of `UpdateDifferences`. Adam divides by the size of a gradient, so rounding
decides how a weight with an almost zero gradient moves."""

AGG_MODES = {
    "grpo": LossAggMode.SEQ_MEAN_TOKEN_MEAN,
    "dapo": LossAggMode.TOKEN_MEAN,
    "dr_grpo": LossAggMode.SEQ_MEAN_TOKEN_SUM_NORM,
}
"""TRL's `loss_type` -> our `loss_agg_mode`. `dr_grpo` also needs the longest completion as
`loss_scale_factor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Settings with TRL's names. With `off_policy`, old log-probs differ from the model's, so the
    ratio is not 1 and clips have an effect. `delta` is our `clip_ratio_c`."""

    name: str
    loss_type: str
    scale_rewards: str = "group"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    off_policy: bool = False

    def settings(self, max_completion_length: int) -> dict[str, Any]:
        """Arguments of TRL's GRPOConfig."""
        names = ("loss_type", "scale_rewards", "epsilon", "epsilon_high", "delta")
        given = asdict(self)
        return {
            **{name: given[name] for name in names},
            "max_completion_length": max_completion_length,
        }


CASES = (
    Case(name="dapo", loss_type="dapo"),
    Case(name="grpo", loss_type="grpo"),
    Case(name="dr_grpo", loss_type="dr_grpo", scale_rewards="none"),
    Case(
        name="dapo, clipped",
        loss_type="dapo",
        epsilon_high=0.28,
        delta=2.0,
        off_policy=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBatch:
    """Completions with rewards, `group_size` consecutive ones per prompt. In off-policy cases, old
    log-probs are the model's own plus `shifts`, one per token. `masks` are 1 for tokens that a
    policy sampled and 0 for those of a tool; None: there are no tools."""

    group_size: int
    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[Sequence[int]]
    rewards: Sequence[float]
    shifts: Sequence[Sequence[float]]
    masks: Sequence[Sequence[int]] | None = None

    @property
    def longest(self) -> int:
        return max(map(len, self.completion_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityOutcome:
    """The result of one case: loss, advantages (B,), and the gradients of all weights by name."""

    loss: float
    advantages: Sequence[float]
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Largest differences, relative to the largest compared value.

    `loss` is relative to the largest advantage, because a loss is a mean of advantages and can be
    0. `gradient` is relative to the largest gradient of all weights; `tensor` is the worst
    difference relative to the largest gradient of its own tensor.
    """

    loss: float
    advantages: float
    gradient: float
    tensor: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.advantages, self.gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """The result of several optimizer steps: the gradient norm of each, before clipping, and all
    final weights by name."""

    grad_norms: Sequence[float]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateDifferences:
    """`grad_norm` is the largest relative difference of gradient norms over the steps. `update` is
    the distance between both final weights over the distance that they moved."""

    grad_norm: float
    update: float


def make_batch(
    task: CountdownTask,
    tokenizer: PreTrainedTokenizerBase,
    *,
    groups: int = 4,
    group_size: int = 4,
    first: int = 0,
) -> FixedBatch:
    """Demonstrations of the task's training problems, starting at problem `first`. Each group has
    `group_size` variants for a problem; only groups with different rewards are used."""
    found = (_group(task, tokenizer, index, group_size) for index in itertools.count(first))
    usable = (group for group in found if group is not None)
    rows = [row for group in itertools.islice(usable, groups) for row in group]
    draws = random.Random(0)
    return FixedBatch(
        group_size=group_size,
        prompt_ids=[prompt for prompt, _, _ in rows],
        completion_ids=[completion for _, completion, _ in rows],
        rewards=[reward for _, _, reward in rows],
        shifts=[[draws.gauss(0, 0.4) for _ in completion] for _, completion, _ in rows],
    )


def _group(
    task: CountdownTask, tokenizer: PreTrainedTokenizerBase, index: int, size: int
) -> list[tuple[list[int], list[int], float]] | None:
    """(prompt, completion, reward) of each variant; None if all rewards are equal."""
    problem = task.problem("train", index)
    rows = []
    for variant in range(size):
        messages = task.demonstration("train", index, variant=variant)
        whole = tokenize_conversation(messages, tokenizer)
        start = next(place for place, mask in enumerate(whole.loss_mask) if mask)
        reward = float(task.verify(problem, str(messages[-1]["content"])).correct)
        rows.append((list(whole.ids[:start]), list(whole.ids[start:]), reward))
    return rows if len({reward for _, _, reward in rows}) > 1 else None


def old_log_probs(model: Path, batch: FixedBatch) -> list[list[float]]:
    """Old log-probs of completions for off-policy cases: the model's own plus `shifts`."""
    backend = _backend(model)
    try:
        rows = train_batch(_rows(batch, None, None))
        flat = backend.compute_log_probs(rows).wait()
        own = [values.tolist() for values in rows_of_column(flat, rows.starts)]
    finally:
        backend.close()
    return [
        [a + b for a, b in zip(values[-len(shifts) :], shifts, strict=True)]
        for values, shifts in zip(own, batch.shifts, strict=True)
    ]


def ours(
    model: Path, batch: FixedBatch, case: Case, old: Sequence[Sequence[float]] | None
) -> ParityOutcome:
    """Loss and gradients of our trainer. `old` are old log-probs of completions (None: its own)."""
    advantages = _advantages(batch, by_std=case.scale_rewards == "group")
    config = PolicyLossConfig(
        clip_ratio=case.epsilon,
        clip_ratio_high=case.epsilon_high,
        # Without `delta`, TRL does not bound the ratio for negative advantages.
        clip_ratio_c=1e9 if case.delta is None else case.delta,
        loss_scale_factor=batch.longest if case.loss_type == "dr_grpo" else None,
    )
    loss = policy_loss_fn(loss_agg_mode=AGG_MODES[case.loss_type], config=config)
    backend = _backend(model)
    try:
        rows = _rows(batch, advantages, old)
        metrics = backend.forward_backward(train_batch(rows), loss).wait()
    finally:
        backend.close()
    gradients = {
        name: weight.grad
        for name, weight in backend.decoder.named_parameters()
        if weight.grad is not None
    }
    return ParityOutcome(loss=metrics["actor/pg_loss"], advantages=advantages, gradients=gradients)


def theirs(
    process: PeerProcess,
    model: Path,
    batch: FixedBatch,
    case: Case,
    old: Sequence[Sequence[float]] | None,
    threads: int,
) -> ParityOutcome:
    """Loss and gradients of TRL, computed by the process of `bench/peers/trl_peer.py`."""
    with TemporaryDirectory() as folder:
        given, gradients = Path(folder) / "batch.json", Path(folder) / "gradients.safetensors"
        content = {**asdict(batch), "old_log_probs": old}
        given.write_text(json.dumps(content))
        answer = process.ask(
            "parity",
            model=str(model.resolve()),
            batch=str(given),
            gradients=str(gradients),
            threads=threads,
            settings=case.settings(batch.longest),
        )
        return ParityOutcome(
            loss=answer["loss"], advantages=answer["advantages"], gradients=load_file(gradients)
        )


def our_updates(model: Path, batches: Sequence[FixedBatch], settings: Mapping[str, Any]) -> Updated:
    """Weights of our trainer after one step per batch. `settings` are those of
    `trl_runs.trl_settings`."""
    scaled = settings["loss_type"] == "dr_grpo"
    loss = policy_loss_fn(
        loss_agg_mode=AGG_MODES[settings["loss_type"]],
        config=PolicyLossConfig(
            clip_ratio=settings["epsilon"],
            loss_scale_factor=settings["max_completion_length"] if scaled else None,
        ),
    )
    optim = OptimSettings(
        lr=settings["lr"],
        betas=(settings["betas"][0], settings["betas"][1]),
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        warmup_steps=settings["warmup_steps"],
    )
    norms = []
    backend = _backend(model, optim, settings["grad_clip"])
    try:
        for batch in batches:
            advantages = _advantages(batch, by_std=settings["scale_rewards"] == "group")
            backend.forward_backward(train_batch(_rows(batch, advantages, None)), loss).wait()
            norms.append(backend.optim_step().wait()["actor/grad_norm"])
        return Updated(grad_norms=norms, weights=backend.get_weights().wait())
    finally:
        backend.close()


def their_updates(
    process: PeerProcess,
    model: Path,
    batches: Sequence[FixedBatch],
    settings: Mapping[str, Any],
    threads: int,
) -> Updated:
    """Weights of TRL after one step per batch, from the process of `bench/peers/trl_peer.py`."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{place}.json" for place in range(len(batches))]
        for file, batch in zip(files, batches, strict=True):
            file.write_text(json.dumps(asdict(batch)))
        weights = Path(folder) / "weights.safetensors"
        answer = process.ask(
            "updates",
            model=str(model.resolve()),
            batches=[str(file) for file in files],
            weights=str(weights),
            threads=threads,
            settings=dict(settings),
        )
        return Updated(grad_norms=answer["grad_norms"], weights=load_file(weights))


def update_differences(model: Path, a: Updated, b: Updated) -> UpdateDifferences:
    """Differences between the weights that both trained from `model`. Raises ValueError if they
    have weights of other names or numbers of steps, or if weights did not move."""
    _check_names(a.weights, b.weights)
    start = dict(load_checkpoint(model).named_parameters())
    moved = sum(_square(a.weights[name], start[name].detach()) for name in a.weights)
    apart = sum(_square(a.weights[name], b.weights[name]) for name in a.weights)
    if not moved or not min(*a.grad_norms, *b.grad_norms):
        raise ValueError("weights did not move: a learning rate or a gradient is 0")
    norms = zip(a.grad_norms, b.grad_norms, strict=True)
    return UpdateDifferences(
        grad_norm=max(abs(x - y) / max(x, y) for x, y in norms), update=(apart / moved) ** 0.5
    )


def _square(a: Tensor, b: Tensor) -> float:
    return float(((a.double() - b.double()) ** 2).sum())


def _check_names(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    if a.keys() != b.keys():
        odd = ", ".join(sorted(a.keys() ^ b.keys()))
        raise ValueError(f"the names of the weights differ: only one side has {odd}")


def differences(a: ParityOutcome, b: ParityOutcome) -> Differences:
    """Differences between two outcomes of one case. Raises ValueError for weights of other
    names."""
    _check_names(a.gradients, b.gradients)
    pairs = [(a.gradients[name], b.gradients[name]) for name in a.gradients]
    apart = [_apart(x, y) for x, y in pairs]
    size = [_size(x, y) for x, y in pairs]
    scores = torch.tensor(a.advantages), torch.tensor(b.advantages)
    return Differences(
        loss=abs(a.loss - b.loss) / _size(*scores),
        advantages=_apart(*scores) / _size(*scores),
        gradient=max(apart) / max(size),
        tensor=max(x / y for x, y in zip(apart, size, strict=True)),
    )


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _size(a: Tensor, b: Tensor) -> float:
    return max(float(a.abs().max()), float(b.abs().max()), 1e-30)


def _backend(
    model: Path, optim: OptimSettings | None = None, grad_clip: float | None = None
) -> SingleProcessBackend:
    decoder = load_checkpoint(model)
    optim = optim or OptimSettings(lr=0.0)
    return SingleProcessBackend(decoder, optim=optim, dtype=torch.float32, grad_clip=grad_clip)


def _advantages(batch: FixedBatch, *, by_std: bool) -> list[float]:
    """Advantages (B,), with TRL's epsilon."""
    groups = [place // batch.group_size for place in range(len(batch.rewards))]
    rewards = torch.tensor(batch.rewards, dtype=torch.float64)[:, None]
    found, _ = grpo(
        rewards,
        torch.ones_like(rewards),
        groups,
        epsilon=TRL_EPS,
        norm_adv_by_std_in_grpo=by_std,
    )
    return [float(value) for value in found[:, 0]]


def _rows(
    batch: FixedBatch,
    advantages: Sequence[float] | None,
    old: Sequence[Sequence[float]] | None,
) -> list[TrainRow]:
    rows = []
    for place, (prompt, completion) in enumerate(
        zip(batch.prompt_ids, batch.completion_ids, strict=True)
    ):
        before = [0.0] * len(prompt)
        mask = [1.0] * len(completion) if batch.masks is None else map(float, batch.masks[place])
        rows.append(
            TrainRow(
                tokens=[*prompt, *completion],
                loss_mask=[*before, *mask],
                advantages=None
                if advantages is None
                else [*before, *[advantages[place]] * len(completion)],
                old_log_probs=None if old is None else [*before, *old[place]],
            )
        )
    return rows
