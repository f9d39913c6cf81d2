"""Lets users' code ask the policy for turns, in one episode.

The code passes token ids, and gets the next turn.

Each call must repeat all earlier tokens unchanged. New tokens in it get loss mask 0. Some code may
have several contexts, for example of agents that ask each other: a call that repeats the tokens of
no context begins a new one, which is a branch of the episode. When the batch is complete, the run
stops the code. A later step starts it again, and returns its recorded turns. Knows engines by
`Generate` only. Used by the adapters of this folder.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import DataError, SlipstreamError, did_you_mean, shortened
from slipstream.reading import reason
from slipstream.rollout.episode import (
    EpisodeError,
    Generate,
    begin_branch,
    extend_sample,
    put_aside,
)
from slipstream.types import EpisodeRecord, Sample, Segment, Status

LENGTHS = ("max_tokens", "max_new_tokens")
"""Sampling parameters that limit the tokens of a turn."""

FIXED = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")
"""Sampling parameters that users' code must not change: the trainer's log-probs depend on them, or
the engine has them for the whole run."""


@dataclass(frozen=True, slots=True)
class Result:
    """What users' code returned of a branch: tokens after the prompt, their mask (None: all), and
    the prompt (None: not checked)."""

    ids: Sequence[int]
    mask: Sequence[int] | None = None
    prompt: list[int] | None = None


class EpisodeStopped(BaseException):
    """Ends users' code whose batch is complete. It begins again later."""


