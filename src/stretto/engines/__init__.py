"""Rollout engines."""

from stretto.engines.base import EngineError, RolloutEngine

__all__ = ["EngineError", "RolloutEngine"]
