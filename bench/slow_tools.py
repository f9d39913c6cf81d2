"""Measures rollouts whose tools are slow.

    python -m bench.slow_tools --policy RUN [--episodes 64] [--median 0.05] [--longest 5]
        [--rounds 3]

RUN is a run with tools, such as `slipstream quickstart --agent`. Each turn with calls waits for a
random time (log-normal), which depends on the problem and the turn only. Prints wall times:

    engine    tools without delays: the engine alone
    longest   the episode with the longest path, alone: its turns and its delays
    episodes  all episodes, each with its delays; the larger of the two above is the least possible
    in turns  all episodes generate one turn, then all tools answer, and so on

and the tokens that prefill computed, divided by those that no earlier turn had computed. Fails if
two rollouts of all episodes differ in a token.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import anyio

from slipstream.bench.flags import add_count_flag
from slipstream.bench.printing import progress
from slipstream.build.data import make_reward_manager, make_task, make_tokenizer, validation_prompts
from slipstream.build.engine import make_engine
from slipstream.build.episodes import (
    episode_limits,
    make_renderer,
    make_tools,
    tool_limits,
    tool_schemas,
)
from slipstream.build.process import import_external
from slipstream.build.rollouts import eval_settings
from slipstream.checkpoint.layout import policy_folder
from slipstream.config.load import CONFIG_FILE, load_config
from slipstream.environment.protocol import Answer, Environment, Start, Turn
from slipstream.environment.tools.environment import Toolbox, ToolEnvironment
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.loops.evaluate import EvalSettings, evaluate
from slipstream.models.hf_io import load_checkpoint
from slipstream.rewards.protocol import RewardManager
from slipstream.rollout.episode import EpisodeLimits, Episodes
from slipstream.rollout.render import Renderer
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import Prompt, Sample

Delay = Callable[[str, int], float]
"""Seconds of the calls of a turn: from the uid of the prompt and the number of the turn."""


@dataclass(slots=True)
class Rounds:
    """Lets all running episodes do one thing, then all of them the next."""

    running: int
    waiting: list[asyncio.Event] = field(default_factory=list)

    async def wait(self) -> None:
        """Return when all running episodes wait."""
        event = asyncio.Event()
        self.waiting.append(event)
        self._release()
        await event.wait()

    def leave(self) -> None:
        """An episode has ended."""
        self.running -= 1
        self._release()

    def _release(self) -> None:
        if len(self.waiting) == self.running:
            for event in self.waiting:
                event.set()
            self.waiting = []


class Delayed:
    """An environment whose answers take longer. With `rounds` they wait for all others."""

    def __init__(self, inner: Environment, delay: Delay, rounds: Rounds | None) -> None:
        self._inner, self._delay, self._rounds = inner, delay, rounds
        self._uid = ""

    async def reset(self, row: Prompt, seed: int) -> Start:
        self._uid = row.uid
        return await self._inner.reset(row, seed)

    async def step(self, turn: Turn) -> Answer:
        if self._rounds is not None and turn.message.tool_calls:
            await self._rounds.wait()
        if turn.message.tool_calls:
            await asyncio.sleep(self._delay(self._uid, turn.number))
        answer = await self._inner.step(turn)
        if self._rounds is not None and turn.message.tool_calls:
            await self._rounds.wait()
        return answer

    async def score(self) -> Mapping[str, float]:
        return await self._inner.score()

    async def close(self) -> None:
        if self._rounds is not None:
            self._rounds.leave()
        await self._inner.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The policy and the problems."""

    engine: EmbeddedEngine
    prompts: Sequence[Prompt]
    rewards: RewardManager
    settings: EvalSettings
    make: Callable[[], Environment]
    renderer: Renderer
    limits: EpisodeLimits

    async def run(
        self, prompts: Sequence[Prompt], delay: Delay, *, together: bool = False
    ) -> tuple[float, list[Sample]]:
        """Run the episodes of `prompts`. Returns the wall time in seconds, and the samples."""
        rounds = Rounds(len(prompts)) if together else None

        def make() -> Environment:
            return Delayed(self.make(), delay, rounds)

        episodes = Episodes(make, self.renderer, self.limits)
        settings = replace(self.settings, episodes=episodes)
        started = time.perf_counter()
        done = await evaluate([self.engine], prompts, self.rewards, settings)
        seconds = time.perf_counter() - started
        return seconds, [sample for group in done.groups for sample in group.samples]


