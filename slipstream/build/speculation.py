"""Wiring of speculative decoding: who drafts, and who chooses how much.

Called by `build.make_engine`, on the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.checkpoint.layout import head_folder
from slipstream.config.schema import Config
from slipstream.config.schema_speculative import MOST_BRANCHES, EagleSection
from slipstream.errors import ConfigError
from slipstream.inference.engine.recorder import CudaRecorder
from slipstream.inference.speculation.bandits import (
    BanditSelector,
    EpsilonGreedy,
    UpperConfidenceBound,
    buckets_by_rows,
)
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.report import ReportedSelector, plan_table
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    PredefinedSelector,
    StrategySelector,
)
from slipstream.inference.speculation.union import UnionProposer
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head, default_aux_layers
from slipstream.models.draft.files import load_draft_head
from slipstream.models.draft.model import DraftModel

TRACE_FILE = "speculation.jsonl"

DEPTHS = (1, 2, 3, 4, 5, 7, 11, 15)
"""Drafts in a row that a cost model chooses from. A request alone is verified in fours: 3, 7 and 11
drafts fill them."""

TREE_ROWS = (8, 12, 16, 24, 32, 48, 64)
"""Tokens of a request to verify, on average, that it chooses trees by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What an engine speculates with."""

    proposer: Proposer
    selector: StrategySelector


def make_speculation(
    config: Config,
    policy: Decoder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_budget_bytes: int,
    free_cache: bool,
    notify: Callable[[str], None],
) -> Speculation | None:
    """After `speculative`; None where it is not enabled.

    Raises CheckpointError for a draft head that is not one of this policy.
    """
    speculative = config.speculative
    if not speculative.enable:
        return None
    what = "history"
    folder: str | None = None
    head_record: Callable[[], tuple[int, int]] | None = None
    proposer: Proposer
    history = HistoryProposer(
        match=speculative.history.match_tokens, max_tokens=speculative.history.max_tokens
    )
    if speculative.spec_strategy == "history":
        proposer = history
    else:
        head, source = first_head(config, policy)
        folder = None if source is None else str(source)
        what = f"draft head {source}" if source is not None else "a draft head that begins anew"
        recorded = device.type == "cuda" and not config.actor_rollout_ref.rollout.enforce_eager
        # One layer beside the policy's: its share holds as many contexts as theirs do.
        proposer = EagleProposer(
            head.to(device),
            dtype=dtype,
            kv_budget_bytes=kv_budget_bytes // policy.config.num_layers,
            free_cache=free_cache,
            record=CudaRecorder() if recorded else None,
        )
        if speculative.spec_strategy == "union":
            proposer = union = UnionProposer(proposer, history)
            head_record = lambda: union.head_record  # noqa: E731
            what += " and history"
    selector = make_selector(config)
    notify(
        f"Speculative decoding enabled: {what}; {plan_table(selector, speculative.bs_threshold)}"
    )
    reported = ReportedSelector(
        selector, notify=notify, head=folder, head_record=head_record, trace=_trace(config)
    )
    return Speculation(proposer=proposer, selector=reported)


def first_head(
    config: Config, policy: Decoder, frequent: Callable[[int], Sequence[int]] | None = None
) -> tuple[DraftModel, Path | None]:
    """The head to begin with, and its folder: `speculative.eagle.spec_model_path`, or a new one.
    `frequent` tells so many of the tokens that are drafted most, in order.

    Raises ConfigError for impossible auxiliary layers or draft vocabularies, and for ones that
    differ from the folder's. Raises CheckpointError for a folder without a head of this policy.
    """
    if config.speculative.eagle.spec_model_path is not None:
        return _known_head(config, policy.config)
    head = _new_head(config, policy.config, frequent)
    head.init_weights(config.trainer.seed, policy)
    return head, None


def head_to_be(config: Config, policy: ModelConfig) -> DraftModel:
    """Of the shape of the head that RL begins with. Raises what `first_head` does."""
    if config.speculative.eagle.spec_model_path is not None:
        return _known_head(config, policy)[0]
    with torch.device("meta"):
        return _new_head(config, policy)


def _new_head(
    config: Config, policy: ModelConfig, frequent: Callable[[int], Sequence[int]] | None = None
) -> DraftModel:
    eagle = config.speculative.eagle
    if eagle.spec_algorithm == "EAGLE":
        return DraftHead(policy)
    size, aux_layers, tokens = eagle.draft_vocab_size, eagle.aux_hidden_state_layer_ids, None
    if size is not None:
        if frequent is None or size > policy.vocab_size:
            raise ConfigError(
                f"speculative.eagle.draft_vocab_size={size}: it must be at most the policy's "
                f"{policy.vocab_size}, and responses must be there to count tokens in; set it so, "
                "train the draft model with `slipstream draft` first, or set "
                "speculative.eagle.draft_vocab_size=null"
            )
        tokens = frequent(size)
    return Eagle3Head(
        policy, default_aux_layers(policy.num_layers) if aux_layers is None else aux_layers, tokens
    )


def _known_head(config: Config, policy: ModelConfig) -> tuple[DraftModel, Path]:
    """That of `speculative.eagle.spec_model_path`, which must be what the options say it is."""
    eagle, key = config.speculative.eagle, "speculative.eagle"
    assert eagle.spec_model_path is not None
    folder = head_folder(Path(eagle.spec_model_path))
    head = load_draft_head(folder, policy)
    size = head.draft_vocab_size if isinstance(head, Eagle3Head) else None
    aux_layers = eagle.aux_hidden_state_layer_ids
    for option, wanted, found, usual in (
        ("spec_algorithm", eagle.spec_algorithm, head.algorithm, "EAGLE"),
        ("draft_vocab_size", eagle.draft_vocab_size, size, None),
        ("aux_hidden_state_layer_ids", aux_layers, head.aux_layers, None),
    ):
        if wanted not in (usual, found):
            raise ConfigError(
                f"{key}.{option}={wanted}, and in {folder} it is {found}; leave it out, or begin a "
                f"new draft model with {key}.spec_model_path=null"
            )
    return head, folder


def _trace(config: Config) -> Callable[[str], object] | None:
    """Appends lines to the trace of the run; None where none is asked for."""
    if not config.speculative.trace:
        return None
    path = Path(config.trainer.default_local_dir) / TRACE_FILE

    def write(line: str) -> None:
        # Opened for each line: engines end in many ways, and none of them may lose the last steps.
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)

    return write


def check_speculation(config: Config, policy: ModelConfig, max_model_len: int) -> None:
    """Refuse a draft head that cannot be read, or is not one of `policy`, and shapes of drafts that
    cannot be, or not in a context of `max_model_len`. Raises CheckpointError, and ConfigError where
    its folder is not there."""
    speculative = config.speculative
    if speculative.enable:
        make_selector(config)
        _check_depths(speculative.eagle, max_model_len)
        topk = speculative.eagle.spec_topk
        if topk > policy.vocab_size:
            raise ConfigError(
                f"speculative.eagle.spec_topk={topk}: the policy has {policy.vocab_size} tokens; "
                f"set speculative.eagle.spec_topk={policy.vocab_size} or less"
            )
    path = speculative.eagle.spec_model_path
    if speculative.enable and speculative.spec_strategy != "history":
        if path is not None and not Path(path).is_dir():
            raise ConfigError(
                f"speculative.eagle.spec_model_path={path} is not a folder; train a draft head "
                "with `slipstream draft`, or set speculative.enable=false"
            )
        head_to_be(config, policy)


def _check_depths(eagle: EagleSection, max_model_len: int) -> None:
    """Drafts follow a prompt of one token and one that was sampled, at the least. Near the end of a
    context they are cut; what is deeper than any context is a mistake."""
    most, key = max_model_len - 2, "speculative.eagle"
    if eagle.spec_steps > most:
        raise ConfigError(
            f"{key}.spec_steps={eagle.spec_steps}: a context of {max_model_len} tokens (data."
            f"max_prompt_length + data.max_response_length, or actor_rollout_ref.rollout."
            f"max_model_len) never has room for so many drafts in a row; set {key}.spec_steps=7 "
            "or so"
        )
    if eagle.tune_algorithm not in ("COST", "PREDEFINED"):
        deep = [plan for plan in eagle.mab_configs if DraftPlan.parse(plan).steps > most]
        if deep:
            raise ConfigError(
                f"{key}.mab_configs: {', '.join(deep)}: a context of {max_model_len} tokens never "
                "has room for so many drafts in a row; take them out"
            )


def make_selector(config: Config) -> StrategySelector:
    """After `speculative.eagle.tune_algorithm`."""
    speculative, eagle = config.speculative, config.speculative.eagle
    largest = _largest_plan(eagle)
    if eagle.tune_algorithm == "PREDEFINED":
        return PredefinedSelector(largest, bs_threshold=speculative.bs_threshold)
    if eagle.tune_algorithm != "COST":
        return _bandit(config, largest)
    return CostModelSelector(
        [*_smaller_plans(largest), largest],
        bs_threshold=speculative.bs_threshold,
        hysteresis=eagle.hysteresis,
        exploration=eagle.exploration,
    )


def _largest_plan(eagle: EagleSection) -> DraftPlan:
    """What the options ask for."""
    if eagle.spec_topk == 1 or eagle.spec_verify_tokens is None:
        return DraftPlan.chain(eagle.spec_steps)
    return DraftPlan(eagle.spec_steps, eagle.spec_topk, eagle.spec_verify_tokens)


def _smaller_plans(largest: DraftPlan) -> list[DraftPlan]:
    """Chains up to its depth, and where it is a tree, one as deep, and trees of fewer rows that are
    as deep or half as deep."""
    chains = [DraftPlan.chain(depth) for depth in DEPTHS if depth < largest.steps]
    if largest.topk == 1:
        return chains
    chains.append(DraftPlan.chain(largest.steps))
    trees = []
    for steps in dict.fromkeys([(largest.steps + 1) // 2, largest.steps]):
        for topk in dict.fromkeys([min(2, largest.topk), largest.topk]):
            most = topk + (steps - 1) * topk**2 + 1
            rows = [n for n in TREE_ROWS if n < largest.verify_tokens and n <= most]
            trees += [DraftPlan(steps, topk, n) for n in rows if n > steps]
    return [*chains, *trees]


def _bandit(config: Config, default: DraftPlan) -> BanditSelector:
    """FastRL's, which picks from `mab_configs` and the `default`."""
    speculative, eagle, key = config.speculative, config.speculative.eagle, "speculative.eagle"
    try:
        plans = [*map(DraftPlan.parse, eagle.mab_configs), default]
        wide = [str(plan) for plan in plans if plan.topk > MOST_BRANCHES]
        if wide:
            raise ConfigError(
                f"{', '.join(wide)}: a tree follows at most {MOST_BRANCHES} tokens of a level"
            )
        trees = [str(plan) for plan in plans if plan.topk > 1]
        if trees and speculative.spec_strategy == "history":
            raise ConfigError(
                f"{', '.join(trees)}: what was written before is drafted in chains; give such as "
                "3_1_4, or set speculative.spec_strategy=union"
            )
    except ConfigError as error:
        raise ConfigError(f"{key}.mab_configs: {error}") from error
    buckets: dict[int, list[DraftPlan]] = {1: plans}
    if eagle.tune_algorithm == "BEG":
        try:
            buckets = buckets_by_rows(plans, eagle.mab_bs_threshold)
        except ConfigError as error:
            raise ConfigError(f"{key}.mab_bs_threshold: {error}") from error
    greedy = EpsilonGreedy(eagle.mab_epsilon)
    return BanditSelector(
        buckets,
        UpperConfidenceBound() if eagle.tune_algorithm == "UCB1" else greedy,
        bs_threshold=speculative.bs_threshold,
        window=eagle.mab_window_size,
        seed=config.trainer.seed,
    )
