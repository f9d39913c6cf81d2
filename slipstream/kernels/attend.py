"""Rotation and causal attention: kernels over the joined projections of query, key and value.

Every argument is an address, a size or an offset in elements; fp32. M rows (tokens), Q query heads,
H key-value heads, K head width. Keys of a head lie one after another in slots of K numbers; a row's
keys begin `first[m]` elements from the start of the keys, its own key goes to `own[m]` (-1: it is
not kept), other heads follow `head_stride` elements apart; values likewise. Row m sees `seen[m]`
slots, the first ones, or those on its path (`kernels.tree_paths`).
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.dots import dots
from slipstream.kernels.memory import LINE, ask_for, floats_at, hold, ints_at
from slipstream.kernels.numeric import ONE, ZERO, F, exp, largest, squares, total, triple
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL, tile_1, tile_1x2, tile_2x2, tiles
from slipstream.kernels.tree_paths import bends, path_of, stem_of


@kernel
def turn(x, norm, tiny, cos, sin, times, out, K):
    """One head of K numbers: normed (unless `norm` is 0), rotated and multiplied by `times`."""
    half = K // 2
    a, o = carray(floats_at(x), (K,)), carray(floats_at(out), (K,))
    c, s = carray(floats_at(cos), (K,)), carray(floats_at(sin), (K,))
    if norm:
        scale = ONE / np.sqrt(squares(x, K) / F(K) + tiny)
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
    """Whether each thread has key-value heads of its own, from placing to mixing: then none waits
    in between, and no two write to one line of memory."""
    return H % parts == 0


@kernel
def heads_of(H, part, parts):
    """The first of the key-value heads that a part places, and the one after its last."""
    if by_heads(H, parts):
        return H // parts * part, H // parts * (part + 1)
    return 0, H


@kernel
def rows_of(M, H, part, parts):
    """The first of the rows whose keys a part places, and the one after its last."""
    if by_heads(H, parts):
        return 0, M
    return M * part // parts, M * (part + 1) // parts


@kernel
def place_part(
    qkv, norms, eps, cos, sin, positions, q, keys, values, own, head_stride, M, Q, H, K, part, parts
):
    at = carray(ints_at(positions), (M,))
    place = carray(ints_at(own), (M,))
    tiny = carray(floats_at(eps), (1,))[0]
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
                turn(row + g * K * 4, norm, tiny, c, s, root, q + (m * Q + g) * K * 4, K)
            if place[m] < 0:
                continue
            norm = norms + (Q + h) * K * 4 if norms else 0
            spot = (place[m] + h * head_stride) * 4
            turn(row + (Q + h) * K * 4, norm, tiny, c, s, ONE, keys + spot, K)
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
    """Norm (unless `norms`, (Q + H, K), is 0), rotation by row `positions[m]` of the tables, and
    scaling of the queries by 1 / sqrt(K), from `qkv` (M, Q + 2H, K) to `q` (M, Q, K), to the keys
    and to the values."""
    arguments = (
        qkv, norms, eps, cos, sin, positions, q, keys, values, own, head_stride, M, Q, H, K
    )  # fmt: skip
    run(place_part, _place_shared, arguments, M * (Q + 2 * H) * K)


@kernel
def _place_backward(
    qkv, norms, eps, cos, sin, positions, dq, dk, dqkv, dnorms, M, Q, H, K, part, parts
):
    at = carray(ints_at(positions), (M,))
    tiny = carray(floats_at(eps), (1,))[0]
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
                scale = ONE / np.sqrt(squares(qkv + row + h * K * 4, K) / F(K) + tiny)
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
    """From the gradients of `place`'s queries (M, Q, K) and keys (M, H, K), those of the first
    Q + H heads of `qkv` and of the norms: `dnorms` has (Q + H, K) for each thread that torch has,
    zeroed."""
    arguments = (
        qkv, norms, eps, cos, sin, positions, dq, dk, dqkv, dnorms, M, Q, H, K
    )  # fmt: skip
    run(_place_backward, _place_backward_shared, arguments, 3 * M * (Q + H) * K)


_KEYS = 32
"""Keys between two times of asking for values."""


@kernel
def _score(query, keys, K, n, scores, ask, end):
    """Scores of `n` keys, while memory is asked at an even pace for what lies from `ask` to `end`.
    Returns the first address that was not asked for."""
    j, first = 0, ask
    while j < n:
        few = min(_KEYS, n - j)
        dots(query, keys + j * K * 4, K, few, scores + j * 4)
        j += few
        while ask < first + (end - first) * j // n:
            ask_for(ask)
            ask += LINE
    return ask


@kernel
def _softmax(scores, n):
    """In place; the logarithm of the denominator."""
    p = carray(floats_at(scores), (n,))
    top = largest(scores, n)
    for j in range(n):
        p[j] = exp(p[j] - top)
    mass = total(scores, n)
    for j in range(n):
        p[j] = p[j] / mass
    return top + np.log(mass)


@kernel
def _mix(weights, step, values, n, K, G, zeros, out, ask):
    """Sums of `n` values by the weights of G heads, `step` bytes apart; a share of what is asked
    for goes with each panel of values."""
    i = 0
    # Two panels at a time where rows are few: more chains of additions run side by side.
    while G <= 2 and i + 2 * PANEL <= K:
        w, to = values + i * 4, out + i * 4
        if G == 1:
            tile_1x2(weights, 0, w, K * 4, 4 * PANEL, n, zeros, to, K * 4, ask, 2 * LINE)
        else:
            tile_2x2(weights, step, w, K * 4, 4 * PANEL, n, zeros, to, K * 4, ask, 2 * LINE)
        ask += 2 * LINE * n
        i += 2 * PANEL
    while i + PANEL <= K:
        w, to = values + i * 4, out + i * 4
        tiles(weights, step, w, K * 4, n, zeros, to, K * 4, G, ask, LINE)
        ask += LINE * n
        i += PANEL
    for g in range(G):
        if K % PANEL:
            last = carray(floats_at(out + g * K * 4), (K,))
            for i in range(K - K % PANEL, K):
                last[i] = ZERO
            _rest(weights + g * step, values, n, K, out + g * K * 4)


@kernel
def _rest(weights, values, count, K, out):
    """Add to what of a result fills no panel `count` values by their weights."""
    p, v = carray(floats_at(weights), (count,)), carray(floats_at(values), (count * K,))
    o = carray(floats_at(out), (K,))
    for i in range(K - K % PANEL, K):
        s = o[i]
        for j in range(count):
            s += p[j] * v[j * K + i]
        o[i] = s


@kernel
def _go_on_along(weights, step, values, path, count, K, out, G):
    """Add to the results of G heads, whose weights are `step` bytes apart, the values on a path."""
    for j in range(count):
        v = values + path[j] * K * 4
        for g in range(G):
            w, o = weights + g * step + 4 * j, out + g * K * 4
            for i in range(0, K - K % PANEL, PANEL):
                at, to = v + 4 * i, o + 4 * i
                tile_1(w, 0, at, 4 * K, 0, 1, to, to, 0, at, 0)
            _rest(w, v, 1, K, o)


@kernel
def attend_part(
    q, keys, values, first, seen, paths, path_step, head_stride, longest, out, logs, M, Q, H, K,
    part, parts,
):  # fmt: skip
    row = carray(ints_at(first), (M,))
    count = carray(ints_at(seen), (M,))
    G = Q // H
    scores = np.empty(G * longest, np.float32)
    start = scores.ctypes.data
    nothing = np.zeros(2 * PANEL, np.float32)
    zeros = nothing.ctypes.data
    # Every task is one key-value head of one row. Where threads have no heads of their own,
    # neighbours go to different ones, for later rows see more keys.
    own_h, end_h = heads_of(H, part, parts)
    heads, begin, step = end_h - own_h, part, parts
    if by_heads(H, parts):
        begin, step = 0, 1
    for task in range(begin, M * heads, step):
        m, h = task // heads, own_h + task % heads
        sees = count[m]
        # Slots that are where their positions are, and those after them.
        bent = bends(paths, path_step, m, sees)
        n = stem_of(paths, path_step, m) if bent else sees
        k_start = keys + (row[m] + h * head_stride) * 4
        v_start = values + (row[m] + h * head_stride) * 4
        ask = v_start
        for g in range(G):
            weights, end = start + g * sees * 4, v_start + (g + 1) * n * K * 4 // G
            query = q + (m * Q + h * G + g) * K * 4
            ask = _score(query, k_start, K, n, weights, ask, end)
            if bent:
                path = path_of(paths, path_step, m)
                for j in range(sees - n):
                    dots(query, k_start + path[j] * K * 4, K, 1, weights + (n + j) * 4)
            mass = _softmax(weights, sees)
            if logs:
                carray(floats_at(logs + (m * Q + h * G + g) * 4), (1,))[0] = mass
        o = out + (m * Q + h * G) * K * 4
        # The keys of this thread's next task.
        after = min(task + step, M * heads - 1)
        ask = keys + (row[after // heads] + (own_h + after % heads) * head_stride) * 4
        _mix(start, sees * 4, v_start, n, K, G, zeros, o, ask)
        if bent:
            path = path_of(paths, path_step, m)
            _go_on_along(start + n * 4, sees * 4, v_start, path, sees - n, K, o, G)
    hold(scores)
    hold(nothing)


@for_team
def _attend_shared(p):
    attend_part(*to_fixed_tuple(carray(p, (15,)), 15), part_number(), part_count())


def attend(
    q: int,
    keys: int,
    values: int,
    first: int,
    seen: int,
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
    """softmax(q k^T) v to `out` (M, Q * K), and to `logs` (M, Q), unless 0, the logarithms of the
    denominators. No row sees a slot beyond the first `longest` ones. `paths`, `path_step`: see
    `kernels.tree_paths`; 0: row m sees slots 0 to `seen[m]` - 1."""
    arguments = (
        q, keys, values, first, seen, paths, path_step, head_stride, longest, out, logs, M, Q, H, K
    )  # fmt: skip
    run(attend_part, _attend_shared, arguments, M * Q * longest * K // 4)
