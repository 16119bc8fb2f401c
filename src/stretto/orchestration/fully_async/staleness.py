"""How old the weights of a sample are, and how far generation may run ahead: pure functions of version numbers."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.types import VersionSpan


def lag(spans: Iterable[VersionSpan], trainer: int) -> int:
    """Versions between the weights that are trained, number `trainer`, and those of the sample's oldest token."""
    return trainer - min((span.version.number for span in spans), default=trainer)


def rolled_back(spans: Iterable[VersionSpan], incarnation: int, restored: int) -> bool:
    """Whether a token is of a version that the surviving lineage does not have.

    The lineage of `incarnation` began at version number `restored`, which earlier incarnations had too.
    """
    return any(version.incarnation < incarnation and version.number > restored for version, _, _ in spans)


def may_begin(*, served: int, trained_batches: int, open_groups: int, ready: int, batch: int, bound: int) -> bool:
    """Whether one more group may be begun with weights of version number `served`.

    Groups are trained `batch` at a time, oldest first, and batch number n is trained with version n: a group that would
    be in batch n is within the `bound` on staleness if ``served >= n - bound``. Beyond what the bound asks, nothing is
    begun while a whole batch waits for the trainer: it would only be older when its turn comes.
    """
    number = trained_batches + open_groups // batch
    waits_enough = bound > 0 and ready >= batch
    return served >= number - bound and not waits_enough
