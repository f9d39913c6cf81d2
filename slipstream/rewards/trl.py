"""What TRL's trainer passes to reward functions besides texts: its state, and functions that log.

Used by `signatures`. Objects of this module travel to the process of the reward function and back.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from slipstream.rewards.results import InvalidResultError, limited_text, number_of

STATE, LOG_EXTRA, LOG_METRIC = "trainer_state", "log_extra", "log_metric"

TRAINER_ARGUMENTS = (STATE, LOG_EXTRA, LOG_METRIC)
"""Arguments that TRL's trainer passes in addition to prompts, responses and columns."""

ENVIRONMENTS = "environments"
"""An argument that TRL's trainer passes only with an `environment_factory`; not available here."""


class TrainerState:
    """The fields of transformers' `TrainerState` that are known when a response is scored.

    `global_step` is the policy version that generated the response: the number of weight updates
    before it. `epoch` is the number of complete passes over the prompts. `max_steps` is
    `trainer.total_training_steps`. Other fields raise AttributeError.
    """

    def __init__(self, global_step: int, epoch: float, max_steps: int | None = None) -> None:
        self.global_step, self.epoch = global_step, epoch
        if max_steps is not None:
            self.max_steps = max_steps

    def __getattr__(self, name: str) -> Any:
        if name == "max_steps":
            raise AttributeError(
                "trainer_state.max_steps is unknown; set trainer.total_training_steps"
            )
        raise AttributeError(
            f"trainer_state.{name} is not available; it has global_step, epoch and max_steps"
        )


class Logs:
    """What a reward function logs during one call for `count` responses."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[str]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number. It becomes a part of the reward of each response of the call.

        Several numbers of the same name are averaged. Raises ValueError if it is not a number.
        """
        number = number_of(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}) got {type(value).__name__}, not a number")
        self._metrics.setdefault(limited_text(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log one value per response. They are written to the dump of the responses as text."""
        texts = [limited_text(value) for value in values]
        self._columns.setdefault(limited_text(column), []).extend(texts)

    def metrics(self) -> dict[str, float]:
        """Return the logged metrics."""
        return {name: statistics.fmean(values) for name, values in self._metrics.items()}

    def extras(self, place: int) -> dict[str, str]:
        """Return the logged texts of one response, by column.

        Raises InvalidResultError if a column has another number of values than there are responses.
        """
        for column, values in self._columns.items():
            if len(values) != self._count:
                raise InvalidResultError(
                    f"log_extra({column!r}) got {len(values)} values for {self._count} responses"
                )
        return {column: values[place] for column, values in self._columns.items()}


def logs_of(arguments: dict[str, Any]) -> Logs | None:
    """Return the logs that the arguments of a call write to; None without any."""
    for name in (LOG_METRIC, LOG_EXTRA):
        owner = getattr(arguments.get(name), "__self__", None)
        if isinstance(owner, Logs):
            return owner
    return None
