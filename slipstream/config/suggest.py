"""Finds existing keys that are similar to an unknown key, for error messages.

`load` and `docs` use it.
"""

from __future__ import annotations

import difflib

from slipstream.config.tree import options


def nearest_keys(key: str, limit: int = 5) -> list[str]:
    """Return up to `limit` existing keys that are similar to `key`, the most similar first.

    A key is similar if the whole key or its last name is similar.
    """
    known = options()
    scored: dict[str, float] = {}
    matcher = difflib.SequenceMatcher()
    matcher.set_seq2(key)
    leaf_matcher = difflib.SequenceMatcher()
    leaf_matcher.set_seq2(key.rpartition(".")[2])
    for candidate, option in known.items():
        matcher.set_seq1(candidate)
        leaf_matcher.set_seq1(option.name)
        whole = matcher.ratio() if matcher.quick_ratio() > 0.8 else 0.0
        leaf = leaf_matcher.ratio() if leaf_matcher.quick_ratio() > 0.75 else 0.0
        if whole > 0.8 or leaf > 0.75:
            scored[candidate] = max(whole, leaf)
    # Equally similar keys keep the order of the schema, which starts with common options.
    return sorted(scored, key=lambda candidate: -scored[candidate])[:limit]


def unknown_key(key: str) -> str:
    """Return the message for a key that does not exist."""
    near = nearest_keys(key)
    if not near:
        return f"{key}: there is no such option; `slipstream config` lists all options"
    return f"{key}: there is no such option; did you mean {' or '.join(near)}?"
