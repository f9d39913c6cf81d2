"""A draft head in vLLM (`slipstream bench export`): is it as good there as it is here?

The policy and its head go to vLLM as files, as `slipstream export` writes them, and both
engines answer the same prompts greedily, with chains of the same depths; vLLM answers them without
drafts, too. All must write the same tokens where their sums agree, which the benchmark counts, and
both accept as many drafts. vLLM adds up in another order than we do, and with drafts, that is of
other numbers of rows, in another one than without: where responses part, it says how far apart the
two likeliest tokens were there. vLLM's class for EAGLE-1 heads is one of the Llama family, that for
EAGLE-3 heads is for policies of all of ours. It is asked one prompt at a time: on a CPU, vLLM 0.32
accepts fewer of the drafts after the first one the more requests run, whoever trained the head
(docs/log.md). Times are not compared: that is `rollout --policy`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from slipstream.bench.contenders import VllmSettings, Workload, requests, vllm_of
from slipstream.bench.record import ResultRow, Spread, median_of, this_machine
from slipstream.bench.speculation.trained import Trained, load_trained, make_engine
from slipstream.errors import ConfigError, check_at_least_one
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.layouts import export_draft_head
from slipstream.models.hf_io import save_checkpoint

TOLERANCE = 0.10
"""How far tokens per verification in vLLM may be from ours, as a share of ours."""

TIES = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats by which rounding may decide between two tokens, by what is computed in: the largest logits
are mostly 8 to 16, where bf16 numbers are 0.0625 apart. Responses may part there only."""

_PARTING = "largest_gap_where_they_part"
_VLLM_PARTING = "vllm_largest_gap_where_they_part"

