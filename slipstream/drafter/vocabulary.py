"""Chooses the draft vocabulary of a head: the tokens that the policy writes most.

The LM head is the largest part of a small policy with a large vocabulary, and a draft step reads
all rows that it can draft. So a head for such a policy drafts only the most frequent tokens (Zhao
et al. 2025, FR-Spec, arXiv 2502.14856). A token outside is never drafted, only sampled. This module
knows tokens and sizes, not heads or engines.

Shapes: V vocabulary size of the policy, Z size of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch

from slipstream.models.config import ModelConfig

LARGE = 16384
"""Up to this vocabulary size, heads draft all tokens by default."""

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
"""Sizes of draft vocabularies that `best_size` compares, besides all tokens."""

SIZE_WITHOUT_RESPONSES = 8192
"""First size of the draft vocabulary of a new head of RL, which has no responses to choose a size
by. Its first training lowers it (`CoTrainSettings.sizes_vocabulary`).
`best_size` chose it for the untouched SmolLM2-135M (docs/log/draft_vocabulary.md)."""

ACCEPTANCE = 0.75
"""Acceptance of a draft token that `best_size` assumes for a head that drafts all tokens."""

_DEPTHS = range(1, 8)


class TokenCounts:
    """Counts of the tokens that a policy has written, with exponential forgetting."""

    def __init__(self, vocab_size: int) -> None:
        self.counts = torch.zeros(vocab_size, dtype=torch.float64)

    def add(self, tokens: Sequence[int]) -> None:
        """Count the tokens of a response."""
        self.counts += torch.bincount(
            torch.tensor(tokens, dtype=torch.int64), minlength=len(self.counts)
        )

    def fade(self, share: float) -> None:
        """Keep `share` of all earlier counts."""
        self.counts *= share

    def coverage(self, tokens: Sequence[int]) -> float:
        """Return the share of all counted tokens that are in `tokens`; 1 if none was counted."""
        total = float(self.counts.sum())
        return float(self.counts[list(tokens)].sum()) / total if total else 1.0

    def most_frequent(
        self, size: int, *, always: Iterable[int] = (), before: Sequence[int] = ()
    ) -> list[int]:
        """Return `size` tokens in ascending order: `always`, then the most frequent ones.

        Among equally frequent tokens, those of an earlier vocabulary, `before`, come first, then
        the lowest ids. Tokenizers number tokens roughly by frequency. `size` must be at least the
        number of `always`.
        """
        new = torch.ones(len(self.counts), dtype=torch.bool)
        new[list(before)] = False
        ids = torch.cat([torch.tensor(list(before), dtype=torch.int64), new.nonzero()[:, 0]])
        counts = self.counts.clone()
        counts[list(always)] = torch.inf
        order = torch.sort(counts[ids], descending=True, stable=True).indices
        return sorted(ids[order[:size]].tolist())


def best_size(
    responses: Sequence[Sequence[int]], policy: ModelConfig, prompts: Sequence[Hashable] = ()
) -> int | None:
    """Return the size of the draft vocabulary with the highest estimated speed; None: all tokens.

    Coverage is measured on the responses to every second prompt, with the most frequent tokens of
    the others. `prompts[i]` identifies the prompt of response i; if empty, all prompts differ. A
    step's time is estimated by the weights that it reads, for which one request waits. So equal
    responses give equal sizes.
    """
    if policy.vocab_size <= LARGE or len(responses) < 2:
        return None
    counted, measured = TokenCounts(policy.vocab_size), TokenCounts(policy.vocab_size)
    names = prompts or range(len(responses))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    for name, response in zip(names, responses, strict=True):
        (counted, measured)[numbers[name] % 2].add(response)
    speeds: dict[int | None, float] = {None: _speed(1.0, policy, policy.vocab_size)}
    for size in SIZES:
        if size < policy.vocab_size:
            covered = measured.coverage(counted.most_frequent(size))
            speeds[size] = _speed(covered, policy, size)
    return max(speeds, key=lambda size: speeds[size])


def _speed(covered: float, policy: ModelConfig, size: int) -> float:
    """Return the estimated speed of the best chain, relative to decoding without drafts."""
    layer, outside = policy.layer_weights, policy.vocab_size * policy.hidden_size
    step = policy.num_layers * layer + outside
    # fc, one layer, and the rows of the LM head.
    draft = 2 * policy.hidden_size**2 + layer + size * policy.hidden_size
    accepted = ACCEPTANCE * covered
    return max(
        (1 - accepted ** (depth + 1)) / (1 - accepted) / (1 + depth * draft / step)
        for depth in _DEPTHS
    )
