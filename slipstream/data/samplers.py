"""Orders of a data set's items: VERL's abstract samplers, and a curriculum by pass rate.

A sampler gives one epoch of places each time it is iterated over. One with `update(batch)` is told
of every batch that was trained on. Knows lengths and batches, no prompts. `data.sampler` names one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch

from slipstream.data.keyed import KeyedDraws
from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.user_code import called, load_named

DATASET_INDEX = "dataset_index"
"""The field of a batch that holds the places of its rows in the data set."""


_UNKNOWN = 0.5
"""The pass rate of a prompt that was never asked."""


class AbstractSampler(torch.utils.data.Sampler[int]):
    """What `data.sampler` names. `data_source` is the data set, `data_config` the section `data`.

    `__iter__` yields the places of one epoch. With `state_dict` and `load_state_dict` (JSON types)
    a resumed run goes on where it was; without, it is iterated over again up to there, so its
    order must be a function of what it was made of.
    """

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Mapping[str, Any]) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from what was trained on."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Called after each step with VERL's `DataProto` of it: `batch["token_level_scores"]`
        (B, R), and beside its fields `acc`, `uid`, `dataset_index` and `trained`, which is False
        for groups that `algorithm.filter_groups` rejected."""


class PassRateSampler(AbstractCurriculumSampler):
    """Draws prompts that the policy solves sometimes more often than those it always or never does.

    A prompt whose running pass rate is p is drawn with weight p (1 - p) + `floor`: the variance of
    its rewards, which is what group-relative advantages learn from, and a floor that keeps asking
    for what seemed settled. The rate is that of the first group, and then an exponential mean of
    `momentum` per group; what was never asked counts as 1/2, so that it comes first. No prompt is
    drawn twice before the next update, as long as there are others. A response is solved where its
    `acc` is above 0 or, where scores tell none, its reward above `threshold`. Options in
    `data.sampler.kwargs`; the draws are a function of the seed, the count, and the rates.
    """

    def __init__(self, data_source: Sized, data_config: Mapping[str, Any]) -> None:
        options = {"floor": 0.05, "momentum": 0.5, "threshold": 0.0}
        given = (data_config.get("sampler") or {}).get("kwargs") or {}
        for key, value in given.items():
            if key not in options:
                raise ConfigError(
                    f"data.sampler.kwargs.{key} is no option of PassRateSampler"
                    f"{did_you_mean(key, options)} (known: {', '.join(options)})"
                )
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or (key != "threshold" and not 0 < value <= 1):
                raise ConfigError(
                    f"data.sampler.kwargs.{key}={value} must be "
                    + ("a number" if key == "threshold" else "above 0 and at most 1")
                )
            options[key] = float(value)
        self._source = data_source
        self._floor, self._momentum = options["floor"], options["momentum"]
        self._threshold = options["threshold"]
        self._seed = str(data_config.get("seed"))
        self._rates = np.full(len(data_source), _UNKNOWN)
        self._asked = np.zeros(len(data_source), dtype=bool)
        self._drawn = 0
        self._taken: set[int] = set()
        self._sums: np.ndarray[Any, np.dtype[np.float64]] | None = None

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[int]:
        self._see_growth()
        for _ in range(len(self._rates)):
            yield self._draw()

    @property
    def pass_rates(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The running pass rate of each prompt (N,)."""
        return self._rates.copy()

    def update(self, batch: Any) -> None:
        self._see_growth()
        places = [int(i) for i in batch.non_tensor_batch[DATASET_INDEX]]
        solved = self._solved(batch)
        for place in sorted(set(places)):
            of_it = [right for i, right in zip(places, solved, strict=True) if i == place]
            rate = sum(of_it) / len(of_it)
            share = self._momentum if self._asked[place] else 1.0
            self._rates[place] += share * (rate - self._rates[place])
            self._asked[place] = True
        self._taken.clear()
        self._sums = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "rates": self._rates.tolist(),
            "asked": self._asked.nonzero()[0].tolist(),
            "drawn": self._drawn,
            "taken": sorted(self._taken),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `DataError` for the state of a larger data set."""
        rates = np.array(state["rates"], dtype=np.float64)
        if len(rates) > len(self._source):
            raise DataError(
                f"data position: the sampler knows {len(rates)} prompts and there are "
                f"{len(self._source)}; resume with the same data"
            )
        self._rates, self._drawn, self._sums = rates, int(state["drawn"]), None
        self._asked = np.zeros(len(rates), dtype=bool)
        self._asked[state["asked"]] = True
        self._taken = {int(i) for i in state["taken"]}
        self._see_growth()

    def _solved(self, batch: Any) -> list[float]:
        """1.0 for each row that is right, else 0.0."""
        rights = batch.non_tensor_batch.get("acc")
        if rights is not None and all(right is not None for right in rights):
            return [float(right > 0) for right in rights]
        # Compared by torch: 0.1 of a tensor is above the 0.1 of Python.
        above = batch.batch["token_level_scores"].sum(-1) > self._threshold
        return [float(right) for right in above.tolist()]

    def _see_growth(self) -> None:
        """A data set may have gained rows."""
        if (more := len(self._source) - len(self._rates)) > 0:
            self._rates = np.append(self._rates, np.full(more, _UNKNOWN))
            self._asked = np.append(self._asked, np.zeros(more, dtype=bool))
            self._sums = None

    def _draw(self) -> int:
        if len(self._taken) >= len(self._rates):
            self._taken.clear()
        while True:
            if self._sums is None:
                self._sums = self._left_sums()
            draws = KeyedDraws("pass-rate", self._seed, self._drawn)
            self._drawn += 1
            at = int(np.searchsorted(self._sums, draws.unit() * self._sums[-1], side="right"))
            if at < len(self._rates) and at not in self._taken:
                break
            # Most of the weight may be taken: look at what is left alone.
            self._sums = self._left_sums()
        self._taken.add(at)
        return at

    def _left_sums(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        weights = self._rates * (1.0 - self._rates) + self._floor
        weights[list(self._taken)] = 0.0
        return np.cumsum(weights)


BUILT_IN = {"PassRateSampler": PassRateSampler}


def load_sampler(
    dataset: Sized, config: Mapping[str, Any], *, path: str | None, name: str
) -> torch.utils.data.Sampler[int]:
    """The sampler that `data.sampler.class_path` and `class_name` name; one of ours without a path.

    Raises `ConfigError` for an unknown one, and for a class that is none.
    """
    if path is None:
        if name not in BUILT_IN:
            raise ConfigError(
                f"data.sampler.class_name={name} is not built in{did_you_mean(name, BUILT_IN)} "
                f"(known: {', '.join(BUILT_IN)}); for one of your own set "
                "data.sampler.class_path=FILE"
            )
        return BUILT_IN[name](dataset, config)
    found = load_named(
        path,
        name,
        path_key="data.sampler.class_path",
        name_key="data.sampler.class_name",
        what="classes",
    )
    if not isinstance(found, type) or not issubclass(found, torch.utils.data.Sampler):
        raise ConfigError(
            f"data.sampler.class_name={name} must be a torch.utils.data.Sampler, such as "
            "AbstractSampler of slipstream.data.samplers"
        )
    sampler: torch.utils.data.Sampler[int] = called(
        found, f"{name}(...)", data_source=dataset, data_config=config
    )
    return sampler
