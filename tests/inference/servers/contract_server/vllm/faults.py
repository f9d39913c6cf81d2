"""Faults of the contract server. `POST /test/plant {"fault": NAME, "value": VALUE}` sets one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "CONTRACT_SERVER_FAULTS"
"""Environment variable with faults from the start: a JSON object of names and values."""

DEFAULTS: Mapping[str, Any] = {
    # Seconds before each step.
    "delay": 0.0,
    # Standard deviation in nats of noise on log-probs, as from another order of additions.
    "rounding": 0.0,
    # An update reaches all weights but those of the LM head.
    "forget_head": False,
    # An update changes nothing, and is answered with the right checksums.
    "skip_load": False,
    # An update is answered with a wrong checksum.
    "wrong_sum": False,
    # An update ends the process after it has changed the weights.
    "die_in_update": False,
    # After the first tensor of an update, the worker ends ("die"), or its call fails ("raise").
    "broken_read": None,
    # Cached keys and values are used for all salts.
    "stale_cache": False,
    # A draft head is acknowledged and not loaded, or replaced by a random one.
    "skip_draft": False,
    "random_draft": False,
    # The server says that it has a draft head of this version.
    "draft_version": None,
    # Why the worker extension could not repair speculation.
    "unmended": None,
    # A draft head is answered with a wrong checksum.
    "wrong_draft_sum": False,
    # The process ends after this number of generated tokens.
    "die_after": None,
    # The engine behind the routes ends after this number of tokens, as when its process is killed.
    "core_dies_after": None,
    # A stream ends with an error after this number of tokens.
    "error_after": None,
    # The server breaks the connections of this number of requests.
    "drop": 0,
    # A route that answers with text that is not JSON, and one that never answers.
    "garbage": None,
    "hang": None,
    # What the server is.
    "version": "0.32.0",
    "dev_mode": False,
    "scale_out": False,
    "extension": True,
}


class Faults:
    """The values that are planted."""

    def __init__(self, **own: Any) -> None:
        self.start = {**DEFAULTS, **own, **json.loads(os.environ.get(VARIABLE, "{}"))}
        """The values at the start of the server."""
        self.values = dict(self.start)

    def renew(self) -> None:
        """Take back what was planted since the start."""
        self.values = dict(self.start)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def plant(self, name: str, value: Any) -> None:
        """Set a fault. Raises KeyError for an unknown name."""
        if name not in self.start:
            raise KeyError(f"no fault {name!r}; there are {', '.join(self.start)}")
        self.values[name] = value
