"""Drafting: what is proposed, by whom, and how much. Verification is the engine's."""

from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree, Proposer

__all__ = [
    "OFF",
    "DraftBatch",
    "DraftPlan",
    "DraftTree",
    "EagleProposer",
    "HistoryProposer",
    "Proposer",
]
