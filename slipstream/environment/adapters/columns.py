"""The columns of a row, as environments of other libraries get them."""

from __future__ import annotations

import copy
from typing import Any

from slipstream.types import Prompt


def columns_of(row: Prompt) -> dict[str, Any]:
    """Return a copy of the columns of a row by name; those of `extra_info` are columns, too."""
    return {
        **copy.deepcopy(row.extra_info),
        "prompt": copy.deepcopy(row.messages),
        "data_source": row.data_source,
        "ability": row.ability,
        "ground_truth": row.ground_truth,
    }
