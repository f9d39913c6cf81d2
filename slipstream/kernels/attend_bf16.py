"""Rotation and causal attention with keys and values in bf16. `attend` is the fp32 version.

`tile_amx` computes the products on CPUs with AMX, and `tile_bf16` on others. All queries that see
the same keys form the rows of a tile: the heads of a group, and the tokens of a draft or a prompt.
Keys and values have the layout of a tile's weights:

    keys of a head    [block of 16 slots][pair of numbers][slot][2]
    values of a head  [pair of slots][number][2]

So the first n slots of a block, n a multiple of 16, are the first n * K numbers of a head. Blocks
have a multiple of 32 slots. The place of a key among 32 slots is `own[m] % head_stride // K % 32`.
Queries are rounded to bf16. The weights of values are rounded to bf16 before the division by their
sum. Scores, sums and results are fp32. Slots beyond those that a row sees get weight zero, and
their contents must be finite. Arguments are as in `attend`, except:

    q (H, M, G, K) bf16, G = Q / H: the query heads of a key-value head side by side;
    K must be a multiple of 16.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.attend import (
    block_offset,
    by_heads,
    heads_of,
    rotate,
    rows_of,
)
from slipstream.kernels.avx512 import rotate_row, softmax_row
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import LINE, aligned, floats_at, halves_at, hold, ints_at, words_at
from slipstream.kernels.numeric import ONE, F, exp, largest, round_to_bf16, total, widen
from slipstream.kernels.product_amx import USE_AMX
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL
from slipstream.kernels.tile_amx import MOST_ROWS as MOST_ROWS_AMX
from slipstream.kernels.tile_amx import (
    PAIRS,
    ROWS,
    configure,
    continue_two_panels_amx,
    release,
    round_16_lanes,
    two_panels_amx,
)
from slipstream.kernels.tile_bf16 import MOST_ROWS, WIDE_FROM, panels_bf16
from slipstream.kernels.tree_paths import (
    is_out_of_order,
    path_slots,
    slots_spanned,
    stem_length,
)

BLOCK = 2 * PANEL
"""The number of slots of a block of keys is a multiple of this: two panels of keys."""

_MOST_ROWS = MOST_ROWS_AMX if USE_AMX else MOST_ROWS


@kernel
def _rotate(x, norm, eps, cos, sin, times, fp32, out, K):
    """Compute `attend.rotate` of a head and round it to bf16. `fp32` is a buffer for K numbers."""
    if USE_AMX and K % (2 * PANEL) == 0:
        rotate_row(x, norm, eps, cos, sin, times, out, K // 2)
    else:
        rotate(x, norm, carray(floats_at(eps), (1,))[0], cos, sin, times, fp32, K)
        round_to_bf16(fp32, out, K)


@kernel
def _to_bf16(x, out, K):
    """Round K fp32 numbers to bf16."""
    if USE_AMX:
        round_16_lanes(x, out, K)
    else:
        round_to_bf16(x, out, K)


@kernel
def place_bf16_part(
    qkv, norms, eps, cos, sin, positions, q, keys, values, own, head_stride, M, Q, H, K, part, parts
):
    """Compute one of `parts` parts of `place_bf16`."""
    at = carray(ints_at(positions), (M,))
    place = carray(ints_at(own), (M,))
    G = Q // H
    root = ONE / np.sqrt(F(K))
    rotated, bf16 = np.empty(K, np.float32), np.empty(K, np.uint16)
    fp32_at, bf16_at = rotated.ctypes.data, bf16.ctypes.data
    halves, words = carray(halves_at(bf16_at), (K,)), carray(words_at(bf16_at), (K // 2,))
    own_h, end_h = heads_of(H, part, parts)
    begin, end = rows_of(M, H, part, parts)
    for m in range(begin, end):
        c, s = cos + at[m] * K * 4, sin + at[m] * K * 4
        row = qkv + m * (Q + 2 * H) * K * 4
        stored = place[m] >= 0
        slot = place[m] % head_stride // K if stored else 0
        start = place[m] - slot * K
        for h in range(own_h, end_h):
            for g in range(G):
                i = h * G + g
                norm = norms + i * K * 4 if norms else 0
                out = q + 2 * K * ((h * M + m) * G + g)
                _rotate(row + i * K * 4, norm, eps, c, s, root, fp32_at, out, K)
            if not stored:
                continue
            head = start + h * head_stride
            norm = norms + (Q + h) * K * 4 if norms else 0
            _rotate(row + (Q + h) * K * 4, norm, eps, c, s, ONE, fp32_at, bf16_at, K)
            block = keys + 2 * (head + slot // PANEL * PANEL * K) + 4 * (slot % PANEL)
            pairs = carray(words_at(block), (K // 2 * PANEL,))
            for i in range(K // 2):
                pairs[i * PANEL] = words[i]
            _to_bf16(row + (Q + H + h) * K * 4, bf16_at, K)
            out2 = carray(halves_at(values + 2 * (head + slot // 2 * 2 * K)), (K, 2))
            for i in range(K):
                out2[i, slot % 2] = halves[i]
    hold(rotated)
    hold(bf16)


@for_team
def _place_shared(p):
    place_bf16_part(*to_fixed_tuple(carray(p, (15,)), 15), part_number(), part_count())


def place_bf16(*arguments: int) -> None:
    """Do what `attend.place` does, with queries, keys and values in bf16. Same arguments."""
    M, Q, H, K = arguments[-4:]
    run(place_bf16_part, _place_shared, arguments, M * (Q + 2 * H) * K)


@kernel
def _copy(halves, out, count):
    """Copy `count` bf16 numbers."""
    a, o = carray(halves_at(halves), (count,)), carray(halves_at(out), (count,))
    for i in range(count):
        o[i] = a[i]


@kernel
def _softmax_weights(scores, weights, sees, pairs, wide):
    """Compute the unnormalized softmax weights, rounded to bf16, of a row that sees `sees` slots.

    They go to `weights` as bf16, followed by zeros up to 2 * `pairs`. If `wide`, they also replace
    the scores, as fp32. Returns the largest score and the sum of the weights before rounding.
    """
    if USE_AMX:
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
def _prepare(q, rows, K, wide, queries):
    """Prepare `rows` rows of queries for `_scores`. `queries` is a buffer for a copy of them.

    Returns the address of the prepared queries and the bytes between rows.
    """
    if USE_AMX:
        # A copy, because the product reads rows past the last one.
        _copy(q, queries, rows * K)
        if K // 2 % PAIRS:
            configure(K // 2)
        return queries, 2 * K
    if wide:
        widen(q, queries, rows * K)
        return queries, 4 * K
    return q, 2 * K


@kernel
def _scores(q, step, rows, keys, slots, K, ahead, wide, zeros, scores, score_step):
    """Compute the scores of `rows` rows of prepared queries over `slots` slots of a block."""
    if USE_AMX:
        for tile in range(slots // BLOCK):
            two_panels_amx(
                rows, q, step, keys + 2 * BLOCK * K * tile, 4 * PANEL, 2 * PANEL * K,
                K // 2, scores + 4 * BLOCK * tile, score_step, 4 * PANEL, ahead,
            )  # fmt: skip
        return
    panels = slots // PANEL
    panels_bf16(
        q, step, keys, 4 * PANEL, 2 * PANEL * K, 0, panels, panels, K // 2, zeros, 0, 0,
        scores, score_step, rows, ahead, wide,
    )  # fmt: skip


@kernel
def _score_blocks(
    q, step, rows, keys, table, first, block, n, K, ahead, wide, zeros, scores, score_step
):
    """Compute the scores of `rows` rows of prepared queries over the first `n` slots of a sequence.

    `keys` is the start of the keys of the head.
    """
    for begun in range(0, n, block):
        k = keys + 2 * block_offset(table, first, begun // block)
        slots = (min(block, n - begun) + BLOCK - 1) // BLOCK * BLOCK
        to = scores + 4 * begun
        _scores(q, step, rows, k, slots, K, ahead, wide, zeros, to, score_step)


@kernel
def _mix(weights, step, rows, values, pairs, K, ahead, wide, zeros, mixed, mixed_step):
    """Compute the weighted sums of values over `pairs` pairs of slots.

    Rows of `weights` are `step` bytes apart.
    """
    panels = K // PANEL
    if USE_AMX:
        if K // 2 % PAIRS:
            configure(pairs)
        p, second = 0, 4 * PANEL if panels > 1 else 0
        while p < panels:
            at = 4 * PANEL * max(min(p, panels - 2), 0)
            two_panels_amx(
                rows, weights, step, values + at, 4 * K, second, pairs,
                mixed + at, mixed_step, 4 * PANEL, ahead,
            )  # fmt: skip
            p += 2
        return
    panels_bf16(
        weights, step, values, 4 * K, 4 * PANEL, 0, panels, panels, pairs, zeros, 0, 0,
        mixed, mixed_step, rows, ahead, wide,
    )  # fmt: skip


@kernel
def _continue_mix(weights, step, rows, values, pairs, K, ahead, wide, sums, mixed, mixed_step):
    """Continue `_mix` from `sums`, which have the layout of `mixed`.

    With one panel or an even number of panels, `sums` may be `mixed`. The results equal those of a
    single `_mix` over all slots. With AMX, `pairs` is a multiple of `PAIRS`, and nothing is
    prefetched.
    """
    panels = K // PANEL
    if USE_AMX:
        p, second = 0, 4 * PANEL if panels > 1 else 0
        while p < panels:
            at = 4 * PANEL * max(min(p, panels - 2), 0)
            continue_two_panels_amx(
                rows, weights, step, values + at, 4 * K, second, pairs,
                sums + at, mixed + at, mixed_step, 4 * PANEL,
            )  # fmt: skip
            p += 2
        return
    panels_bf16(
        weights, step, values, 4 * K, 4 * PANEL, 0, panels, panels, pairs, sums, 4 * PANEL,
        mixed_step, mixed, mixed_step, rows, ahead, wide,
    )  # fmt: skip


@kernel
def _mix_blocks(
    weights, step, rows, values, table, first, block, n, K, after, wide, zeros, mixed, mixed_step,
    sums,
):  # fmt: skip
    """Compute the weighted sums of the values of the first `n` slots of a sequence.

    `values` is the start of the values of the head. `after` is the address to prefetch next. `sums`
    is a buffer with the layout of `mixed`.
    """
    size = 4 if wide else 2
    # If the number of panels is odd, one panel is computed twice. Both times it must start from the
    # same sums, so they are copied.
    if K // PANEL % 2 == 0 or K == PANEL:
        sums = mixed
    for begun in range(0, n, block):
        few, index = min(block, n - begun), begun // block
        v = values + 2 * block_offset(table, first, index)
        ahead = after - v
        if begun + few < n:
            ahead = values + 2 * block_offset(table, first, index + 1) - v
        pairs = (few + BLOCK - 1) // BLOCK * BLOCK // 2 if USE_AMX else (few + 1) // 2
        w = weights + begun * size
        if begun == 0:
            _mix(w, step, rows, v, pairs, K, ahead, wide, zeros, mixed, mixed_step)
        else:
            if sums != mixed:
                _copy(mixed, sums, rows * mixed_step // 2)
            _continue_mix(w, step, rows, v, pairs, K, ahead, wide, sums, mixed, mixed_step)


@kernel
def copy_value(values, slot, target_values, target, K):
    """Copy the value of a slot to the slot `target` of other values."""
    x = carray(halves_at(values + 4 * K * (slot // 2)), (K, 2))
    o = carray(halves_at(target_values + 4 * K * (target // 2)), (K, 2))
    for i in range(K):
        o[i, target % 2] = x[i, slot % 2]


@kernel
def _scores_in_order(scores, paths, step, m, sees):
    """Move the scores of the slots on a row's path to the order of their positions."""
    stem, spanned = stem_length(paths, step, m), slots_spanned(paths, step, m, sees)
    s, path = carray(floats_at(scores), (spanned,)), path_slots(paths, step, m)
    for j in range(sees - stem):
        s[stem + j] = s[path[j]]


