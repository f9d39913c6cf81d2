"""Scorers of response texts, one file per kind of task. They are pure functions of text.

Each file has a `compute_score` with verl's arguments; `rewards.functions` selects it by a row's
`data_source`. Scorers know nothing of samples and tokens. Shared code is in `boxed`, `latex`,
`number`, `outputs` and `truth`. Scorers that compare by value call `math_verified`.
"""
