"""What a response's text is worth, by kind of task: a file each, pure functions of text.

Each has a `compute_score` with VERL's arguments; `rewards.functions` finds it by a row's
`data_source`. They know nothing of samples, tokens or each other, but `boxed` and `latex`, which
several build on.
"""
