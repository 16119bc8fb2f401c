"""A publication's protocol, and the local transport that carries it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto.sync.publication import Publisher
from stretto.sync.transports import LocalTransport
from stretto.types import Version


class Diary:
    """Stands on both sides of a publisher and writes down what it is asked, failing where it is told to."""

    name = "diary"

    def __init__(self, fails_at: str = ""):
        self.entries: list[object] = []
        self.fails_at = fails_at

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


@pytest.mark.parametrize("step", ["transfer", "verify"])
def test_a_failure_before_the_commit_reaches_the_trainer_and_the_engine(step: str) -> None:
    diary = Diary(fails_at=step)
    publisher = Publisher(diary, diary)
    publisher.open(Version(1, 1))
    with pytest.raises(RuntimeError, match=f"{step} failed"):
        publisher.close()
    assert diary.entries[-1] == ("fail", Version(1, 1))
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


def test_a_local_transfer_copies_every_tensor_and_counts_the_bytes_written() -> None:
    source, target = tensors(), {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}
    transport = LocalTransport(lambda: source, target)
    assert transport.transfer(Version(1, 1)) == 6 * 2 + 4 * 4
    transport.verify()
    assert target["a"].equal(source["a"].bfloat16())
    assert target["b"].equal(source["b"])


def test_a_local_transfer_asks_for_the_source_anew_each_time() -> None:
    sources = iter([tensors(), {name: tensor + 1 for name, tensor in tensors().items()}])
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    transport = LocalTransport(lambda: next(sources), target)
    transport.transfer(Version(1, 1))
    transport.transfer(Version(1, 1))
    assert target["b"].equal(torch.full((4,), 2.0))


def test_a_cast_rounds_to_nearest_even() -> None:
    """1 + 2^-8 lies halfway between two bf16 numbers; a bit more goes up; two roundings would lose it."""
    source = {"a": torch.tensor([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 3 * 2.0**-8])}
    target = {"a": torch.zeros(3, dtype=torch.bfloat16)}
    LocalTransport(lambda: source, target).transfer(Version(1, 1))
    assert target["a"].tolist() == [1.0, 1 + 2.0**-7, 1 + 2.0**-6]


def test_verify_names_what_was_not_filled_or_has_moved() -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    transport = LocalTransport(tensors, target)
    with pytest.raises(RuntimeError, match="a was not filled"):
        transport.verify()
    transport.transfer(Version(1, 1))
    target["b"].data = torch.ones(4)
    with pytest.raises(RuntimeError, match="b of the engine has moved"):
        transport.verify()


def test_a_transfer_that_fails_is_not_verified_by_the_one_before_it() -> None:
    lost: list[str] = []
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    transport = LocalTransport(lambda: {n: t for n, t in tensors().items() if n not in lost}, target)
    transport.transfer(Version(1, 1))
    lost.append("b")
    with pytest.raises(KeyError):
        transport.transfer(Version(1, 1))
    with pytest.raises(RuntimeError, match="b was not filled"):
        transport.verify()
