"""Checkpoints that the Megatron tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_helpers import write_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by kind."""
    return write_models(tmp_path_factory.mktemp("megatron-models"))
