"""Adds named reward terms to the score of the reward function.

    reward_model:
      terms: {answer: 1.0, think_format: 0.2, mine: {weight: 0.5, path: mine.py, name: brevity}}

`answer` is the reward function's score; its weight is 1 by default. As in TRL, a function that
returns None for a response does not count for it. Knows managers and samples, not
how responses are generated. Called by `load_reward_manager` and by rollouts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import ConfigError, RewardError, did_you_mean, reason_of, shortened
from slipstream.rewards.custom import get_custom_reward_fn
from slipstream.rewards.protocol import (
    REWARD_EXTRAS,
    REWARD_FAILURE,
    SCORE_PART,
    Decode,
    OnFailure,
    RewardManager,
    Score,
    apply_score,
    response_text,
)
from slipstream.rewards.results import (
    MAX_SCORE,
    NOT_APPLICABLE,
    Reader,
    fault_of,
    outcome_of,
)
from slipstream.rewards.runner import DeadlineRunner, is_async
from slipstream.rewards.shaping import ANSWER, OF_GROUPS, OF_SAMPLES
from slipstream.rewards.signatures import signature_of
from slipstream.rewards.trl import logs_of
from slipstream.types import Sample, Status

_FILE_KEYS = ("path", "name", "reward_kwargs", "group")


@dataclass(frozen=True, slots=True)
class Term:
    """A term adds `weight` times the value of `function`, whose settings are already bound.

    `custom`: the function is the user's and may fail. `group`: it scores all samples of a group
    together.
    """

    name: str
    weight: float
    function: Callable[..., Any]
    custom: bool = False
    group: bool = False


def read_terms(config: Mapping[str, Any]) -> tuple[float, list[Term]]:
    """Return the weight of the reward function, and the other terms in their order.

    Raises ConfigError for invalid names, weights and settings.
    """
    weight, terms = 1.0, []
    for name, entry in config.items():
        settings = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
        number = settings.pop("weight", None)
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not abs(number) <= MAX_SCORE
        ):
            raise ConfigError(
                f"reward_model.terms.{name} has the weight {_shown(number)}; give a number, or a "
                "mapping with `weight`"
            )
        if name == ANSWER:
            if settings:
                raise ConfigError(
                    f"reward_model.terms.{ANSWER} has {', '.join(settings)}; it is the score of "
                    "the reward function (custom_reward_function), so only set its weight"
                )
            weight = float(number)
        elif "path" in settings:
            terms.append(_of_file(name, float(number), settings))
        else:
            terms.append(_built_in(name, float(number), settings))
    return weight, terms


def _of_file(name: str, weight: float, settings: Mapping[str, Any]) -> Term:
    if name in (*OF_SAMPLES, *OF_GROUPS, SCORE_PART):
        raise ConfigError(
            f"reward_model.terms.{name} has a path, but is the name of a built-in term; choose "
            "another name"
        )
    unknown = sorted(set(settings) - set(_FILE_KEYS))
    if unknown:
        raise ConfigError(
            f"reward_model.terms.{name} has {unknown[0]}{did_you_mean(unknown[0], _FILE_KEYS)} "
            f"(known: weight, {', '.join(_FILE_KEYS)})"
        )
    function = get_custom_reward_fn(
        settings["path"], settings.get("name", "compute_score"), settings.get("reward_kwargs")
    )
    group = bool(settings.get("group", False))
    if group and not signature_of(function).many:
        raise ConfigError(
            f"reward_model.terms.{name} has group: true, but its function takes one response "
            "(solution_str); give it the parameter completions (TRL), solution_strs (verl's batch) "
            "or data (DataProto)"
        )
    return Term(name, weight, function, custom=True, group=group)


def _built_in(name: str, weight: float, settings: Mapping[str, Any]) -> Term:
    known: dict[str, Callable[..., Any]] = {**OF_SAMPLES, **OF_GROUPS}
    if name not in known:
        raise ConfigError(
            f"reward_model.terms.{name} is not known{did_you_mean(name, known)} (known: {ANSWER}, "
            f"{', '.join(known)}); a function of your own needs `path`"
        )
    function = known[name]
    try:
        inspect.signature(function).bind(None, **settings)
    except TypeError as error:
        raise ConfigError(f"reward_model.terms.{name}: {error}") from error
    for key, value in settings.items():
        kind = inspect.signature(function).parameters[key].annotation
        if not _fits(kind, value):
            raise ConfigError(
                f"reward_model.terms.{name}.{key}={_shown(value)} is not of the type {kind}"
            )
    bound = functools.partial(function, **settings)
    group = name in OF_GROUPS
    probe = Sample()
    try:
        # A wrong value must not end the run later, at the first response.
        bound([probe] if group else probe)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        shown = ", ".join(f"{key}={_shown(value)}" for key, value in settings.items())
        raise ConfigError(
            f"reward_model.terms.{name} cannot be computed with {shown} ({reason_of(error)}); set "
            "numbers as docs/rewards.md lists them"
        ) from error
    return Term(name, weight, bound, group=group)


def _fits(kind: str, value: Any) -> bool:
    """Return whether a setting's value has the annotated type."""
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if not isinstance(value, int if kind == "int" else int | float):
        return False
    return abs(value) <= MAX_SCORE  # false for NaN


def _shown(value: Any) -> str:
    """Return the text of a setting's value for a message."""
    try:
        return shortened(repr(value), 100)
    except ValueError:  # an integer of more than 4,300 digits
        return "an integer with too many digits"


