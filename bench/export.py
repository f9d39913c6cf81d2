"""A draft head in vLLM (`slipstream bench export`): does vLLM accept its drafts as often?

`slipstream export` writes the policy and its head for vLLM. Both engines answer the same prompts
greedily, with chains of the same depths. vLLM also answers them without drafts. Both must accept
the same number of drafts, and all must write the same tokens, up to rounding: vLLM sums in another
order than our engine, and with drafts in another order than without. So where responses diverge,
the benchmark reports the gap between the two most likely tokens.

vLLM's class for EAGLE-1 heads needs a policy of the Llama family; its class for EAGLE-3 heads works
with all of our families. vLLM gets one prompt at a time: on a CPU, vLLM 0.32 accepts fewer of the
drafts after the first one with more running requests, whoever trained the head
(docs/log/draft_heads.md). `rollout --policy` compares times. Also runs as `python -m bench.export`.
"""

from __future__ import annotations

import itertools
import sys
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
"""Largest relative difference between vLLM's tokens per verification and ours."""

TIES = {"float32": 1e-3, "bfloat16": 0.25}
"""By dtype: the largest gap, in nats, between two tokens that rounding can swap. The largest logits
are mostly 8 to 16, where bf16 numbers are 0.0625 apart. Responses may diverge only at such gaps."""

_GAP = "largest_gap_where_they_part"
_VLLM_GAP = "vllm_largest_gap_where_they_part"

_DRAFTED = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportBench:
    """Responses of `new_tokens` tokens to `prompts` prompts, with chains of each depth in `depths`.

    vLLM gets `at_once` prompts at a time. Raises ConfigError for impossible values.
    """

    policy: Path
    dtype: torch.dtype = torch.float32
    depths: tuple[int, ...] = (1, 3, 5)
    prompts: int = 64
    new_tokens: int = 64
    at_once: int = 1

    def __post_init__(self) -> None:
        check_at_least_one(self, "prompts", "new_tokens", "at_once", where="bench export: ")
        if not self.depths or min(self.depths) < 1:
            raise ConfigError(f"bench export: every depth of {self.depths} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An engine's responses, its tokens per verification, and its seconds.

    `gaps` (only from vLLM) is, for each token, the log-prob of the most likely token minus that of
    the second most likely one, in nats.
    """

    token_ids: Sequence[Sequence[int]]
    per_verification: float
    seconds: float
    gaps: Sequence[Sequence[float]] = ()


def run(bench: ExportBench, say: Callable[[str], None]) -> list[ResultRow]:
    """Measure; one row per depth. Raises ConfigError if vLLM has no class for the head and policy,
    if the policy has too few positions, or if vLLM is not installed."""
    trained = load_trained(bench.policy)
    family = trained.decoder.config.family
    if family != "llama" and not isinstance(trained.head, Eagle3Head):
        raise ConfigError(
            f"{bench.policy} has a policy of the family {family}, but vLLM's class for EAGLE-1 "
            "heads needs Llama; train a policy with actor_rollout_ref.model.init.family=llama, or "
            "a head with speculative.eagle.spec_algorithm=EAGLE3"
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
            say(f"{len(workload.prompts)} prompts, chains of {depth}: in our engine and in vLLM")
            ours = _ours(trained, workload, bench.dtype, depth)
            drafts = {"method": method, "model": str(head), "num_speculative_tokens": depth}
            theirs, versions = _theirs(policy, f"vllm-{method}-{depth}", drafts, workload, bench)
            rows.append(_row(bench, workload, depth, ours, theirs, plain, versions))
    return rows


def ratio_of(row: ResultRow) -> float:
    """vLLM's tokens per verification over ours."""
    found = row.values["vllm_over_ours"]
    assert isinstance(found, float)
    return found


def largest_gap(row: ResultRow) -> float:
    """The largest gap, in nats, between the two most likely tokens where responses diverge: vLLM's
    from ours, and vLLM's with drafts from those without."""
    return max(median_of(row.values[_GAP]), median_of(row.values[_VLLM_GAP]))


def good(rows: Sequence[ResultRow]) -> bool:
    """Whether vLLM accepts the same number of drafts, and all responses are equal up to
    rounding."""
    return all(
        abs(ratio_of(row) - 1) <= TOLERANCE and largest_gap(row) <= TIES[row.dtype] for row in rows
    )


def gaps_at_divergence(one: Accepted, others: Sequence[Sequence[int]]) -> list[float]:
    """For each response of `one` that differs from `others`: the gap at the first different
    token."""
    found = []
    for mine, other, gaps in zip(one.token_ids, others, one.gaps, strict=True):
        places = (i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
        found += [gaps[i] for i in itertools.islice(places, 1)]
    return found


def _workload(trained: Trained, bench: ExportBench) -> Workload:
    """The prompts and lengths. Raises ConfigError if the longest prompt leaves too few
    positions."""
    prompts = tuple(tuple(prompt) for prompt in trained.prompts[: bench.prompts])
    room = trained.max_model_len - max(map(len, prompts))
    if bench.new_tokens > room:
        raise ConfigError(
            f"--new-tokens {bench.new_tokens}: the policy's run has room for only {room} tokens "
            f"after a prompt; lower --new-tokens to {room}"
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
    """vLLM's responses with the `speculative_config` `drafts` (None: without), and its versions."""
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
    # Without drafts, vLLM has no such counters.
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
    from_ours = gaps_at_divergence(theirs, ours.token_ids)
    from_plain = gaps_at_divergence(plain, theirs.token_ids)
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
            "same_responses": 1 - len(from_ours) / answers,
            _GAP: max(from_ours, default=0.0),
            "vllm_same_as_plain": 1 - len(from_plain) / answers,
            _VLLM_GAP: max(from_plain, default=0.0),
            "vllm_median_gap": median(gap for gaps in plain.gaps for gap in gaps),
        },
        settings={
            "prompts": len(workload.prompts),
            "new_tokens": bench.new_tokens,
            "at_once": bench.at_once,
        },
    )


if __name__ == "__main__":
    from slipstream import cli

    sys.exit(cli.main(["bench", "export", *sys.argv[1:]]))
