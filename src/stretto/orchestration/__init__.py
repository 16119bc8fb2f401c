"""Orchestration: the loop, and putting its parts together."""
