"""Sending a plan from the trainer: from tensors that it holds, or from a stream of whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from stretto.sync.execute import Execution
from stretto.sync.links import Link
from stretto.sync.streaming import StreamCheck
from stretto.sync.windows import Part


class Sending(Protocol):
    """One trainer rank's part in every publication."""

    def run(self) -> None:
        """Send one publication; all ranks call together."""
        ...


def sending(
    parts: list[Part],
    process: int,
    weights: Callable[[], Mapping[str, Tensor]],
    stream: Callable[[], Iterable[tuple[str, Tensor]]] | None,
    link: Link,
    *,
    checksums: bool = False,
) -> Sending:
    """What sends the parts: from the stream when the trainer has one, else from its tensors."""
    if stream is not None:
        return FromStream(parts, process, stream, link, checksums=checksums)
    return FromTensors(parts, process, weights, link, checksums=checksums)


class FromTensors:
    """The trainer holds its layout's tensors."""

    def __init__(
        self,
        parts: list[Part],
        process: int,
        weights: Callable[[], Mapping[str, Tensor]],
        link: Link,
        *,
        checksums: bool,
    ):
        self._executions = [
            Execution(part.plan, process, lambda: {process: weights()}, dict, link=link, checksums=checksums)
            for part in parts
        ]

    def run(self) -> None:
        """See :class:`Sending`."""
        for execution in self._executions:
            execution.run()


class FromStream:
    """Whole tensors come by, one after another, on every rank; the first rank sends them.

    What a part needs is kept until the part is sent, so that the stream may have another order than the plan.
    """

    def __init__(
        self,
        parts: list[Part],
        process: int,
        stream: Callable[[], Iterable[tuple[str, Tensor]]],
        link: Link,
        *,
        checksums: bool,
    ):
        self._source, self._stream, self._process = parts[0].plan.source, stream, process
        self._kept: dict[str, Tensor] = {}
        self._parts = []
        for part in parts:
            execution = Execution(
                part.plan, process, lambda: {process: self._kept}, dict, link=link, checksums=checksums
            )
            needed = {move.source.tensor for move in execution.program.read()}
            self._parts.append((needed, execution))

    def run(self) -> None:
        """See :class:`Sending`. Raises RuntimeError when the stream is not what its layout says."""
        check = StreamCheck(self._source)
        stream = iter(self._stream())
        self._kept.clear()
        waiting = list(self._parts)
        for name, tensor in stream:
            if check.takes(name, tensor) and self._process == 0:
                self._kept[name] = tensor.detach()
            while waiting and waiting[0][0] <= self._kept.keys():
                waiting.pop(0)[1].run()
                self._forget(waiting)
        check.verify()
        for _, execution in waiting:
            execution.run()

    def _forget(self, waiting: list[tuple[set[str], Execution]]) -> None:
        """Drop what no later part needs."""
        needed = set().union(*(names for names, _ in waiting)) if waiting else set()
        for name in self._kept.keys() - needed:
            del self._kept[name]
