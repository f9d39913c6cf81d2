"""How many drafts in a row would be accepted: measured along responses that are known.

The engine accepts a draft where it is the token that the policy itself chooses there, from its law
and the noise of the position (`sampling.choose`). A response that the policy sampled consists of
these very tokens. So a chain of drafts from any of its slots is compared with the tokens that
follow, and as far as it agrees, each draft has been made after the same tokens as in the engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass

import torch

from slipstream.drafter.sequences import DraftSequence, PolicyEnds, collate
from slipstream.models.decoder import takes_sequences_in_a_row
from slipstream.models.draft.model import DraftModel
from slipstream.models.numerics import pad_rows
from slipstream.sampling.choose import SamplingRows, choose
from slipstream.sampling.noise import key_words
from slipstream.types import NoiseKey, SamplingParams

_MUCH_WORSE = 0.1
"""Share of verifications more with which a head is worse, however few prompts say so."""

ROWS_AT_ONCE = 1024
"""Slots whose logits are in memory together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A response with what decided its tokens: the noise of `key`, and `params`.

    Its mask is 1 from the first token that the policy wrote to the end.
    """

    sequence: DraftSequence
    key: NoiseKey
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What an engine with a fixed number of drafts would have done over some responses.

    `tokens` are those that verifications gave: all but the first of each response. `accepted`
    counts drafts that brought another token, as `EngineStats` does: one that ends a response does
    not.
    """

    verifications: int
    drafted: int
    accepted: int
    tokens: int

    @property
    def tokens_per_verification(self) -> float:
        """Accepted drafts and the policy's own token after them; 1 where nothing is accepted."""
        return self.tokens / max(self.verifications, 1)


@dataclass(frozen=True, slots=True)
class Loss:
    """What one head loses against another: the `share` of verifications that it takes more (below
    0: fewer), and the `variance` of that. Losses one after the other add up."""

    share: float = 0.0
    variance: float = 0.0

    def __add__(self, later: Loss) -> Loss:
        return Loss(self.share + later.share, self.variance + later.variance)

    @property
    def beyond_chance(self) -> bool:
        """Whether it is more than one standard error, or much."""
        return self.share > min(math.sqrt(self.variance), _MUCH_WORSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """`lengths[i][s]`: right drafts in a row, at most `depth`, after token s of response i.

    There is one number for each token of the response but the last. `prompts[i]` names the prompt
    of response i; responses that name none in common (empty: none at all) are independent.
    """

    depth: int
    lengths: Sequence[Sequence[int]]
    prompts: Sequence[Hashable] = ()

    def at_depth(self, k: int) -> float:
        """Share of chains, of those with k tokens to compare with, whose first k are right."""
        long_enough = [n for row in self.lengths for n in row[: max(len(row) - k + 1, 0)]]
        return sum(n >= k for n in long_enough) / max(len(long_enough), 1)

    def walk(self, drafts: int) -> Walk:
        """The responses decoded with `drafts` (at most `depth`) drafts a verification."""
        verifications = sum(self.verifications(drafts))
        tokens = sum(map(len, self.lengths))
        return Walk(
            verifications=verifications,
            drafted=drafts * verifications,
            accepted=tokens - verifications,
            tokens=tokens,
        )

    def verifications(self, drafts: int) -> list[int]:
        """How many each response takes so."""
        found = []
        for row in self.lengths:
            place = count = 0
            while place < len(row):
                place += min(row[place], drafts, len(row) - place - 1) + 1
                count += 1
            found.append(count)
        return found

    def loss_against(self, other: Acceptance) -> Loss:
        """What is lost on the same responses, with as many drafts as were measured.

        Responses to one prompt are alike, so the error is that of a ratio between sums over
        prompts, if in truth nothing is lost or gained: then what a prompt takes more is its
        residual (cluster-robust; Cochran, Sampling Techniques, 1977, 9A).
        """
        theirs = other.verifications(self.depth)
        more = Counter[Hashable]()
        names = self.prompts or range(len(theirs))
        for name, a, b in zip(names, self.verifications(self.depth), theirs, strict=True):
            more[name] += a - b
        total = max(sum(theirs), 1)
        squares = sum(d * d for d in more.values())
        return Loss(more.total() / total, squares / total**2)


@torch.no_grad()
def measure_acceptance(
    head: DraftModel,
    held_out: Sequence[HeldOut],
    ends: PolicyEnds,
    *,
    depth: int,
    batch_size: int = 32,
) -> Acceptance:
    """Draft `depth` tokens after every token of each response, and see how far they are right.

    `ends` are those of the policy that wrote the responses; the head computes in their dtype.
    """
    packed = head.pack(ends.dtype)
    padded = not takes_sequences_in_a_row(head.config, ends.dtype, ends.embedding_VD.device)
    lengths: list[list[int]] = [[] for _ in held_out]
    order = sorted(range(len(held_out)), key=lambda i: len(held_out[i].sequence.tokens))
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        batch = collate([held_out[i].sequence for i in part], ends, padded=padded)
        ids = batch.tokens_BT.flatten()
        sequence_M, place_M, _ = batch.places()
        rows = _rows([held_out[i] for i in part], ids.device)
        right = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        unrolled = packed.unroll(
            batch.tokens_BT.roll(-1, -1),
            batch.given,
            ends.embedding_VD,
            depth,
            lengths=batch.lengths,
        )
        for k, predicted in enumerate(unrolled):
            states, slots = predicted.flatten(0, 1), batch.drafted(2 + k)
            # Those whose drafts so far were right.
            for some in torch.split(slots[right[slots] == k], ROWS_AT_ONCE):
                logits = packed.logits(pad_rows(states[some]), ends.lm_head)[: len(some)]
                drafts = choose(logits, place_M[some] + (2 + k), rows.part(sequence_M[some])).tokens
                right[some] += drafts == ids[some + (2 + k)]
        for row, index in enumerate(part):
            sequence = held_out[index].sequence
            prompt = next(i for i, m in enumerate(sequence.loss_mask) if m)
            own = right[sequence_M == row]
            lengths[index] = own[prompt - 1 : len(sequence.tokens) - 2].tolist()
    prompts = [(h.key.seed, h.key.namespace, h.key.epoch, h.key.uid) for h in held_out]
    return Acceptance(depth=depth, lengths=lengths, prompts=prompts)


def _rows(held_out: Sequence[HeldOut], device: torch.device) -> SamplingRows:
    params = [h.params for h in held_out]
    return SamplingRows.of(
        [key_words(astuple(h.key)) for h in held_out],
        temperatures=[p.temperature for p in params],
        top_ks=[p.top_k for p in params],
        top_ps=[p.top_p for p in params],
        min_ps=[p.min_p for p in params],
        device=device,
    )
