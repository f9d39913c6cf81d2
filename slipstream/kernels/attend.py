"""Rotation and causal attention in fp32, over the joined projections of query, key and value.

All arguments are addresses, sizes or offsets in elements. M rows (tokens), Q query heads, H
key-value heads, G = Q / H query heads per key-value head, K head width.

The keys of a sequence are in blocks of `block` slots. `table` has the offsets of all blocks, in
elements after the start of the keys; those of the sequence of row m start at entry `first[m]`.
Within a block, the keys of a head are contiguous slots of K numbers, and heads are `head_stride`
elements apart. Values have the same layout. The own key of row m goes to offset `own[m]` (-1: it is
not stored). Row m sees the first `seen[m]` slots, or those on its path through a draft tree
(`kernels.tree_paths`). Sums follow the order of slots across blocks, so the results do not depend
on the blocks.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.dots import dots
from slipstream.kernels.memory import LINE, floats_at, hold, ints_at, prefetch_at
from slipstream.kernels.numeric import ONE, ZERO, F, exp, largest, squares, total, triple
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL, tile_1, tile_1x2, tile_2x2, tiles
from slipstream.kernels.tree_paths import is_out_of_order, path_slots, stem_length


@kernel
def rotate(x, norm, eps, cos, sin, times, out, K):
    """Apply norm (unless `norm` is 0), rotation and the factor `times` to a head of K numbers."""
    half = K // 2
    a, o = carray(floats_at(x), (K,)), carray(floats_at(out), (K,))
    c, s = carray(floats_at(cos), (K,)), carray(floats_at(sin), (K,))
    if norm:
        scale = ONE / np.sqrt(squares(x, K) / F(K) + eps)
        w = carray(floats_at(norm), (K,))
        for i in range(half):
            left = a[i] * scale * w[i]
            right = a[i + half] * scale * w[i + half]
            o[i] = (left * c[i] + right * s[i]) * times
            o[i + half] = (right * c[i + half] + left * s[i + half]) * times
    else:
        for i in range(half):
            left = a[i]
            right = a[i + half]
            o[i] = (left * c[i] + right * s[i]) * times
            o[i + half] = (right * c[i + half] + left * s[i + half]) * times


@kernel
def by_heads(H, parts):
    """Return whether each thread processes its own key-value heads, from `place` to `attend`.

    Then no thread waits in between, and no two threads write to the same cache line.
    """
    return H % parts == 0


@kernel
def heads_of(H, part, parts):
    """Return the begin and the end of the key-value heads that a part places."""
    if by_heads(H, parts):
        return H // parts * part, H // parts * (part + 1)
    return 0, H


@kernel
def rows_of(M, H, part, parts):
    """Return the begin and the end of the rows whose keys a part places."""
    if by_heads(H, parts):
        return 0, M
    return M * part // parts, M * (part + 1) // parts


@kernel
def place_part(
    qkv, norms, eps, cos, sin, positions, q, keys, values, own, head_stride, M, Q, H, K, part, parts
):
    """Compute one of `parts` parts of `place`."""
    at = carray(ints_at(positions), (M,))
    place = carray(ints_at(own), (M,))
    epsilon = carray(floats_at(eps), (1,))[0]
    root = ONE / np.sqrt(F(K))
    own_h, end_h = heads_of(H, part, parts)
    begin, end = rows_of(M, H, part, parts)
    G = Q // H
    for m in range(begin, end):
        c, s = cos + at[m] * K * 4, sin + at[m] * K * 4
        row = qkv + m * (Q + 2 * H) * K * 4
        for h in range(own_h, end_h):
            for g in range(h * G, (h + 1) * G):
                norm = norms + g * K * 4 if norms else 0
                rotate(row + g * K * 4, norm, epsilon, c, s, root, q + (m * Q + g) * K * 4, K)
            if place[m] < 0:
                continue
            norm = norms + (Q + h) * K * 4 if norms else 0
            spot = (place[m] + h * head_stride) * 4
            rotate(row + (Q + h) * K * 4, norm, epsilon, c, s, ONE, keys + spot, K)
            x = carray(floats_at(row + (Q + H + h) * K * 4), (K,))
            out = carray(floats_at(values + spot), (K,))
            for i in range(K):
                out[i] = x[i]


@for_team
def _place_shared(p):
    place_part(*to_fixed_tuple(carray(p, (15,)), 15), part_number(), part_count())


def place(
    qkv: int,
    norms: int,
    eps: int,
    cos: int,
    sin: int,
    positions: int,
    q: int,
    keys: int,
    values: int,
    own: int,
    head_stride: int,
    M: int,
    Q: int,
    H: int,
    K: int,
) -> None:
    """Write `qkv` (M, Q + 2H, K) to the queries `q` (M, Q, K), to the keys and to the values.

    Queries and keys are normed (unless `norms`, (Q + H, K), is 0) and rotated by row `positions[m]`
    of the tables. Queries are also scaled by 1 / sqrt(K).
    """
    arguments = (
        qkv, norms, eps, cos, sin, positions, q, keys, values, own, head_stride, M, Q, H, K
    )  # fmt: skip
    run(place_part, _place_shared, arguments, M * (Q + 2 * H) * K)


@kernel
def _place_backward(
    qkv, norms, eps, cos, sin, positions, dq, dk, dqkv, dnorms, M, Q, H, K, part, parts
):
    """Compute one of `parts` parts of `place_backward`."""
    at = carray(ints_at(positions), (M,))
    epsilon = carray(floats_at(eps), (1,))[0]
    half = K // 2
    root = ONE / np.sqrt(F(K))
    d = np.empty(K, np.float32)
    if norms:
        sums = carray(floats_at(dnorms + part * (Q + H) * K * 4), ((Q + H) * K,))
        for i in range((Q + H) * K):
            sums[i] = ZERO
    for m in range(M * part // parts, M * (part + 1) // parts):
        c = carray(floats_at(cos + at[m] * K * 4), (K,))
        s = carray(floats_at(sin + at[m] * K * 4), (K,))
        row = m * (Q + 2 * H) * K * 4
        for h in range(Q + H):
            times = root
            source = dq + (m * Q + h) * K * 4
            if h >= Q:
                times = ONE
                source = dk + (m * H + h - Q) * K * 4
            g = carray(floats_at(source), (K,))
            out = carray(floats_at(dqkv + row + h * K * 4), (K,))
            for i in range(half):
                a = g[i] * times
                b = g[i + half] * times
                d[i] = a * c[i] + b * s[i + half]
                d[i + half] = b * c[i + half] + a * s[i]
            if norms:
                x = carray(floats_at(qkv + row + h * K * 4), (K,))
                w = carray(floats_at(norms + h * K * 4), (K,))
                dw = carray(floats_at(dnorms + (part * (Q + H) + h) * K * 4), (K,))
                along = triple(d.ctypes.data, norms + h * K * 4, qkv + row + h * K * 4, K)
                scale = ONE / np.sqrt(squares(qkv + row + h * K * 4, K) / F(K) + epsilon)
                back = along * scale * scale * scale / F(K)
                for i in range(K):
                    out[i] = d[i] * w[i] * scale - x[i] * back
                    dw[i] += d[i] * x[i] * scale
            else:
                for i in range(K):
                    out[i] = d[i]
    hold(d)


@for_team
def _place_backward_shared(p):
    _place_backward(*to_fixed_tuple(carray(p, (14,)), 14), part_number(), part_count())


def place_backward(
    qkv: int,
    norms: int,
    eps: int,
    cos: int,
    sin: int,
    positions: int,
    dq: int,
    dk: int,
    dqkv: int,
    dnorms: int,
    M: int,
    Q: int,
    H: int,
    K: int,
) -> None:
    """Compute the gradients of `place` from those of its queries (M, Q, K) and keys (M, H, K).

    The results are the gradient of the first Q + H heads of `qkv`, and of the norms. `dnorms` has
    (Q + H, K) numbers, initially zero, for each of torch's threads; the caller adds them.
    """
    arguments = (
        qkv, norms, eps, cos, sin, positions, dq, dk, dqkv, dnorms, M, Q, H, K
    )  # fmt: skip
    run(_place_backward, _place_backward_shared, arguments, 3 * M * (Q + H) * K)


@kernel
def block_offset(table, first, index):
    """Return the offset of a block: number `index` of the sequence that starts at entry `first`."""
    return carray(ints_at(table + 8 * (first + index)), (1,))[0]


@kernel
def slot_offset(table, first, block, slot, K):
    """Return the offset of a slot of a sequence, in the first head."""
    return block_offset(table, first, slot // block) + slot % block * K


_KEYS = 32
"""Number of keys between two prefetches of values."""


@kernel
def _score(query, keys, K, n, scores, ahead, end):
    """Compute the scores of `n` keys and prefetch the memory from `ahead` to `end` meanwhile."""
    j, first = 0, ahead
    while j < n:
        few = min(_KEYS, n - j)
        dots(query, keys + j * K * 4, K, few, scores + j * 4)
        j += few
        while ahead < first + (end - first) * j // n:
            prefetch_at(ahead)
            ahead += LINE


@kernel
def _softmax(scores, n):
    """Compute the softmax in place. Return the logarithm of the denominator."""
    p = carray(floats_at(scores), (n,))
    top = largest(scores, n)
    for j in range(n):
        p[j] = exp(p[j] - top)
    mass = total(scores, n)
    for j in range(n):
        p[j] = p[j] / mass
    return top + np.log(mass)


@kernel
def _mix(weights, step, values, n, K, G, start, start_step, out, ahead):
    """Add the weighted values of `n` slots for G heads, whose weights are `step` bytes apart.

    `start` are the initial sums: zeros (`start_step` 0), or `out` (`start_step` 4 * K). Each panel
    of values prefetches a share of the memory from `ahead` on.
    """
    continued = start_step != 0
    i = 0
    # For few rows two panels at a time, so that more chains of additions run in parallel.
    while G <= 2 and i + 2 * PANEL <= K:
        w, to = values + i * 4, out + i * 4
        sums = to if continued else start
        if G == 1:
            tile_1x2(weights, 0, w, K * 4, 4 * PANEL, n, sums, 0, to, K * 4, ahead, 2 * LINE)
        else:
            tile_2x2(
                weights, step, w, K * 4, 4 * PANEL, n, sums, start_step, to, K * 4, ahead, 2 * LINE
            )
        ahead += 2 * LINE * n
        i += 2 * PANEL
    while i + PANEL <= K:
        w, to = values + i * 4, out + i * 4
        sums = to if continued else start
        tiles(weights, step, w, K * 4, n, sums, start_step, to, K * 4, G, ahead, LINE)
        ahead += LINE * n
        i += PANEL
    for g in range(G):
        if K % PANEL:
            if not continued:
                last = carray(floats_at(out + g * K * 4), (K,))
                for i in range(K - K % PANEL, K):
                    last[i] = ZERO
            _mix_remainder(weights + g * step, values, n, K, out + g * K * 4)


@kernel
def _mix_remainder(weights, values, count, K, out):
    """Add `count` weighted values to the last numbers of a head, which do not fill a panel."""
    p, v = carray(floats_at(weights), (count,)), carray(floats_at(values), (count * K,))
    o = carray(floats_at(out), (K,))
    for i in range(K - K % PANEL, K):
        s = o[i]
        for j in range(count):
            s += p[j] * v[j * K + i]
        o[i] = s


@kernel
def _mix_path(weights, step, values, table, first, block, path, count, K, out, G):
    """Add `count` weighted values on a path to G heads, whose weights are `step` bytes apart.

    `values` is the start of the values of the head.
    """
    for j in range(count):
        v = values + slot_offset(table, first, block, path[j], K) * 4
        for g in range(G):
            w, o = weights + g * step + 4 * j, out + g * K * 4
            for i in range(0, K - K % PANEL, PANEL):
                at, to = v + 4 * i, o + 4 * i
                tile_1(w, 0, at, 4 * K, 0, 1, to, 0, to, 0, at, 0)
            _mix_remainder(w, v, 1, K, o)


@kernel
def attend_part(
    q, keys, values, first, seen, table, block, paths, path_step, head_stride, longest, out, logs,
    M, Q, H, K, part, parts,
):  # fmt: skip
    """Compute one of `parts` parts of `attend`."""
    row = carray(ints_at(first), (M,))
    count = carray(ints_at(seen), (M,))
    G = Q // H
    scores = np.empty(G * longest, np.float32)
    start = scores.ctypes.data
    nothing = np.zeros(2 * PANEL, np.float32)
    zeros = nothing.ctypes.data
    # A task is one key-value head of one row. If threads do not have their own heads, neighboring
    # tasks go to different threads, because later rows see more keys.
    own_h, end_h = heads_of(H, part, parts)
    heads, begin, step = end_h - own_h, part, parts
    if by_heads(H, parts):
        begin, step = 0, 1
    for task in range(begin, M * heads, step):
        m, h = task // heads, own_h + task % heads
        sees = count[m]
        # The first n tokens are in the slots of their positions. The others follow the path.
        on_path = is_out_of_order(paths, path_step, m, sees)
        n = stem_length(paths, path_step, m) if on_path else sees
        k_start, v_start = keys + h * head_stride * 4, values + h * head_stride * 4
        for g in range(G):
            weights = start + g * sees * 4
            query = q + (m * Q + h * G + g) * K * 4
            for begun in range(0, n, block):
                # Prefetch a share of the values of this block.
                few = min(block, n - begun)
                spot = block_offset(table, row[m], begun // block) * 4
                ahead = v_start + spot + g * few * K * 4 // G
                end = v_start + spot + (g + 1) * few * K * 4 // G
                _score(query, k_start + spot, K, few, weights + begun * 4, ahead, end)
            if on_path:
                path = path_slots(paths, path_step, m)
                for j in range(sees - n):
                    spot = slot_offset(table, row[m], block, path[j], K) * 4
                    dots(query, k_start + spot, K, 1, weights + (n + j) * 4)
            mass = _softmax(weights, sees)
            if logs:
                carray(floats_at(logs + (m * Q + h * G + g) * 4), (1,))[0] = mass
        o = out + (m * Q + h * G) * K * 4
        # Prefetch the values of the next block, or the keys of this thread's next task.
        after = min(task + step, M * heads - 1)
        following = block_offset(table, row[after // heads], 0)
        following = keys + (following + (own_h + after % heads) * head_stride) * 4
        for begun in range(0, n, block):
            few, index = min(block, n - begun), begun // block
            v = v_start + block_offset(table, row[m], index) * 4
            sums, sums_step, ahead = (o, K * 4, following) if begun else (zeros, 0, following)
            if begun + few < n:
                ahead = v_start + block_offset(table, row[m], index + 1) * 4
            _mix(start + begun * 4, sees * 4, v, few, K, G, sums, sums_step, o, ahead)
        if on_path:
            path = path_slots(paths, path_step, m)
            _mix_path(
                start + n * 4, sees * 4, v_start, table, row[m], block, path, sees - n, K, o, G
            )
    hold(scores)
    hold(nothing)


@for_team
def _attend_shared(p):
    attend_part(*to_fixed_tuple(carray(p, (17,)), 17), part_number(), part_count())


def attend(
    q: int,
    keys: int,
    values: int,
    first: int,
    seen: int,
    table: int,
    block: int,
    paths: int,
    path_step: int,
    head_stride: int,
    longest: int,
    out: int,
    logs: int,
    M: int,
    Q: int,
    H: int,
    K: int,
) -> None:
    """Write softmax(q k^T) v to `out` (M, Q * K).

    The logarithms of the softmax denominators go to `logs` (M, Q), unless it is 0. No row sees more
    than `longest` slots. `paths` and `path_step` are as in `kernels.tree_paths`; with `paths` 0,
    row m sees slots 0 to `seen[m]` - 1.
    """
    arguments = (
        q, keys, values, first, seen, table, block, paths, path_step, head_stride, longest, out,
        logs, M, Q, H, K,
    )  # fmt: skip
    run(attend_part, _attend_shared, arguments, M * Q * longest * K // 4)
