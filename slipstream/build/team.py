"""Builds the policy's trainer, reference and engine, in one process or several.

If `trainer.nnodes` times `trainer.n_gpus_per_node` is more than one, every process creates the same
objects here, and the first process uses them as in a single process. Called by the phases.
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
from slipstream.drafter.sequences import VocabLayers
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.protocol import InferenceEngine
from slipstream.metrics.timeline import Timeline
from slipstream.models.decoder import Decoder
from slipstream.models.policy import Policy
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.fsdp2 import Ranks
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import ReferencePolicy, TrainingBackend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """The policy, its trainer, its reference and its rollout engine."""

    policy: Policy
    """The trainer's policy; in several processes a shard of it."""
    whole: Policy
    """All weights before training."""
    backend: TrainingBackend
    reference: ReferencePolicy | None
    engine: InferenceEngine | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The objects to create: a trainer with `optim` for SFT or RL, from the weights in `start`
    (None: random), and optionally an engine, which drafts in RL."""

    start: Path | None
    optim: OptimSettings
    sft: bool = False
    engine: bool = True


@contextlib.contextmanager
def open_team(
    config: Config, deadlines: Deadlines, compute: ComputeThread, timeline: Timeline
) -> Iterator[Team | None]:
    """Start the other processes of the run for the duration of the body; yields None if there are
    none. Their start and end are spans of the `timeline`."""
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
    """Print an error and end the process."""
    end_process(f"error: {message}", 1)


def policy_parts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    wanted: Wanted,
    compute: ComputeThread,
    team: Team | None,
    notify: Callable[[str], None],
) -> PolicyParts:
    """Create the parts on `compute`, in this process and in all processes of `team`."""
    if team is None:
        return _own_parts(config, tokenizer, wanted, compute, None, notify)
    with team.collective(HOST, "make_parts", _parts_of_member, config, wanted, tokenizer) as call:
        parts = _own_parts(config, tokenizer, wanted, compute, team, notify)
        call.wait()
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
        reference = make_reference(
            config, tokenizer, wanted.start, policy, compute, backend, team=team
        )
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


def gathered_vocab(config: Config, policy: Policy, team: Team) -> Callable[[], VocabLayers]:
    """A function that copies embedding and LM head of the trained `policy`, which is sharded over
    processes. Call it on the compute thread."""
    dtype = rollout_dtype(config)
    assert isinstance(policy, Decoder)

    def gathered() -> VocabLayers:
        with team.collective(POLICY, "gather_vocab") as call:
            vocab = VocabLayers.of(policy, dtype)
            call.wait()
        return vocab

    return gathered
