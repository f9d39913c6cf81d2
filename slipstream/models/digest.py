"""Identifies a model by its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Container

from torch import nn

from slipstream.models.sharded import full


def weights_digest(model: nn.Module, *, without: Container[str] = ()) -> str:
    """Return a digest of the names and values of all parameters, 32 hexadecimal digits.

    `without` are names of parameters to leave out. Collective if the model is sharded over
    processes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if name not in without:
            digest.update(name.encode())
            digest.update(full(parameter.detach()).cpu().contiguous().numpy().data)
    return digest.hexdigest()
