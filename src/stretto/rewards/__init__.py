"""Verifiers and adapters for the signatures people already have, in worker processes."""

from stretto.rewards.pending import PendingScores
from stretto.rewards.pool import RewardPool
from stretto.rewards.sample import Sample

__all__ = ["PendingScores", "RewardPool", "Sample"]