class TermsRewardManager:
    """Adds terms to the score of the manager `answers`.

    `scorers` call users' functions of single samples, by term name. `runner` calls users' functions
    of groups, with responses decoded by `decode`. If a term fails, scoring of the sample fails, or
    of its whole group. `total_steps` is the number of steps of the run, None if unknown.
    """

    def __init__(
        self,
        answers: RewardManager,
        weight: float,
        terms: Sequence[Term],
        scorers: Mapping[str, RewardManager],
        *,
        decode: Decode,
        runner: DeadlineRunner,
        on_failure: OnFailure,
        total_steps: int | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._answers, self._weight, self._scorers = answers, weight, scorers
        self._sample_terms = [term for term in terms if not term.group]
        self._group_terms = [term for term in terms if term.group]
        self._decode, self._runner, self._on_failure = decode, runner, on_failure

    async def score_sample(self, sample: Sample) -> Score:
        """Return the weighted sum of `answer` and the sample terms, which become parts of it.

        A function that returned None is left out. If all did, scoring fails.
        """
        score = await self._answers.score_sample(sample)
        applies = score.failure != NOT_APPLICABLE
        if score.failure is not None and applies:
            return score
        # Keep the unmodified score as `acc`, as in verl, for filters and validation.
        own = {ANSWER: score.value} if applies else {}
        parts = {"acc": score.value, **score.parts, **own} if applies else {}
        total, extras = self._weight * score.value, dict(score.extras)
        for term in self._sample_terms:
            if term.custom:
                mine = await self._scorers[term.name].score_sample(sample)
                if mine.failure == NOT_APPLICABLE:
                    continue
                if mine.failure is not None:
                    return Score(0.0, ok=mine.ok, failure=f"{term.name}: {mine.failure}")
                value = mine.value
                parts = {**mine.parts, **parts}
                extras = {**mine.extras, **extras}
            else:
                value = term.function(sample)
            applies = True
            parts[term.name] = value
            total += term.weight * value
        if not applies and not self._group_terms:
            return self._fault(sample, NOT_APPLICABLE)
        if (fault := fault_of(total)) is not None:
            return self._fault(sample, f"the weighted sum of the terms {fault}")
        return replace(score, value=total, parts=parts, failure=None, extras=extras)

    def _fault(self, sample: Sample, reason: str) -> Score:
        """Return the score of a sample whose weighted sum is unusable."""
        if self._on_failure == "stop":
            raise RewardError(
                f"reward_model.terms failed on sample {sample.uid!r}: {reason}. Change the weights "
                "or the functions, or set reward_model.on_failure to zero or drop"
            )
        return Score(0.0, ok=self._on_failure == "zero", failure=reason)

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample. Group terms are added later, by `finish_group`."""
        return [await self.score_sample(sample) for sample in samples]

    async def finish_group(self, samples: Sequence[Sample]) -> None:
        """Add the group terms to the rewards of the group's scored samples.

        Scoring of a sample fails if no function applied to it.
        """
        for term in self._group_terms:
            scored = [s for s in samples if usable(s)]
            if not scored:
                return
            values = await self._values(term, scored)
            if isinstance(values, str):
                self._failed(term, scored, values)
                continue
            for sample, value in zip(scored, values, strict=True):
                if value is None:
                    continue
                if (fault := fault_of(sample.reward + term.weight * value)) is not None:
                    reason = f"the weighted sum of the terms {fault}"
                    apply_score(sample, self._fault(sample, reason))
                    continue
                sample.reward_parts[term.name] = value
                sample.reward += term.weight * value
                sample.reward_parts[SCORE_PART] = sample.reward
        names = {ANSWER, *(term.name for term in (*self._sample_terms, *self._group_terms))}
        for sample in samples:
            parts = sample.reward_parts.keys()
            if usable(sample) and SCORE_PART in parts and not names & parts:
                apply_score(sample, self._fault(sample, NOT_APPLICABLE))

    async def _values(self, term: Term, samples: Sequence[Sample]) -> list[float | None] | str:
        """Return one value per sample, None if the term does not apply to it, or the reason of a
        failure. What the function logged becomes parts of the rewards."""
        if not term.custom:
            return [float(value) for value in term.function(samples)]
        signature = signature_of(term.function, self._total_steps)
        texts = [response_text(sample, self._decode) for sample in samples]
        try:
            arguments = signature.arguments(samples, texts)
            call = functools.partial(term.function, **arguments)
        except Exception as error:  # for example, columns whose names are not strings
            outcome = outcome_of(error)
        else:
            outcome = await self._runner.run(
                call,
                name=term.name,
                asynchronous=is_async(term.function),
                reader=Reader(signature, len(samples), logs_of(arguments)),
            )
        scores = outcome.each(len(samples))
        reasons = (score for score in scores if isinstance(score, str))
        if (wrong := next((r for r in reasons if r != NOT_APPLICABLE), None)) is not None:
            return wrong
        for sample, score in zip(samples, scores, strict=True):
            if isinstance(score, Score):
                sample.reward_parts.update({**score.parts, **sample.reward_parts})
                if score.extras:
                    sample.metadata.setdefault(REWARD_EXTRAS, {}).update(score.extras)
        return [score.value if isinstance(score, Score) else None for score in scores]

    def _failed(self, term: Term, samples: Sequence[Sample], reason: str) -> None:
        if self._on_failure == "stop":
            raise RewardError(
                f"reward_model.terms.{term.name} failed on the {len(samples)} responses to "
                f"{samples[0].uid!r}: {reason}. Fix it, or set reward_model.on_failure to zero "
                "or drop"
            )
        for sample in samples:
            zero = Score(0.0, ok=self._on_failure == "zero", failure=f"{term.name}: {reason}")
            apply_score(sample, zero)


def usable(sample: Sample) -> bool:
    """Return whether scoring of the sample has not failed."""
    return sample.status is not Status.FAILED and REWARD_FAILURE not in sample.metadata
