"""The tensors of a checkpoint, gathered from a trainer on its first rank, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from stretto.sync.execute import EXTRA_BYTES, Execution, over_group
from stretto.sync.layout import Layout
from stretto.sync.plan import Plan
from stretto.sync.streaming import StreamCheck
from stretto.sync.windows import windows

Window = dict[str, Tensor]
"""Whole tensors on CPU, in memory of their own; empty on every rank but the first."""


class Gathering(Protocol):
    """All ranks iterate together, to the end, anew for every publication."""

    def __iter__(self) -> Iterator[Window]: ...


class GatherTensors:
    """From the tensors that the ranks of `source` hold, to those of `target`, which has one rank.

    A window has at most `window_bytes`, unless one tensor is larger. Raises ValueError when `source` does not fill
    `target`.
    """

    def __init__(
        self,
        source: Layout,
        target: Layout,
        rank: int,
        tensors: Callable[[], Mapping[str, Tensor]],
        device: torch.device,
        window_bytes: int,
        extra_bytes: int = EXTRA_BYTES,
    ):
        self._specs, self._first = target.local(0), rank == 0
        self._arriving: Window = {}
        self._parts = [
            (
                part.names,
                Execution(
                    part.plan,
                    rank,
                    lambda: {rank: tensors()},
                    lambda: {0: self._arriving},
                    link=over_group(part.plan, device=device, extra_bytes=extra_bytes),
                ),
            )
            for part in windows(Plan.of(source, target, [0]), window_bytes)
        ]

    def __iter__(self) -> Iterator[Window]:
        for names, execution in self._parts:
            self._arriving = {name: _empty(*self._specs[name]) for name in names} if self._first else {}
            execution.run()
            execution.verify()
            yield self._arriving
        self._arriving = {}


class GatherStream:
    """From a stream of whole tensors in `source`'s dtypes, in the order in which they come, in `target`'s dtypes.

    The rank that `keeps` them, the first, is given them. Raises RuntimeError when the stream is not whole, on every
    rank and after its end.
    """

    def __init__(
        self,
        source: Layout,
        target: Layout,
        stream: Callable[[], Iterable[tuple[str, Tensor]]],
        window_bytes: int,
        *,
        keeps: bool,
    ):
        self._source, self._stream = source, stream
        self._keeps, self._window_bytes = keeps, window_bytes
        self._dtypes = {name: getattr(torch, dtype) for name, (_, dtype) in target.local(0).items()}

    def __iter__(self) -> Iterator[Window]:
        check = StreamCheck(self._source)
        kept: Window = {}
        used = 0
        for name, tensor in self._stream():
            if not check.takes(name, tensor) or not self._keeps:
                continue
            size = tensor.numel() * self._dtypes[name].itemsize
            if kept and used + size > self._window_bytes:
                yield kept
                kept, used = {}, 0
            kept[name] = tensor.detach().to("cpu", self._dtypes[name], copy=True).contiguous()
            used += size
        yield kept
        check.verify()


def _empty(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))
