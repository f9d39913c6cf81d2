"""The carriers: the only values that cross a folder boundary.

    Prompt --rollout--> Group of Samples --rewards--> scored Group --advantages--> TrainBatch

Nothing here knows how a token is drawn, scored or trained on. torch is imported for types only, so
that configuration, command line and data tools stay light.
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
"""Counts published weight updates: 0 is the policy that a run starts from."""

Message = dict[str, Any]
"""One chat turn: `{"role": ..., "content": ...}`, with VERL's and Hugging Face's optional keys."""


class Status(StrEnum):
    """Where a sample stands."""

    PENDING = "pending"
    """Not generated yet, or only in part: an aborted sample that will be carried over."""
    COMPLETED = "completed"
    """Ended by itself: end-of-sequence token or a stop condition."""
    TRUNCATED = "truncated"
    """Cut at the length limit."""
    ABORTED = "aborted"
    """Stopped from outside; its partial tokens are kept."""
    FAILED = "failed"
    """Engine, tool or reward failed; `Sample.failure` says why."""


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
    """What the randomness of one sample depends on, and nothing else (see `sampling.noise`).

    A restarted sample increments `attempt`; a resumed one does not.
    """

    seed: int
    namespace: str = "train"
    epoch: int = 0
    uid: str = ""
    index: int = 0
    branch: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    `temperature == 0` is greedy. `top_k <= 0` and `top_p == 1` and `min_p == 0` switch the
    truncations off. `stop_token_ids` end the response and are kept in it; a stop string ends it
    with the token that completes the string.
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
    """One task instance, in the terms of VERL's row schema.

    `uid` is stable over epochs and runs; `ids` is the rendered, tokenised prompt.
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
    """One append-only run of tokens with one author. All per-token lists have equal length.

    `log_probs` are full-vocabulary log-probabilities at the sampling temperature (what the trainer
    recomputes); `sampling_log_probs` those of the truncated law that the token was drawn from, the
    same numbers where nothing truncates. Tokens that no policy sampled carry 0.0 and no span.
    """

    role: str
    ids: list[int]
    loss_mask: list[float]
    log_probs: list[float]
    sampling_log_probs: list[float]
    spans: list[VersionSpan] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list, compare=False)
    """Places in `ids` of tokens that were drafted before the policy chose them. It depends on the
    clock, and is no part of what was generated."""

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
        """Tokens that no policy sampled: a prompt, a tool reply, a demonstration (`loss=1`)."""
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
        """Policy version per token; -1 where no policy sampled it."""
        out = [-1] * len(self.ids)
        for span in self.spans:
            out[span.start : span.end] = [span.version] * (span.end - span.start)
        return out


