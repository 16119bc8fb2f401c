"""What kind of mistake made one tensor out of another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto.orchestration.check.diagnose import Case, classify

torch.manual_seed(0)
SQUARE, WIDE, VECTOR = torch.randn(6, 6), torch.randn(6, 4), torch.randn(6)
STACK = torch.randn(3, 4, 5)
OTHERS = {"layers.0.w": WIDE, "layers.1.w": torch.randn(6, 4), "layers.0.u": torch.randn(6, 4)}

KINDS: list[tuple[str, Tensor, Tensor, str]] = [
    ("transposed", SQUARE.T, SQUARE, "transposed"),
    ("halves", torch.cat([WIDE[3:], WIDE[:3]]), WIDE, "halves swapped"),
    ("halves of a stack", torch.cat([STACK[:, 2:], STACK[:, :2]], 1), STACK, "halves swapped"),
    ("rolled", WIDE.roll(1, 0), WIDE, "off by one"),
    ("rolled by a shard", WIDE.roll(2, 0), WIDE, "off by one shard"),
    ("interleaved", WIDE[[0, 2, 4, 1, 3, 5]], WIDE, "groups interleaved wrongly"),
    ("one less", VECTOR - 1, VECTOR, r"+1 missing"),
    ("one more", VECTOR + 1, VECTOR, r"+1 added once too often"),
    ("rounded", VECTOR.bfloat16().float(), VECTOR, "rounded to bfloat16"),
    ("unwritten", torch.full((6,), torch.nan), VECTOR, "never written"),
    ("zero", torch.zeros(6), VECTOR, "never written"),
    ("a sibling's", OTHERS["layers.0.u"], WIDE, "swapped: it has the values of layers.0.u"),
    ("another layer's", OTHERS["layers.1.w"], WIDE, "off by one: it has the values of layers.1.w"),
    ("doubled", 2 * WIDE, WIDE, "2 times"),
    ("anything", torch.randn(6, 4), WIDE, "other values"),
    ("of another shape", torch.randn(4, 6), WIDE, "wrong shape"),
    ("of the transposed shape", WIDE.T, WIDE, "transposed"),
    ("of fewer axes", VECTOR, WIDE, "wrong shape"),
    ("of more axes", WIDE, VECTOR, "wrong shape"),
    ("dtype", WIDE.double(), WIDE, "wrong dtype"),
]


@pytest.mark.parametrize(("found", "expected", "kind"), [one[1:] for one in KINDS], ids=[one[0] for one in KINDS])
def test_a_kind_is_told_from_the_values(found: Tensor, expected: Tensor, kind: str) -> None:
    said, evidence = classify(Case("layers.0.w", found, expected, OTHERS, shards=3))
    assert kind in said
    assert evidence


def test_what_has_the_values_from_before_the_step_is_stale() -> None:
    new, old = torch.randn(8), torch.randn(8)
    assert classify(Case("w", old, new, earlier=old))[0] == "stale"
    mixed = torch.cat([new[:4], old[4:]])
    assert classify(Case("w", mixed, new, earlier=old))[0].startswith("stale in part")


def test_elements_that_nobody_expects_anything_of_are_left_out() -> None:
    expected = torch.cat([WIDE, torch.full((2, 4), torch.nan)])
    found = torch.cat([WIDE - 1, torch.full((2, 4), 7.0)])
    kind, evidence = classify(Case("w", found, expected))
    assert kind == "+1 missing"
    assert "24 of 32 elements" in evidence
