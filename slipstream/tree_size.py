"""How many candidates a draft tree has.

The configuration's rules, draft plans, the PyTorch code and the compiled kernels all need this
number. It is here, below all of them, so that it is written once; the kernels compile this very
function (`kernels.compiling` counts this file as one of theirs).
"""

from __future__ import annotations


def candidate_count(levels: int, topk: int) -> int:
    """Candidates of the first `levels` levels of a draft tree, per request.

    The first level has `topk` candidates. Of each level, the `topk` best are followed, and each of
    these has `topk` candidates on the next level. So this is also the number of the first candidate
    of level `levels`, counted from 0.
    """
    return topk + (levels - 1) * topk * topk if levels else 0