class PolicySession:
    """The turns of one episode. It writes to the sample what was sampled and what was added."""

    def __init__(
        self,
        sample: Sample,
        generate: Generate,
        *,
        kind: str,
        max_tokens: int,
        max_prompt_tokens: int | None,
        branches_fit: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        """`kind` names the code in messages. `max_tokens` limits the tokens after the prompt.
        `branches_fit` tells whether branches of given lengths can be trained on together; None: the
        code has one context. The recorded turns of a stopped sample are replayed."""
        self._sample = sample
        self._generate = generate
        self._kind = kind
        self._max_tokens = max_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._branches_fit = branches_fit
        branches = {branch.branch: branch.segments for branch in sample.branches}
        self._prompts = {place: segments[0] for place, segments in branches.items()}
        """The recorded prompts, by branch."""
        self._replay = {place: segments[1:] for place, segments in branches.items()}
        """What is left of the recorded segments, by branch."""
        self._stopped_in = sample.branch
        self._parted: str | None = None
        """Why the episode has more than one branch."""
        self._busy = False
        self.record = EpisodeRecord()
        self.begun = False
        """Whether there was a call of `turn`."""
        self.ended: BaseException | None = None
        """Why the episode cannot continue. Users' code may have caught the exception."""
        sample.earlier, sample.branch, sample.parent = [], 0, None
        sample.segments = [self._prompts[0]]
        sample.episode = self.record

    @property
    def replays(self) -> bool:
        """Whether recorded turns are left."""
        return any(self._replay.values())

    @property
    def _recorded(self) -> list[Segment]:
        """What is left of the recorded segments of the current branch."""
        return self._replay.setdefault(self._sample.branch, [])

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, prompt included."""
        return self._sample.tokens

    @property
    def left(self) -> int:
        """How many tokens may follow."""
        return self._most - self._sample.num_tokens

    @property
    def _most(self) -> int:
        """How many tokens a branch may have."""
        first = min(self._sample.branches, key=lambda branch: branch.branch)
        return len(first.prompt_ids) + self._max_tokens

    async def run(self, name: str, call: Callable[[], Awaitable[None]]) -> bool:
        """Run users' code, which `name` names in the failure of a sample, to its end.

        Returns what `EpisodeRunner.run` returns. Errors of Slipstream pass unchanged.
        """
        try:
            await call()
        except EpisodeStopped:
            return False
        except SlipstreamError:
            raise
        except (Exception, BaseExceptionGroup) as error:
            # A task group of the code wraps what `turn` raised.
            if self.ended is None:
                self.ended = EpisodeError(reason(error))
        if isinstance(self.ended, SlipstreamError):
            raise self.ended
        if self.ended is not None and not isinstance(self.ended, EpisodeStopped):
            self._sample.status = Status.FAILED
            self._sample.failure = f"{name}: {shortened(str(self.ended))}"
        return self.ended is None

    async def turn(self, ids: Sequence[int], most: int | None = None) -> Segment | None:
        """Return the next turn after `ids`, of at most `most` tokens (None: what is left).

        Returns None, and marks the sample as truncated, if no token of the policy fits.
        """
        if self.ended is not None:
            raise self.ended
        try:
            if self._busy:
                raise EpisodeError(f"the {self._kind} asked for two turns at the same time")
            self._busy = True
            return await self._turn(list(ids), most)
        except (EpisodeStopped, EpisodeError) as error:
            self.ended = error
            raise
        finally:
            self._busy = False

    async def _turn(self, ids: list[int], most: int | None) -> Segment | None:
        sample = self._sample
        fits = self._place(ids)
        limit = self.left if most is None else min(self.left, most)
        if not fits or limit < 1:
            sample.status = Status.TRUNCATED
            return None
        turn = Segment.given("assistant", [])
        if self._recorded:
            turn = self._recorded.pop(0)
            if turn.role != "assistant":
                raise self._replay_error("continued otherwise")
        sample.append(turn)
        if turn.ids and (self._recorded or sample.branch != self._stopped_in):
            sample.status = Status.COMPLETED
        else:  # a new turn, or the last recorded one, which is incomplete
            extend_sample(sample, await self._generate(sample, limit - len(turn.ids)))
        if sample.status is Status.PENDING:
            raise EpisodeStopped
        if sample.status is Status.FAILED:
            raise EpisodeError(sample.failure or "the engine failed")
        self.record.turns += 1
        return turn

    def _place(self, ids: list[int]) -> bool:
        """Append the tokens that the code added; the first call sets the prompt. Returns whether
        they fit."""
        sample = self._sample
        if not self.begun:
            self.begun = True
            most = self._max_prompt_tokens
            if not ids or (most is not None and len(ids) > most):
                raise EpisodeError(
                    f"the prompt has {len(ids)} tokens; it must have from 1 to "
                    f"data.max_prompt_length={most}"
                )
            return self._begin(ids)
        known = sample.tokens
        if ids[: len(known)] == known:
            return self._observe(ids[len(known) :])
        parted = (
            f"the prompt of turn {self.record.turns + 1} does not begin with the {len(known)} "
            "tokens so far"
        )
        if self._branches_fit is None:
            raise EpisodeError(
                f"{parted}; the {self._kind} must append to them, and never decode and tokenize "
                "them again"
            )
        self._parted = self._parted or parted
        return self._change_branch(ids)

    def _begin(self, ids: list[int]) -> bool:
        """Begin the current branch with a prompt. Returns True."""
        if self._recorded and ids != self._prompts[self._sample.branch].ids:
            raise self._replay_error("began with another prompt")
        self._sample.segments = [Segment.given("prompt", ids)]
        return True

    def _change_branch(self, ids: list[int]) -> bool:
        """Continue the branch that `ids` extend, or begin a new one. Returns whether the new tokens
        fit."""
        assert self._branches_fit is not None
        sample = self._sample
        fitting = [b for b in sample.earlier if ids[: b.num_tokens] == b.tokens]
        if fitting:
            found = max(fitting, key=lambda branch: branch.num_tokens)
            _make_current(sample, found)
            return self._observe(ids[found.num_tokens :])
        lengths = [*(branch.num_tokens for branch in sample.branches), self._most]
        if len(ids) >= self._most or not self._branches_fit(lengths):
            return False
        begin_branch(sample, ids)
        return self._begin(ids)

    def _observe(self, added: list[int]) -> bool:
        """Append tokens without loss if at least one more token of the policy fits. Returns
        whether they fit."""
        if not added:
            return True
        if len(added) >= self.left:
            return False
        segment = Segment.given("tool", added)
        if self._recorded and self._recorded.pop(0) != segment:
            raise self._replay_error("continued otherwise")
        self._sample.append(segment)
        return True

    def check_replayed(self) -> None:
        """Raise EpisodeError if the code ended although recorded turns are left."""
        if self.replays:
            raise self._replay_error("ended earlier")

    def _replay_error(self, what: str) -> EpisodeError:
        return EpisodeError(f"replay: the {self._kind} {what} than before")

    def finish(
        self, results: Sequence[Result], score: float | None, *, names: tuple[str, str, str]
    ) -> None:
        """Check what users' code returned for each branch, and take the masks and the score (None:
        the reward function's). `names` are the fields of tokens, mask and score in messages.

        Raises EpisodeError for other tokens than those of the episode, and for a score that is not
        finite; DataError for a mask of another length.
        """
        sample = self._sample
        self.check_replayed()
        _sort_branches(sample)
        branches = [*sample.branches]
        if len(results) > len(branches):
            raise DataError(
                f"the {self._kind} returned {len(results)} samples, but had {len(branches)} "
                "contexts; return one sample for each context"
            )
        if len(results) < len(branches):
            raise EpisodeError(
                f"{self._parted}; append to them, or return a sample for each of {len(branches)} "
                "contexts"
            )
        for result in results:
            ids, mask = result.ids, result.mask
            found = [b for b in branches if result.prompt in (None, b.prompt_ids)]
            found = [b for b in found if _agree(ids, b.response_ids)]
            if not found:
                raise EpisodeError(
                    f"{names[0]} of the {self._kind} are not the tokens that were sampled and "
                    "appended"
                )
            branches.remove(found[0])
            if mask is None:
                mask = [1] * len(ids)
            if len(mask) != len(ids):
                raise DataError(
                    f"the {self._kind} returned {len(ids)} tokens in {names[0]} and {len(mask)} "
                    f"entries in {names[1]}; they must have the same length"
                )
            # Tokens after the last turn teach nothing, so they are left out.
            _apply_mask(found[0], mask[: found[0].response_length])
        if sample.status is Status.PENDING:
            sample.status = Status.COMPLETED
        if score is not None:
            if not math.isfinite(score):
                raise EpisodeError(f"{names[2]} is {score}")
            self.record.score = float(score)


def _agree(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether one of two lists begins with the other."""
    common = min(len(left), len(right))
    return list(left[:common]) == list(right[:common])


def _make_current(sample: Sample, branch: Sample) -> None:
    """Exchange the current branch of a sample with an earlier one."""
    place = sample.earlier.index(branch)
    sample.earlier[place] = put_aside(sample)
    sample.segments, sample.branch, sample.parent = branch.segments, branch.branch, branch.parent


def _sort_branches(sample: Sample) -> None:
    """Make the newest branch of a sample its current one."""
    newest = max(sample.branches, key=lambda branch: branch.branch)
    if newest is not sample:
        _make_current(sample, newest)
    sample.earlier.sort(key=lambda branch: branch.branch)


def _apply_mask(sample: Sample, mask: Sequence[int]) -> None:
    """Exclude sampled tokens that the code excludes, and all tokens after its response."""
    start = 0
    for segment in sample.segments[1:]:
        own = list(mask[start : start + len(segment.ids)])
        own += [0] * (len(segment.ids) - len(own))
        segment.loss_mask[:] = [
            one if keep else 0.0 for one, keep in zip(segment.loss_mask, own, strict=True)
        ]
        start += len(segment.ids)


def check_sampling(
    given: Mapping[str, Any], params: Mapping[str, Any], *, kind: str, ignored: Sequence[str]
) -> None:
    """Raise DataError if users' code changed a sampling parameter of `params` that is `FIXED`, or
    gave an unknown one. `ignored` have no effect. `kind` names the code."""
    known = (*params, *LENGTHS, *ignored)
    for name, value in given.items():
        if name in FIXED and value != params.get(name, value):
            raise DataError(
                f"the {kind} changed {name} from {params[name]} to {value}; set "
                f"actor_rollout_ref.rollout.{name} instead, because training depends on it"
            )
        if name not in known:
            raise DataError(
                f"the {kind} gave the sampling parameter {name!r}{did_you_mean(name, known)}"
            )
