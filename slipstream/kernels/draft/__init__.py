"""Compiled CPU kernels of draft heads: prefill, draft chains and trees, selection of nodes."""
