"""Rotation and causal attention over keys and values in bf16; `attend` is the form in fp32.

The products are those of `tile_bf16` or, where there is one, of the matrix unit (`tile_amx`): all
queries that look at the same keys (the heads of a group, the tokens of a draft or a prompt) form
the rows of a tile. Keys and values lie as its weights do:

    keys of a head    [block of 16 slots][pair of places][slot][2]
    values of a head  [pair of slots][place][2]

so that the first n slots, n a multiple of 16, are the first n K numbers; a store has 32 slots or a
multiple of that. Queries are rounded to bf16, and so are the weights of values before they are
divided by their sum; scores, sums and results are fp32. What a slot beyond those that a row sees
holds has weight zero and has to be finite. Arguments as in `attend`, but for:

    q (H, M, G, K) bf16, G = Q / H: the query heads of a key-value head side by side;
    K a multiple of 16.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.attend import by_heads, heads_of, rows_of, turn
from slipstream.kernels.avx512 import softmax_row, turn_row
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import LINE, aligned, floats_at, halves_at, hold, ints_at, words_at
from slipstream.kernels.numeric import ONE, F, exp, largest, round_to_bf16, total, widen
from slipstream.kernels.product_amx import BY_MATRIX_UNIT
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL
from slipstream.kernels.tile_amx import MOST_ROWS as MOST_ROWS_AMX
from slipstream.kernels.tile_amx import (
    PAIRS,
    ROWS,
    configure,
    more_of_two_panels_amx,
    release,
    round_in_sixteens,
    two_panels_amx,
)
from slipstream.kernels.tile_bf16 import MOST_ROWS, WIDE_FROM, panels_bf16
from slipstream.kernels.tree_paths import bends, path_of, reach_of, stem_of

BLOCK = 2 * PANEL
"""Slots come in so many: two panels of keys."""

_MOST_ROWS = MOST_ROWS_AMX if BY_MATRIX_UNIT else MOST_ROWS


@kernel
def _turn(x, norm, eps, cos, sin, times, wide, out, K):
    """`attend.turn` to bf16, by way of `wide`."""
    if BY_MATRIX_UNIT and K % (2 * PANEL) == 0:
        turn_row(x, norm, eps, cos, sin, times, out, K // 2)
    else:
        turn(x, norm, carray(floats_at(eps), (1,))[0], cos, sin, times, wide, K)
        round_to_bf16(wide, out, K)


@kernel
def _narrow(x, out, K):
    if BY_MATRIX_UNIT:
        round_in_sixteens(x, out, K)
    else:
        round_to_bf16(x, out, K)


@kernel
def place_bf16_part(
    qkv, norms, eps, cos, sin, positions, q, keys, values, own, head_stride, M, Q, H, K, part, parts
):
    at = carray(ints_at(positions), (M,))
    place = carray(ints_at(own), (M,))
    G = Q // H
    root = ONE / np.sqrt(F(K))
    turned, narrow = np.empty(K, np.float32), np.empty(K, np.uint16)
    wide_at, narrow_at = turned.ctypes.data, narrow.ctypes.data
    halves, words = carray(halves_at(narrow_at), (K,)), carray(words_at(narrow_at), (K // 2,))
    own_h, end_h = heads_of(H, part, parts)
    begin, end = rows_of(M, H, part, parts)
    for m in range(begin, end):
        c, s = cos + at[m] * K * 4, sin + at[m] * K * 4
        row = qkv + m * (Q + 2 * H) * K * 4
        kept = place[m] >= 0
        slot = place[m] % head_stride // K if kept else 0
        start = place[m] - slot * K
        for h in range(own_h, end_h):
            for g in range(G):
                i = h * G + g
                norm = norms + i * K * 4 if norms else 0
                out = q + 2 * K * ((h * M + m) * G + g)
                _turn(row + i * K * 4, norm, eps, c, s, root, wide_at, out, K)
            if not kept:
                continue
            head = start + h * head_stride
            norm = norms + (Q + h) * K * 4 if norms else 0
            _turn(row + (Q + h) * K * 4, norm, eps, c, s, ONE, wide_at, narrow_at, K)
            block = keys + 2 * (head + slot // PANEL * PANEL * K) + 4 * (slot % PANEL)
            pairs = carray(words_at(block), (K // 2 * PANEL,))
            for i in range(K // 2):
                pairs[i * PANEL] = words[i]
            _narrow(row + (Q + H + h) * K * 4, narrow_at, K)
            out2 = carray(halves_at(values + 2 * (head + slot // 2 * 2 * K)), (K, 2))
            for i in range(K):
                out2[i, slot % 2] = halves[i]
    hold(turned)
    hold(narrow)


@for_team
def _place_shared(p):
    place_bf16_part(*to_fixed_tuple(carray(p, (15,)), 15), part_number(), part_count())


def place_bf16(*arguments: int) -> None:
    """As `attend.place`."""
    M, Q, H, K = arguments[-4:]
    run(place_bf16_part, _place_shared, arguments, M * (Q + 2 * H) * K)


@kernel
def _copy(halves, out, count):
    a, o = carray(halves_at(halves), (count,)), carray(halves_at(out), (count,))
    for i in range(count):
        o[i] = a[i]


@kernel
def _weigh(scores, weights, sees, pairs, wide):
    """What values are multiplied with, from the scores of a row that sees so many slots: bf16, to
    `weights` or, if `wide`, as fp32 in the place of the scores. The largest score and the sum."""
    if BY_MATRIX_UNIT:
        return softmax_row(scores, weights, sees, 2 * pairs)
    s = carray(floats_at(scores), (2 * pairs,))
    top = largest(scores, sees)
    for j in range(sees):
        s[j] = exp(s[j] - top)
    for j in range(sees, 2 * pairs):
        s[j] = F(0)
    mass = total(scores, sees)
    round_to_bf16(scores, weights, 2 * pairs)
    if wide:
        widen(weights, scores, 2 * pairs)
    return top, mass


@kernel
def _look(q, rows, keys, slots, K, ahead, wide, queries, zeros, scores, score_step):
    """Scores of some rows of queries, of which `queries` becomes a copy, over so many slots."""
    if BY_MATRIX_UNIT:
        # A copy, for rows beyond the last one are read, too.
        _copy(q, queries, rows * K)
        if K // 2 % PAIRS:
            configure(K // 2)
        for block in range(slots // BLOCK):
            two_panels_amx(
                rows, queries, 2 * K, keys + 2 * BLOCK * K * block, 4 * PANEL, 2 * PANEL * K,
                K // 2, scores + 4 * BLOCK * block, score_step, 4 * PANEL, ahead,
            )  # fmt: skip
        return
    step, panels = 2 * K, slots // PANEL
    if wide:
        widen(q, queries, rows * K)
        q, step = queries, 4 * K
    panels_bf16(
        q, step, keys, 4 * PANEL, 2 * PANEL * K, 0, panels, panels, K // 2, zeros, 0,
        scores, score_step, rows, ahead, wide,
    )  # fmt: skip


@kernel
def _mix(weights, step, rows, values, pairs, K, ahead, wide, zeros, mixed, mixed_step):
    """Sums of values by weights, `step` bytes from row to row, of so many pairs of slots."""
    panels = K // PANEL
    if BY_MATRIX_UNIT:
        if K // 2 % PAIRS:
            configure(pairs)
        p, beside = 0, 4 * PANEL if panels > 1 else 0
        while p < panels:
            at = 4 * PANEL * max(min(p, panels - 2), 0)
            two_panels_amx(
                rows, weights, step, values + at, 4 * K, beside, pairs,
                mixed + at, mixed_step, 4 * PANEL, ahead,
            )  # fmt: skip
            p += 2
        return
    panels_bf16(
        weights, step, values, 4 * K, 4 * PANEL, 0, panels, panels, pairs, zeros, 0,
        mixed, mixed_step, rows, ahead, wide,
    )  # fmt: skip


@kernel
def _go_on(weights, step, rows, values, pairs, K, wide, sums, mixed, mixed_step):
    """`_mix` of what comes after `sums`, which lie as `mixed` will: what both would be in one."""
    panels = K // PANEL
    if BY_MATRIX_UNIT:
        p, beside = 0, 4 * PANEL if panels > 1 else 0
        while p < panels:
            at = 4 * PANEL * max(min(p, panels - 2), 0)
            more_of_two_panels_amx(
                rows, weights, step, values + at, 4 * K, beside, pairs,
                sums + at, mixed + at, mixed_step, 4 * PANEL,
            )  # fmt: skip
            p += 2
        return
    for i in range(rows):
        panels_bf16(
            weights + i * step, step, values, 4 * K, 4 * PANEL, 0, panels, panels, pairs,
            sums + i * mixed_step, 4 * PANEL, mixed + i * mixed_step, mixed_step, 1, 0, wide,
        )  # fmt: skip


@kernel
def value_to(values, slot, tail, place, K):
    """Copy the values of a slot to another place of other values."""
    x = carray(halves_at(values + 4 * K * (slot // 2)), (K, 2))
    o = carray(halves_at(tail + 4 * K * (place // 2)), (K, 2))
    for i in range(K):
        o[i, place % 2] = x[i, slot % 2]


@kernel
def _straighten(scores, paths, step, m, sees):
    """Scores of the slots on a row's path to the places of their positions."""
    stem = stem_of(paths, step, m)
    s, path = carray(floats_at(scores), (reach_of(paths, step, m, sees),)), path_of(paths, step, m)
    for j in range(sees - stem):
        s[stem + j] = s[path[j]]


