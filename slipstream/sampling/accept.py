"""Accept a draft token only if it equals the target policy's own token.

Verification computes the target's token after every node of a draft tree, with the keyed noise of
that position (`choose`). A draft token is accepted only if it equals that token. So the output does
not depend on the drafter, the number of drafts or the shape of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]
) -> list[int]:
    """Return the path of accepted nodes, starting at the root.

    The chosen tokens of all nodes on the path are emitted; the last one is the bonus token. Node 0
    is the last known token. `parents[i]` < i is the parent of node i (the root's entry is ignored).
    `chosen[i]` is the target's token after node i. If two children of a node hold the same token,
    the first counts.
    """
    path = [0]
    for node in range(1, len(tokens)):
        # Children come after their parents, so one pass finds the whole path.
        if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]:
            path.append(node)
    return path
