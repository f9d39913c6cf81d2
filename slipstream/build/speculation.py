"""Builds speculative decoding: the proposer of drafts and the selector of draft plans.

Called by `build.engine`, on the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.checkpoint.layout import head_folder
from slipstream.config.schema import Config
from slipstream.config.schema_speculative import MOST_BRANCHES, EagleSection
from slipstream.drafter.vocabulary import (
    LARGE,
    SIZE_WITHOUT_RESPONSES,
    TokenCounts,
    best_size,
)
from slipstream.errors import ConfigError
from slipstream.inference.engine.memory import free_bytes
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
from slipstream.inference.speculation.protocol import LearningProposer, Proposer
from slipstream.inference.speculation.quantized import QuantizedProposer
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
from slipstream.models.draft.eagle3 import Eagle3Head, check_aux_layers, default_aux_layers
from slipstream.models.draft.files import aux_layers_in, load_draft_head
from slipstream.models.draft.model import DraftModel
from slipstream.models.quantized import quantized_policy_bytes, why_not_quantized
from slipstream.tree_size import candidate_count

TRACE_FILE = "speculation.jsonl"

DEPTHS = (1, 2, 3, 4, 5, 7, 11, 15)
"""Chain lengths that the cost model chooses from. A single request is verified in blocks of four
tokens, which 3, 7 and 11 drafts fill."""

TREE_ROWS = (8, 12, 16, 24, 32, 48, 64)
"""Average numbers of tokens to verify per request, for the trees that it chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The objects with which an engine drafts."""

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
    """Build speculative decoding by the section `speculative`; None if it is not enabled.

    Raises CheckpointError for a draft head of another policy.
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
    elif speculative.drafts_with_copy:
        what = f"a copy of the policy with {speculative.quantized.bits}-bit weights"
        check_copy_fits(config, policy.config, free_bytes(device) - kv_budget_bytes)
        proposer = QuantizedProposer(speculative.quantized.bits, speculative.quantized.lm_head_bits)
    else:
        head, source = first_head(config, policy)
        folder = None if source is None else str(source)
        what = f"draft head {source}" if source is not None else "a new draft head"
        recorded = device.type == "cuda" and not config.actor_rollout_ref.rollout.enforce_eager
        # The head has one layer more than the policy: its share of the memory holds as many
        # contexts as the policy's.
        proposer = EagleProposer(
            head.to(device),
            dtype=dtype,
            kv_budget_bytes=kv_budget_bytes // policy.config.num_layers,
            free_cache=free_cache,
            record=CudaRecorder() if recorded else None,
        )
    if isinstance(proposer, LearningProposer) and speculative.drafts_from_history:
        proposer = union = UnionProposer(proposer, history)
        head_record = lambda: union.head_record  # noqa: E731
        what += " and history"
    selector = make_selector(config)
    # The first drafts of an untrained head are wrong, and co-training replaces it soon.
    waits_for_head = (
        isinstance(proposer, EagleProposer)
        and folder is None
        and isinstance(selector, CostModelSelector)
    )
    if waits_for_head:
        what += ", and no drafts before its first training"
    notify(
        f"Speculative decoding enabled: {what}; {plan_table(selector, speculative.bs_threshold)}"
    )
    reported = ReportedSelector(
        selector,
        notify=notify,
        head=folder,
        head_record=head_record,
        trace=_trace(config),
        waits_for_head=waits_for_head,
    )
    return Speculation(proposer=proposer, selector=reported)


def copy_bytes(config: Config, policy: ModelConfig) -> int:
    """Bytes of the quantized copy of the policy that drafts."""
    quantized = config.speculative.quantized
    return quantized_policy_bytes(policy, quantized.bits, quantized.lm_head_bits)


