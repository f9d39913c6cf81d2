"""Reference estimators on Python floats, row by row and token by token.

An independent check: no tensors, no shared code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Rows = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: (B, T) lists, (B,) lists, and settings."""

    rewards: Rows
    mask: Rows
    index: list[str]
    values: Rows
    reward_baselines: list[float]
    old_log_probs: Rows
    ref_log_probs: Rows
    sum_pi_squared: Rows
    rollout_is_weights: Rows | None
    reward_parts: dict[str, list[float]]
    gamma: float = 1.0
    lam: float = 1.0
    by_std: bool = True
    part_weights: list[float] | None = None


def reference(name: str, case: Case) -> tuple[Rows, Rows]:
    """(advantages, returns) of the estimator `name`."""
    return _REFERENCES[name](case)


def _groups(case: Case) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for row, key in enumerate(case.index):
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _targets(case: Case, row: int) -> list[int]:
    return [t for t, m in enumerate(case.mask[row]) if m]


def _std(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _outcome(
    rule: Callable[[Case, list[int], list[float]], list[float]], whitened: bool = False
) -> Callable[[Case], tuple[Rows, Rows]]:
    def run(case: Case) -> tuple[Rows, Rows]:
        scores = [math.fsum(row) for row in case.rewards]
        per_row = [0.0] * len(scores)
        for rows in _groups(case):
            for row, value in zip(rows, rule(case, rows, [scores[r] for r in rows]), strict=True):
                per_row[row] = value
        out = [[a if m else 0.0 for m in mask] for a, mask in zip(per_row, case.mask, strict=True)]
        out = _whiten(case, out) if whitened else out
        return out, out

    return run


def _whiten(case: Case, rows: Rows) -> Rows:
    chosen = [rows[b][t] for b in range(len(rows)) for t in _targets(case, b)]
    mean, var = math.fsum(chosen) / len(chosen), _std(chosen) ** 2
    return [
        [(v - mean) / math.sqrt(var + 1e-8) if m else 0.0 for v, m in zip(row, mask, strict=True)]
        for row, mask in zip(rows, case.mask, strict=True)
    ]


def _grpo(case: Case, rows: list[int], s: list[float]) -> list[float]:
    if len(s) == 1:
        return s
    mean = math.fsum(s) / len(s)
    return [(v - mean) / (_std(s) + 1e-6 if case.by_std else 1.0) for v in s]


def _passk(case: Case, rows: list[int], s: list[float]) -> list[float]:
    best, second = sorted(s, reverse=True)[:2]
    gap = (best - second) / (_std(s) + 1e-6 if case.by_std else 1.0)
    return [gap if i == s.index(best) else 0.0 for i in range(len(s))]


def _rloo(case: Case, rows: list[int], s: list[float]) -> list[float]:
    if len(s) == 1:
        return s
    return [v - math.fsum(s[:i] + s[i + 1 :]) / (len(s) - 1) for i, v in enumerate(s)]


def _rloo_vectorized(case: Case, rows: list[int], s: list[float]) -> list[float]:
    return [0.0] if len(s) == 1 else _rloo(case, rows, s)


def _opo(case: Case, rows: list[int], s: list[float]) -> list[float]:
    lengths = [len(_targets(case, row)) for row in rows]
    if len(s) == 1 or not any(lengths):
        return s
    base = math.fsum(n * v for n, v in zip(lengths, s, strict=True)) / sum(lengths)
    return [v - base for v in s]


def _gpg(case: Case, rows: list[int], s: list[float]) -> list[float]:
    alpha = len(case.rewards) / max(sum(math.fsum(row) != 0 for row in case.rewards), 1)
    mean = 0.0 if len(s) == 1 else math.fsum(s) / len(s)
    return [alpha * (v - mean) for v in s]


def _centred(case: Case, rows: list[int], s: list[float]) -> list[float]:
    mean = 0.0 if len(s) == 1 else math.fsum(s) / len(s)
    return [v - mean for v in s]


def _gdpo_rule(case: Case, rows: list[int], s: list[float]) -> list[float]:
    weights = case.part_weights or [1.0] * len(case.reward_parts)
    out = [0.0] * len(rows)
    for weight, part in zip(weights, case.reward_parts.values(), strict=True):
        for i, a in enumerate(_grpo(case, rows, [part[row] for row in rows])):
            out[i] += weight * a
    return out


def _to_go(case: Case, gamma: float) -> Rows:
    out = [[0.0] * len(row) for row in case.rewards]
    for b in range(len(out)):
        after = 0.0
        for t in reversed(_targets(case, b)):
            after = out[b][t] = case.rewards[b][t] + gamma * after
    return out


def _reinforce(case: Case) -> tuple[Rows, Rows]:
    returns = _to_go(case, case.gamma)
    return _whiten(case, returns), returns


def _remax(case: Case) -> tuple[Rows, Rows]:
    returns = _to_go(case, 1.0)
    advantages = [[0.0] * len(row) for row in returns]
    for b, base in enumerate(case.reward_baselines):
        for t in _targets(case, b):
            advantages[b][t] = returns[b][t] - base
    return advantages, returns


def _gae(case: Case) -> tuple[Rows, Rows]:
    """The definition as a sum over k of (gamma lam)^k delta_k, without the recursion."""
    estimates = [[0.0] * len(row) for row in case.rewards]
    returns = [[0.0] * len(row) for row in case.rewards]
    for b, values in enumerate(case.values):
        places = _targets(case, b)
        ahead = [*(values[t] for t in places[1:]), 0.0][: len(places)]
        deltas = [
            case.rewards[b][t] + case.gamma * after - values[t]
            for t, after in zip(places, ahead, strict=True)
        ]
        for i, t in enumerate(places):
            estimates[b][t] = math.fsum(
                (case.gamma * case.lam) ** k * d for k, d in enumerate(deltas[i:])
            )
            returns[b][t] = estimates[b][t] + values[t]
    return _whiten(case, estimates), returns


def _otb(packed: bool) -> Callable[[Case], tuple[Rows, Rows]]:
    def run(case: Case) -> tuple[Rows, Rows]:
        returns = _to_go(case, 1.0)
        advantages = [[0.0] * len(row) for row in returns]
        for rows in _groups(case):
            steps: dict[int, list[tuple[int, int, float]]] = {}
            for b in rows:
                energy = 0.0
                for n, t in enumerate(_targets(case, b)):
                    w = 1.0 if case.rollout_is_weights is None else case.rollout_is_weights[b][t]
                    pi = math.exp(case.old_log_probs[b][t])
                    energy += (1 - 2 * pi + case.sum_pi_squared[b][t]) * w**2
                    steps.setdefault(n if packed else t, []).append((b, t, energy))
            for here in steps.values():
                base = 0.0
                if len(here) > 1:
                    base = math.fsum(returns[b][t] * w for b, t, w in here)
                    base /= math.fsum(w for _, _, w in here) + 1e-8
                for b, t, _ in here:
                    advantages[b][t] = returns[b][t] - base
        return advantages, returns

    return run


def _distillation(case: Case) -> tuple[Rows, Rows]:
    out = [[0.0] * len(row) for row in case.rewards]
    for b in range(len(out)):
        for t in _targets(case, b):
            out[b][t] = case.ref_log_probs[b][t] - case.old_log_probs[b][t]
    return out, out


_REFERENCES: dict[str, Callable[[Case], tuple[Rows, Rows]]] = {
    "gae": _gae,
    "grpo": _outcome(_grpo),
    "grpo_vectorized": _outcome(_grpo),
    "grpo_passk": _outcome(_passk),
    "reinforce_plus_plus": _reinforce,
    "reinforce_plus_plus_baseline": _outcome(_centred, whitened=True),
    "rloo": _outcome(_rloo),
    "rloo_vectorized": _outcome(_rloo_vectorized),
    "opo": _outcome(_opo),
    "gpg": _outcome(_gpg),
    "remax": _remax,
    "gdpo": _outcome(_gdpo_rule, whitened=True),
    "optimal_token_baseline": _otb(packed=False),
    "tir_optimal_token_baseline": _otb(packed=True),
    "on_policy_distillation": _distillation,
}
