"""Checkpoints on disk. Each one is complete or absent, has checksums, and contains no pickle.

`manager`: folders, tracker file, pruning. `tree`: nested values with tensors in one file. `state`:
file layout and `state.json`. `layout`: find the parts of a checkpoint. `interrupt`: Ctrl-C.
"""
