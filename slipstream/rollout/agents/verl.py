"""Agent loops written for VERL: classes derived from `AgentLoopBase`, chosen by a row's
`agent_name`.

    @register("my_agent")
    class MyAgent(AgentLoopBase):
        async def run(self, sampling_params, **row) -> AgentLoopOutput:
            output = await self.server_manager.generate(
                request_id=..., prompt_ids=..., sampling_params=sampling_params)

The prompt of each later call must begin with all tokens so far, which stay as they were sampled;
the tokens after them get loss mask 0. A loop that is stopped begins again later, and gets its
recorded turns without generating them again. Knows engines by `Generate` only.
"""

from __future__ import annotations

import asyncio
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from slipstream.data.chat_template import prompt_ids
from slipstream.errors import (
    ConfigError,
    DataError,
    SlipstreamError,
    did_you_mean,
    name_of,
    shortened,
)
from slipstream.reading import reason
from slipstream.rollout.episode import EpisodeRunner, Generate, extend_sample
from slipstream.types import (
    EpisodeRecord,
    Prompt,
    Sample,
    Segment,
    Status,
)

SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
"""VERL's names of its own loops."""

_FIXED = ("temperature", "top_p", "top_k", "min_p")
"""Sampling parameters that a loop must not change: the trainer's log-probs depend on them."""

_IGNORED = ("logprobs", "repetition_penalty")

C = TypeVar("C", bound=type[Any])


@dataclass(slots=True)
class TokenOutput:
    """The answer of `server_manager.generate`. `stop_reason` is `completed`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = "completed"
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class AgentLoopMetrics:
    """Seconds of a loop, filled in by the loop."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass(slots=True, kw_only=True)
