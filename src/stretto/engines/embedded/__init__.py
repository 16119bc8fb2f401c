"""The embedded engine: generation inside the trainer's own process, on one device, with any full-attention model."""

from stretto.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
