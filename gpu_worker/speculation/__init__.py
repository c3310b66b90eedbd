"""Speculative decoding: guess tokens, verify all guesses in one forward, keep those that hold.

The output is that of plain decoding, greedy or seeded: a draft holds exactly when it is the token that would have
been sampled in its place.
"""

from gpu_worker.speculation.ngram import NgramDrafter, NgramProposer
from gpu_worker.speculation.proposer import Drafter, Proposer, SpeculationStats

__all__ = ["Drafter", "NgramDrafter", "NgramProposer", "Proposer", "SpeculationStats"]
