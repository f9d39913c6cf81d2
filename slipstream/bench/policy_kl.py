"""How far a policy has moved: the KL divergence between two checkpoints, on responses of the later.

What a frozen draft head loses over an RL run, it loses because the policy moves; without this
number a comparison with a head that learns says little.
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
    """KL(last || first) in nats, mean over the response tokens of a file of `rollouts`, over the
    whole vocabulary at temperature 1, computed on `device` in fp32.

    Where `last` wrote the rollouts it is the mean over states that it visits. Raises DataError for
    a file without response tokens, CheckpointError for folders that hold no policy.
    """
    texts = [_tokens(line) for line in rollouts.read_text().splitlines()]
    if not any(response for _, response in texts):
        raise DataError(f"{rollouts} holds no response tokens, so there is nothing to compare on")
    policies = (load_checkpoint(folder, device=device) for folder in (first, last))
    old, new = (policy.pack(torch.float32) for policy in policies)
    whole = [[*prompt, *response] for prompt, response in texts]
    total, count = 0.0, 0
    pairs = zip(policy_features(old, whole), policy_features(new, whole), strict=True)
    for (prompt, _), text, (before, after) in zip(texts, whole, pairs, strict=True):
        # A state predicts the token after it.
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