def check_copy(
    config: Config, policy: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ConfigError if the policy cannot have the quantized copy that should draft."""
    speculative = config.speculative
    if not speculative.drafts_with_copy:
        return
    reason = why_not_quantized(policy, dtype, device)
    if reason is not None:
        raise ConfigError(
            f"speculative.spec_strategy={speculative.spec_strategy}: {reason}; set "
            "speculative.spec_strategy=history or eagle"
        )


def check_copy_fits(config: Config, policy: ModelConfig, free: int) -> None:
    """Raise ConfigError if the quantized copy of the policy needs more than `free` bytes."""
    speculative, needed = config.speculative, copy_bytes(config, policy)
    if needed > free:
        raise ConfigError(
            f"speculative.spec_strategy={speculative.spec_strategy}: the quantized copy of the "
            f"policy needs {needed} bytes, but beside the KV cache {max(free, 0)} are free; set "
            "speculative.spec_strategy=history, or lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization or .kv_cache_bytes"
        )


def first_head(
    config: Config, policy: Decoder, answers: Callable[[], Sequence[Sequence[int]]] | None = None
) -> tuple[DraftModel, Path | None]:
    """The initial head and its folder: `speculative.eagle.spec_model_path`, or a new head.

    `answers` returns responses of the policy, in which the tokens of a draft vocabulary are
    counted.

    Raises ConfigError for impossible auxiliary layers or draft vocabularies, and for ones that
    differ from the folder's. Raises CheckpointError for a folder without a head of this policy.
    """
    if config.speculative.eagle.spec_model_path is not None:
        return _known_head(config, policy.config)
    eagle = config.speculative.eagle
    aux_layers = _new_aux_layers(eagle, policy.config, counts=answers is not None)
    head = _new_head(eagle, policy.config, aux_layers, _draft_tokens(eagle, policy.config, answers))
    head.init_weights(config.trainer.seed, policy)
    return head, None


def head_to_be(config: Config, policy: ModelConfig) -> DraftModel:
    """A head with the shape of RL's initial head, for estimates. Raises the errors of
    `first_head`."""
    if config.speculative.eagle.spec_model_path is not None:
        return _known_head(config, policy)[0]
    eagle = config.speculative.eagle
    aux_layers = _new_aux_layers(eagle, policy, counts=False)
    tokens = _draft_tokens(eagle, policy, None)
    with torch.device("meta"):
        return _new_head(eagle, policy, aux_layers, tokens)


def _new_head(
    eagle: EagleSection,
    policy: ModelConfig,
    aux_layers: tuple[int, ...],
    tokens: Sequence[int] | None,
) -> DraftModel:
    if eagle.spec_algorithm == "EAGLE":
        return DraftHead(policy, tokens)
    return Eagle3Head(policy, aux_layers, tokens)


def _draft_tokens(
    eagle: EagleSection,
    policy: ModelConfig,
    answers: Callable[[], Sequence[Sequence[int]]] | None,
) -> list[int] | None:
    """The draft vocabulary of a new head; None: all tokens.

    Without `answers` no token can be counted. Then the head has the lowest token ids, until
    co-training replaces them and, with `auto`, lowers their number. An EAGLE3 head cannot replace
    its tokens, and `auto` means all.
    """
    size, responses = eagle.draft_vocab_size, list[Sequence[int]]()
    if answers is not None and size is not None and (size != "auto" or policy.vocab_size > LARGE):
        responses.extend(answers())
    if size == "auto" and answers is None and eagle.spec_algorithm == "EAGLE":
        size = SIZE_WITHOUT_RESPONSES if policy.vocab_size > LARGE else None
    elif size == "auto":
        size = best_size(responses, policy)
    if size is None:
        return None
    counts = TokenCounts(policy.vocab_size)
    for response in responses:
        counts.add(response)
    return counts.most_frequent(size, always=policy.eos_token_ids)


def _new_aux_layers(eagle: EagleSection, policy: ModelConfig, *, counts: bool) -> tuple[int, ...]:
    """The auxiliary layers of a new head; none for EAGLE-1.

    `counts`: there are responses in which the tokens for a draft vocabulary can be counted. Raises
    ConfigError for auxiliary layers or a draft vocabulary that the policy cannot have.
    """
    size, eagle3 = eagle.draft_vocab_size, eagle.spec_algorithm == "EAGLE3"
    key, least = "speculative.eagle.draft_vocab_size", max(1, len(policy.eos_token_ids))
    if isinstance(size, int) and not least <= size <= policy.vocab_size:
        raise ConfigError(
            f"{key}={size}: a draft vocabulary has at least the policy's end tokens, and at most "
            f"all of its tokens; set a number from {least} to {policy.vocab_size}, or {key}=null"
        )
    if isinstance(size, int) and eagle3 and not counts:
        raise ConfigError(
            f"{key}={size}: a new EAGLE3 head needs responses to count tokens in; train it with "
            f"`slipstream draft` first, or set {key}=null"
        )
    if not eagle3:
        return ()
    aux_layers = eagle.aux_hidden_state_layer_ids
    if aux_layers is None:
        aux_layers = default_aux_layers(policy.num_layers)
    check_aux_layers(aux_layers, policy.num_layers)
    return aux_layers


def head_aux_layers(
    config: Config, policy: ModelConfig, *, counts: bool = False
) -> tuple[int, ...]:
    """The auxiliary layers of the initial head. `counts`: as for `slipstream draft`, there are
    responses in which tokens can be counted. Reads only `config.json` of a head's folder;
    `check_speculation` reads everything. Raises the errors of `first_head`."""
    eagle = config.speculative.eagle
    if eagle.spec_model_path is not None:
        return aux_layers_in(head_folder(Path(eagle.spec_model_path)), policy)
    return _new_aux_layers(eagle, policy, counts=counts)


def _known_head(config: Config, policy: ModelConfig) -> tuple[DraftModel, Path]:
    """The head of `speculative.eagle.spec_model_path`, which must match the options."""
    eagle, key = config.speculative.eagle, "speculative.eagle"
    assert eagle.spec_model_path is not None
    folder = head_folder(Path(eagle.spec_model_path))
    head = load_draft_head(folder, policy)
    size = None if head.draft_tokens is None else head.draft_vocab_size
    aux_layers = eagle.aux_hidden_state_layer_ids
    for option, wanted, found, usual in (
        ("spec_algorithm", eagle.spec_algorithm, head.algorithm, "EAGLE"),
        ("draft_vocab_size", eagle.draft_vocab_size, size, "auto"),
        ("aux_hidden_state_layer_ids", aux_layers, head.aux_layers, None),
    ):
        if wanted not in (usual, found):
            raise ConfigError(
                f"{key}.{option}={wanted}, but in {folder} it is {found}; remove the option, or "
                f"start "
                f"with a new draft head by {key}.spec_model_path=null"
            )
    return head, folder


def _trace(config: Config) -> Callable[[str], object] | None:
    """A function that appends lines to the run's trace file; None without `speculative.trace`."""
    if not config.speculative.trace:
        return None
    path = Path(config.trainer.default_local_dir) / TRACE_FILE

    def write(line: str) -> None:
        # Opened for each line, so that the last steps are not lost, however the process ends.
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)

    return write


