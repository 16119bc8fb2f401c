"""Where the plan of updates was before all trainers shared it."""

from stretto.trainers.updates import Update, plan_updates

__all__ = ["Update", "plan_updates"]
