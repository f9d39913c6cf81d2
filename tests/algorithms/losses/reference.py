"""Reference losses on Python floats, token by token, with explicit derivatives.

An independent check: no tensors, no autograd, no shared code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Rows = list[list[float]]


@dataclass(kw_only=True)
class Settings:
    low: float = 0.2
    high: float = 0.2
    c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    beta: float = 0.1
    kl_coef: float = 0.1
    horizon: float = 10.0
    selected: set[tuple[int, int]] = field(default_factory=set)


@dataclass(kw_only=True)
class Result:
    loss: float
    grad: Rows
    clipped: float
    clipped_lower: float


def reference(
    name: str,
    old: Rows,
    new: Rows,
    advantages: Rows,
    mask: Rows,
    mode: str,
    settings: Settings,
    weights: Rows | None = None,
) -> Result:
    """Loss, d loss / d new, and the two clip fractions."""
    rows = range(len(new))
    targets = {i: [t for t in range(len(new[i])) if mask[i][t]] for i in rows}
    full = [i for i in rows if targets[i]]
    num_tokens = sum(len(targets[i]) for i in rows)
    grad = [[0.0] * len(new[i]) for i in rows]
    loss, clipped, lower = 0.0, 0, 0
    if name in ("gspo", "sapo"):
        mode = "seq-mean-token-mean"
    for i in full:
        length = len(targets[i])
        k = {t: new[i][t] - old[i][t] for t in targets[i]}
        if name == "geo_mean":
            clamped = {t: min(max(k[t], -settings.low), settings.high) for t in k}
            pick = {
                t: (
                    min(k[t], clamped[t])
                    if advantages[i][t] > 0
                    else max(k[t], clamped[t])
                    if advantages[i][t] < 0
                    else 0.0
                )
                for t in k
            }
            mean_advantage = sum(advantages[i][t] for t in k) / length
            value = -mean_advantage * math.exp(sum(pick.values()) / length)
            if weights is not None:
                value *= math.prod(weights[i][t] for t in k) ** (1 / length)
            loss += value / len(full)
            for t in k:
                moves = pick[t] == k[t] and advantages[i][t] != 0
                grad[i][t] = value / len(full) / length if moves else 0.0
                clipped += k[t] != clamped[t] and advantages[i][t] > 0
                lower += k[t] != clamped[t] and advantages[i][t] < 0
            continue
        coefficient = {
            "token-mean": 1 / num_tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / len(full),
            "seq-mean-token-mean": 1 / len(full) / length,
            "seq-mean-token-sum-norm": 1 / len(full) / settings.horizon,
        }[mode]
        for t in k:
            of_row = sum(k.values()) / length if name == "gspo" else k[t]
            value, slope, is_clipped, is_lower = _token(
                name, of_row, old[i][t], new[i][t], advantages[i][t], settings, (i, t)
            )
            weight = 1.0 if weights is None else weights[i][t]
            loss += coefficient * weight * value
            grad[i][t] = coefficient * weight * slope
            clipped += is_clipped
            lower += is_lower
    return Result(
        loss=loss, grad=grad, clipped=clipped / num_tokens, clipped_lower=lower / num_tokens
    )


def _token(
    name: str, k: float, old: float, new: float, a: float, s: Settings, place: tuple[int, int]
) -> tuple[float, float, bool, bool]:
    """(loss, d loss / d new, clipped, clipped from below) of one token."""
    r = math.exp(k)
    bounded = min(max(r, 1 - s.low), 1 + s.high)
    if name in ("gpg", "reinforce", "policy_gradient"):
        return -a * new, -a, False, False
    if name in ("vanilla", "ppo", "grpo", "bypass_mode", "rollout_correction", "gspo", "clip_cov"):
        binds = -a * bounded > -a * r
        value, slope = (-a * bounded, 0.0) if binds else (-a * r, -a * r)
        dual = False
        if name == "clip_cov":
            binds = place in s.selected
            return (0.0, 0.0, True, False) if binds else (value, slope, False, False)
        if name != "gspo" and a < 0 and value > -a * s.c:
            value, slope, dual = -a * s.c, 0.0, True
        return value, slope, binds, dual
    if name == "kl_cov":
        extra = place in s.selected
        sign = (k > 0) - (k < 0)
        value = -a * r + (s.kl_coef * abs(k) if extra else 0.0)
        return value, -a * r + (s.kl_coef * sign if extra else 0.0), False, False
    if name == "sapo":
        tau = s.tau_pos if a > 0 else s.tau_neg
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * r, False, False
    if name == "cispo":
        return -bounded * a * new, -bounded * a, bounded != r, False
    if name in ("dppo_tv", "dppo_kl"):
        p, q = math.exp(new), math.exp(old)
        if name == "dppo_tv":
            inside = p - q <= s.high if a > 0 else q - p <= s.low
        else:
            d = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            inside = (d <= s.high or p <= q) if a > 0 else (d <= s.low or p >= q)
        if not inside:
            return 0.0, 0.0, True, False
        weight = min(r, s.c)
        return -a * weight * new, -a * weight, False, r > s.c
    assert name == "dro"
    return -(a * new - 0.5 * s.beta * k * k), -(a - s.beta * k), False, False


def covariances(new: Rows, advantages: Rows, mask: Rows) -> dict[tuple[int, int], float]:
    """The covariances of target tokens, by (row, position)."""
    places = [(i, t) for i, row in enumerate(mask) for t, m in enumerate(row) if m]
    mean_a = math.fsum(advantages[i][t] for i, t in places) / len(places)
    mean_lp = math.fsum(new[i][t] for i, t in places) / len(places)
    return {(i, t): (advantages[i][t] - mean_a) * (new[i][t] - mean_lp) for i, t in places}


def select(
    name: str,
    old: Rows,
    new: Rows,
    advantages: Rows,
    mask: Rows,
    settings: Settings,
    *,
    share: float,
    bounds: tuple[float, float],
    hashes: list[list[int]],
) -> set[tuple[int, int]]:
    """The (row, position) of tokens that `clip_cov` or `kl_cov` select."""
    covariance = covariances(new, advantages, mask)
    number = max(int(share * len(covariance)), 1)
    if name == "kl_cov":
        order = sorted(covariance, key=lambda p: (-covariance[p], hashes[p[0]][p[1]]))
        return set(order[:number])
    candidates = []
    for (i, t), value in covariance.items():
        r, a = math.exp(new[i][t] - old[i][t]), advantages[i][t]
        bounded = min(max(r, 1 - settings.low), 1 + settings.high)
        if bounds[0] < value < bounds[1] and not -a * bounded > -a * r:
            candidates.append((i, t))
    return set(sorted(candidates, key=lambda p: hashes[p[0]][p[1]])[:number])
