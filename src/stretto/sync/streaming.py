"""Whether a stream of whole tensors is what its layout says: each once, with its shape and dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from stretto.sync.binding import unlike
from stretto.sync.coverage import differences
from stretto.sync.layout import Layout

_SHOWN = 20


class StreamCheck:
    """Looks at every tensor of one pass.

    What is wrong is told at the end: to stop in the middle would leave other ranks waiting for this one.
    """

    def __init__(self, layout: Layout):
        self._title, self._specs = layout.title, layout.local(0)
        self._arrived: Counter[str] = Counter()
        self._unlike: list[str] = []

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Whether this is a tensor of the layout, as it says and for the first time."""
        self._arrived[name] += 1
        if name not in self._specs or self._arrived[name] > 1:
            return False
        line = unlike(name, tensor, self._specs[name])
        self._unlike += [line] if line else []
        return line is None

    def lines(self) -> list[str]:
        """What never came, what does not belong, what came twice and what is not as the layout says."""
        arrived, specs = self._arrived, self._specs
        return [
            *differences("nothing came for", [name for name in specs if name not in arrived], arrived),
            *differences("the layout does not have", [name for name in arrived if name not in specs], specs),
            *(f"{name} came {times} times" for name, times in arrived.items() if times > 1),
            *self._unlike,
        ]

    def verify(self) -> None:
        """Raise RuntimeError with the `lines`, if there are any."""
        if lines := self.lines():
            raise RuntimeError(f"{self._title} is not whole:\n  " + "\n  ".join(shown(lines)))


def shown(lines: Sequence[str]) -> list[str]:
    """The first of many lines."""
    return [*lines[:_SHOWN], *([f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]