@kernel
def _put(mixed, mass, out, K):
    """One head's result from its sums."""
    o, x = carray(floats_at(out), (K,)), carray(floats_at(mixed), (K,))
    over = ONE / mass
    for j in range(K):
        o[j] = x[j] * over


@kernel
def _mix_paths(
    weights, step, some, G, values, K, wide, zeros, mixed, mixed_step, result, tail, masses, paths,
    path_step, count, r0, stem, out, out_step,
):  # fmt: skip
    """Mixed values of rows of one sequence that stand on paths, to `out`. Products of whole tiles
    depend on the place of a slot in them: those before the last of the stem are the same for all;
    from there on each row goes on with values that are put where their positions are."""
    first = stem // BLOCK * BLOCK
    most = 0
    for i in range(some):
        most = max(most, count[r0 + i] - first)
    slots = (most + BLOCK - 1) // BLOCK * BLOCK
    cleared = carray(words_at(tail), (slots * K // 2,))
    for i in range(slots * K // 2):
        cleared[i] = 0
    if first:
        _mix(weights, step, some * G, values, first // 2, K, 0, wide, zeros, mixed, mixed_step)
    else:
        nothing = carray(floats_at(mixed), (some * G * mixed_step // 4,))
        for i in range(some * G * mixed_step // 4):
            nothing[i] = 0
    for slot in range(first, stem):
        value_to(values, slot, tail, slot - first, K)
    if BY_MATRIX_UNIT and K // 2 % PAIRS:
        configure(BLOCK // 2)
    size = 4 if wide else 2
    # What lies in the places after the stem.
    there = np.full(most, -1)
    for i in range(some):
        r, row = r0 + i, i * G
        sees = count[r]
        path = path_of(paths, path_step, r)
        for j in range(sees - stem):
            if there[j] != path[j]:
                there[j] = path[j]
                value_to(values, path[j], tail, stem + j - first, K)
        pairs = slots // 2 if BY_MATRIX_UNIT else max((sees - first + 1) // 2, 1)
        _go_on(
            weights + row * step + size * first, step, G, tail, pairs, K, wide,
            mixed + row * mixed_step, result, mixed_step,
        )  # fmt: skip
        for g in range(G):
            o = out + i * out_step + 4 * g * K
            _put(result + g * mixed_step, masses[row + g], o, K)


@kernel
def _reach(paths, path_step, count, first, some):
    """The slots that some rows see, up to the last one, and whether one of them bends."""
    n, bent = 0, False
    for r in range(first, first + some):
        n = max(n, reach_of(paths, path_step, r, count[r]))
        bent = bent or bends(paths, path_step, r, count[r])
    return n, bent


@kernel
def _room_for(sizes):
    """Bytes of buffers of so many bytes each, which begin at lines."""
    whole = LINE
    for i in range(len(sizes)):
        whole += (sizes[i] + LINE - 1) // LINE * LINE
    return whole


@kernel
def _lay_out(sizes, address, at):
    """Where they begin, from an address on."""
    place = aligned(address)
    for i in range(len(sizes)):
        at[i] = place
        place += (sizes[i] + LINE - 1) // LINE * LINE


@kernel
def attend_bf16_part(
    q, keys, values, first, seen, paths, path_step, head_stride, longest, out, logs, M, Q, H, K,
    part, parts,
):  # fmt: skip
    begin = carray(ints_at(first), (M,))
    count = carray(ints_at(seen), (M,))
    G = Q // H
    most = max(_MOST_ROWS // G, 1)
    # Room for whole tiles, which may begin at any row.
    tall = (most * G + _MOST_ROWS - 1) // _MOST_ROWS * _MOST_ROWS + ROWS
    width = (longest + BLOCK - 1) // BLOCK * BLOCK
    mixed_step = 4 * max(K, BLOCK)
    turned = tall * mixed_step if paths else 0
    sizes = (
        tall * width * 4, tall * width * 2, tall * K * 4, tall * mixed_step, turned,
        (BLOCK + width) * K * 2 if paths else 0,
    )  # fmt: skip
    places = np.empty(6, np.int64)
    room = np.empty(_room_for(sizes), np.uint8)
    _lay_out(sizes, room.ctypes.data, places)
    scores, weights, queries, mixed, result, tail = places
    masses, nothing = np.empty(most * G, np.float32), np.zeros(2 * PANEL, np.float32)
    zeros = nothing.ctypes.data
    if BY_MATRIX_UNIT:
        configure(K // 2)
    own_h, end_h = heads_of(H, part, parts)
    task = -1
    m = 0
    while m < M:
        # Rows that begin at the same slot, in even shares.
        together = 1
        while m + together < M and begin[m + together] == begin[m]:
            together += 1
        shares = (together + most - 1) // most
        for share in range(shares):
            r0 = m + together * share // shares
            some = m + together * (share + 1) // shares - r0
            n, bent = _reach(paths, path_step, count, r0, some)
            for h in range(own_h, end_h):
                task += 1
                if not by_heads(H, parts) and task % parts != part:
                    continue
                slots = (n + BLOCK - 1) // BLOCK * BLOCK
                spot = 2 * (begin[r0] + h * head_stride)
                after = 2 * (begin[min(r0 + some, M - 1)] + h * head_stride)
                rows = some * G
                wide = not BY_MATRIX_UNIT and rows >= WIDE_FROM and K > PANEL
                _look(
                    q + 2 * K * (h * M + r0) * G, rows, keys + spot, slots, K, values - keys, wide,
                    queries, zeros, scores, 4 * width,
                )  # fmt: skip
                pairs = slots // 2 if BY_MATRIX_UNIT else (n + 1) // 2
                for i in range(rows):
                    r = r0 + i // G
                    line = scores + 4 * width * i
                    if bent:
                        _straighten(line, paths, path_step, r, count[r])
                    top, masses[i] = _weigh(line, weights + 2 * width * i, count[r], pairs, wide)
                    if logs:
                        place = logs + (r * Q + h * G + i % G) * 4
                        carray(floats_at(place), (1,))[0] = top + np.log(masses[i])
                given, step = (scores, 4 * width) if wide else (weights, 2 * width)
                to = out + (r0 * Q + h * G) * K * 4
                if bent:
                    _mix_paths(
                        given, step, some, G, values + spot, K, wide, zeros, mixed, mixed_step,
                        result, tail, masses, paths, path_step, count, r0,
                        stem_of(paths, path_step, r0), to, 4 * Q * K,
                    )  # fmt: skip
                    continue
                _mix(
                    given, step, rows, values + spot, pairs, K, keys + after - values - spot, wide,
                    zeros, mixed, mixed_step,
                )  # fmt: skip
                for i in range(rows):
                    _put(mixed + mixed_step * i, masses[i], to + (i // G * Q + i % G) * K * 4, K)
        m += together
    if BY_MATRIX_UNIT:
        release()
    hold(room)
    hold(nothing)


@for_team
def _attend_shared(p):
    attend_bf16_part(*to_fixed_tuple(carray(p, (15,)), 15), part_number(), part_count())


def attend_bf16(*arguments: int) -> None:
    """As `attend.attend`."""
    longest, M, Q, _, K = arguments[8], *arguments[-4:]
    run(attend_bf16_part, _attend_shared, arguments, M * Q * longest * K // 16)
