"""Drafts of the contract server: a head, what the worker extension asks of it, and counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import StepRecord
from slipstream.models.config import ModelConfig
from slipstream.models.draft.files import load_draft_head
from slipstream.models.draft.model import DRAFT_TOKENS
from slipstream.models.draft.token_map import MASK, OFFSETS
from slipstream.types import UpdateKind, WeightUpdate
from vllm.faults import Faults

KEYS = {"method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}


class Drafter:
    """vLLM's object that the worker extension switches on and off."""

    def propose(self, *args: Any, **more: Any) -> None:
        raise NotImplementedError


class Plans:
    """A selector: the number of drafts by the number of running requests."""

    def __init__(self, steps: int, sizes: list[list[int]] | None, drafter: Drafter) -> None:
        self._steps, self._sizes, self._drafter = steps, sizes, drafter

    def begin_rollout(self, requests: int) -> int:
        return 0

    def select(self, running: int) -> DraftPlan:
        steps = self._steps
        for first, last, count in self._sizes or ():
            if first <= running <= last:
                steps = count
        on = getattr(self._drafter, "slipstream_on", True)
        return DraftPlan.chain(steps) if steps and on else OFF

    def record(self, step: StepRecord) -> None: ...

    def changed(self, *, drafter: bool = False) -> None: ...


@dataclass(slots=True)
class Counts:
    """The drafts of one request."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.drafted.append(drafted)
            self.accepted.append(accepted)

    def metrics(self, steps: int) -> dict[str, Any]:
        """vLLM's `SpeculativeDecodingMetrics`; the lists are missing without drafts."""
        histogram = [self.accepted.count(number) for number in range(steps + 1)]
        count = len(self.drafted)
        found = {
            "mean_acceptance_length": 1.0 + sum(self.accepted) / count if count else 1.0,
            "draft_acceptance_rate": sum(self.accepted) / sum(self.drafted) if count else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": count,
            "num_accepted_draft_tokens": sum(self.accepted),
            "num_draft_tokens": sum(self.drafted),
            "num_spec_tokens": steps,
        }
        if count:
            found |= {"per_step_accepted": self.accepted, "per_step_drafted": self.drafted}
        return found


class Speculation:
    """The head with which a core drafts."""

    def __init__(
        self, config: Mapping[str, Any], policy: ModelConfig, dtype: torch.dtype, faults: Faults
    ) -> None:
        """`config` is the value of `--speculative-config`. Raises ValueError for keys that
        Slipstream does not give."""
        if unknown := config.keys() - KEYS:
            raise ValueError(f"unexpected keyword argument {', '.join(sorted(unknown))}")
        self.steps = int(config["num_speculative_tokens"])
        self._head = load_draft_head(Path(config["model"]), policy)
        if config["method"] != self._head.algorithm.lower():
            raise ValueError(f"method {config['method']} with a head of {self._head.algorithm}")
        self.drafter = Drafter()
        self.proposer = EagleProposer(self._head, dtype=dtype)
        self.plans = Plans(
            self.steps, config.get("num_speculative_tokens_per_batch_size"), self.drafter
        )
        self._faults = faults

    def load(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Load the tensors of a file. Returns the parameters that got none."""
        wanted = dict(self._head.named_parameters())
        found = {name: tensor for name, tensor in tensors.items() if name in wanted}
        missing = wanted.keys() - found.keys()
        if self._faults["skip_draft"] or missing:
            return set(missing)
        if self._faults["random_draft"]:
            generator = torch.Generator().manual_seed(1)
            found = {n: torch.randn(t.shape, generator=generator) for n, t in found.items()}
        if OFFSETS in tensors:
            offsets = tensors[OFFSETS]
            found[DRAFT_TOKENS] = offsets + torch.arange(len(offsets))
        assert MASK not in found
        update = WeightUpdate(version=0, kind=UpdateKind.DRAFT, buckets=[list(found.items())])
        self.proposer.update(update)
        return set()

    def modules(self) -> Iterator[tuple[str, Layer]]:
        """The layers of the head, by vLLM's names, as far as vLLM does not merge them."""
        for name, weight in self._head.named_parameters():
            layer = name.removesuffix(".weight").replace("midlayer", "layers.0")
            yield layer if layer == "lm_head" else f"model.{layer}", Layer(weight.detach())


class Layer(nn.Module):
    """A layer as the worker extension sees it: linear layers have a `quant_method`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        if weight.ndim == 2:
            self.input_size = weight.shape[1]
            self.quant_method = self

    def apply(self, module: Layer, x: Tensor) -> Tensor:  # type: ignore[override]
        return x @ module.weight.to(x.dtype).T


class DraftModel:
    """vLLM's draft model."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation

    def named_modules(self) -> Iterator[tuple[str, Layer]]:
        yield from self._speculation.modules()
