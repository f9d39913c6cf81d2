"""Data classes that the folders of the package pass to each other. Nothing else crosses a folder.

    Prompt --rollout--> Group of Samples --rewards--> scored Group --advantages--> TrainBatch

This module does not know how tokens are sampled, scored or trained on. It imports torch for type
checking only, so the configuration, the command line and the data tools start without torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

PolicyVersion = int
"""Number of weight updates sent to the engines so far; 0 is the policy at the start of a run."""

Message = dict[str, Any]
"""One chat message: `{"role": ..., "content": ...}`, with the optional keys of verl and Hugging
Face."""


class Status(StrEnum):
    """The state of a sample."""

    PENDING = "pending"
    """Not generated yet, or a partial response that the next step will continue."""
    COMPLETED = "completed"
    """Generation ended with an end-of-sequence token or another stop condition."""
    TRUNCATED = "truncated"
    """Generation reached the length limit."""
    ABORTED = "aborted"
    """The run stopped the generation; the tokens so far are kept."""
    FAILED = "failed"
    """The engine, a tool or the reward failed. `Sample.failure` has the reason."""


class StopReason(StrEnum):
    """Why generation ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, end)` of a segment or generation were sampled under policy `version`."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """The key of a sample's sampling noise. The noise depends on nothing else but the position and
    the token id (`sampling.noise`).

    A sample that is generated again from the start has a higher `attempt`. A sample that is
    continued keeps its `attempt`.
    """

    seed: int
    namespace: str = "train"
    epoch: int = 0
    uid: str = ""
    index: int = 0
    branch: int = 0
    attempt: int = 0

    @property
    def parts(self) -> tuple[int, str, int, str, int, int, int]:
        """All fields, in their order."""
        return (
            self.seed,
            self.namespace,
            self.epoch,
            self.uid,
            self.index,
            self.branch,
            self.attempt,
        )

    @property
    def prompt(self) -> tuple[int, str, int, str]:
        """The part that all samples of a prompt have in common."""
        return self.seed, self.namespace, self.epoch, self.uid


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of sampling and of the end of a response.

    `temperature == 0` is greedy decoding. `top_k <= 0`, `top_p == 1` and `min_p == 0` switch the
    truncations off. A token of `stop_token_ids` ends the response and stays in it. A stop string
    ends the response; the token that completes the string is the last one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One problem of a data set, with the fields of verl's data format.

    `uid` is the same in all epochs and runs. `ids` is the prompt after chat template and
    tokenizer.
    """

    uid: str
    ids: list[int]
    messages: str | list[Message] = ""
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    ability: str = ""
    epoch: int = 0
    multi_modal: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one author (`role`). All per-token lists have equal length.

    `log_probs` are over the full vocabulary at the sampling temperature; the trainer recomputes
    them. `sampling_log_probs` are those of the truncated distribution that the token was sampled
    from (top-k, top-p, min-p); without truncation they equal `log_probs`. Tokens that the policy
    did not sample have the log-prob 0.0 and no span. Raises ValueError if the lengths differ.
    """

    role: str
    ids: list[int]
    loss_mask: list[float]
    log_probs: list[float]
    sampling_log_probs: list[float]
    spans: list[VersionSpan] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list, compare=False)
    """Indices into `ids` of accepted draft tokens. They depend on timing, so they do not count when
    two segments are compared."""

    def __post_init__(self) -> None:
        lengths = {
            len(self.ids),
            len(self.loss_mask),
            len(self.log_probs),
            len(self.sampling_log_probs),
        }
        if len(lengths) != 1:
            raise ValueError(
                f"segment of role {self.role!r}: ids, loss_mask, log_probs and sampling_log_probs "
                f"must have equal length, got {len(self.ids)}, {len(self.loss_mask)}, "
                f"{len(self.log_probs)}, {len(self.sampling_log_probs)}"
            )

    @classmethod
    def given(cls, role: str, ids: Sequence[int], *, loss: float = 0.0) -> Segment:
        """A segment that the policy did not sample: a prompt, a tool reply, or a demonstration
        (`loss=1`)."""
        n = len(ids)
        return cls(
            role=role,
            ids=list(ids),
            loss_mask=[loss] * n,
            log_probs=[0.0] * n,
            sampling_log_probs=[0.0] * n,
        )

    @property
    def versions(self) -> list[PolicyVersion]:
        """Policy version of each token; -1 for tokens that the policy did not sample."""
        out = [-1] * len(self.ids)
        for span in self.spans:
            out[span.start : span.end] = [span.version] * (span.end - span.start)
        return out


@dataclass(frozen=True, slots=True)
class PlacedReward:
    """A reward of one turn. `place` is the index into `Sample.tokens` of the last token that the
    policy sampled in this turn, in the branch with the number `branch`. `name` says who gave it,
    such as a tool."""

    place: int
    name: str
    value: float
    branch: int = 0


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """Counts of an episode with an environment.

    `problems` counts tool calls that could not be answered normally, by kind. `truncated_by` names
    the budget that ended the episode (`tokens`, `assistant_turns`, `user_turns`, `tool_seconds`,
    `micro_batch`), or is `environment_crash`. `score`, if it is not None, replaces the reward
    function's score. `metrics` are the environment's own. `tool_seconds` are the seconds in tools
    and the environment; they do not count for equality.
    """

    turns: int = 0
    calls: int = 0
    problems: dict[str, int] = field(default_factory=dict)
    truncated_by: str | None = None
    rewards: list[PlacedReward] = field(default_factory=list)
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    tool_seconds: float = field(default=0.0, compare=False)


class _FlatViews:
    """A cache of the flat per-token lists of a sample.

    A list is made at its first use and kept until the segments or their lengths change. The cache
    does not count for equality, `asdict` and pickle. It is not safe if another thread appends
    tokens at the same time.
    """

    __slots__ = ("_made_of", "_views")

    segments: list[Segment]
    _made_of: list[tuple[Segment, int]]
    _views: dict[str, list[Any]]

    def _view(self, name: str, make: Callable[[], list[T]]) -> list[T]:
        if not self._is_current():
            self._made_of = [(segment, len(segment.ids)) for segment in self.segments]
            self._views = {}
        if name not in self._views:
            self._views[name] = make()
        return self._views[name]

    def _is_current(self) -> bool:
        made_of = getattr(self, "_made_of", None)
        if made_of is None or len(made_of) != len(self.segments):
            return False
        # A loop, because a generator takes twice as long, and every turn asks several times.
        for segment, (known, length) in zip(self.segments, made_of, strict=True):
            if segment is not known or len(segment.ids) != length:
                return False
        return True


@dataclass(slots=True, kw_only=True)
class Sample(_FlatViews):
    """One response to one prompt, with the prompt; tokens are only ever appended.

    Token ids from the model are never decoded and tokenized again. The flat lists `tokens`,
    `loss_mask`, `rollout_log_probs`, `sampling_log_probs` and `versions` join all segments and have
    equal length. All callers share these lists: copy a list before you change it.
    """

    prompt: str | list[Message] = ""
    segments: list[Segment] = field(default_factory=list)
    response: str = ""
    status: Status = Status.PENDING
    stop_reason: StopReason | None = None
    failure: str | None = None
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    uid: str = ""
    epoch: int = 0
    group_index: int | None = None
    index: int = 0
    branch: int = 0
    parent: int | None = None
    attempt: int = 0
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    multi_modal: dict[str, Any] | None = None
    episode: EpisodeRecord | None = None
    """None for a single turn without an environment."""
    earlier: list[Sample] = field(default_factory=list)
    """The earlier branches of the episode, in order. A branch ends where the next context is no
    extension of its tokens; its last tokens were sampled by the policy. Each branch has its own
    tokens only; reward, status and record are in this sample."""

    @property
    def branches(self) -> list[Sample]:
        """All branches of the episode, in order; the last one is this sample."""
        return [*self.earlier, self]

    def append(self, segment: Segment) -> None:
        """Add a segment at the end."""
        self.segments.append(segment)

    def noise_key(self, seed: int, namespace: str = "train") -> NoiseKey:
        """The key of this sample's sampling noise, in a run with `seed`."""
        return NoiseKey(
            seed=seed,
            namespace=namespace,
            epoch=self.epoch,
            uid=self.uid,
            index=self.index,
            branch=self.branch,
            attempt=self.attempt,
        )

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def tokens(self) -> list[int]:
        return self._view("tokens", lambda: [t for s in self.segments for t in s.ids])

    @property
    def loss_mask(self) -> list[float]:
        return self._view("loss_mask", lambda: [m for s in self.segments for m in s.loss_mask])

    @property
    def rollout_log_probs(self) -> list[float]:
        return self._view("log_probs", lambda: [x for s in self.segments for x in s.log_probs])

    @property
    def sampling_log_probs(self) -> list[float]:
        return self._view(
            "sampling_log_probs", lambda: [x for s in self.segments for x in s.sampling_log_probs]
        )

    @property
    def versions(self) -> list[PolicyVersion]:
        return self._view("versions", lambda: [v for s in self.segments for v in s.versions])

    @property
    def drafted(self) -> list[int]:
        """Indices into `tokens` of accepted draft tokens."""
        indices, start = list[int](), 0
        for segment in self.segments:
            indices.extend(start + index for index in segment.drafted)
            start += len(segment.ids)
        return indices

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the first segment with the role `assistant`."""
        return self._view("prompt_ids", self._find_prompt)

    def _find_prompt(self) -> list[int]:
        before = len(self.segments) - len(self.answer_segments)
        return [token for segment in self.segments[:before] for token in segment.ids]

    @property
    def answer_segments(self) -> list[Segment]:
        """The segments after the prompt."""
        first = next((i for i, s in enumerate(self.segments) if s.role == "assistant"), None)
        return [] if first is None else self.segments[first:]

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the prompt, tool replies included."""
        return self._view("response_ids", lambda: self.tokens[len(self.prompt_ids) :])

    @property
    def all_response_ids(self) -> list[int]:
        """The responses of all branches, one after another."""
        return [token for branch in self.branches for token in branch.response_ids]

    @property
    def num_sampled(self) -> int:
        """Number of tokens that a policy sampled, in all branches."""
        segments = [segment for branch in self.branches for segment in branch.segments]
        return sum(len(segment.ids) for segment in segments if segment.role == "assistant")

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response together."""
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        count = 0
        for segment in self.segments:
            if segment.role == "assistant":
                break
            count += len(segment.ids)
        return count

    @property
    def response_length(self) -> int:
        return self.num_tokens - self.prompt_length

    @classmethod
    def from_prompt(cls, prompt: Prompt, *, group_index: int, index: int) -> Sample:
        """A sample of `prompt` without a response, which a rollout will generate."""
        return cls(
            prompt=prompt.messages,
            segments=[Segment.given("prompt", prompt.ids)],
            uid=prompt.uid,
            epoch=prompt.epoch,
            group_index=group_index,
            index=index,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=dict(prompt.extra_info),
            multi_modal=prompt.multi_modal,
        )


@dataclass(slots=True, kw_only=True)
class Group:
    """The samples of one prompt. Group-relative advantages compare them with each other.

    `greedy` is an additional, greedily decoded response. Its reward is the baseline of ReMax; it is
    not trained on.
    """

    index: int
    prompt: Prompt
    samples: list[Sample]
    greedy: Sample | None = None

    @property
    def members(self) -> list[Sample]:
        """The samples, and the greedy response if there is one."""
        return self.samples if self.greedy is None else [*self.samples, self.greedy]


@dataclass(slots=True, kw_only=True)
class RolloutBatch:
    """Samples as lists per column. Row i of each list belongs to the same sample."""

    tokens: list[list[int]]
    loss_masks: list[list[float]]
    rewards: list[float]
    response_lengths: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class TrainRow:
    """One training sequence as Python lists, with the fields of `TrainBatch`.

    `training.columns.train_batch` makes a batch from such rows, and `TrainBatch.row` returns one
    row of a batch. All lists have the length of `tokens`.
    """

    tokens: list[int]
    loss_mask: list[float]
    advantages: list[float] | None = None
    old_log_probs: list[float] | None = None
    ref_log_probs: list[float] | None = None
    rollout_log_probs: list[float] | None = None
    values: list[float] | None = None
    returns: list[float] | None = None
    rollout_is_weights: list[float] | None = None
    selected: list[float] | None = None
    kept_ids: list[array[int]] | None = None
    uid: str = ""
    key: NoiseKey | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class TrainBatch:
    """Training sequences of one optimizer step (a mini-batch), or of several before they are split.

    The N rows have different lengths and no padding. Each column is one flat CPU tensor (T,) over
    the T tokens of all rows; row i is its slice `[starts[i], starts[i + 1])`. Float columns are
    float32, or float64 if their values need it. Batches share columns, so replace a column and
    never change it in place. Losses are normalized over all rows. `rollout.train_rows.rows_of`
    makes a batch from samples, `training.columns` from lists.

    Entry t of each column belongs to token t. Token t is trained on if `loss_mask[t]` is not 0 and
    it is not the first token of its row, which has no context. `values` and `returns` (of a critic)
    at t belong to the state before token t.
    """

    starts: list[int]
    """(N + 1,): the start of each row, then T."""
    sequences: list[int] | None = None
    """(S + 1,): the first row of each sequence, then N; None: each row is a sequence. The rows of a
    sequence are the branches of an episode. Advantages and losses see their target tokens as those
    of one row."""
    tokens: Tensor
    """int64."""
    loss_mask: Tensor
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None
    has_old_log_probs: Tensor | None = None
    """(N,) bool: the rows with valid `old_log_probs`; None if all rows are valid or there is no
    such column."""
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    """Importance weight of each token's loss (rollout correction)."""
    selected: Tensor | None = None
    """1.0 for the tokens that a policy loss such as Clip-Cov treats differently. They are selected
    over the whole mini-batch."""
    kept_ids: list[list[array[int]]] | None = None
    """By row and token: the ids that the truncating sampler (top-k, top-p, min-p) kept. Log-probs
    are then those of the distribution over these ids. An empty array means the full vocabulary."""
    uids: list[str]
    keys: list[NoiseKey | None]
    """Sampling noise key of each row; None if the engine does not use keyed noise."""
    temperature: float = 1.0
    """Sampling temperature: log-probs are those of logits / temperature."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [end - start for start, end in pairwise(self.starts)]

    @property
    def sequence_starts(self) -> list[int]:
        """(S + 1,): the start of each sequence in the columns, then T."""
        return self.starts if self.sequences is None else [self.starts[r] for r in self.sequences]

    @property
    def targets(self) -> Tensor:
        """(T,) bool: the tokens that are trained on."""
        targets: Tensor = self.loss_mask != 0
        targets[[start for start, end in pairwise(self.starts) if end > start]] = False
        return targets

    @property
    def num_target_tokens(self) -> int:
        return int(self.targets.sum())

    def slice_of(self, row: int) -> slice:
        """The slice of each column that holds the tokens of a row."""
        return slice(self.starts[row], self.starts[row + 1])

    def row(self, index: int) -> TrainRow:
        """A copy of one row as lists. Too slow to read all rows of a large batch."""
        own = self.slice_of(index)
        lists: dict[str, Any] = {}
        for name in FLOAT_COLUMNS:
            column = getattr(self, name)
            if column is not None:
                lists[name] = column[own].tolist()
        if self.has_old_log_probs is not None and not self.has_old_log_probs[index]:
            lists["old_log_probs"] = None
        return TrainRow(
            tokens=self.tokens[own].tolist(),
            kept_ids=None if self.kept_ids is None else self.kept_ids[index],
            uid=self.uids[index],
            key=self.keys[index],
            **lists,
        )

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """The state for pickle. Columns that are views of a larger tensor are copied, because
        pickle would send the whole tensor to the other process."""
        copies: dict[int, Any] = {}
        state = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _TENSORS and value is not None:
                if id(value) not in copies:
                    whole = value.untyped_storage().nbytes() == value.nbytes
                    copies[id(value)] = value if whole else value.clone()
                value = copies[id(value)]
            state[f.name] = value
        return None, state


FLOAT_COLUMNS = (
    "loss_mask",
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "values",
    "returns",
    "rollout_is_weights",
    "selected",
)
"""Names of the float columns of `TrainBatch`; they are lists of floats in `TrainRow`."""

_TENSORS = frozenset(("tokens", "has_old_log_probs", *FLOAT_COLUMNS))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request to an engine to generate one response.

    The context is `prompt_ids` followed by `prior_ids`. `prior_ids` are response tokens from before
    an interruption: generation continues at position `len(prompt_ids) + len(prior_ids)`, and
    `params.max_tokens` counts new tokens only. Requests with the same `group` share one prefill.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    key: NoiseKey
    prior_ids: tuple[int, ...] = ()
    group: str | None = None
    return_hidden_states: bool = False


@dataclass(slots=True, kw_only=True)
class Generation:
    """An engine's answer to one request. Per-token lists have the length of `token_ids`.

    Hidden states are returned only on request. `hidden_states` (len(token_ids), D): row i is the
    final hidden state from which token i was sampled. `context_hidden_states` (C - 1, D): the final
    hidden states of the C context tokens except the last one. If weights changed during the
    request, each state is that of the weights at its time. `spans` and `drafted` (accepted draft
    tokens) are indices into `token_ids`.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    sampling_log_probs: list[float]
    spans: list[VersionSpan]
    stop_reason: StopReason
    text: str = ""
    hidden_states: Tensor | None = None
    context_hidden_states: Tensor | None = None
    error: str | None = None
    drafted: list[int] = field(default_factory=list, compare=False)


class UpdateKind(StrEnum):
    """The weights that a `WeightUpdate` contains: all of the policy, LoRA adapters, or the draft
    head."""

    FULL = "full"
    LORA = "lora"
    DRAFT = "draft"


class KVPolicy(StrEnum):
    """How a weight update treats the KV cache of running requests."""

    KEEP = "keep"
    """Keep the keys and values that the old weights computed."""
    RECOMPUTE = "recompute"
    """Compute the keys and values of prompt and generated tokens again with the new weights."""


class Transport(StrEnum):
    """How the tensors of a `WeightUpdate` reach the engine."""

    REFERENCE = "reference"
    SHARED_MEMORY = "shared_memory"
    FILE = "file"
    COLLECTIVE = "collective"


class PolicyKind(StrEnum):
    """The code that computes a policy's forward pass."""

    DECODER = "decoder"
    """Slipstream's decoder (`models.decoder`)."""
    TRANSFORMERS = "transformers"
    """The model class of transformers (`models.hf_policy`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The features that an inference engine supports.

    Checks of the configuration ask for capabilities, never for the name of an engine. The defaults
    are those of an engine without any optional feature.
    """

    policies: frozenset[PolicyKind] = frozenset()
    """The kinds of policy that the engine can run; empty if it needs no policy."""
    keyed_noise: bool = False
    """A token depends only on the request's noise key, its position and the target logits."""
    exact: bool = False
    """If engine and trainer use the same dtype, their log-probs are equal to the bit."""
    drafts: bool = False
    """The engine supports speculative decoding, and its draft head can be updated."""
    hidden_states: bool = False
    """The engine can return the hidden states of decoding
    (`GenerateRequest.return_hidden_states`)."""
    top_log_probs: int = 0
    """Largest number of top log-probs that the engine can return per position."""
    transports: frozenset[Transport] = frozenset({Transport.REFERENCE})
    """The transports of a `WeightUpdate` that the engine supports."""
    several_processes: bool = False
    """The engine accepts weights that are sharded over several trainer processes."""
    one_thread_tail: bool = False
    """On a CPU with compiled kernels, the engine can decode the last requests on one thread and
    leave the other cores to drafter training (`actor_rollout_ref.rollout.one_thread_below`)."""
    kv_budget: bool = False
    """The engine keeps its KV cache within `actor_rollout_ref.rollout.kv_cache_bytes`."""
    servers: bool = False
    """The engine is a client of servers (`actor_rollout_ref.rollout.server`)."""
    width_multiple: int = 1
    """Hidden size, intermediate size and head dimension must be multiples of this."""
    for_tests: bool = False
    """The engine is for tests only; a run cannot select it."""


WeightBucket = Sequence[tuple[str, "Tensor"]]
"""Tensors with their Hugging Face names. An update is split into buckets to limit memory: only one
bucket is in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights from the trainer for an engine, with their policy version.

    `buckets` can be iterated once. An engine checks names and shapes before it changes anything.
    """

    version: PolicyVersion
    buckets: Iterable[WeightBucket]
    kind: UpdateKind = UpdateKind.FULL
    transport: Transport = Transport.REFERENCE
    kv_policy: KVPolicy = KVPolicy.KEEP

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets:
            yield from bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Hidden states of one row from the trainer's forward pass, for a `FeatureSink`.

    `hidden` (T, D) are the final hidden states (inputs of the LM head) of the T tokens `tokens`.
    `aux_layers` (T, n * D) are the concatenated inputs of the n layers that the sink requested;
    None if it requested no layers. `optimizer_step` is the step that produced the weights.
    """

    uid: str
    tokens: list[int]
    loss_mask: list[float]
    hidden: Tensor
    aux_layers: Tensor | None
    optimizer_step: int
    key: NoiseKey | None = None


class FeatureSink(Protocol):
    """Receives hidden states of the trainer's forward pass, to train a draft head on them."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose inputs the sink needs in addition to the final hidden states
        (auxiliary layers), in the order of concatenation."""
        ...

    def select(self, batch: TrainBatch) -> set[int]:
        """The rows of `batch` whose features the sink needs. Called before the forward pass."""
        ...

    def receive(self, features: Features) -> None:
        """Receive the features of one selected row. The tensors are detached."""
        ...


class GenerationSink(Protocol):
    """Receives hidden states that the engine computes while it decodes."""

    def wants(self, request: GenerateRequest) -> bool:
        """Whether the sink needs the hidden states of this request. Called before it runs."""
        ...

    def receive(self, request: GenerateRequest, generation: Generation) -> None:
        """Receive a generation with hidden states. Called only for requests that the sink wanted,
        and only if the response was not interrupted."""
        ...
