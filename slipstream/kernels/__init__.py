"""Compiled CPU kernels (Numba) for the layers of a decoder: in fp32 and bf16.

A decode step of a few rows spends most of its time calling small tensor operations; here each row
is done in one go. Exact mode holds by construction: a row is computed by the same loop over the
same number of elements, whatever else is in the batch. Files: `product` and `product_amx`
(matrix products) over `tile`, `tile_bf16` and `tile_amx`, `rows` (norm, gate), `attend` and
`attend_bf16` (rotation, attention), `draw` (a token with its noise); all of these in a row are
`layers` (a forward pass) and `chain` (a whole draft). Below them `numeric` (exponential, sums,
rounding), `memory` (addresses in compiled code), `team` (sharing work out among threads),
`compiling` and `processor` (what this one can do). Knows addresses and sizes, not tensors or
models; what calls it, in `models` and `sampling`, answers for both.
"""
