"""Measures the acceptance of a draft head on known responses, without running an engine.

The engine accepts a draft token if it equals the token that the policy samples at that position
with its noise (`sampling.choose`). A response of the policy consists of exactly these tokens. So
the head drafts a chain after each token of a response, and the chain is compared with the tokens
that follow. As long as they agree, the head has the same context as in the engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from slipstream.drafter.sequences import DraftSequence, VocabLayers, collate
from slipstream.models.decoder import supports_varlen
from slipstream.models.draft.model import DraftModel
from slipstream.models.numerics import pad_rows
from slipstream.sampling.choose import SamplingRows, choose
from slipstream.sampling.noise import key_words
from slipstream.types import NoiseKey, SamplingParams

_LARGE_REGRESSION = 0.1
"""A regression above this share is significant, however few prompts were measured."""

ROWS_AT_ONCE = 1024
"""Number of slots whose logits are in memory at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A response, with the noise key and the sampling parameters that determined its tokens.

    Its loss mask is 1 from the first token that the policy wrote to the end.
    """

    sequence: DraftSequence
    key: NoiseKey
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Counters of an engine that would decode given responses with a fixed number of draft tokens.

    `tokens` counts the tokens from verifications: all except the first one of each response.
    `accepted` counts like `EngineStats`: a draft token that ends a response yields no further token
    and does not count.
    """

    verifications: int
    drafted: int
    accepted: int
    tokens: int

    @property
    def tokens_per_verification(self) -> float:
        """Mean accepted length: accepted draft tokens plus the policy's token after them. It is 1
        if no draft is accepted."""
        return self.tokens / max(self.verifications, 1)


@dataclass(frozen=True, slots=True)
class Regression:
    """How much worse one head is than another: the `share` of verifications that it needs in
    addition (negative if it needs fewer), and the `variance` of the share. Regressions of
    successive heads add up."""

    share: float = 0.0
    variance: float = 0.0

    def __add__(self, later: Regression) -> Regression:
        return Regression(self.share + later.share, self.variance + later.variance)

    @property
    def significant(self) -> bool:
        """Whether the share exceeds one standard error, or 10 % of the verifications."""
        return self.share > min(math.sqrt(self.variance), _LARGE_REGRESSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """`lengths[i][s]` is the number of correct draft tokens after token s of response i.

    It is at most `depth`. There is one number for each token of the response except the last.
    `prompts[i]` identifies the prompt of response i. Responses to different prompts are
    independent; an empty `prompts` means that all are.
    """

    depth: int
    lengths: Sequence[Sequence[int]]
    prompts: Sequence[Hashable] = ()

    def at_depth(self, k: int) -> float:
        """Share of chains whose first k draft tokens are all correct, among the chains with at
        least k tokens left to compare."""
        long_enough = [n for row in self.lengths for n in row[: max(len(row) - k + 1, 0)]]
        return sum(n >= k for n in long_enough) / max(len(long_enough), 1)

    def replay(self, drafts: int) -> Replay:
        """Counters of decoding the responses with `drafts` draft tokens per verification, at most
        `depth`."""
        verifications = sum(self.verifications(drafts))
        tokens = sum(map(len, self.lengths))
        return Replay(
            verifications=verifications,
            drafted=drafts * verifications,
            accepted=tokens - verifications,
            tokens=tokens,
        )

    def verifications(self, drafts: int) -> list[int]:
        """Number of verifications that each response needs with `drafts` draft tokens."""
        found = []
        for row in self.lengths:
            position = count = 0
            while position < len(row):
                position += min(row[position], drafts, len(row) - position - 1) + 1
                count += 1
            found.append(count)
        return found

    def regression_from(self, other: Acceptance) -> Regression:
        """How much worse this head is than `other` on the same responses, at full depth.

        Responses to one prompt are correlated, so the variance is cluster-robust, with prompts as
        clusters: it is that of a ratio of sums over prompts under the null hypothesis of equal
        heads, where a prompt's residual is its difference in verifications (Cochran, Sampling
        Techniques, 1977, 9A).
        """
        theirs = other.verifications(self.depth)
        differences = Counter[Hashable]()
        names = self.prompts or range(len(theirs))
        for name, a, b in zip(names, self.verifications(self.depth), theirs, strict=True):
            differences[name] += a - b
        total = max(sum(theirs), 1)
        squares = sum(d * d for d in differences.values())
        return Regression(differences.total() / total, squares / total**2)


@torch.no_grad()
def measure_acceptance(
    head: DraftModel,
    held_out: Sequence[HeldOut],
    vocab: VocabLayers,
    *,
    depth: int,
    batch_size: int = 32,
) -> Acceptance:
    """Draft `depth` tokens after every token of each response, and count the correct ones.

    `vocab` are the embedding and LM head of the policy that wrote the responses. The head computes
    in their dtype.
    """
    packed = head.pack(vocab.dtype)
    lm_head = packed.draft_lm_head(vocab.lm_head)
    padded = not supports_varlen(head.config, vocab.dtype, vocab.embedding_VD.device)
    lengths: list[list[int]] = [[] for _ in held_out]
    order = sorted(range(len(held_out)), key=lambda i: len(held_out[i].sequence.tokens))
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        batch = collate([held_out[i].sequence for i in part], vocab, padded=padded)
        ids = batch.tokens_BT.flatten()
        sequence_M, position_M, _ = batch.positions()
        rows = _rows([held_out[i] for i in part], ids.device)
        correct = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        unrolled = packed.unroll(
            batch.tokens_BT.roll(-1, -1),
            batch.head_inputs,
            vocab.embedding_VD,
            depth,
            lengths=batch.lengths,
        )
        for k, predicted in enumerate(unrolled):
            states, slots = predicted.flatten(0, 1), batch.slots(2 + k)
            # Continue only the chains that are correct so far.
            for some in torch.split(slots[correct[slots] == k], ROWS_AT_ONCE):
                logits = packed.draft_logits(pad_rows(states[some]), lm_head)[: len(some)].float()
                positions = position_M[some] + (2 + k)
                settings = rows.part(sequence_M[some])
                drafts = choose(logits, positions, settings, packed.tokens).tokens
                correct[some] += drafts == ids[some + (2 + k)]
        for row, index in enumerate(part):
            sequence = held_out[index].sequence
            prompt = next(i for i, m in enumerate(sequence.loss_mask) if m)
            own = correct[sequence_M == row]
            lengths[index] = own[prompt - 1 : len(sequence.tokens) - 2].tolist()
    return Acceptance(depth=depth, lengths=lengths, prompts=[h.key.prompt for h in held_out])


def _rows(held_out: Sequence[HeldOut], device: torch.device) -> SamplingRows:
    params = [h.params for h in held_out]
    return SamplingRows.of(
        [key_words(h.key.parts) for h in held_out],
        temperatures=[p.temperature for p in params],
        top_ks=[p.top_k for p in params],
        top_ps=[p.top_p for p in params],
        min_ps=[p.min_p for p in params],
        device=device,
    )
