"""How far generation may run ahead, against a model of the whole loop."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.orchestration.fully_async.staleness import lag, may_begin, rolled_back
from stretto.types import Version, VersionSpan


def spans(*versions: tuple[int, int]) -> list[VersionSpan]:
    return [VersionSpan(Version(*version), at, at + 1) for at, version in enumerate(versions)]


def test_lag_is_that_of_the_oldest_token() -> None:
    assert lag(spans((1, 4), (1, 2), (1, 5)), trainer=6) == 4
    assert lag([], trainer=6) == 0


def test_only_versions_of_a_lineage_that_is_lost_are_rolled_back() -> None:
    assert not rolled_back(spans((1, 3), (2, 7)), incarnation=2, restored=3)
    assert rolled_back(spans((2, 7), (1, 4)), incarnation=2, restored=3)


@settings(max_examples=200, deadline=None)
@given(batch=st.integers(1, 5), bound=st.integers(0, 4), slow=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_groups_trained_oldest_first_never_exceed_the_bound_whatever_the_timing(
    batch: int, bound: int, slow: int, seed: int
) -> None:
    """Groups take random times, publications arrive up to `slow` events late; nothing is ever dropped here."""
    chance = random.Random(seed)
    version = {}
    growing: set[int] = set()
    ready: set[int] = set()
    served = trained = begun = 0
    for _ in range(400):
        event = chance.choice(["begin", "begin", "grow", "train", "publish"])
        open_groups = len(growing) + len(ready)
        if event == "begin" and may_begin(
            served=served, trained_batches=trained, open_groups=open_groups, ready=len(ready), batch=batch, bound=bound
        ):
            version[begun] = served
            growing.add(begun)
            begun += 1
        elif event == "grow" and growing:
            one = chance.choice(sorted(growing))
            growing.discard(one)
            ready.add(one)
        elif event == "train":
            oldest = sorted(growing | ready)[:batch]
            if len(oldest) == batch and set(oldest) <= ready:
                assert all(trained - version[group] <= bound for group in oldest)
                ready -= set(oldest)
                trained += 1
        elif event == "publish" and trained - served > chance.randint(0, slow) - 1:
            served = trained
    assert trained, "the loop came to a stand"


@given(batch=st.integers(1, 8), bound=st.integers(0, 8), served=st.integers(0, 50))
def test_the_first_batch_is_always_allowed_and_the_bound_is_tight(batch: int, bound: int, served: int) -> None:
    def allowed(open_groups: int) -> bool:
        return may_begin(
            served=served, trained_batches=served, open_groups=open_groups, ready=0, batch=batch, bound=bound
        )

    assert all(allowed(open_groups) for open_groups in range((bound + 1) * batch))
    assert not allowed((bound + 1) * batch)
