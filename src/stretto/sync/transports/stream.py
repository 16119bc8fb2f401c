"""Whole tensors of the checkpoint, one after another, into an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from stretto.sync.binding import check_targets
from stretto.sync.fill import Filler
from stretto.sync.layout import Layout
from stretto.sync.streaming import StreamCheck
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
        self._source, self._stream, self._tensors = source, stream, tensors
        self._check = StreamCheck(source)
        self._filler = Filler(source, target, rank)
        self.touched = False

    def transfer(self, version: Version) -> int:
        """Take the stream to its end; returns the bytes that are written here. All ranks call together."""
        self._check = StreamCheck(self._source)
        self.touched = False
        for name, tensor in self._stream():
            if self._check.takes(name, tensor):
                self.touched = True
                self._filler.write(self._tensors, name, tensor)
        return self._filler.bytes

    def verify(self) -> None:
        """Raise RuntimeError with every tensor that never came, came twice, or is not what the layout says."""
        self._check.verify()

    def close(self) -> None:
        """Nothing to let go of."""
