"""All layers of a forward pass in one call: what a step of few rows would otherwise spend on calls.

The parts of the other files in a row. Either every thread has its share of each product's outputs,
and threads wait for each other in between; or each takes some of the sequences through all layers
by itself, which reads all weights once a thread, but moves no rows from one core to another. The
same numbers come out as one by one.
"""

from __future__ import annotations

from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.attend import attend_part, by_heads, place_part
from slipstream.kernels.attend_bf16 import attend_bf16_part, place_bf16_part
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at, ints_at
from slipstream.kernels.product import BF16, product_part, some_outputs
from slipstream.kernels.product_amx import BY_MATRIX_UNIT, gated_product_part, narrow_product_part
from slipstream.kernels.rows import add_norm_part, add_part, gate_part
from slipstream.kernels.team import for_team, part_count, part_number, run, wait
from slipstream.kernels.tile import PANEL

WEIGHTS = 10
"""Addresses of a layer's weights, in this order: input norm (0: none), packed qkv and what its sums
begin with, norms of query and key (0: none), packed out, its beginning, norm before the gates,
packed gates, their beginning, packed down. The beginning of `down` is that of `out`."""

_OWN_ROWS = 3
"""Times as many numbers as rows have that a thread but the first needs for itself, to add and norm
rows in."""

_NORMED_ALONE = 1 << 14
"""Up to so many numbers of all rows it does: to wait for each other, and to bring rows from one
core to another, takes longer than the others' share."""

_ROWS_FROM = 16
"""Threads take sequences of their own from one row each to so many numbers of a row on: what moves
from core to core grows with rows times width, and weights with its square (docs/log.md)."""


@kernel
def place_sized(size, arguments, part, parts):
    """`place` of keys and values of `size` bytes a number."""
    if size == BF16:
        place_bf16_part(*arguments, part, parts)
    else:
        place_part(*arguments, part, parts)


@kernel
def _attend_sized(size, arguments, part, parts):
    """`attend`, likewise."""
    if size == BF16:
        attend_bf16_part(*arguments, part, parts)
    else:
        attend_part(*arguments, part, parts)


@kernel
def _copy(x, out, count):
    """Numbers from one place to another."""
    a, o = carray(floats_at(x), (count,)), carray(floats_at(out), (count,))
    for i in range(count):
        o[i] = a[i]


