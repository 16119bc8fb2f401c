"""What every rollout engine must do with a publication: prepare, commit, cancel, and refuse after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_helpers import Factory, Served, nudge, request, run

from stretto.engines import EngineError
from stretto.types import Version, VersionSpan


@pytest.fixture
def served(serve: Factory, tiny_model: Path) -> Served:
    return serve(tiny_model)


@pytest.mark.parametrize("version", [Version(1, 0), Version(0, 9)])
def test_a_version_that_is_not_newer_is_refused_and_the_engine_serves_on(served: Served, version: Version) -> None:
    with pytest.raises(EngineError, match="not newer"):
        served.engine.prepare(version)
    assert len(run(served.engine, request(0, served.prompt(4)))) == 1


def refuses(served: Served, reason: str) -> None:
    """No token is computed now, for this reason."""
    with pytest.raises(EngineError, match=reason):
        list(served.engine.generate([request(0, served.prompt(4))], deadline_s=0.05))


def serves(served: Served, version: Version) -> None:
    """Tokens are computed now, by this version."""
    completion = run(served.engine, request(0, served.prompt(4)))[0, 0]
    assert completion.version_spans == (VersionSpan(version, 0, 8),)
    assert served.engine.version == version


def test_a_prepared_version_must_be_committed_before_a_token_is_computed(served: Served) -> None:
    served.engine.prepare(Version(1, 1))
    served.engine.resume()
    refuses(served, r"1\) was prepared and neither committed nor cancelled")
    served.engine.commit(Version(1, 1))
    serves(served, Version(1, 1))


def test_a_commit_does_not_undo_a_pause_and_a_resume_no_prepare(served: Served) -> None:
    served.engine.pause()
    served.engine.prepare(Version(1, 1))
    served.engine.commit(Version(1, 1))
    refuses(served, "paused")
    served.engine.prepare(Version(1, 2))
    served.engine.resume()
    refuses(served, "prepared")
    served.engine.cancel(Version(1, 2))
    serves(served, Version(1, 1))


@pytest.mark.parametrize("end", ["commit", "cancel", "fail"])
def test_only_the_prepared_version_can_be_committed_cancelled_or_failed(served: Served, end: str) -> None:
    with pytest.raises(EngineError, match="not the prepared one, which is None"):
        getattr(served.engine, end)(Version(1, 1))
    serves(served, Version(1, 0))
    served.engine.prepare(Version(1, 1))
    with pytest.raises(EngineError, match="not the prepared one"):
        getattr(served.engine, end)(Version(1, 2))
    refuses(served, "prepared")
    served.engine.commit(Version(1, 1))
    serves(served, Version(1, 1))


def test_a_cancelled_publication_leaves_the_old_version_serving(served: Served) -> None:
    one = request(0, served.prompt(13), (4, 5))
    expected = run(served.engine, one)
    served.publisher.open(Version(1, 1))
    served.publisher.cancel()
    assert run(served.engine, one) == expected
    with pytest.raises(RuntimeError, match="nothing to cancel"):
        served.publisher.cancel()
    serves(served, served.publish(1, lambda: nudge(served.reference, seed=0)))


def test_after_a_failed_publication_only_a_full_one_lets_the_engine_serve(served: Served) -> None:
    served.engine.prepare(Version(1, 1))
    served.engine.fail(Version(1, 1))
    served.engine.resume()
    refuses(served, "full publication must commit")
    served.engine.prepare(Version(1, 2))
    served.engine.cancel(Version(1, 2))
    refuses(served, "full publication must commit")
    serves(served, served.publish(2))


def test_a_version_that_replaces_a_prepared_one_cannot_be_cancelled_back_to_the_old(served: Served) -> None:
    served.engine.prepare(Version(1, 1))
    served.engine.prepare(Version(1, 2))
    served.engine.cancel(Version(1, 2))
    refuses(served, "full publication must commit")
