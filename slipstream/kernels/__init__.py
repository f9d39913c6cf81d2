"""Compiled CPU kernels (Numba) for the layers of a decoder, in fp32 and bf16.

A decode step of a few rows (tokens) spends most of its time on the overhead of small tensor
operations. These kernels compute each row in one call. Exact mode holds by construction: the same
loop over the same number of elements computes a row, whatever else is in the batch.

Files:

    product, product_amx      matrix products, over the tiles in tile, tile_bf16 and tile_amx
    product_quantized         products with weights of 4 or 8 bits, over tile_quantized
    rows                      norm and gate
    attend, attend_bf16       rotation and attention
    attend_backward(_bf16)    gradients of attention
    tree_paths, move          tokens of draft trees in attention and in the KV cache
    draw, draw_top            tokens with the largest score plus keyed noise
    layers                    all of these for a forward pass, in one call
    draft                     a whole draft of a draft head, in one call
    dots, numeric, avx512     sums, exponential, rounding
    memory                    arrays at addresses, in compiled code
    team                      sharing work among threads
    compiling, processor      compilation and its cache; features of this CPU

The kernels get addresses and sizes, not tensors or models. Nothing checks them: the callers in
`models` and `sampling` are responsible for both.

Shapes: M rows, D hidden width, Q query heads, H key-value heads, G = Q / H, K head width (or the
number of inputs of a product), W inner width of the MLP, V vocabulary.
"""
