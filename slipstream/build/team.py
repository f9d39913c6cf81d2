"""Wiring of the policy's trainer, reference and engine, in one process or in several.

Where `trainer.nnodes` and `trainer.n_gpus_per_node` come to more than one, each process makes the
same parts here, and the first one gets them as if they were its own alone. With `build_policy` the
only module of the loops that imports `distributed`. Called by the phases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.build.engine import make_engine, rollout_dtype
from slipstream.build.policy import (
    POLICY,
    REFERENCE,
    add_adapter,
    device_of,
    initial_policy,
    make_backend,
    make_policy,
    make_reference,
    process_count,
    thread_count,
)
from slipstream.build.process import import_external
from slipstream.config.schema import Config
from slipstream.deadlines import Deadlines, end_process
from slipstream.distributed.backend import TeamBackend
from slipstream.distributed.engines import EngineTeam, OwnEngine
from slipstream.distributed.host import HOST
from slipstream.distributed.team import Team
from slipstream.drafter.sequences import PolicyEnds
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.protocol import InferenceEngine
from slipstream.metrics.timeline import Timeline
from slipstream.models.decoder import Decoder
from slipstream.models.policy import Policy
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.fsdp2 import Ranks
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import ReferencePolicy
from slipstream.training.single import SingleProcessBackend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """The policy, and what trains it, what it is compared with, and what generates with it."""

    policy: Policy
    """The trainer's own; in several processes a part of it."""
    whole: Policy
    """All of its weights as they are before anything is learned."""
    backend: SingleProcessBackend
    reference: ReferencePolicy | None
    engine: InferenceEngine | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be made: a trainer with `optim` for `sft` or RL, from the weights in `start`
    (None: freshly drawn), and an engine or none, which drafts in RL."""

    start: Path | None
    optim: OptimSettings
    sft: bool = False
    engine: bool = True


@contextlib.contextmanager
def open_team(
    config: Config, deadlines: Deadlines, compute: ComputeThread, timeline: Timeline
) -> Iterator[Team | None]:
    """The other processes of a run that computes on `compute`, for the body; None where there are
    none. Their beginning and their end are spans of the `timeline`."""
    count = process_count(config)
    if count == 1:
        yield None
        return
    from slipstream.distributed.placement import Cluster

    def on_failure(error: BaseException) -> None:
        message = f"another process of the run failed: {type(error).__name__}: {error}"
        (deadlines.on_stuck or end_now)(message)

    with timeline.span("setup"):
        cluster = Cluster(
            count,
            device=device_of(config).type,
            timeout_s=config.trainer.stage_timeout_s + deadlines.grace_s,
            threads=thread_count(config),
            on_failure=on_failure,
        )
    try:
        compute.run(cluster.use_gpu)
        yield cluster.team
    finally:
        with timeline.span("close"):
            cluster.close()


def end_now(message: str) -> None:
    """End the process with an error."""
    end_process(f"error: {message}", 1)


def policy_parts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    wanted: Wanted,
    compute: ComputeThread,
    team: Team | None,
    notify: Callable[[str], None],
) -> PolicyParts:
    """Made on `compute`, and in all processes of `team`."""
    if team is None:
        return _own_parts(config, tokenizer, wanted, compute, None, notify)
    with team.together(
        HOST, "make_parts", _parts_of_member, config, wanted, tokenizer
    ) as all_of_us:
        parts = _own_parts(config, tokenizer, wanted, compute, team, notify)
        all_of_us.wait()
    if parts.engine is None:
        return parts
    return replace(parts, engine=EngineTeam(parts.engine, team))


def _own_parts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    wanted: Wanted,
    compute: ComputeThread,
    team: Team | None,
    notify: Callable[[str], None],
) -> PolicyParts:
    policy = make_policy(config, tokenizer, wanted.start, team)
    add_adapter(config, policy, first=wanted.start == initial_policy(config))
    backend = make_backend(config, policy, compute, optim=wanted.optim, sft=wanted.sft, team=team)
    reference = None
    if not wanted.sft:
        reference = make_reference(config, tokenizer, wanted.start, compute, backend, team=team)
    engine = None
    if wanted.engine:
        speculate = None if wanted.sft else notify
        engine = make_engine(config, policy, tokenizer, compute, speculate=speculate)
    whole = policy if team is None or not isinstance(engine, EmbeddedEngine) else engine.decoder
    return PolicyParts(
        policy=policy, whole=whole, backend=backend, reference=reference, engine=engine
    )


def _parts_of_member(
    ranks: Ranks, config: Config, wanted: Wanted, tokenizer: PreTrainedTokenizerBase
) -> Mapping[str, Any]:
    """Runs in the other processes (`distributed.host`)."""
    import_external(config)
    compute = ComputeThread()
    parts = compute.run(
        lambda: _own_parts(config, tokenizer, wanted, compute, Team(ranks), lambda note: None)
    )
    made: dict[str, Any] = {POLICY: parts.backend, REFERENCE: parts.reference}
    if parts.engine is not None:
        assert isinstance(parts.backend, TeamBackend)
        made["engine"] = OwnEngine(parts.engine, parts.backend)
    return made


def gathered_ends(config: Config, policy: Policy, team: Team) -> Callable[[], PolicyEnds]:
    """Copies the ends of the trained `policy`, of which each process has a part, as they are; on
    the compute thread."""
    dtype = rollout_dtype(config)
    assert isinstance(policy, Decoder)

    def gathered() -> PolicyEnds:
        with team.together(POLICY, "gather_ends") as all_of_us:
            ends = PolicyEnds.of(policy, dtype)
            all_of_us.wait()
        return ends

    return gathered
