"""Decisions about the weights of a server from its log-probs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from slipstream.inference.servers.check import Finding, Verdict, WeightCheck, judge

SHAPE = (16, 8)


def policies(change: float) -> tuple[Tensor, Tensor]:
    """Log-probs of a new and an old policy that differ by `change` nats (root mean square)."""
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(SHAPE, generator=generator) * 8
    return old + change * torch.randn(SHAPE, generator=generator), old


def rounded(values: Tensor, rounding: float) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return values + rounding * torch.randn(SHAPE, generator=generator)


def found(change: float, rounding: float, share: float) -> Finding:
    """The finding about a server that shows `share` of the change."""
    new, old = policies(change)
    return judge(rounded(old + share * (new - old), rounding), new, old, rounding=4 * rounding)


@pytest.mark.parametrize(
    ("change", "rounding", "share", "verdict"),
    [
        (1e-3, 1e-6, 1.0, Verdict.NEW),
        (1e-3, 1e-6, 0.0, Verdict.OLD),
        (1e-2, 5e-3, 1.0, Verdict.NEW),
        (1e-2, 5e-3, 0.0, Verdict.OLD),
        (1e-4, 5e-3, 1.0, Verdict.UNDECIDED),
        (1e-4, 5e-3, 0.0, Verdict.UNDECIDED),
        (1e-3, 1e-6, 0.7, Verdict.WRONG),  # such as all weights but those of the LM head
        (1e-3, 1e-6, math.nan, Verdict.WRONG),
    ],
)
def test_the_share_of_the_change_decides_unless_rounding_hides_it(
    change: float, rounding: float, share: float, verdict: Verdict
) -> None:
    assert found(change, rounding, share).verdict is verdict


def test_share_and_error_are_those_of_a_regression() -> None:
    new, old = policies(1e-2)
    finding = found(1e-2, 5e-3, 1.0)
    assert finding.change == pytest.approx(float((new - old).square().mean().sqrt()))
    assert finding.share == pytest.approx(1.0, abs=3 * finding.error)
    assert finding.error == pytest.approx(0.5 / math.sqrt(128), rel=0.3)
    assert finding.difference == pytest.approx(5e-3, rel=0.2)


def test_rounding_that_the_values_of_a_context_share_makes_the_error_larger() -> None:
    """The rounding of a context's hidden state moves all its log-probs along one direction."""
    new, old = policies(1e-2)
    d = new - old
    shifts = torch.randn(16, 1, generator=torch.Generator().manual_seed(5))
    server = new + 0.4 * shifts * d  # each context shows another share of the change
    finding = judge(server, new, old, rounding=1.0)
    weights = d.double().square().sum(1)
    expected = float((weights * (1 + 0.4 * shifts[:, 0])).sum() / weights.sum())
    assert finding.share == pytest.approx(expected, rel=1e-4)
    # The error of a mean over 16 contexts, not over 128 values.
    assert finding.error == pytest.approx(0.4 / math.sqrt(16), rel=0.35)


def test_right_servers_seldom_look_old() -> None:
    """At 10,000 updates that rounding hides, none of 10,000 right servers is taken for old."""
    generator = torch.Generator().manual_seed(6)
    new, old = policies(1e-4)
    verdicts = set[Verdict]()
    for _ in range(10_000):
        rounding = (
            1e-3 * torch.randn(16, 1, generator=generator) * torch.randn(SHAPE, generator=generator)
        )
        verdicts.add(judge(new + rounding, new, old, rounding=1.0).verdict)
    assert Verdict.OLD not in verdicts


def test_an_update_without_changes_is_undecided() -> None:
    new, _ = policies(0.0)
    assert judge(new, new, new, rounding=1e-6).verdict is Verdict.UNDECIDED


class Policy:
    """A policy whose log-probs after each token are rows of a table, plus `moved` times others.

    A server answers with `rows`. The check asks for those of `weights`.
    """

    def __init__(self, vocab: int = 50) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(vocab, vocab, generator=generator)
        self.step = torch.randn(vocab, vocab, generator=generator)
        self.moved = 0.0

    def weights(self) -> dict[str, Tensor]:
        return {"table": self.table + self.moved * self.step}

    def rows(self, ids: Sequence[int]) -> Tensor:
        return score(self.weights(), ids)