class _FlatViews:
    """The flat lists of a sample: made at the first access, kept until tokens are appended.

    They are no part of the sample's state: equality, `asdict` and pickle leave them out. Appended
    tokens are noticed by the segments and their lengths. Not for threads that append meanwhile.
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
        return (
            made_of is not None
            and len(made_of) == len(self.segments)
            and all(
                segment is known and len(segment.ids) == length
                for segment, (known, length) in zip(self.segments, made_of, strict=True)
            )
        )


@dataclass(slots=True, kw_only=True)
class Sample(_FlatViews):
    """One response to one prompt, append-only, token-in and token-out.

    Ids that the model produced are never decoded and tokenised again. The flat views `tokens`,
    `loss_mask`, `rollout_log_probs`, `sampling_log_probs` and `versions` have equal length. Views
    are made once and shared: copy one before you change it.
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

    def append(self, segment: Segment) -> None:
        """Add tokens at the end; what is there is never changed."""
        self.segments.append(segment)

    def noise_key(self, seed: int, namespace: str = "train") -> NoiseKey:
        """What decides this sample's tokens in the rollouts of a run's `seed`."""
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
        """Places in `tokens` of those that were drafted before the policy chose them."""
        found, start = list[int](), 0
        for segment in self.segments:
            found.extend(start + place for place in segment.drafted)
            start += len(segment.ids)
        return found

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the first one that the policy wrote."""
        return self._view("prompt_ids", self._find_prompt)

    def _find_prompt(self) -> list[int]:
        out: list[int] = []
        for segment in self.segments:
            if segment.role == "assistant":
                break
            out.extend(segment.ids)
        return out

    @property
    def response_ids(self) -> list[int]:
        """Everything after the prompt."""
        return self._view("response_ids", lambda: self.tokens[len(self.prompt_ids) :])

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def response_length(self) -> int:
        return self.num_tokens - len(self.prompt_ids)

    @classmethod
    def from_prompt(cls, prompt: Prompt, *, group_index: int, index: int) -> Sample:
        """An empty sample of `prompt`, to be filled by a rollout."""
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
    """The samples of one prompt: what a group-relative advantage is computed over. `greedy` is a
    further response, greedily decoded, whose reward is a baseline (ReMax); nothing trains on it."""

    index: int
    prompt: Prompt
    samples: list[Sample]
    greedy: Sample | None = None

    @property
    def members(self) -> list[Sample]:
        """The samples, and the greedy one."""
        return self.samples if self.greedy is None else [*self.samples, self.greedy]


@dataclass(slots=True, kw_only=True)
class RolloutBatch:
    """Samples as ragged columns (seed API of the `rollouts` design)."""

    tokens: list[list[int]]
    loss_masks: list[list[float]]
    rewards: list[float]
    response_lengths: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class TrainRow:
    """One sequence to train on, as lists: what a batch is written by hand from
    (`training.columns.train_batch`), and what `TrainBatch.row` returns for a look at one. Every
    list has the length of `tokens`. The fields are those of `TrainBatch`.
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
    """One mini-batch: what one optimizer step sees. Losses are normalised over all of its rows.

    The N rows are ragged columns: each column is one flat CPU tensor (T,) over the T tokens of all
    rows, and row i is `[starts[i], starts[i + 1])` of it. Float columns are float32, or float64
    where their values need it. A column is replaced, never changed in place: batches share them.
    Made by `rollout.train_rows.rows_of` from samples and by `training.columns` from lists.

    `loss_mask[t]` is not 0 where token t is a target (it is predicted from the tokens before it);
    the first token of a row has no context and is never a target. Log-probs are aligned with
    tokens: entry t belongs to token t. So are `values` and `returns`, a critic's: the state before
    token t.
    """

    starts: list[int]
    """(N + 1,): where each row begins, and the end of the last one."""
    tokens: Tensor
    """int64."""
    loss_mask: Tensor
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None
    has_old_log_probs: Tensor | None = None
    """(N,) bool: rows with `old_log_probs`; None: all, if there are any."""
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    """What each token's loss is multiplied by (rollout correction)."""
    selected: Tensor | None = None
    """1.0 on the tokens that the policy loss treats in its own way, chosen over the mini-batch."""
    kept_ids: list[list[array[int]]] | None = None
    """For each row and token, the ids that a truncating sampler kept there: log-probs are then
    those of the law over them. An empty array stands for the whole vocabulary."""
    uids: list[str]
    keys: list[NoiseKey | None]
    """Of each row, the noise that the policy's tokens were sampled with, where the engine takes
    keyed noise."""
    temperature: float = 1.0

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
    def targets(self) -> Tensor:
        """(T,) bool: tokens that carry loss."""
        targets: Tensor = self.loss_mask != 0
        targets[[start for start, end in pairwise(self.starts) if end > start]] = False
        return targets

    @property
    def num_target_tokens(self) -> int:
        return int(self.targets.sum())

    def slice_of(self, row: int) -> slice:
        """Where in the columns the tokens of a row stand."""
        return slice(self.starts[row], self.starts[row + 1])

    def row(self, index: int) -> TrainRow:
        """One row as lists, made at each call: for a look, not for all rows of a large batch."""
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
        """For other processes: a part of a larger batch leaves the rest behind."""
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
"""The float columns of `TrainBatch`, and lists of `TrainRow`."""

