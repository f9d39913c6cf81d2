"""Run all layers of a forward pass in one call, to avoid call overhead for few rows.

The file combines the kernels of the other files. Threads share the work in one of two ways. Either
each thread computes its share of every product's outputs, and threads wait for each other in
between. Or each thread runs some of the sequences through all layers: then each thread reads all
weights, but no rows move between cores. Both give the same results as one call per operation.
"""

from __future__ import annotations

from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.attend import attend_part, by_heads, place_part
from slipstream.kernels.attend_bf16 import attend_bf16_part, place_bf16_part
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at, ints_at
from slipstream.kernels.product import BF16, product_panels, product_part
from slipstream.kernels.product_amx import USE_AMX, bf16_rows_product_part, gated_product_part
from slipstream.kernels.product_quantized import quantized_product_part
from slipstream.kernels.rows import add_norm_part, add_part, gate_part
from slipstream.kernels.team import for_team, part_count, part_number, run, wait
from slipstream.kernels.tile import PANEL

WEIGHTS = 10
"""Number of addresses of a layer's weights. In this order: input norm (0: none), packed qkv and its
initial sums, norms of query and key (0: none), packed out and its initial sums, norm before the
gates, packed gates and their initial sums, packed down. `down` has the initial sums of `out`."""

_OWN_ROWS = 3
"""Each thread but the first needs buffers for this number of copies of all rows, to add and norm
rows in."""

_REPLICATED_NORM = 1 << 14
"""Up to this number of elements (rows times width), every thread adds and norms all rows itself.
This takes less time than waiting for other threads and moving their rows between cores."""

_ROWS_FROM = 16
"""Threads run their own sequences if each has at least one row per this number of elements of a
row. The traffic between cores grows with rows times width, the weights with width squared
(docs/log/amx.md)."""


@kernel
def place_sized(size, arguments, part, parts):
    """Call `place` for keys and values of `size` bytes per number."""
    if size == BF16:
        place_bf16_part(*arguments, part, parts)
    else:
        place_part(*arguments, part, parts)


@kernel
def _attend_sized(size, arguments, part, parts):
    """Call `attend` for keys and values of `size` bytes per number."""
    if size == BF16:
        attend_bf16_part(*arguments, part, parts)
    else:
        attend_part(*arguments, part, parts)


@kernel
def _copy(x, out, count):
    """Copy `count` fp32 numbers."""
    a, o = carray(floats_at(x), (count,)), carray(floats_at(out), (count,))
    for i in range(count):
        o[i] = a[i]