@kernel
def _normalize(mixed, mass, out, K):
    """Divide the weighted sums of a head by the sum of the weights."""
    o, x = carray(floats_at(out), (K,)), carray(floats_at(mixed), (K,))
    over = ONE / mass
    for j in range(K):
        o[j] = x[j] * over


@kernel
def _mix_paths(
    weights, step, some, G, values, table, begin, block, K, wide, zeros, mixed, mixed_step, result,
    tail, masses, paths, path_step, count, r0, stem, out, out_step,
):  # fmt: skip
    """Compute the mixed values of rows of one sequence that are on tree paths.

    The result of a tile depends on the place of a slot in it. So the whole tiles of the stem are
    computed for all rows together. From the first tile that the stem does not fill, each row
    continues with a copy of the values in the order of positions (`tail`). `begin` is the entry of
    the sequence in `table`.
    """
    first = stem // BLOCK * BLOCK
    most = 0
    for i in range(some):
        most = max(most, count[r0 + i] - first)
    slots = (most + BLOCK - 1) // BLOCK * BLOCK
    cleared = carray(words_at(tail), (slots * K // 2,))
    for i in range(slots * K // 2):
        cleared[i] = 0
    if first:
        _mix_blocks(
            weights, step, some * G, values, table, begin, block, first, K, tail, wide, zeros,
            mixed, mixed_step, result,
        )  # fmt: skip
    else:
        nothing = carray(floats_at(mixed), (some * G * mixed_step // 4,))
        for i in range(some * G * mixed_step // 4):
            nothing[i] = 0
    for slot in range(first, stem):
        of_block = values + 2 * block_offset(table, begin, slot // block)
        copy_value(of_block, slot % block, tail, slot - first, K)
    if USE_AMX and K // 2 % PAIRS:
        configure(BLOCK // 2)
    size = 4 if wide else 2
    # The slots whose values `tail` currently holds after the stem.
    copied = np.full(most, -1)
    for i in range(some):
        r, row = r0 + i, i * G
        sees = count[r]
        path = path_slots(paths, path_step, r)
        for j in range(sees - stem):
            if copied[j] != path[j]:
                copied[j] = path[j]
                of_block = values + 2 * block_offset(table, begin, path[j] // block)
                copy_value(of_block, path[j] % block, tail, stem + j - first, K)
        pairs = slots // 2 if USE_AMX else max((sees - first + 1) // 2, 1)
        _continue_mix(
            weights + row * step + size * first, step, G, tail, pairs, K, 0, wide,
            mixed + row * mixed_step, result, mixed_step,
        )  # fmt: skip
        for g in range(G):
            o = out + i * out_step + 4 * g * K
            _normalize(result + g * mixed_step, masses[row + g], o, K)


@kernel
def _span(paths, path_step, count, first, some):
    """Return the number of slots that some rows span, and whether any row is out of order."""
    n, on_path = 0, False
    for r in range(first, first + some):
        n = max(n, slots_spanned(paths, path_step, r, count[r]))
        on_path = on_path or is_out_of_order(paths, path_step, r, count[r])
    return n, on_path


@kernel
def _room_for(sizes):
    """Return the bytes needed for buffers of these sizes, each aligned to a cache line."""
    whole = LINE
    for i in range(len(sizes)):
        whole += (sizes[i] + LINE - 1) // LINE * LINE
    return whole


@kernel
def _lay_out(sizes, address, at):
    """Write the addresses of the buffers of `_room_for`, starting at `address`, to `at`."""
    place = aligned(address)
    for i in range(len(sizes)):
        at[i] = place
        place += (sizes[i] + LINE - 1) // LINE * LINE


@kernel
def attend_bf16_part(
    q, keys, values, first, seen, table, block, paths, path_step, head_stride, longest, out, logs,
    M, Q, H, K, part, parts,
):  # fmt: skip
    """Compute one of `parts` parts of `attend_bf16`."""
    begin = carray(ints_at(first), (M,))
    count = carray(ints_at(seen), (M,))
    G = Q // H
    most = max(_MOST_ROWS // G, 1)
    # Room for whole tiles, which may start at any row.
    tall = (most * G + _MOST_ROWS - 1) // _MOST_ROWS * _MOST_ROWS + ROWS
    width = (longest + BLOCK - 1) // BLOCK * BLOCK
    mixed_step = 4 * max(K, BLOCK)
    sizes = (
        tall * width * 4, tall * width * 2, tall * K * 4, tall * mixed_step, tall * mixed_step,
        (BLOCK + width) * K * 2 if paths else 0,
    )  # fmt: skip
    places = np.empty(6, np.int64)
    room = np.empty(_room_for(sizes), np.uint8)
    _lay_out(sizes, room.ctypes.data, places)
    scores, weights, queries, mixed, result, tail = places
    masses, nothing = np.empty(most * G, np.float32), np.zeros(2 * PANEL, np.float32)
    zeros = nothing.ctypes.data
    if USE_AMX:
        configure(K // 2)
    own_h, end_h = heads_of(H, part, parts)
    task = -1
    m = 0
    while m < M:
        # Rows of the same sequence start at the same slot. They are divided into even shares.
        together = 1
        while m + together < M and begin[m + together] == begin[m]:
            together += 1
        shares = (together + most - 1) // most
        for share in range(shares):
            r0 = m + together * share // shares
            some = m + together * (share + 1) // shares - r0
            n, on_path = _span(paths, path_step, count, r0, some)
            for h in range(own_h, end_h):
                task += 1
                if not by_heads(H, parts) and task % parts != part:
                    continue
                head = 2 * h * head_stride
                rows = some * G
                wide = not USE_AMX and rows >= WIDE_FROM and K > PANEL
                prepared, query_step = _prepare(
                    q + 2 * K * (h * M + r0) * G, rows, K, wide, queries
                )
                _score_blocks(
                    prepared, query_step, rows, keys + head, table, begin[r0], block, n, K,
                    values - keys, wide, zeros, scores, 4 * width,
                )  # fmt: skip
                pairs = (n + BLOCK - 1) // BLOCK * (BLOCK // 2) if USE_AMX else (n + 1) // 2
                for i in range(rows):
                    r = r0 + i // G
                    line = scores + 4 * width * i
                    if on_path:
                        _scores_in_order(line, paths, path_step, r, count[r])
                    top, masses[i] = _softmax_weights(
                        line, weights + 2 * width * i, count[r], pairs, wide
                    )
                    if logs:
                        place = logs + (r * Q + h * G + i % G) * 4
                        carray(floats_at(place), (1,))[0] = top + np.log(masses[i])
                factors, step = (scores, 4 * width) if wide else (weights, 2 * width)
                to = out + (r0 * Q + h * G) * K * 4
                if on_path:
                    _mix_paths(
                        factors, step, some, G, values + head, table, begin[r0], block, K, wide,
                        zeros, mixed, mixed_step, result, tail, masses, paths, path_step, count,
                        r0, stem_length(paths, path_step, r0), to, 4 * Q * K,
                    )  # fmt: skip
                    continue
                after = keys + head + 2 * block_offset(table, begin[min(r0 + some, M - 1)], 0)
                _mix_blocks(
                    factors, step, rows, values + head, table, begin[r0], block, n, K, after,
                    wide, zeros, mixed, mixed_step, result,
                )  # fmt: skip
                for i in range(rows):
                    o = to + (i // G * Q + i % G) * K * 4
                    _normalize(mixed + mixed_step * i, masses[i], o, K)
        m += together
    if USE_AMX:
        release()
    hold(room)
    hold(nothing)


@for_team
def _attend_shared(p):
    attend_bf16_part(*to_fixed_tuple(carray(p, (17,)), 17), part_number(), part_count())


def attend_bf16(*arguments: int) -> None:
    """Do what `attend.attend` does, with queries, keys and values in bf16. Same arguments."""
    longest, M, Q, _, K = arguments[10], *arguments[-4:]
    run(attend_bf16_part, _attend_shared, arguments, M * Q * longest * K // 16)