_TENSORS = frozenset(("tokens", "has_old_log_probs", *FLOAT_COLUMNS))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One response to generate.

    `prompt_ids` is everything the model sees first. `prior_ids` are response tokens of an earlier,
    interrupted attempt of the same sample: generation goes on at position
    `len(prompt_ids) + len(prior_ids)` and `params.max_tokens` counts new tokens only.
    Requests of equal `group` share one prefill.
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
    """What an engine returns for one request; per-token lists have the length of `token_ids`.

    `hidden_states` (only on request): (len(token_ids), D), row i the final hidden state that
    predicted token i; `context_hidden_states` (C - 1, D) are those before, of all tokens of the
    context of C but the last. Each is of the weights that computed it. `spans` index `token_ids`,
    and so does `drafted`: tokens that were drafted before the policy chose them.
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
    """Which weights a `WeightUpdate` carries."""

    FULL = "full"
    LORA = "lora"
    DRAFT = "draft"


class KVPolicy(StrEnum):
    """What a weight update does to the KV cache of running requests."""

    KEEP = "keep"
    """Go on with the keys and values of the old weights."""
    RECOMPUTE = "recompute"
    """Prefill prompt and generated tokens again under the new weights."""


class Transport(StrEnum):
    """How the tensors of a `WeightUpdate` travel."""

    REFERENCE = "reference"
    SHARED_MEMORY = "shared_memory"
    FILE = "file"
    COLLECTIVE = "collective"


class PolicyKind(StrEnum):
    """Which code computes a policy's forward pass."""

    DECODER = "decoder"
    """Slipstream's decoder (`models.decoder`)."""
    TRANSFORMERS = "transformers"
    """The architecture's class in `transformers` (`models.hf_policy`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an inference engine can do. Rules between options ask this, never an engine's name.

    The defaults describe an engine about which nothing is promised.
    """

    policies: frozenset[PolicyKind] = frozenset()
    """The kinds of policy that the engine generates with; empty: it needs no policy."""
    keyed_noise: bool = False
    """A token depends only on the request's noise key, its position and the target logits."""
    exact: bool = False
    """With the trainer's dtype, log-probs are bit for bit the trainer's."""
    drafts: bool = False
    """The engine can speculate: it verifies draft tokens, and its draft head can be updated."""
    hidden_states: bool = False
    """`GenerateRequest.return_hidden_states` returns the hidden states of decoding."""
    top_log_probs: int = 0
    """How many of the likeliest tokens' log-probs the engine can return at each position."""
    transports: frozenset[Transport] = frozenset({Transport.REFERENCE})
    """How the tensors of a `WeightUpdate` may travel to the engine."""
    several_processes: bool = False
    """The engine takes weights that several trainer processes hold in parts."""
    one_thread_tail: bool = False
    """On a CPU with compiled kernels, the engine can decode the last requests on one thread and
    lend the other cores (`actor_rollout_ref.rollout.one_thread_below`)."""
    kv_budget: bool = False
    """Keys and values stay within `actor_rollout_ref.rollout.kv_cache_bytes`."""
    width_multiple: int = 1
    """Hidden size, intermediate size and head width must be multiples of this."""
    for_tests: bool = False
    """No run may select this engine."""


WeightBucket = Sequence[tuple[str, "Tensor"]]
"""Some named tensors, Hugging Face names; a bucket is what is in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """A versioned set of weights on its way from a trainer to an engine.

    `buckets` may be consumed once; an engine validates names and shapes before it changes anything.
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
    """Hidden states that a trainer's forward pass hands to a `FeatureSink`.

    `hidden` (T, D) is the final hidden state (the input of the LM head) of the T tokens `tokens`;
    `aux_layers` (T, n * D) are the inputs of the n layers that were asked for, side by side; None
    where none was. `optimizer_step` produced the weights.
    """

    uid: str
    tokens: list[int]
    loss_mask: list[float]
    hidden: Tensor
    aux_layers: Tensor | None
    optimizer_step: int
    key: NoiseKey | None = None


class FeatureSink(Protocol):
    """A subscriber to the hidden states that the trainer computes anyway (drafter co-training)."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers whose inputs are wanted next to the final hidden state, in order."""
        ...

    def select(self, batch: TrainBatch) -> set[int]:
        """Rows of `batch` whose features are wanted. Asked before the forward pass."""
        ...

    def receive(self, features: Features) -> None:
        """Keep the features of one selected row; the tensors are detached."""
        ...


class GenerationSink(Protocol):
    """A subscriber to the hidden states that an engine computes while it decodes."""

    def wants(self, request: GenerateRequest) -> bool:
        """Whether those of this request are wanted. Asked before it runs."""
        ...

    def receive(self, request: GenerateRequest, generation: Generation) -> None:
        """Keep those of a response that were wanted and that has ended by itself."""
        ...
