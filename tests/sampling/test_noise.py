"""Keyed noise: golden values, uniformity, independence and finiteness."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch

from slipstream.sampling import gumbel_noise, key_words
from slipstream.sampling import noise as noise_module
from slipstream.sampling.noise import hash_words
from slipstream.types import NoiseKey

KEY = (1234567, "train", 0, "uid-7", 3, 0, 0)
GOLDEN_KEY = (-45697085, -1471158307)
GOLDEN_WORDS = [
    [3236998588, 1385350584, 532279842, 441758464, 2795625230],
    [3866194822, 1383558412, 815765361, 3960181012, 1330083489],
]
GOLDEN_GUMBEL = [0.10281125500953578, 1.1027301255232786, 0.0050520122136423935]


def keys(*parts: tuple[int | str, ...]) -> torch.Tensor:
    return torch.tensor([key_words(p) for p in parts], dtype=torch.int32)


def many_keys(count: int) -> torch.Tensor:
    return keys(*[(0, "train", 0, f"u{i}", 0, 0, 0) for i in range(count)])


def words(count: int, positions: int, vocab: int) -> torch.Tensor:
    """Return k of `count` samples at `positions` positions: (count, positions, vocab)."""
    rows = many_keys(count).repeat_interleave(positions, 0)
    at = torch.arange(positions).repeat(count)
    return hash_words(rows, at, vocab).view(count, positions, vocab)


def test_hash_and_noise_have_their_golden_values() -> None:
    # A change of the hash would make recorded runs impossible to replay.
    assert key_words(KEY) == GOLDEN_KEY
    k = hash_words(keys(KEY, KEY), torch.tensor([0, 2_000_000]), 5)
    assert k.tolist() == GOLDEN_WORDS
    g = gumbel_noise(keys(KEY), torch.tensor([17]), 3)
    assert g.dtype == torch.float64
    assert g[0].tolist() == pytest.approx(GOLDEN_GUMBEL, rel=1e-12)


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def test_the_hash_equals_one_in_python_integers() -> None:
    a, b = (w & 0xFFFFFFFF for w in key_words(KEY))
    got = hash_words(keys(KEY), torch.tensor([977]), 300)[0].tolist()
    golden = 0x9E3779B9
    first = mix(a ^ (977 * golden & 0xFFFFFFFF))
    second = mix((b + first) & 0xFFFFFFFF)
    expected = [
        mix(mix((i * golden & 0xFFFFFFFF) ^ first) + second & 0xFFFFFFFF) for i in range(300)
    ]
    # Python binds `+` before `&`: the sum wraps around, as on int32.
    assert got == expected


def test_the_boundaries_between_key_parts_matter() -> None:
    variants: list[tuple[int | str, ...]] = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("abc", ""),
        ("", "abc"),
        (1, 23),
        (12, 3),
        (123,),
        (-123,),
        ("a", 1),
        ("a1", ""),
        ("a\x001",),
        ("é",),
        ("e\u0301",),
        ("\ud800",),
    ]
    assert len({key_words(v) for v in variants}) == len(variants)


def test_the_parts_of_a_key_are_all_its_fields() -> None:
    key = NoiseKey(seed=1, namespace="a", epoch=2, uid="b", index=3, branch=4, attempt=5)
    assert key.parts == astuple(key)


def test_every_field_of_a_key_matters() -> None:
    base: list[int | str] = list(KEY)
    seen = {key_words(base)}
    others: list[int | str] = [1234568, "val", 1, "uid-8", 4, 1, 1]
    for i, value in enumerate(others):
        seen.add(key_words([*base[:i], value, *base[i + 1 :]]))
    assert len(seen) == 8


def chi_square(counts: torch.Tensor) -> float:
    """Return a chi-square statistic of equal cells as standard deviations from its mean."""
    counts = counts.double()
    expected = counts.mean()
    cells = counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - (cells - 1)) / math.sqrt(2 * (cells - 1)))


def test_words_are_uniform_in_high_and_low_bits() -> None:
    k = words(40, 40, 500).flatten()
    for shift in (24, 16, 8, 0):
        assert abs(chi_square(torch.bincount((k >> shift) & 255, minlength=256))) < 4, shift


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["keys", "positions", "token ids"])
def test_neighbors_are_independent(axis: int) -> None:
    # Pairs at several distances along one axis, in 32 x 32 cells of their top bits.
    k = words(64, 64, 64) >> 27
    for distance in (1, 2, 3, 16):
        left = k.narrow(axis, 0, 64 - distance)
        right = k.narrow(axis, distance, 64 - distance)
        table = torch.bincount((left * 32 + right).flatten(), minlength=1024)
        assert abs(chi_square(table)) < 4, distance
        low = words(64, 64, 64) & 31
        pairs = low.narrow(axis, 0, 64 - distance) * 32 + low.narrow(axis, distance, 64 - distance)
        assert abs(chi_square(torch.bincount(pairs.flatten(), minlength=1024))) < 4, distance


def test_correlations_vanish() -> None:
    g = gumbel_noise(many_keys(200), torch.arange(200), 400)
    g = (g - g.mean()) / g.std()
    for a, b in [
        (g[:, :-1], g[:, 1:]),
        (g[:-1], g[1:]),
        (g[:100], g[100:]),
        (g[:, :200], g[:, 200:]),
    ]:
        assert abs(float((a * b).mean())) < 4 / math.sqrt(a.numel())


def test_one_bit_of_the_key_flips_half_of_the_bits() -> None:
    base = torch.tensor([[0, 0]], dtype=torch.int32)
    position = torch.tensor([5])
    reference = hash_words(base, position, 2000)
    for word in (0, 1):
        for bit in (0, 7, 16, 31):
            other = base.clone()
            other[0, word] = 1 << bit if bit < 31 else -(1 << 31)
            changed = hash_words(other, position, 2000) ^ reference
            flipped = sum(float(((changed >> i) & 1).double().mean()) for i in range(32)) / 32
            assert 0.47 < flipped < 0.53, (word, bit)


def test_gumbel_noise_has_the_right_mean_and_variance() -> None:
    g = gumbel_noise(many_keys(50), torch.arange(50), 4000).flatten()
    n = g.numel()
    assert float(g.mean()) == pytest.approx(0.5772156649, abs=4 * 1.2825 / math.sqrt(n))
    assert float(g.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_gumbel_is_finite_for_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    # The words 0, 1, 2^31 - 1, 2^31, 2^32 - 2 and 2^32 - 1.
    extremes = torch.tensor([[0, 1, 2**31 - 1, -(2**31), -2, -1]], dtype=torch.int32)
    monkeypatch.setattr(noise_module, "_signed_words", lambda *_: extremes)
    g = gumbel_noise(keys(KEY), torch.tensor([0]), 6)[0]
    assert g.isfinite().all()
    assert (g.diff() > 0).all()
    assert float(g[0]) == pytest.approx(-math.log(33 * math.log(2)), rel=1e-9)
    assert float(g[-1]) == pytest.approx(33 * math.log(2), rel=1e-6)


def test_rows_are_independent_of_their_batch() -> None:
    positions = torch.tensor([3, 900, 0, 77, 5])
    together = gumbel_noise(many_keys(5), positions, 67)
    for i in range(5):
        alone = gumbel_noise(many_keys(5)[i : i + 1], positions[i : i + 1], 67)
        assert torch.equal(alone[0], together[i])
    # A larger vocabulary only adds values.
    assert torch.equal(hash_words(many_keys(5), positions, 99)[:, :67], words_of(positions))


def words_of(positions: torch.Tensor) -> torch.Tensor:
    return hash_words(many_keys(5), positions, 67)


def test_all_token_ids_have_different_hashes() -> None:
    k = hash_words(keys(KEY), torch.tensor([9]), 200_000)
    assert len(set(k[0].tolist())) == 200_000