def check_speculation(config: Config, policy: ModelConfig, max_model_len: int) -> None:
    """Check the draft head and the draft plans.

    Raises CheckpointError for a head that cannot be read or is of another policy, and ConfigError
    for a missing folder and for plans that are impossible in a context of `max_model_len`.
    """
    speculative = config.speculative
    if speculative.enable:
        draft_plans(config)
        _check_depths(speculative.eagle, max_model_len)
        topk = speculative.eagle.spec_topk
        if topk > policy.vocab_size:
            raise ConfigError(
                f"speculative.eagle.spec_topk={topk}: the policy has {policy.vocab_size} tokens; "
                f"set speculative.eagle.spec_topk={policy.vocab_size} or less"
            )
    path = speculative.eagle.spec_model_path
    if speculative.drafts_with_head:
        if path is not None and not Path(path).is_dir():
            raise ConfigError(
                f"speculative.eagle.spec_model_path={path} is not a folder; train a draft head "
                "with `slipstream draft`, or set speculative.enable=false"
            )
        if path is not None:
            # Only the tensors show whether a head is complete and fits this policy.
            _known_head(config, policy)
        else:
            _new_aux_layers(speculative.eagle, policy, counts=False)


def _check_depths(eagle: EagleSection, max_model_len: int) -> None:
    """Raise ConfigError for plans deeper than the context, with at least one prompt token and one
    sampled token before the drafts. Near the end of a context, drafts are cut automatically."""
    most, key = max_model_len - 2, "speculative.eagle"
    if eagle.spec_steps > most:
        raise ConfigError(
            f"{key}.spec_steps={eagle.spec_steps}: a context of {max_model_len} tokens (data."
            f"max_prompt_length + data.max_response_length, or actor_rollout_ref.rollout."
            f"max_model_len) never has room for drafts of this depth; set {key}.spec_steps=7 "
            "or so"
        )
    if eagle.tune_algorithm not in ("COST", "PREDEFINED"):
        deep = [plan for plan in eagle.mab_configs if DraftPlan.parse(plan).steps > most]
        if deep:
            raise ConfigError(
                f"{key}.mab_configs: {', '.join(deep)}: a context of {max_model_len} tokens never "
                "has room for drafts of this depth; remove them"
            )


