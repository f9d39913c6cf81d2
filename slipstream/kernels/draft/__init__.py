"""Compiled CPU kernels for draft heads: prefill, draft chains and trees, selection of nodes."""
