"""Fixtures of the sync tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """What a test puts here is closed after it, the last first."""
    things: list[Any] = []
    yield things
    for one in reversed(things):
        one.close()
