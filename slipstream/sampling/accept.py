"""Accept-if-equal: which drafted tokens are the target's own.

Verification computes the target's token after every node of a draft tree, with the noise of that
position (`choose`). A draft counts only where it is that very token, so what comes out does not
depend on who drafted it, how much, or in what shape.
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]
) -> list[int]:
    """Nodes whose chosen tokens are emitted, from the root on; the last one's is the bonus token.

    Node 0 is the last token that is known, `parents[i]` < i the node that node i follows (that of
    the root is not looked at), and `chosen[i]` the target's token after node i. Where two nodes
    hold the same token after the same parent, the first is taken.
    """
    path = [0]
    for node in range(1, len(tokens)):
        # Children come after their parents, so one pass finds the whole path.
        if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]:
            path.append(node)
    return path
