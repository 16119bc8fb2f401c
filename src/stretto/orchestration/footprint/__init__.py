"""What one process of a run will hold in memory at most, from shapes alone: nothing is loaded, nothing computed."""

from __future__ import annotations

from stretto.orchestration.footprint.megatron import replicas
from stretto.orchestration.footprint.shapes import Cut, Footprint, ServerFootprint, Sizes, Slabs, passes, slabs
from stretto.orchestration.footprint.whole import Forecast, footprint, forecast

__all__ = [
    "Cut",
    "Footprint",
    "Forecast",
    "ServerFootprint",
    "Sizes",
    "Slabs",
    "footprint",
    "forecast",
    "passes",
    "replicas",
    "slabs",
]
