"""Samplers, which order the items of a data set: verl's abstract classes, and a curriculum.

A sampler yields the item indices of one epoch each time it is iterated over. If it has
`update(batch)`, it is called with every batch that was trained on. Knows lengths and batches, not
prompts. Selected by `data.sampler`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch

from slipstream.checkpoint.saved import Saved
from slipstream.data.keyed import KeyedDraws
from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.user_code import called, load_named

DATASET_INDEX = "dataset_index"
"""The batch field with the data set index of each row."""


_UNKNOWN = 0.5
"""The pass rate assumed for a prompt without any result."""


class AbstractSampler(torch.utils.data.Sampler[int]):
    """Base class of user samplers, selected by `data.sampler`.

    `data_source` is the data set, `data_config` the section `data`. `__iter__` yields the indices
    of one epoch. With `state_dict` and `load_state_dict` (JSON types), a resumed run restores the
    sampler. Otherwise the sampler is iterated again up to the same position, so its order must
    depend only on its arguments.
    """

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Mapping[str, Any]) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that adapts to the results of training batches."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Process the batch of a finished step (verl's `DataProto`).

        It has `batch["token_level_scores"]` (B, R), and the fields `acc`, `uid`, `dataset_index`
        and `trained`, which is False for groups rejected by `algorithm.filter_groups`.
        """


class PassRateSampler(AbstractCurriculumSampler):
    """Prefers prompts that the policy solves sometimes over those it always or never solves.

    A prompt with running pass rate p is drawn with weight p (1 - p) + `floor`. The first term is
    the variance of its 0/1 rewards, from which group-relative advantages learn. `floor` keeps
    drawing the other prompts. The pass rate starts with that of the first group, then is an
    exponential mean with `momentum` per group. Prompts without a result count as 1/2, so they are
    preferred. No prompt is drawn twice before the next update unless all have been drawn. A
    response is solved if its `acc` is above 0 or, without `acc`, its reward is above `threshold`.
    Options are set in `data.sampler.kwargs`. Draws depend on the seed, the number of draws and the
    rates.
    """

    def __init__(self, data_source: Sized, data_config: Mapping[str, Any]) -> None:
        options = {"floor": 0.05, "momentum": 0.5, "threshold": 0.0}
        given = (data_config.get("sampler") or {}).get("kwargs") or {}
        for key, value in given.items():
            if key not in options:
                raise ConfigError(
                    f"data.sampler.kwargs.{key} is not an option of PassRateSampler"
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
        self._seen = np.zeros(len(data_source), dtype=bool)
        self._drawn = 0
        self._recent: set[int] = set()  # drawn since the last update
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

    @property
    def drawn(self) -> int:
        """The number of draws since the start."""
        return self._drawn

    def update(self, batch: Any) -> None:
        self._see_growth()
        places = [int(i) for i in batch.non_tensor_batch[DATASET_INDEX]]
        solved = self._solved(batch)
        for place in sorted(set(places)):
            results = [value for i, value in zip(places, solved, strict=True) if i == place]
            rate = sum(results) / len(results)
            share = self._momentum if self._seen[place] else 1.0
            self._rates[place] += share * (rate - self._rates[place])
            self._seen[place] = True
        self._recent.clear()
        self._sums = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "rates": self._rates.tolist(),
            "asked": self._seen.nonzero()[0].tolist(),
            "drawn": self._drawn,
            "taken": sorted(self._recent),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Raises DataError if it belongs to a larger data set, or has values
        that no sampler writes."""
        saved = Saved(state, error=DataError).fields("rates", "asked", "drawn", "taken")
        rates = [rate.number(0.0, 1.0) for rate in saved["rates"].elements()]
        if len(rates) > len(self._source):
            raise DataError(
                f"data position: the sampler's state has {len(rates)} prompts, but the data set "
                f"has {len(self._source)}; resume with the same data"
            )
        last, drawn = len(rates) - 1, saved["drawn"].count()
        seen = [place.count(last) for place in saved["asked"].elements()]
        recent = [place.count(last) for place in saved["taken"].elements()]
        if len(set(recent)) != len(recent) or len(recent) > drawn:
            saved["taken"].refuse(f"a list of different prompts, at most drawn={drawn} of them")
        self._rates, self._drawn, self._sums = np.array(rates), drawn, None
        self._seen = np.zeros(len(rates), dtype=bool)
        self._seen[seen] = True
        self._recent = set(recent)
        self._see_growth()

    def _solved(self, batch: Any) -> list[float]:
        """Return 1.0 for each solved row, else 0.0."""
        rights = batch.non_tensor_batch.get("acc")
        if rights is not None and all(right is not None for right in rights):
            return [float(right > 0) for right in rights]
        # Compare in torch: 0.1 as float32 is larger than Python's 0.1.
        above = batch.batch["token_level_scores"].sum(-1) > self._threshold
        return [float(right) for right in above.tolist()]

    def _see_growth(self) -> None:
        """Extend the rates if rows were added to the data set."""
        if (more := len(self._source) - len(self._rates)) > 0:
            self._rates = np.append(self._rates, np.full(more, _UNKNOWN))
            self._seen = np.append(self._seen, np.zeros(more, dtype=bool))
            self._sums = None

    def _draw(self) -> int:
        if len(self._recent) >= len(self._rates):
            self._recent.clear()
        while True:
            if self._sums is None:
                self._sums = self._left_sums()
            draws = KeyedDraws("pass-rate", self._seed, self._drawn)
            self._drawn += 1
            at = int(np.searchsorted(self._sums, draws.unit() * self._sums[-1], side="right"))
            if at < len(self._rates) and at not in self._recent:
                break
            # Drawn prompts may hold most of the weight, so recompute the sums without them.
            self._sums = self._left_sums()
        self._recent.add(at)
        return at

    def _left_sums(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        weights = self._rates * (1.0 - self._rates) + self._floor
        weights[list(self._recent)] = 0.0
        return np.cumsum(weights)


BUILT_IN = {"PassRateSampler": PassRateSampler}


def load_sampler(
    dataset: Sized, config: Mapping[str, Any], *, path: str | None, name: str
) -> torch.utils.data.Sampler[int]:
    """Return the sampler that `data.sampler.class_path` and `class_name` name.

    Without a path the name is that of a built-in sampler. Raises ConfigError for an unknown name,
    and for a class that is not a sampler.
    """
    if path is None:
        if name not in BUILT_IN:
            raise ConfigError(
                f"data.sampler.class_name={name} is not built in{did_you_mean(name, BUILT_IN)} "
                f"(known: {', '.join(BUILT_IN)}); to use your own class set "
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