_DRAFTED = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportBench:
    """Responses of `new_tokens` to `prompts` prompts of a policy, by chains of
    each of `depths` drafts; vLLM is given `at_once` prompts together. Raises ConfigError for
    impossible values."""

    policy: Path
    dtype: torch.dtype = torch.float32
    depths: tuple[int, ...] = (1, 3, 5)
    prompts: int = 64
    new_tokens: int = 64
    at_once: int = 1

    def __post_init__(self) -> None:
        check_at_least_one(self, "prompts", "new_tokens", "at_once", where="bench export: ")
        if not self.depths or min(self.depths) < 1:
            raise ConfigError(f"bench export: depths {self.depths} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What an engine wrote in so many seconds, and how many tokens came of each verification. For
    each token `gaps` (vLLM's only) has how far its log-prob is above the next one's, in nats."""

    token_ids: Sequence[Sequence[int]]
    per_verification: float
    seconds: float
    gaps: Sequence[Sequence[float]] = ()


def run(bench: ExportBench, say: Callable[[str], None]) -> list[ResultRow]:
    """A row for each depth. Raises ConfigError where the policy is of another family, has no room
    for such responses, or vLLM is not installed."""
    trained = load_trained(bench.policy)
    family = trained.decoder.config.family
    if family != "llama" and not isinstance(trained.head, Eagle3Head):
        raise ConfigError(
            f"{bench.policy} has a policy of the family {family}, and vLLM's class for EAGLE heads "
            "is one of Llama's; train one with actor_rollout_ref.model.init.family=llama, or a "
            "head with speculative.eagle.spec_algorithm=EAGLE3, whose class is for all"
        )
    workload = _workload(trained, bench)
    rows = []
    with TemporaryDirectory() as parent:
        policy, head = Path(parent) / "policy", Path(parent) / "head"
        save_checkpoint(trained.decoder, policy)
        export_draft_head(trained.head, head, "vllm")
        method = trained.head.algorithm.lower()
        say(f"{len(workload.prompts)} prompts in vLLM, without drafts")
        plain, _ = _theirs(policy, "vllm-plain", None, workload, bench)
        for depth in bench.depths:
            say(f"{len(workload.prompts)} prompts, chains of {depth}: here, and in vLLM")
            ours = _ours(trained, workload, bench.dtype, depth)
            drafts = {"method": method, "model": str(head), "num_speculative_tokens": depth}
            theirs, versions = _theirs(policy, f"vllm-{method}-{depth}", drafts, workload, bench)
            rows.append(_row(bench, workload, depth, ours, theirs, plain, versions))
    return rows


def ratio_of(row: ResultRow) -> float:
    """Tokens per verification in vLLM over ours."""
    found = row.values["vllm_over_ours"]
    assert isinstance(found, float)
    return found


def widest_parting(row: ResultRow) -> float:
    """Nats between the two likeliest tokens, at most, where responses part: ours from vLLM's, and
    these from vLLM's without drafts."""
    return max(median_of(row.values[_PARTING]), median_of(row.values[_VLLM_PARTING]))


def good(rows: Sequence[ResultRow]) -> bool:
    """Whether vLLM accepts as much, and all write the same up to ties."""
    return all(
        abs(ratio_of(row) - 1) <= TOLERANCE and widest_parting(row) <= TIES[row.dtype]
        for row in rows
    )


def parted(one: Accepted, others: Sequence[Sequence[int]]) -> list[float]:
    """How sure `one` was of its first token that is another in the other's response, for each
    response that differs."""
    found = []
    for mine, other, gaps in zip(one.token_ids, others, one.gaps, strict=True):
        places = (i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
        found += [gaps[i] for i in itertools.islice(places, 1)]
    return found


def _workload(trained: Trained, bench: ExportBench) -> Workload:
    """Prompts, and room for as many tokens as are asked for after the longest."""
    prompts = tuple(tuple(prompt) for prompt in trained.prompts[: bench.prompts])
    room = trained.max_model_len - max(map(len, prompts))
    if bench.new_tokens > room:
        raise ConfigError(
            f"--new-tokens {bench.new_tokens}: the policy's run has room for {room} after a prompt"
        )
    return Workload(name="export", prompts=prompts, lengths=(bench.new_tokens,) * len(prompts))


def _ours(trained: Trained, workload: Workload, dtype: torch.dtype, depth: int) -> Accepted:
    proposer = EagleProposer(trained.head, dtype=dtype)
    engine = make_engine(trained, dtype, proposer=proposer, plan=DraftPlan.chain(depth))
    started = time.perf_counter()
    done = engine.run(requests(workload, 0.0))
    seconds = time.perf_counter() - started
    return Accepted(
        token_ids=[list(generation.token_ids) for generation in done],
        per_verification=engine.stats().accept_length,
        seconds=seconds,
    )


def _theirs(
    policy: Path,
    name: str,
    drafts: Mapping[str, object] | None,
    workload: Workload,
    bench: ExportBench,
) -> tuple[Accepted, Mapping[str, str]]:
    """What vLLM writes with `drafts`, its `speculative_config`, and its versions."""
    settings = VllmSettings(
        dtype=str(bench.dtype).removeprefix("torch."), eager=True, speculative=drafts, gaps=True
    )
    positions = max(map(len, workload.prompts)) + max(workload.lengths)
    with vllm_of(name, settings, policy, positions, 0.0) as peer:
        token_ids = list[list[int]]()
        for start in range(0, len(workload.prompts), bench.at_once):
            some = slice(start, start + bench.at_once)
            token_ids += peer.generate(
                Workload(
                    name="export", prompts=workload.prompts[some], lengths=workload.lengths[some]
                )
            )
        counted = [answer["speculation"] for answer in peer.answers]
        versions = dict(peer.versions or {})
    # Without drafts nothing is counted.
    verifications = sum(one.get(_DRAFTED, 0) for one in counted)
    accepted = sum(one.get(_ACCEPTED, 0) for one in counted)
    theirs = Accepted(
        token_ids=token_ids,
        per_verification=1 + accepted / max(verifications, 1),
        seconds=sum(answer["seconds"] for answer in peer.answers),
        gaps=[gaps for answer in peer.answers for gaps in answer["gaps"]],
    )
    return theirs, versions


def _row(
    bench: ExportBench,
    workload: Workload,
    depth: int,
    ours: Accepted,
    theirs: Accepted,
    plain: Accepted,
    versions: Mapping[str, str],
) -> ResultRow:
    parts, theirs_part = parted(theirs, ours.token_ids), parted(plain, theirs.token_ids)
    answers = len(workload.prompts)
    return ResultRow(
        benchmark="export",
        case=f"chains of {depth}",
        contender="vllm",
        dtype=str(bench.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        seconds=Spread.of([theirs.seconds]),
        machine=this_machine(versions),
        values={
            "tokens_per_verification": ours.per_verification,
            "vllm_tokens_per_verification": theirs.per_verification,
            "vllm_over_ours": theirs.per_verification / ours.per_verification,
            "same_responses": 1 - len(parts) / answers,
            _PARTING: max(parts, default=0.0),
            "vllm_same_as_plain": 1 - len(theirs_part) / answers,
            _VLLM_PARTING: max(theirs_part, default=0.0),
            "vllm_median_gap": median(gap for gaps in plain.gaps for gap in gaps),
        },
        settings={
            "prompts": len(workload.prompts),
            "new_tokens": bench.new_tokens,
            "at_once": bench.at_once,
        },
    )
