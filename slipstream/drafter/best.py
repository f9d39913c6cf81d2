"""Keeps the best draft head of a training, by its acceptance on held-out responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from slipstream.checkpoint.saved import Saved
from slipstream.drafter.acceptance import Acceptance
from slipstream.models.draft.model import DraftModel

Metrics = dict[str, float]

_DEPTH, _LENGTH = "draft/accept_depth_", "draft/accept_length_"


class BestHead:
    """A copy of the best head so far, its step and its `acceptance_metrics`.

    The first head that is offered is the best.
    """

    def __init__(self) -> None:
        self.step = -1
        self.metrics: Metrics = {}
        self.head: DraftModel | None = None

    def offer(self, step: int, metrics: Metrics, head: DraftModel) -> bool:
        """Keep a copy of `head` if it is at least as good as the best so far; return whether it
        is."""
        if not self.is_beaten_by(metrics):
            return False
        self.step, self.metrics, self.head = step, metrics, head.copy()
        return True

    def is_beaten_by(self, metrics: Metrics) -> bool:
        """Return whether a head with these `acceptance_metrics` is at least as good."""
        if not self.metrics:
            return True
        # A resumed training may measure to another depth.
        depth = min(depth_of(self.metrics), depth_of(metrics))
        return metrics[f"{_LENGTH}{depth}"] >= self.metrics[f"{_LENGTH}{depth}"]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the head, as JSON values."""
        return {"step": self.step, "metrics": self.metrics}

    @classmethod
    def restore(cls, saved: Saved, head: DraftModel, *, step: int) -> Self:
        """Restore a `state_dict` of a training at `step`, with its `head`.

        Raises CheckpointError for values that no training writes.
        """
        fields, best = saved.fields("step", "metrics"), cls()
        best.step = fields["step"].count(step)
        best.metrics, best.head = saved_acceptance(fields["metrics"]), head
        return best


def acceptance_metrics(acceptance: Acceptance) -> Metrics:
    """Acceptance by depth, with the names of docs/metrics.md."""
    depths = range(1, acceptance.depth + 1)
    return {f"{_DEPTH}{k}": acceptance.at_depth(k) for k in depths} | {
        f"{_LENGTH}{k}": acceptance.replay(k).tokens_per_verification for k in depths
    }


def saved_acceptance(saved: Saved) -> Metrics:
    """Return saved `acceptance_metrics`. Raises CheckpointError for others."""
    depth = max(1, -(-len(dict(saved.items())) // 2))
    ranges = {f"{_DEPTH}{k}": (0.0, 1.0) for k in range(1, depth + 1)}
    # A replay without tokens has length 0.
    ranges |= {f"{_LENGTH}{k}": (0.0, k + 1.0) for k in range(1, depth + 1)}
    found = saved.fields(*ranges)
    return {name: value.number(*ranges[name]) for name, value in found.items()}


def depth_of(metrics: Mapping[str, float]) -> int:
    """Return the depth to which `acceptance_metrics` were measured."""
    return sum(name.startswith(_DEPTH) for name in metrics)


def acceptance_line(metrics: Mapping[str, float]) -> str:
    """Format `acceptance_metrics` for the console."""
    depth = depth_of(metrics)
    return (
        f"{metrics[f'{_DEPTH}1']:.3f} of first drafts accepted, "
        f"{metrics[f'{_LENGTH}{depth}']:.2f} tokens per verification with {depth} drafts"
    )


def acceptance_table(rows: Mapping[str, Metrics]) -> list[str]:
    """Format measurements of `acceptance_metrics` as lines of text, one row per measurement."""
    # The run may have been resumed with another speculative.draft.accept_depth.
    depths = range(1, 1 + min(map(depth_of, rows.values())))
    lines = []
    for title, name, form in (
        ("all drafts to this depth accepted (share)", _DEPTH, "6.3f"),
        ("tokens per verification, by draft depth", _LENGTH, "6.2f"),
    ):
        lines.append(f"{title:<42}" + "".join(f"{k:6d}" for k in depths))
        for label, metrics in rows.items():
            values = "".join(format(metrics[f"{name}{k}"], form) for k in depths)
            lines.append(f"  {label:<40}" + values)
    return lines
