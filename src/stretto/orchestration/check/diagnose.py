"""What kind of mistake makes one tensor out of another, told from their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_NUMBER = re.compile(r"\d+")
_PARTS = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Case:
    """A tensor that is not as expected, with what it may have been confused with.

    `others` are the expected values of all tensors; `earlier` the tensor's own before the last step; `shards` how many
    ranks cut a tensor.
    """

    name: str
    found: Tensor
    expected: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)
    earlier: Tensor | None = None
    shards: int = 1


def classify(case: Case) -> tuple[str, str]:
    """The likely kind of mistake and the evidence for it."""
    found, expected = case.found.detach().cpu(), case.expected.detach().cpu()
    if found.shape != expected.shape:
        return _of_shape(found, expected)
    known = ~expected.isnan()
    found, expected = torch.where(known, found, 0), torch.where(known, expected, 0)
    wrong = found != expected
    evidence = _evidence(case.name, found, expected, wrong)
    if not wrong.any():
        return "wrong dtype", evidence
    kind = (
        _stale(case, found, wrong)
        or _unwritten(found, expected, wrong)
        or _shifted(found[known], expected[known])
        or _rounded(found, expected)
        or _moved(case, found.float(), expected.float())
        or _another(case, found)
        or _scaled(found.float(), expected.float())
        or "other values"
    )
    return kind, evidence


def _of_shape(found: Tensor, expected: Tensor) -> tuple[str, str]:
    said = f"its shape is {list(found.shape)} and must be {list(expected.shape)}"
    turned = found.ndim == expected.ndim >= 2 and torch.equal(found, expected.mT)
    return ("transposed" if turned else "wrong shape"), said


def _evidence(name: str, found: Tensor, expected: Tensor, wrong: Tensor) -> str:
    count, total = int(wrong.sum()), wrong.numel()
    if not count:
        return f"{name} is {found.dtype} and must be {expected.dtype}; the values agree"
    first = wrong.flatten().nonzero()[0].item()
    place = [int(one) for one in torch.unravel_index(torch.tensor(first), wrong.shape)]
    return (
        f"{count} of {total} elements of {name} differ, the first at {place}: "
        f"{float(found.flatten()[int(first)]):.6g} and not {float(expected.flatten()[int(first)]):.6g}"
    )


def _stale(case: Case, found: Tensor, wrong: Tensor) -> str | None:
    if case.earlier is None or not wrong.any():
        return None
    old = case.earlier.detach().cpu()
    if torch.equal(found[wrong], old[wrong]):
        return "stale" if wrong.all() else "stale in part: some of it still has the values before the step"
    return None


def _unwritten(found: Tensor, expected: Tensor, wrong: Tensor) -> str | None:
    if found.isnan().any():
        return "never written"
    if wrong.any() and not found[wrong].any() and expected[wrong].all():
        return "zero where it must not be: never written"
    return None


def _shifted(found: Tensor, expected: Tensor) -> str | None:
    difference = found.float() - expected.float()
    for shift, kind in ((-1.0, "+1 missing"), (1.0, "+1 added once too often")):
        if torch.allclose(difference, torch.full_like(difference, shift), rtol=0, atol=1e-5):
            return kind
    return None


def _rounded(found: Tensor, expected: Tensor) -> str | None:
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(found.float(), expected.to(dtype).float()):
            return f"rounded to {str(dtype).removeprefix('torch.')}: wrong dtype"
    return None


def _moved(case: Case, found: Tensor, expected: Tensor) -> str | None:
    """Parts of the tensor itself in another place."""
    if found.ndim >= 2 and found.shape[-1] == found.shape[-2] and torch.equal(found, expected.mT):
        return "transposed"
    for axis in range(found.ndim):
        size = found.shape[axis]
        if size % 2 == 0 and size > 1 and torch.equal(found, torch.cat(expected.chunk(2, axis)[::-1], axis)):
            return "halves swapped"
    for axis in range(found.ndim):
        if (turn := _turn(found, expected, axis)) is not None:
            shard = found.shape[axis] // case.shards
            return (
                "off by one shard" if case.shards > 1 and turn in (shard, found.shape[axis] - shard) else "off by one"
            )
    if found.ndim and _same_rows(found, expected):
        return "groups interleaved wrongly: the right rows in another order"
    return None


def _turn(found: Tensor, expected: Tensor, axis: int) -> int | None:
    """By how much `found` is `expected` turned along an axis."""
    size = found.shape[axis]
    if size < 2:
        return None
    first = found.select(axis, 0)
    for turn in range(1, size):
        if torch.equal(first, expected.select(axis, turn)) and torch.equal(found, expected.roll(-turn, axis)):
            return turn
    return None


def _same_rows(found: Tensor, expected: Tensor) -> bool:
    if found.ndim == 1:
        return len(found) > 1 and torch.equal(found.sort()[0], expected.sort()[0])
    key = torch.randn(found[0].numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = [(one.flatten(1).double() @ key).sort()[0] for one in (found, expected)]
    return len(found) > 1 and torch.allclose(*sums, rtol=0, atol=1e-12)


def _another(case: Case, found: Tensor) -> str | None:
    """Another tensor's values: a sibling's, or those of another layer or expert."""
    for name, other in case.others.items():
        if name != case.name and other.shape == found.shape and torch.equal(other.detach().cpu(), found):
            if _NUMBER.sub("#", name) == _NUMBER.sub("#", case.name):
                return f"off by one: it has the values of {name}"
            return f"swapped: it has the values of {name}"
    return None


def _scaled(found: Tensor, expected: Tensor) -> str | None:
    size = float(expected.norm())
    if not size:
        return None
    factor = float((found * expected).sum()) / size**2
    if abs(factor) > 1e-6 and abs(factor - 1) > 1e-3 and float((found - factor * expected).norm()) < 1e-4 * size:
        return f"{factor:.4g} times what it must be"
    return None
