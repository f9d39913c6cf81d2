"""Policy KL: the KL divergence between two checkpoints, on responses of the later one.

A fixed draft head loses acceptance during RL only because the policy changes. So a comparison with
a co-trained head needs this number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.drafter.sequences import policy_features
from slipstream.errors import DataError
from slipstream.models.decoder import PackedDecoder
from slipstream.models.hf_io import load_checkpoint


@torch.no_grad()
def policy_kl(first: Path, last: Path, rollouts: Path, device: torch.device) -> float:
    """KL(last || first) in nats, as the mean over the response tokens in the file `rollouts`, over
    the whole vocabulary at temperature 1. Computed on `device` in fp32.

    If `last` wrote the rollouts, this is the mean over the states that it visits. Raises DataError
    for a file without response tokens, CheckpointError for folders without a policy.
    """
    texts = [_tokens(line) for line in rollouts.read_text().splitlines()]
    if not any(response for _, response in texts):
        raise DataError(f"{rollouts} has no response tokens; give a file of rollouts with some")
    policies = (load_checkpoint(folder, device=device) for folder in (first, last))
    old, new = (policy.pack(torch.float32) for policy in policies)
    whole = [[*prompt, *response] for prompt, response in texts]
    total, count = 0.0, 0
    pairs = zip(policy_features(old, whole), policy_features(new, whole), strict=True)
    for (prompt, _), text, (before, after) in zip(texts, whole, pairs, strict=True):
        # The state at a position predicts the next token.
        states = slice(len(prompt) - 1, len(text) - 1)
        now, then = _log_probs(new, after[states]), _log_probs(old, before[states])
        total += float((now.exp() * (now - then)).sum())
        count += len(now)
    return total / count


def _tokens(line: str) -> tuple[Sequence[int], Sequence[int]]:
    record = json.loads(line)
    return record["prompt_ids"], record["response_ids"]


def _log_probs(policy: PackedDecoder, hidden_TD: Tensor) -> Tensor:
    logits: Tensor = policy.lm_head(hidden_TD)
    return logits.double().log_softmax(-1)
