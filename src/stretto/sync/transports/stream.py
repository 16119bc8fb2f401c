"""Whole tensors of the checkpoint, one after another, into an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from stretto.sync.binding import check_targets
from stretto.sync.layout import Layout
from stretto.sync.plan import Plan
from stretto.sync.program import Move, moves_to
from stretto.sync.streaming import StreamCheck
from stretto.sync.views import copy, view
from stretto.types import Version


class StreamTransport:
    """Fills an engine's own tensors from a stream of whole tensors that comes by on every rank.

    One tensor of the stream is in memory at a time. `source` is the layout of the stream, on one rank; `target` is the
    engine's, of which `rank` is here; `stream` begins a new pass over the current weights. A tensor that does not
    belong is kept out, and told by `verify`.

    Raises ValueError when the stream as `source` has it does not fill the engine.
    """

    name = "stream"

    def __init__(
        self,
        source: Layout,
        target: Layout,
        rank: int,
        stream: Callable[[], Iterable[tuple[str, Tensor]]],
        tensors: Mapping[str, Tensor],
    ):
        check_targets(target, rank, tensors)
        plan = Plan.of(source, target, [0] * target.ranks, [0])
        self._source, self._stream = source, stream
        self._check = StreamCheck(source)
        self._moves: dict[str, list[tuple[Move, Tensor]]] = {name: [] for name in source.local(0)}
        for move in moves_to(plan, rank):
            into = view(tensors[move.target.tensor].detach(), move.target, move.size)
            self._moves[move.source.tensor].append((move, into))
        self._bytes = sum(move.bytes for moves in self._moves.values() for move, _ in moves)

    @torch.no_grad()
    def transfer(self, version: Version) -> int:
        """Take the stream to its end; returns the bytes that are written here. All ranks call together."""
        self._check = StreamCheck(self._source)
        for name, tensor in self._stream():
            if self._check.takes(name, tensor):
                self._write(name, tensor.detach().contiguous())
        return self._bytes

    def _write(self, name: str, whole: Tensor) -> None:
        moves = self._moves[name]
        copy(
            [into for _, into in moves],
            [view(whole, move.source, move.size) for move, _ in moves],
            [move.shift for move, _ in moves],
        )

    def verify(self) -> None:
        """Raise RuntimeError with every tensor that never came, came twice, or is not what the layout says."""
        self._check.verify()