@kernel
def _tap_part(x, aux_layers, stride, M, D, part, parts):
    """Rows of `x` to places `stride` bytes apart. Nobody waits: `x` is written over only after the
    layer's products."""
    for m in range(M * part // parts, M * (part + 1) // parts):
        row = carray(floats_at(x + m * D * 4), (D,))
        kept = carray(floats_at(aux_layers + m * stride), (D,))
        for i in range(D):
            kept[i] = row[i]


@kernel
def _project(x, panels, start, qkv, M, Q, H, K, width, size, part, parts):
    """Queries, keys and values of rows (M, width), ready to be placed."""
    heads = H // parts
    if parts == 1 or not by_heads(H, parts) or heads * K % PANEL:
        product_part(x, panels, start, qkv, M, (Q + 2 * H) * K, width, size, part, parts)
        wait(parts)
        return
    # Of a thread's own heads, so that it need not wait for others.
    own = heads * K // PANEL
    N = (Q + 2 * H) * K
    for first, count in ((0, Q // H * own), (Q * K // PANEL, own), ((Q + H) * K // PANEL, own)):
        begin = first + part * count
        some_outputs(x, panels, start, qkv, M, N, width, size, begin, begin + count)


@kernel
def layers_part(
    weights, layers, final_norm, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated,
    cos, sin, positions, own, first, seen, paths, path_step, head_stride, longest, keys, values,
    layer_step, aux_layers, columns, tapped, given, E, own_rows, M, D, Q, H, K, W, size, part,
    parts,
):  # fmt: skip
    table = carray(ints_at(weights), (layers * WEIGHTS,))
    places = carray(ints_at(columns), (layers if aux_layers else 0,))
    now, other, added = x, spare, 0
    # Few rows are added up and normed by every thread for itself.
    alone = parts == 1 or M * D <= _NORMED_ALONE
    of, shares, result = (0, 1, normed) if alone else (part, parts, normed)
    if alone and part:
        now = own_rows + (part - 1) * _OWN_ROWS * 4 * M * D
        other, result = now + 4 * M * D, now + 8 * M * D
        _copy(x, now, M * D)
    for layer in range(layers):
        t = layer * WEIGHTS
        rows, width = now, D
        if given and layer == 0:
            rows, width = given, E
        elif table[t]:
            rows = result
            add_norm_part(now, added, table[t], eps, other, result, M, D, of, shares)
            if added:
                now, other = other, now
            wait(1 if alone else parts)
        if aux_layers and places[layer] >= 0:
            _tap_part(now, aux_layers + places[layer] * D * 4, tapped * D * 4, M, D, part, parts)
        _project(
            rows, table[t + 1], table[t + 2], qkv, M, Q, H, K, width, size, part, parts
        )  # fmt: skip
        k, v = keys + layer * layer_step, values + layer * layer_step
        placed = (
            qkv, table[t + 3], eps, cos, sin, positions, q, k, v, own, head_stride, M, Q, H, K
        )  # fmt: skip
        place_sized(size, placed, part, parts)
        if not by_heads(H, parts):
            wait(parts)
        looked = (
            q, k, v, first, seen, paths, path_step, head_stride, longest, mixed, 0, M, Q, H, K
        )  # fmt: skip
        _attend_sized(size, looked, part, parts)
        wait(parts)
        product_part(mixed, table[t + 4], table[t + 5], delta, M, D, Q * K, size, part, parts)
        wait(parts)
        add_norm_part(now, delta, table[t + 6], eps, other, result, M, D, of, shares)
        now, other = other, now
        wait(1 if alone else parts)
        if size == BF16 and BY_MATRIX_UNIT and W % PANEL == 0:
            gated_product_part(result, table[t + 7], table[t + 8], gated, M, W, D, part, parts)
            wait(parts)
            narrow_product_part(gated, table[t + 9], table[t + 5], delta, M, D, W, part, parts)
        else:
            product_part(result, table[t + 7], table[t + 8], gates, M, 2 * W, D, size, part, parts)
            wait(parts)
            gate_part(gates, gated, M, W, part, parts)
            wait(parts)
            product_part(gated, table[t + 9], table[t + 5], delta, M, D, W, size, part, parts)
        added = delta
        wait(parts)
    if final_norm:
        add_norm_part(now, added, final_norm, eps, other, normed, M, D, part, parts)
    else:
        add_part(now, added, normed, M, D, part, parts)


@kernel
def _cut(first, M, part, parts):
    """The row at which a part begins: the one nearest to an even share that is the first of a
    sequence."""
    begin = carray(ints_at(first), (M,))
    up = down = M * part // parts
    while 0 < up < M and begin[up] == begin[up - 1]:
        up += 1
    while 0 < down < M and begin[down] == begin[down - 1]:
        down -= 1
    even = M * part // parts
    return up if up - even < even - down else down


@kernel
def _by_sequences(first, M, D, size, parts):
    """Whether threads do better with sequences of their own: rows are next to free beside reading
    the weights, and shares are even."""
    if size != BF16 or not BY_MATRIX_UNIT or parts == 1 or M // parts * _ROWS_FROM < D:
        return False
    for part in range(parts):
        share = _cut(first, M, part + 1, parts) - _cut(first, M, part, parts)
        if share * parts * 4 > M * 5:
            return False
    return True


@kernel
def room_from(row, spare, delta, qkv, q, mixed, gates, gated, D, Q, H, K, W, size):
    """Where the buffers of `layers` are for who begins at a row. Of `gated` each row has room for
    fp32, which it is in where it cannot be narrow."""
    return (
        spare + 4 * D * row, delta + 4 * D * row, qkv + 4 * (Q + 2 * H) * K * row,
        q + size * Q * K * row, mixed + 4 * Q * K * row, gates + 8 * W * row,
        gated + 4 * W * row,
    )  # fmt: skip


@kernel
def _layers(
    weights, layers, final_norm, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated,
    cos, sin, positions, own, first, seen, paths, path_step, head_stride, longest, keys, values,
    layer_step, aux_layers, columns, tapped, given, E, own_rows, M, D, Q, H, K, W, size, part,
    parts,
):  # fmt: skip
    m, rows = 0, M
    if _by_sequences(first, M, D, size, parts):
        m = _cut(first, M, part, parts)
        rows = _cut(first, M, part + 1, parts) - m
        part, parts = 0, 1
    spare, delta, qkv, q, mixed, gates, gated = room_from(
        m, spare, delta, qkv, q, mixed, gates, gated, D, Q, H, K, W, size
    )
    if aux_layers:
        aux_layers += 4 * tapped * D * m
    if given:
        given += 4 * E * m
    layers_part(
        weights, layers, final_norm, eps, x + 4 * D * m, spare, delta, normed + 4 * D * m,
        qkv, q, mixed, gates, gated, cos, sin, positions + 8 * m, own + 8 * m,
        first + 8 * m, seen + 8 * m, paths + 8 * path_step * m, path_step, head_stride, longest,
        keys, values, layer_step, aux_layers, columns, tapped, given, E, own_rows,
        rows, D, Q, H, K, W, size, part, parts,
    )  # fmt: skip


@for_team
def _layers_shared(p):
    _layers(*to_fixed_tuple(carray(p, (39,)), 39), part_number(), part_count())


def own_numbers(rows: int, width: int) -> int:
    """What `own_rows` of `layers` has room for, for each thread but the first, where there are at
    most so many rows."""
    return _OWN_ROWS * min(rows * width, _NORMED_ALONE)


def layers(*arguments: int, work: int) -> None:
    """Run `layers` layers over M rows. In this order:

    weights: the address of `WEIGHTS` addresses per layer; layers; final_norm; eps;
    buffers: x (M, D), written over; spare, delta, normed (M, D each); qkv (M, (Q + 2H) K);
    q, mixed (M, Q K); gates (M, 2W); gated (M + `ROWS_BEYOND` / 2, W). At the end `normed` is the
    normed sum, or the sum where `final_norm` is 0.
    cos, sin, positions, own, first, seen, paths, path_step, head_stride, longest: as in `attend`;
    keys, values: those of layer 0, `layer_step` bytes from layer to layer;
    aux_layers (M, tapped, D), written: the inputs of some layers, before any norm (0: none);
    columns: int64, for each layer its place among these, or -1; tapped;
    given (M, E): what the products of the first layer take in place of its input and norm, as
    packed for E inputs (0: none); E;
    own_rows: room for `own_numbers` numbers for each thread but the first;
    M, D, Q, H, K, W; size: bytes of a packed weight, and
    of a key's and a value's numbers (2: they lie as in `attend_bf16`).
    """
    run(layers_part, _layers_shared, arguments, work)