@kernel
def _copy_aux_part(x, aux_layers, stride, M, D, part, parts):
    """Copy one of `parts` parts of the rows of `x` to rows `stride` bytes apart.

    Threads need not wait, because `x` is overwritten only after the layer's products.
    """
    for m in range(M * part // parts, M * (part + 1) // parts):
        row = carray(floats_at(x + m * D * 4), (D,))
        copy = carray(floats_at(aux_layers + m * stride), (D,))
        for i in range(D):
            copy[i] = row[i]


@kernel
def multiply_part(x, panels, start, out, M, N, K, size, bits, part, parts):
    """Compute one of `parts` parts of a product, with quantized weights if `bits` is not 0."""
    if bits:
        quantized_product_part(x, panels, start, out, M, N, K, bits, part, parts)
    else:
        product_part(x, panels, start, out, M, N, K, size, part, parts)


@kernel
def _project(x, panels, start, qkv, M, Q, H, K, width, size, bits, part, parts):
    """Compute queries, keys and values of rows (M, width), as input for `place`."""
    heads = H // parts
    if parts == 1 or bits or not by_heads(H, parts) or heads * K % PANEL:
        N = (Q + 2 * H) * K
        multiply_part(x, panels, start, qkv, M, N, width, size, bits, part, parts)
        wait(parts)
        return
    # Each thread computes the projections of its own heads, so that it need not wait for others.
    own = heads * K // PANEL
    N = (Q + 2 * H) * K
    for first, count in ((0, Q // H * own), (Q * K // PANEL, own), ((Q + H) * K // PANEL, own)):
        begin = first + part * count
        product_panels(x, panels, start, qkv, M, N, width, size, begin, begin + count)


@kernel
def layers_part(
    weights, layers, final_norm, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated,
    cos, sin, positions, own, first, seen, table, block, paths, path_step, head_stride, longest,
    keys, values, layer_step, aux_layers, columns, aux_count, qkv_input, E, own_rows,
    M, D, Q, H, K, W, size, bits, part, parts,
):  # fmt: skip
    """Compute one of `parts` parts of `layers`."""
    w = carray(ints_at(weights), (layers * WEIGHTS,))
    places = carray(ints_at(columns), (layers if aux_layers else 0,))
    now, other, added = x, spare, 0
    # If rows are few, every thread adds and norms all of them itself.
    alone = parts == 1 or M * D <= _REPLICATED_NORM
    of, shares, result = (0, 1, normed) if alone else (part, parts, normed)
    if alone and part:
        now = own_rows + (part - 1) * _OWN_ROWS * 4 * M * D
        other, result = now + 4 * M * D, now + 8 * M * D
        _copy(x, now, M * D)
    for layer in range(layers):
        t = layer * WEIGHTS
        rows, width = now, D
        if qkv_input and layer == 0:
            rows, width = qkv_input, E
        elif w[t]:
            rows = result
            add_norm_part(now, added, w[t], eps, other, result, M, D, of, shares)
            if added:
                now, other = other, now
            wait(1 if alone else parts)
        if aux_layers and places[layer] >= 0:
            column = aux_layers + places[layer] * D * 4
            _copy_aux_part(now, column, aux_count * D * 4, M, D, part, parts)
        _project(rows, w[t + 1], w[t + 2], qkv, M, Q, H, K, width, size, bits, part, parts)
        k, v = keys + layer * layer_step, values + layer * layer_step
        place_arguments = (
            qkv, w[t + 3], eps, cos, sin, positions, q, k, v, own, head_stride, M, Q, H, K
        )  # fmt: skip
        place_sized(size, place_arguments, part, parts)
        if not by_heads(H, parts):
            wait(parts)
        attend_arguments = (
            q, k, v, first, seen, table, block, paths, path_step, head_stride, longest, mixed, 0,
            M, Q, H, K,
        )  # fmt: skip
        _attend_sized(size, attend_arguments, part, parts)
        wait(parts)
        multiply_part(mixed, w[t + 4], w[t + 5], delta, M, D, Q * K, size, bits, part, parts)
        wait(parts)
        add_norm_part(now, delta, w[t + 6], eps, other, result, M, D, of, shares)
        now, other = other, now
        wait(1 if alone else parts)
        if size == BF16 and USE_AMX and W % PANEL == 0 and not bits:
            gated_product_part(result, w[t + 7], w[t + 8], gated, M, W, D, part, parts)
            wait(parts)
            bf16_rows_product_part(gated, w[t + 9], w[t + 5], delta, M, D, W, part, parts)
        else:
            multiply_part(result, w[t + 7], w[t + 8], gates, M, 2 * W, D, size, bits, part, parts)
            wait(parts)
            gate_part(gates, gated, M, W, part, parts)
            wait(parts)
            multiply_part(gated, w[t + 9], w[t + 5], delta, M, D, W, size, bits, part, parts)
        added = delta
        wait(parts)
    if final_norm:
        add_norm_part(now, added, final_norm, eps, other, normed, M, D, part, parts)
    else:
        add_part(now, added, normed, M, D, part, parts)


@kernel
def _cut(first, M, part, parts):
    """Return the first row of a part: the start of a sequence that is nearest to an even share."""
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
    """Return whether it is faster if each thread runs its own sequences.

    This is so if computing rows takes little time compared to reading the weights, and if the
    shares are even.
    """
    if size != BF16 or not USE_AMX or parts == 1 or M // parts * _ROWS_FROM < D:
        return False
    for part in range(parts):
        share = _cut(first, M, part + 1, parts) - _cut(first, M, part, parts)
        if share * parts * 4 > M * 5:
            return False
    return True


@kernel
def room_from(row, spare, delta, qkv, q, mixed, gates, gated, D, Q, H, K, W, size):
    """Return the addresses of the buffers of `layers` for a thread that starts at a row.

    Each row of `gated` has room for fp32, which it holds if it cannot be bf16.
    """
    return (
        spare + 4 * D * row, delta + 4 * D * row, qkv + 4 * (Q + 2 * H) * K * row,
        q + size * Q * K * row, mixed + 4 * Q * K * row, gates + 8 * W * row,
        gated + 4 * W * row,
    )  # fmt: skip


@kernel
def _layers(
    weights, layers, final_norm, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated,
    cos, sin, positions, own, first, seen, table, block, paths, path_step, head_stride, longest,
    keys, values, layer_step, aux_layers, columns, aux_count, qkv_input, E, own_rows,
    M, D, Q, H, K, W, size, bits, part, parts,
):  # fmt: skip
    """Run `layers_part` over the outputs or over the sequences of this part."""
    m, rows = 0, M
    if _by_sequences(first, M, D, size, parts):
        m = _cut(first, M, part, parts)
        rows = _cut(first, M, part + 1, parts) - m
        part, parts = 0, 1
    spare, delta, qkv, q, mixed, gates, gated = room_from(
        m, spare, delta, qkv, q, mixed, gates, gated, D, Q, H, K, W, size
    )
    if aux_layers:
        aux_layers += 4 * aux_count * D * m
    if qkv_input:
        qkv_input += 4 * E * m
    layers_part(
        weights, layers, final_norm, eps, x + 4 * D * m, spare, delta, normed + 4 * D * m,
        qkv, q, mixed, gates, gated, cos, sin, positions + 8 * m, own + 8 * m,
        first + 8 * m, seen + 8 * m, table, block, paths + 8 * path_step * m, path_step,
        head_stride, longest, keys, values, layer_step, aux_layers, columns, aux_count, qkv_input,
        E, own_rows, rows, D, Q, H, K, W, size, bits, part, parts,
    )  # fmt: skip


@for_team
def _layers_shared(p):
    _layers(*to_fixed_tuple(carray(p, (42,)), 42), part_number(), part_count())


def own_numbers(rows: int, width: int) -> int:
    """Return the size of `own_rows` of `layers`, in numbers, for each thread but the first.

    It is enough for up to `rows` rows of `width` numbers.
    """
    return _OWN_ROWS * min(rows * width, _REPLICATED_NORM)


def layers(*arguments: int, work: int) -> None:
    """Run `layers` layers over M rows. Arguments, in this order:

    weights: address of `WEIGHTS` addresses per layer; layers: number of layers; final_norm; eps;
    buffers: x (M, D), which is overwritten; spare, delta, normed (M, D each); qkv
    (M, (Q + 2H) K); q, mixed (M, Q K); gates (M, 2W); gated (M + `ROWS_BEYOND` / 2, W). The result
    is in `normed`: the normed sum, or the sum if `final_norm` is 0;
    cos, sin, positions, own, first, seen, table, block, paths, path_step, head_stride, longest: as
    in `attend`;
    keys, values: addresses for layer 0; layer_step: bytes from layer to layer;
    aux_layers (M, aux_count, D): output for the inputs of some layers, before any norm (0: none);
    columns: int64, the index of each layer among these, or -1; aux_count;
    qkv_input (M, E): input of the q, k and v projections of the first layer, in place of its normed
    input; the weights must be packed for E inputs (0: none); E;
    own_rows: buffer of `own_numbers` numbers for each thread but the first;
    M, D, Q, H, K, W; size: bytes of a packed weight, and of the numbers of keys and values (with 2
    they have the layout of `attend_bf16`); bits: 4 or 8 if the weights of the products are packed
    by `product_quantized` instead, else 0.
    """
    run(layers_part, _layers_shared, arguments, work)
