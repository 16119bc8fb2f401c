"""Trainers."""

from stretto.trainers.base import StepReport, Trainer

__all__ = ["StepReport", "Trainer"]
