"""A publication's protocol, and the planned transport that carries it inside a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from stretto.models.language import Piece, WeightMap, row
from stretto.sync.layout import Atoms
from stretto.sync.layouts import checkpoint_layout, replica_layout
from stretto.sync.plan import Plan
from stretto.sync.publication import Publisher
from stretto.sync.transports import PlannedTransport
from stretto.types import Version


class Diary:
    """Stands on both sides of a publisher and writes down what it is asked, failing where it is told to."""

    name = "diary"

    def __init__(self, fails_at: str = "", *, touched: bool = True):
        self.entries: list[object] = []
        self.fails_at, self.touched = fails_at, touched

    def _note(self, entry: str, version: Version | None = None) -> None:
        self.entries.append(entry if version is None else (entry, version))
        if entry == self.fails_at:
            raise RuntimeError(f"{entry} failed")

    def prepare(self, version: Version) -> None:
        self._note("prepare", version)

    def transfer(self, version: Version) -> int:
        self._note("transfer", version)
        return 7

    def verify(self) -> None:
        self._note("verify")

    def commit(self, version: Version) -> None:
        self._note("commit", version)

    def cancel(self, version: Version) -> None:
        self._note("cancel", version)

    def fail(self, version: Version) -> None:
        self._note("fail", version)


def test_a_publication_is_prepared_transferred_verified_committed_in_this_order() -> None:
    diary = Diary()
    publisher = Publisher(diary, diary)
    publisher.open(Version(2, 5))
    assert diary.entries == [("prepare", Version(2, 5))]
    assert publisher.close() == 7
    assert diary.entries[1:] == [("transfer", Version(2, 5)), "verify", ("commit", Version(2, 5))]
    assert publisher.transport == "diary"


@pytest.mark.parametrize("touched", [True, False])
@pytest.mark.parametrize("step", ["transfer", "verify"])
def test_a_failure_before_the_commit_reaches_the_trainer_and_the_engine(step: str, touched: bool) -> None:
    diary = Diary(fails_at=step, touched=touched)
    publisher = Publisher(diary, diary)
    publisher.open(Version(1, 1))
    with pytest.raises(RuntimeError, match=f"{step} failed"):
        publisher.close()
    assert diary.entries[-1] == ("fail" if touched else "cancel", Version(1, 1)), "what nobody wrote to serves on"
    with pytest.raises(RuntimeError, match="its transfer has begun"):
        publisher.cancel()

    diary.fails_at = ""
    publisher.open(Version(1, 2))
    publisher.close()
    assert diary.entries[-1] == ("commit", Version(1, 2))


def test_a_publication_can_be_cancelled_until_its_transfer() -> None:
    diary = Diary()
    publisher = Publisher(diary, diary)
    with pytest.raises(RuntimeError, match="nothing to cancel"):
        publisher.cancel()
    publisher.open(Version(1, 1))
    publisher.cancel()
    assert diary.entries == [("prepare", Version(1, 1)), ("cancel", Version(1, 1))]
    publisher.open(Version(1, 1))
    publisher.close()
    with pytest.raises(RuntimeError, match="nothing to cancel"):
        publisher.cancel()
    assert diary.entries[-1] == ("commit", Version(1, 1))


def test_an_engine_that_refuses_the_version_opens_no_publication() -> None:
    diary = Diary(fails_at="prepare")
    publisher = Publisher(diary, diary)
    with pytest.raises(RuntimeError, match="prepare failed"):
        publisher.open(Version(1, 1))
    diary.fails_at = ""
    publisher.open(Version(1, 2))
    assert publisher.close() == 7


def tensors() -> dict[str, Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


def buffers() -> dict[str, Tensor]:
    return {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}


def local(source: Callable[[], Mapping[str, Tensor]], target: Mapping[str, Tensor]) -> PlannedTransport:
    """Carries float32 tensors into an engine of one process that has `a` in bfloat16 and `b` in float32."""
    rows = (row(Piece("a", "2 3")), row(Piece("b", "4", dtype="float32")))
    atoms = Atoms.of(WeightMap(family="test", sizes={}, rows=rows, layer_count=1))
    plan = Plan.of(checkpoint_layout(atoms, "float32"), replica_layout(atoms, "bfloat16", 1), [0])
    return PlannedTransport(plan, 0, source, target, torch.device("cpu"))


def test_a_local_transfer_copies_every_tensor_and_counts_the_bytes_written() -> None:
    source, target = tensors(), buffers()
    transport = local(lambda: source, target)
    assert transport.name == "local"
    assert transport.transfer(Version(1, 1)) == 6 * 2 + 4 * 4
    transport.verify()
    assert target["a"].equal(source["a"].bfloat16())
    assert target["b"].equal(source["b"])


def test_a_local_transfer_asks_for_the_source_anew_each_time() -> None:
    """Also when the source is elsewhere, of other strides, or in other memory under the same address."""
    first, target = tensors(), buffers()
    transposed = {"a": (first["a"] + 1).T.contiguous().T, "b": first["b"] + 1}
    sources = iter([first, transposed, first])
    transport = local(lambda: next(sources), target)
    transport.transfer(Version(1, 1))
    transport.transfer(Version(1, 2))
    assert target["a"].equal(transposed["a"].bfloat16())
    assert target["b"].tolist() == [2.0] * 4
    first["a"].fill_(7)
    first["b"].data = torch.full((4,), 9.0)
    transport.transfer(Version(1, 3))
    assert target["a"].tolist() == [[7.0] * 3] * 2
    assert target["b"].tolist() == [9.0] * 4


def test_a_cast_rounds_to_nearest_even() -> None:
    """1 + 2^-8 lies halfway between two bf16 numbers; a bit more goes up; two roundings would lose it."""
    halves = torch.tensor([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 3 * 2.0**-8])
    source, target = {"a": halves.repeat(2, 1), "b": torch.ones(4)}, buffers()
    local(lambda: source, target).transfer(Version(1, 1))
    assert target["a"].tolist() == [[1.0, 1 + 2.0**-7, 1 + 2.0**-6]] * 2


def test_verify_names_what_was_not_filled_or_has_moved() -> None:
    target = buffers()
    transport = local(tensors, target)
    with pytest.raises(RuntimeError, match="a was not filled"):
        transport.verify()
    transport.transfer(Version(1, 1))
    target["b"].data = torch.ones(4)
    with pytest.raises(RuntimeError, match="b of the engine has moved"):
        transport.verify()


def test_a_transfer_that_fails_is_not_verified_by_the_one_before_it() -> None:
    lost: list[str] = []
    transport = local(lambda: {n: t for n, t in tensors().items() if n not in lost}, buffers())
    transport.transfer(Version(1, 1))
    lost.append("b")
    with pytest.raises(ValueError, match="source checkpoint has no tensor b at rank 0"):
        transport.transfer(Version(1, 1))
    with pytest.raises(RuntimeError, match="was not filled"):
        transport.verify()


def test_a_source_that_is_smaller_than_its_layout_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a is \[5\] float32 and its layout says \[2, 3\] float32"):
        local(lambda: {"a": torch.ones(5), "b": torch.ones(4)}, buffers()).transfer(Version(1, 1))
