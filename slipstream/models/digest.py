"""Identifies a model by its weights."""

from __future__ import annotations

import hashlib

from torch import nn


def weights_digest(model: nn.Module) -> str:
    """Return a digest of the names and values of all parameters, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