class AgentLoopOutput:
    """The result of a loop. `response_mask` is 1 for tokens of the policy."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None


class AgentLoopBase(ABC):
    """The base class of loops. There is one object per sample."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config = getattr(trainer_config, "config", trainer_config)
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = getattr(data_config, "config", data_config)
        actor = getattr(self.config, "actor_rollout_ref", None)
        self.rollout_config = getattr(actor, "rollout", None)
        self.loop = asyncio.get_running_loop()

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Any = None, **_: Any
    ) -> list[int]:
        """Return the ids of a conversation, with the generation prompt."""
        return prompt_ids(self.tokenizer, messages, tools=tools)

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Run one episode for a row of the data set."""


_LOOPS: dict[str, Callable[..., Any]] = {}


def register(agent_name: str) -> Callable[[C], C]:
    """A decorator that registers a loop under a name. A later class of the name replaces it."""

    def add(cls: C) -> C:
        _LOOPS[name_of(agent_name, "agent loop")] = cls
        return cls

    return add


def registered_loops() -> list[str]:
    """Return the names of the registered loops, sorted."""
    return sorted(_LOOPS)


class EpisodeStopped(BaseException):
    """Ends a loop whose batch is complete. The loop begins again later."""


class AgentLoops:
    """Runs the loop that a row names; rows of other names are for `others`."""

    def __init__(
        self,
        others: Mapping[str, EpisodeRunner],
        *,
        default: str,
        sampling_params: Mapping[str, Any],
        max_tokens: int,
        tokenizer: Any,
        max_prompt_tokens: int | None = None,
        config: Any = None,
        loops: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """`others` run the rows of other names. `default` is the name of rows without `agent_name`.
        `loops` are classes by name, in addition to the registered ones. `max_tokens` limits the
        tokens after the prompt."""
        self._others = others
        self._default = default
        self._params = dict(sampling_params)
        self._max_tokens = max_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._tokenizer = tokenizer
        self._config = config
        self._loops = {**_LOOPS, **(loops or {})}
        self.check(default)

    def check(self, name: str) -> None:
        """Raise ConfigError, with similar names, if there is no loop `name`."""
        known = [*self._loops, *self._others]
        if name == TOOL_AGENT and name not in known:
            raise ConfigError(
                f"the agent loop {name!r} needs tools; set "
                "actor_rollout_ref.rollout.multi_turn.tool_config_path or function_tool_path"
            )
        if name not in known:
            raise ConfigError(
                f"there is no agent loop {name!r}{did_you_mean(name, known)} (known: "
                f"{', '.join(sorted(known))}); register it in a module of "
                "actor_rollout_ref.model.external_lib, or name its class in "
                "actor_rollout_ref.rollout.agent.agent_loop_config_path"
            )

    async def run(self, sample: Sample, row: Prompt, generate: Generate, *, seed: int) -> bool:
        """Run an episode, or continue one that was stopped (see `EpisodeRunner`)."""
        name = str(row.extra_info.get("agent_name") or self._default)
        if name not in self._loops and name in self._others:
            return await self._others[name].run(sample, row, generate, seed=seed)
        self.check(name)
        server = TurnServer(
            sample, generate, self._params, self._max_tokens, self._max_prompt_tokens
        )
        try:
            loop = self._loops[name](
                trainer_config=SimpleNamespace(config=self._config),
                server_manager=server,
                tokenizer=self._tokenizer,
                processor=None,
                dataset_cls=None,
                data_config=SimpleNamespace(config=getattr(self._config, "data", None)),
            )
            output = await loop.run(dict(self._params), **_columns(row))
            if server.ended is None:
                server.finish(output)
        except EpisodeStopped:
            return False
        except SlipstreamError:
            raise
        except (Exception, BaseExceptionGroup) as error:
            # A task group of the loop wraps what `generate` raised.
            if server.ended is None:
                server.ended = LoopError(reason(error))
        if server.ended is not None and not isinstance(server.ended, EpisodeStopped):
            sample.status = Status.FAILED
            sample.failure = f"agent loop {name}: {shortened(str(server.ended))}"
        return server.ended is None

    async def discard(self, sample: Sample) -> None:
        """Release what a stopped sample holds."""
        for runner in self._others.values():
            await runner.discard(sample)

    async def close(self) -> None:
        """Release what all stopped samples hold."""
        for runner in self._others.values():
            await runner.close()


def _columns(row: Prompt) -> dict[str, Any]:
    """The columns of a row, as VERL passes them."""
    extra = copy.deepcopy(row.extra_info)
    return {
        **extra,
        "raw_prompt": copy.deepcopy(row.messages),
        "data_source": row.data_source,
        "ability": row.ability,
        "reward_model": {"ground_truth": row.ground_truth},
        "extra_info": extra,
        "tools_kwargs": extra.get("tools_kwargs") or {},
        "interaction_kwargs": extra.get("interaction_kwargs") or {},
        "index": extra.get("index", 0),
        "uid": row.uid,
    }


class TurnServer:
    """Generates the turns of one episode; the `server_manager` of an agent loop. It writes to the
    sample what was sampled and what the loop added."""

    def __init__(
        self,
        sample: Sample,
        generate: Generate,
        params: Mapping[str, Any],
        max_tokens: int,
        max_prompt_tokens: int | None,
    ) -> None:
        self._sample = sample
        self._generate = generate
        self._params = params
        self._max_tokens = max_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._prompt = sample.segments[0]
        self._recorded = sample.segments[1:]
        self.record = EpisodeRecord()
        self._begun = False
        self.ended: BaseException | None = None
        """Why the episode cannot continue. The loop may have caught the exception."""
        sample.segments[1:] = []
        sample.episode = self.record

    async def generate(
        self,
        request_id: str = "",
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """Generate the next turn after `prompt_ids`, which begin with all tokens so far."""
        if self.ended is not None:
            raise self.ended
        try:
            return await self._turn(list(prompt_ids), sampling_params or {})
        except (EpisodeStopped, LoopError) as error:
            self.ended = error
            raise

    async def _turn(self, ids: list[int], params: Mapping[str, Any]) -> TokenOutput:
        sample = self._sample
        fits = self._place(ids)
        limit = self._limit(params)
        if not fits or limit < 1:
            sample.status = Status.TRUNCATED
            return TokenOutput([], [])
        turn = Segment.given("assistant", [])
        if self._recorded:
            turn = self._recorded.pop(0)
            if turn.role != "assistant":
                raise LoopError("replay: the agent loop continued otherwise than before")
        sample.append(turn)
        if self._recorded:
            sample.status = Status.COMPLETED
        else:  # a new turn, or the last recorded one, which is incomplete
            extend_sample(sample, await self._generate(sample, limit - len(turn.ids)))
        if sample.status is Status.PENDING:
            raise EpisodeStopped
        if sample.status is Status.FAILED:
            raise LoopError(sample.failure or "the engine failed")
        self.record.turns += 1
        return TokenOutput(list(turn.ids), list(turn.log_probs))

    def _place(self, ids: list[int]) -> bool:
        """Append the tokens that the loop added; the first call sets the prompt. Returns whether
        they fit."""
        sample = self._sample
        if not self._begun:
            self._begun = True
            most = self._max_prompt_tokens
            if not ids or (most is not None and len(ids) > most):
                raise LoopError(
                    f"the prompt has {len(ids)} tokens; it must have from 1 to "
                    f"data.max_prompt_length={most}"
                )
            if self._recorded and ids != self._prompt.ids:
                raise LoopError("replay: the agent loop began with another prompt than before")
            sample.segments[0] = Segment.given("prompt", ids)
            return True
        known = sample.tokens
        if ids[: len(known)] != known:
            raise LoopError(
                f"the prompt of turn {self.record.turns + 1} does not begin with the "
                f"{len(known)} tokens so far; an agent loop must append to them, and never decode "
                "and tokenize them again"
            )
        return self._observe(ids[len(known) :])

    def _observe(self, added: list[int]) -> bool:
        """Append tokens without loss if at least one more token of the policy fits. Returns
        whether they fit."""
        if not added:
            return True
        if self._sample.response_length + len(added) >= self._max_tokens:
            return False
        segment = Segment.given("tool", added)
        if self._recorded and self._recorded.pop(0) != segment:
            raise LoopError("replay: the agent loop continued otherwise than before")
        self._sample.append(segment)
        return True

    def _limit(self, given: Mapping[str, Any]) -> int:
        """Tokens that the next turn may have."""
        for name, value in given.items():
            if name in _FIXED and name in self._params and value != self._params[name]:
                raise DataError(
                    f"an agent loop changed {name} from {self._params[name]} to {value}; set "
                    f"actor_rollout_ref.rollout.{name} instead, because training depends on it"
                )
            known = (*_FIXED, *_IGNORED, *self._params, "max_tokens", "max_new_tokens")
            if name not in known:
                raise DataError(
                    f"an agent loop gave the sampling parameter {name!r}{did_you_mean(name, known)}"
                )
        left = self._max_tokens - self._sample.response_length
        asked = [given[name] for name in ("max_tokens", "max_new_tokens") if given.get(name)]
        return min([left, *map(int, asked)])

    def check_replayed(self) -> None:
        """Raise LoopError if an episode that begins again has ended before its recorded end."""
        if self._recorded:
            raise LoopError("replay: the agent loop ended earlier than before")

    def finish(self, output: Any) -> None:
        """Check the loop's result against what was sampled, and take its mask and reward."""
        sample = self._sample
        outputs = output if isinstance(output, list) else [output]
        if len(outputs) != 1 or not hasattr(outputs[0], "response_ids"):
            raise DataError("an agent loop must return one AgentLoopOutput")
        (output,) = outputs
        self.check_replayed()
        written = sample.response_ids
        ids, mask = list(output.response_ids), list(output.response_mask)
        common = min(len(ids), len(written))
        if ids[:common] != written[:common]:
            raise LoopError(
                "response_ids of the agent loop are not the tokens that were sampled and appended"
            )
        if len(mask) != len(ids):
            raise DataError(
                f"an agent loop returned {len(ids)} response_ids and {len(mask)} entries of "
                "response_mask; they must have the same length"
            )
        # Tokens after the last turn teach nothing, so they are left out.
        _apply_mask(sample, mask[:common])
        if sample.status is Status.PENDING:
            sample.status = Status.COMPLETED
        score = output.reward_score
        if score is not None:
            if not math.isfinite(score):
                raise LoopError(f"reward_score is {score}")
            self.record.score = float(score)


def _apply_mask(sample: Sample, mask: list[int]) -> None:
    """Exclude sampled tokens that the loop excludes, and all tokens after its response."""
    start = 0
    for segment in sample.segments[1:]:
        own = mask[start : start + len(segment.ids)]
        own += [0] * (len(segment.ids) - len(own))
        segment.loss_mask[:] = [
            one if keep else 0.0 for one, keep in zip(segment.loss_mask, own, strict=True)
        ]
        start += len(segment.ids)


class LoopError(Exception):
    """The episode cannot continue; its text is the reason."""
