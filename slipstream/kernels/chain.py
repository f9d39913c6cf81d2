"""A whole draft in one call: draw a token from the head's feature, feed both back, and so on.

The parts of the other files in a row, as in `layers`.
"""

from __future__ import annotations

from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.draw import draw_part
from slipstream.kernels.layers import layers_part
from slipstream.kernels.memory import floats_at, ints_at
from slipstream.kernels.numeric import ZERO
from slipstream.kernels.product import product_part
from slipstream.kernels.team import for_team, part_count, part_number, run, wait


@kernel
def _chain(
    hidden, lm_head, lm_start, logits, V, padded, embedding, fc, fc_start, both,
    keys_N2, positions, temperatures, tokens, steps,
    weights, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated,
    cos, sin, limit, places, own, first, seen, head_stride, longest, keys, values,
    N, D, Q, H, K, W, part, parts,
):  # fmt: skip
    heat = carray(floats_at(temperatures), (N,))
    at = carray(ints_at(positions), (N,))
    place, slot = carray(ints_at(places), (N,)), carray(ints_at(own), (N,))
    count = carray(ints_at(seen), (N,))
    begin, end = N * part // parts, N * (part + 1) // parts
    feature = hidden
    for step in range(steps):
        product_part(feature, lm_head, lm_start, logits, N, padded, D, part, parts)
        wait(parts)
        for n in range(begin, end):
            t = heat[n]
            if t != ZERO:
                row = carray(floats_at(logits + n * padded * 4), (V,))
                for j in range(V):
                    row[j] = row[j] / t
        new = tokens + step * N * 8
        draw_part(
            logits, padded, keys_N2, positions, temperatures, 0, new, N, V, part, parts
        )  # fmt: skip
        if step + 1 < steps:
            drawn = carray(ints_at(new), (N,))
            for n in range(begin, end):
                joined = carray(floats_at(both + n * D * 8), (2 * D,))
                word = carray(floats_at(embedding + drawn[n] * D * 4), (D,))
                last = carray(floats_at(feature + n * D * 4), (D,))
                for i in range(D):
                    joined[i] = word[i]
                    joined[D + i] = last[i]
                at[n] += 1
                if step:
                    slot[n] += K
                    count[n] += 1
                    place[n] = min(place[n] + 1, limit)
            wait(parts)
            product_part(both, fc, fc_start, x, N, D, 2 * D, part, parts)
            wait(parts)
            layers_part(
                weights, 1, 0, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated,
                cos, sin, places, own, first, seen, head_stride, longest, keys, values, 0,
                N, D, Q, H, K, W, part, parts,
            )  # fmt: skip
            wait(parts)
            feature = normed


@for_team
def _chain_shared(p):
    _chain(*to_fixed_tuple(carray(p, (43,)), 43), part_number(), part_count())


def chain(*arguments: int, work: int) -> None:
    """Draft `steps` tokens for each of N rows. In this order:

    hidden (N, D): features to draw the first token from; lm_head, lm_start: packed, `padded`
    outputs of which V are tokens; logits (N, padded): room; V; padded; embedding (V, D);
    fc, fc_start: packed, 2D to D; both (N, 2D): room;
    keys_N2, positions, temperatures: as in `draw`, `positions` of the first token, written over;
    tokens (steps, N): the result; steps;
    weights, eps and room as in `layers`, of one layer; cos, sin: tables; limit: their last row;
    places, own, first, seen: row of the tables, slots, of the first token drawn, written over;
    head_stride, longest, keys, values: as in `attend`; N, D, Q, H, K, W.
    """
    run(_chain, _chain_shared, arguments, work)
