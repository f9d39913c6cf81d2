"""Tie-break hashes: independent of batching, uniform, and equal to published SplitMix64 values."""

from __future__ import annotations

import torch

from slipstream.algorithms import token_hashes
from slipstream.algorithms.losses.tie_break import _mix, _signed, ranked, value_hashes

TOKENS = torch.randint(0, 100, (64, 32), generator=torch.Generator().manual_seed(0))


def test_hash_is_splitmix64() -> None:
    # SplitMix64's first two outputs for seed 0; its state grows by the golden gamma.
    gamma = 0x9E3779B97F4A7C15
    states = torch.tensor([_signed(gamma), _signed(2 * gamma % 2**64)])
    assert _mix(states).tolist() == [_signed(0xE220A8397B1DCDAF), _signed(0x6E789E6AA1B965F4)]


def test_hashes_do_not_depend_on_other_rows_or_padding() -> None:
    keys = torch.arange(64)
    hashes = token_hashes(TOKENS, 7, keys)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(token_hashes(TOKENS[order], 7, keys[order]), hashes[order])
    padded = torch.nn.functional.pad(TOKENS, (0, 9), value=3)
    assert torch.equal(token_hashes(padded, 7, keys)[:, :32], hashes)
    assert torch.equal(token_hashes(TOKENS.int()[:, :5], 7, keys), hashes[:, :5])


def test_seed_key_and_prefix_change_the_hash() -> None:
    hashes = token_hashes(TOKENS, 7)
    with_keys = token_hashes(TOKENS, 7, torch.arange(64))
    assert len(set(with_keys.flatten().tolist())) == hashes.numel()
    assert not bool((token_hashes(TOKENS, 8) == hashes).any())
    assert not bool((token_hashes(TOKENS, 7, torch.zeros(64, dtype=torch.long)) == hashes).any())
    changed = TOKENS.clone()
    changed[:, 10] += 1
    same = token_hashes(changed, 7) == hashes
    assert bool(same[:, :10].all())
    assert not bool(same[:, 10:].any())
    twice = token_hashes(TOKENS[:1].expand(2, -1), 7)
    assert torch.equal(twice[0], twice[1])


def test_hashes_are_uniform() -> None:
    hashes = token_hashes(TOKENS, 3).flatten().double() / 2**63
    assert abs(float(hashes.mean())) < 0.05
    assert abs(float(hashes.var()) - 1 / 3) < 0.03


def test_hashes_of_values_depend_on_their_bits() -> None:
    values = torch.tensor([[0.0, 1.0, 1.0], [-0.0, 1.0, 1.5]])
    hashes = value_hashes(values, torch.ones(2, 3))
    assert (hashes[0] == hashes[1]).tolist() == [True, True, False]
    assert len(set(hashes[0].tolist())) == 3


def test_later_keys_break_ties() -> None:
    keys = [torch.tensor([2, 1, 2, 1]), torch.tensor([0.5, 3.0, -1.0, 2.0])]
    assert ranked(keys).tolist() == [3, 1, 2, 0]
