"""Speculative decoding: propose draft tokens, verify them in one forward, keep the accepted ones.

The output equals that of plain decoding, greedy or seeded: a draft is accepted exactly if it is the token that
would have been sampled in its place. Preparation gives a sequence its drafter; the scheduler asks it.

    ngram     drafts from earlier occurrences of the last tokens
    head      drafts that the runtime makes with a head of the model
    proposer  the interface of draft sources, and how many drafts were accepted
"""

from petiole.gpu_worker.speculation.head import HeadDrafter, HeadProposer
from petiole.gpu_worker.speculation.ngram import NgramDrafter, NgramProposer
from petiole.gpu_worker.speculation.proposer import Drafter, Launched, Price, Proposer, SpeculationStats

__all__ = [
    "Drafter",
    "HeadDrafter",
    "HeadProposer",
    "Launched",
    "NgramDrafter",
    "NgramProposer",
    "Price",
    "Proposer",
    "SpeculationStats",
]
