"""What a checksum finds: any changed byte, and what changed places."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.sync.checksum import checksum


def flat(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_changed_byte_changes_it(data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, len(data) - 1))
    other = draw.draw(st.integers(0, 255).filter(lambda byte: byte != data[place]))
    changed = data[:place] + bytes([other]) + data[place + 1 :]
    assert not torch.equal(checksum([flat(data)]), checksum([flat(changed)]))


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=20, unique=True), st.data())
def test_words_that_change_places_change_it(words: list[bytes], draw: st.DataObject) -> None:
    first, second = draw.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(words)
    swapped[first], swapped[second] = words[second], words[first]
    assert not torch.equal(checksum([flat(b"".join(words))]), checksum([flat(b"".join(swapped))]))


def test_it_does_not_depend_on_alignment_or_on_chunks() -> None:
    data = torch.randint(0, 256, (2**20 + 13,), dtype=torch.uint8)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    assert torch.equal(checksum([data]), checksum([shifted]))