def score(weights: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    return weights["table"][list(ids)].log_softmax(-1)


def ask(check: WeightCheck, server: Policy, name: str = "a", *, rounding: float = 1e-7) -> Finding:
    question = check.question(name)
    generator = torch.Generator().manual_seed(4)
    answers = []
    for context, tokens in zip(question.contexts, question.token_ids, strict=True):
        row = server.rows(context)[-1][tokens]
        answers.append((row + rounding * torch.randn(len(row), generator=generator)).tolist())
    return check.decide(name, question, answers)


def new_check(policy: Policy, dtype: torch.dtype = torch.float32) -> WeightCheck:
    return WeightCheck(score, policy.weights(), vocab_size=50, max_model_len=96, dtype=dtype)


def test_a_server_of_another_model_is_wrong_at_the_start() -> None:
    policy, other = Policy(), Policy()
    other.moved = 0.1
    check = new_check(policy)
    assert ask(check, other).verdict is Verdict.WRONG
    assert ask(check, policy).verdict is Verdict.NEW


def test_each_server_is_compared_with_what_was_confirmed_for_it() -> None:
    policy, stale = Policy(), Policy()
    check = new_check(policy)
    for name in ("a", "b"):
        assert ask(check, policy, name).verdict is Verdict.NEW
    policy.moved = 1e-3
    check.renew(policy.weights())
    assert ask(check, policy, "a").verdict is Verdict.NEW
    assert ask(check, stale, "b").verdict is Verdict.OLD
    stale.moved = 1e-3
    assert ask(check, stale, "b").verdict is Verdict.NEW


def test_changes_add_up_until_they_are_larger_than_rounding() -> None:
    policy, stale = Policy(), Policy()
    check = new_check(policy, torch.bfloat16)
    for name, server in (("a", policy), ("b", stale)):
        assert ask(check, server, name, rounding=5e-3).verdict is Verdict.NEW
    found = {"a": list[Verdict](), "b": list[Verdict]()}
    for step in range(1, 61):
        policy.moved = step * 1e-4
        check.renew(policy.weights())
        for name, server in (("a", policy), ("b", stale)):
            found[name].append(ask(check, server, name, rounding=5e-3).verdict)
    assert set(found["a"]) == {Verdict.UNDECIDED, Verdict.NEW}
    assert found["b"][0] is Verdict.UNDECIDED
    assert Verdict.OLD in found["b"]
    assert Verdict.NEW not in found["b"]


def test_the_tokens_that_changed_most_are_asked_for() -> None:
    policy = Policy()
    check = new_check(policy)
    ask(check, policy)
    before = policy.table.clone()
    policy.table[:, 7] += 0.5
    check.renew(policy.weights())
    question = check.question("a")
    assert all(7 in tokens for tokens in question.token_ids)
    assert all(len(tokens) == 8 for tokens in question.token_ids)
    assert [len(context) for context in question.contexts] == [95 * n // 16 for n in range(1, 17)]
    assert torch.equal(before[:, :7], policy.table[:, :7])


def test_a_server_that_was_started_again_is_compared_with_the_trainer_only() -> None:
    policy, stale = Policy(), Policy()
    check = new_check(policy)
    ask(check, policy)
    policy.moved = 1e-3
    check.renew(policy.weights())
    check.forget("a")
    assert math.isnan(ask(check, stale).change)


def test_one_large_difference_does_not_raise_the_limit() -> None:
    policy, drifting = Policy(), Policy()
    check = new_check(policy)
    ask(check, policy)
    verdicts = []
    for step in range(1, 12):
        policy.moved = drifting.moved = 1e-3 * step
        # The server's weights differ more and more from those it got.
        drifting.table = policy.table + 1.6e-7 * 2**step * policy.step.T
        check.renew(policy.weights())
        verdicts.append(ask(check, drifting).verdict)
    assert Verdict.WRONG in verdicts[:8]


def test_a_server_that_was_started_again_must_be_as_near_as_before() -> None:
    policy, other = Policy(), Policy()
    check = new_check(policy)
    ask(check, policy)
    other.table = policy.table + 1e-4 * policy.step
    check.forget("a")
    assert ask(check, other).verdict is Verdict.WRONG
    assert ask(check, policy).verdict is Verdict.NEW
