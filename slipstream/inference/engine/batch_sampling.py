"""The sampling settings of a batch of requests, as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.inference.engine.request import Running
from slipstream.sampling.choose import SamplingRows


class BatchSampling:
    """The request ids and sampling settings of a batch. It is made once per batch, not per step."""

    def __init__(self, requests: Sequence[Running], device: torch.device) -> None:
        self.names = [request.request_id for request in requests]
        self.rows = sampling_rows(requests, device)
        self._repeated = {1: self.rows}

    def repeated(self, width: int) -> SamplingRows:
        """Settings for `width` rows per request, the rows of a request next to each other."""
        if width not in self._repeated:
            self._repeated[width] = self.rows.repeated(width)
        return self._repeated[width]


def sampling_rows(requests: Sequence[Running], device: torch.device) -> SamplingRows:
    """The sampling settings of `requests` as tensors, one row per request."""
    params = [r.request.params for r in requests]
    return SamplingRows.of(
        [r.key for r in requests],
        temperatures=[p.temperature for p in params],
        top_ks=[p.top_k for p in params],
        top_ps=[p.top_p for p in params],
        min_ps=[p.min_p for p in params],
        device=device,
    )
