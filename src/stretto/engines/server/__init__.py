"""Engines that are servers: a process of their own, spoken to over HTTP. What differs between them is a dialect."""

from stretto.engines.server.engine import ServerEngine

__all__ = ["ServerEngine"]
