"""The names that the configuration accepts are those that the tables hold."""

from typing import get_args

import pytest

from stretto.algorithms.advantages import ADVANTAGES
from stretto.algorithms.aggregation import AGGREGATIONS
from stretto.algorithms.kl import KL_ESTIMATORS
from stretto.algorithms.mismatch import MISMATCH
from stretto.algorithms.policy import LOSSES
from stretto.config.sections import AlgorithmConfig


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("advantage", ADVANTAGES),
        ("loss", LOSSES),
        ("mismatch", MISMATCH),
        ("kl_estimator", KL_ESTIMATORS),
        ("aggregation", AGGREGATIONS),
    ],
)
def test_every_name_of_the_configuration_has_one_row(key, table):
    assert set(get_args(AlgorithmConfig.model_fields[key].annotation)) == set(table)