def log_normal(middle: float, longest: float) -> Delay:
    """Times whose median is `middle`; the longest of about 200 is `longest` seconds."""
    spread = math.log(longest / middle) / 2.6

    def delay(uid: str, turn: int) -> float:
        drawn = random.Random(f"{uid}/{turn}").gauss(0.0, 1.0)
        return min(longest, middle * math.exp(spread * drawn))

    return delay


def new_tokens(sample: Sample) -> int:
    """The context tokens of an episode whose keys and values no earlier turn computed: the prompt,
    and for each later turn the answer and the token that ended the turn before."""
    answers = [s for s in sample.segments[1:] if s.role != "assistant"]
    return len(sample.prompt_ids) + sum(len(answer.ids) + 1 for answer in answers)


async def measure(bench: Bench, args: argparse.Namespace) -> bool:
    """Print the table. Returns whether all rollouts have the same tokens."""
    delay = log_normal(args.median, args.longest)

    def none(uid: str, turn: int) -> float:
        return 0.0

    def path(sample: Sample) -> float:
        turns = 0 if sample.episode is None else sample.episode.turns
        return sum(delay(sample.uid, turn) for turn in range(1, turns))

    names = ("engine", "longest", "episodes", "in turns")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    same, known = True, list[list[int]]()
    # The first rollout of the engine. Later ones find keys and values of earlier ones.
    before = bench.engine.stats()
    _, samples = await bench.run(bench.prompts, none)
    computed = bench.engine.stats().since(before).prompt_tokens
    new = sum(map(new_tokens, samples))
    slowest = max(samples, key=path)
    alone = [prompt for prompt in bench.prompts if prompt.uid == slowest.uid]
    for number in range(args.rounds):
        progress(f"round {number + 1} of {args.rounds}")
        for name, prompts, how in (
            ("engine", bench.prompts, partial(bench.run, delay=none)),
            ("longest", alone, partial(bench.run, delay=delay)),
            ("episodes", bench.prompts, partial(bench.run, delay=delay)),
            ("in turns", bench.prompts, partial(bench.run, delay=delay, together=True)),
        ):
            taken, samples = await how(prompts)
            seconds[name].append(taken)
            if name == "longest":
                continue
            tokens = [sample.tokens for sample in samples]
            known = known or tokens
            same = same and tokens == known
    turns = [0 if s.episode is None else s.episode.turns for s in samples]
    delays = [
        delay(sample.uid, turn)
        for sample, count in zip(samples, turns, strict=True)
        for turn in range(1, count)
    ]
    print(
        f"{len(samples)} episodes, {sum(turns)} turns (longest {max(turns)}), delays: median "
        f"{1000 * median(delays):.0f} ms, longest {max(delays):.2f} s"
    )
    for name in names:
        low, high = min(seconds[name]), max(seconds[name])
        print(f"{name:<9} {median(seconds[name]):7.2f} s  ({low:.2f} to {high:.2f})")
    least = [max(a, b) for a, b in zip(seconds["engine"], seconds["longest"], strict=True)]
    for name in ("episodes", "in turns"):
        ratios = [a / b for a, b in zip(seconds[name], least, strict=True)]
        print(f"{name} over the least possible: {median(ratios):.2f}x")
    print(f"prefill: {computed} tokens computed, {new} new: {computed / new:.3f}")
    print("tokens: " + ("the same in all rollouts" if same else "DIFFERENT"))
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policy", type=Path, required=True, metavar="RUN")
    add_count_flag(parser, "episodes", 64)
    add_count_flag(parser, "rounds", 3)
    parser.add_argument("--median", type=float, default=0.05, help="median of a delay in seconds")
    parser.add_argument("--longest", type=float, default=5.0, help="longest delay in seconds")
    args = parser.parse_args()
    config = load_config(file=args.policy / CONFIG_FILE, notify=lambda _: None)
    import_external(config)
    folder = policy_folder(args.policy)
    tokenizer = make_tokenizer(config, folder)
    task = make_task(config, tokenizer)
    compute = ComputeThread()
    made = partial(make_engine, config, load_checkpoint(folder), tokenizer, compute)
    engine = compute.run(made)
    assert isinstance(engine, EmbeddedEngine)
    toolbox = Toolbox(make_tools(config), tool_limits(config, tokenizer))
    bench = Bench(
        engine=engine,
        prompts=validation_prompts(config, tokenizer, task, count=args.episodes),
        rewards=make_reward_manager(config, tokenizer),
        settings=eval_settings(config, tokenizer),
        make=lambda: ToolEnvironment(toolbox, None),
        renderer=make_renderer(config, tokenizer),
        limits=episode_limits(config, tool_schemas(config) or []),
    )
    try:
        same = anyio.run(measure, bench, args)
    finally:
        engine.close()
        compute.close()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