def draft_plans(config: Config) -> dict[int, list[DraftPlan]]:
    """The plans that the selector of `speculative.eagle.tune_algorithm` chooses from.

    Keys are the least number of running requests that the plans are for; the first is 1. Raises
    ConfigError for impossible plans, and for thresholds that do not match them.
    """
    eagle = config.speculative.eagle
    largest = _largest_plan(eagle)
    if eagle.tune_algorithm == "PREDEFINED":
        return {1: [largest]}
    if eagle.tune_algorithm == "COST":
        return {1: [*_smaller_plans(largest), largest]}
    return _bandit_plans(config, largest)


def make_selector(config: Config) -> StrategySelector:
    """Build the selector of `speculative.eagle.tune_algorithm`. Raises the errors of
    `draft_plans`."""
    speculative, eagle = config.speculative, config.speculative.eagle
    plans = draft_plans(config)
    if eagle.tune_algorithm == "PREDEFINED":
        return PredefinedSelector(plans[1][0], bs_threshold=speculative.bs_threshold)
    if eagle.tune_algorithm == "COST":
        return CostModelSelector(
            plans[1],
            bs_threshold=speculative.bs_threshold,
            hysteresis=eagle.hysteresis,
            exploration=eagle.exploration,
        )
    ucb1 = eagle.tune_algorithm == "UCB1"
    return BanditSelector(
        plans,
        UpperConfidenceBound() if ucb1 else EpsilonGreedy(eagle.mab_epsilon),
        bs_threshold=speculative.bs_threshold,
        window=eagle.mab_window_size,
        seed=config.trainer.seed,
    )


def _largest_plan(eagle: EagleSection) -> DraftPlan:
    """The plan of the options."""
    if eagle.spec_topk == 1 or eagle.spec_verify_tokens is None:
        return DraftPlan.chain(eagle.spec_steps)
    return DraftPlan(eagle.spec_steps, eagle.spec_topk, eagle.spec_verify_tokens)


def _smaller_plans(largest: DraftPlan) -> list[DraftPlan]:
    """Chains up to the depth of `largest`. If it is a tree, also a chain of its depth, and trees of
    the same or half the depth with fewer tokens to verify."""
    chains = [DraftPlan.chain(depth) for depth in DEPTHS if depth < largest.steps]
    if largest.topk == 1:
        return chains
    chains.append(DraftPlan.chain(largest.steps))
    trees = []
    for steps in dict.fromkeys([(largest.steps + 1) // 2, largest.steps]):
        for topk in dict.fromkeys([min(2, largest.topk), largest.topk]):
            most = candidate_count(steps, topk) + 1
            rows = [n for n in TREE_ROWS if n < largest.verify_tokens and n <= most]
            trees += [DraftPlan(steps, topk, n) for n in rows if n > steps]
    return [*chains, *trees]


def _bandit_plans(config: Config, default: DraftPlan) -> dict[int, list[DraftPlan]]:
    """The plans of FastRL's selectors: `mab_configs` and the `default`."""
    speculative, eagle, key = config.speculative, config.speculative.eagle, "speculative.eagle"
    try:
        plans = [*map(DraftPlan.parse, eagle.mab_configs), default]
        wide = [str(plan) for plan in plans if plan.topk > MOST_BRANCHES]
        if wide:
            raise ConfigError(
                f"{', '.join(wide)}: a tree follows at most {MOST_BRANCHES} tokens of a level"
            )
        trees = [str(plan) for plan in plans if plan.topk > 1]
        if trees and not speculative.drafts_with_head:
            raise ConfigError(
                f"{', '.join(trees)}: {speculative.spec_strategy} drafts are chains; use plans "
                "such as 3_1_4, or set speculative.spec_strategy=union"
            )
    except ConfigError as error:
        raise ConfigError(f"{key}.mab_configs: {error}") from error
    if eagle.tune_algorithm != "BEG":
        return {1: plans}
    try:
        return buckets_by_rows(plans, eagle.mab_bs_threshold)
    except ConfigError as error:
        raise ConfigError(f"{key}.mab_bs_threshold: {error}") from error
