"""Two processes for the tests of sharding."""

from collections.abc import Iterator

import pytest
import torch
from trainer_ranks import Ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks of one gloo group."""
    ranks = Ranks(2, tmp_path_factory.mktemp("pair"))
    yield ranks
    ranks.close()
