"""A plan's bytes, inside a process and between the processes of one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stretto.sync.execute import EXTRA_BYTES, Execution, over_group
from stretto.sync.plan import Plan
from stretto.sync.reread import differing, sample_of
from stretto.types import Version


class PlannedTransport:
    """Fills an engine's own tensors, whose addresses never change, from the trainer's local tensors on every rank.

    It is `local` when every byte stays inside its process, and `collective` otherwise: packed buckets over
    torch.distributed.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source: Callable[[], Mapping[str, Tensor]],
        target: Mapping[str, Tensor],
        device: torch.device,
        extra_bytes: int = EXTRA_BYTES,
        checksums: bool = False,
    ):
        self.name = "collective" if plan.moved_bytes else "local"
        self._plan, self._rank, self._source, self._target = plan, rank, source, target
        self._addresses = {name: tensor.data_ptr() for name, tensor in target.items()}
        link = self._link = over_group(plan, device=device, extra_bytes=extra_bytes)
        self._execution = Execution(
            plan, rank, lambda: {rank: source()}, lambda: {rank: target}, link=link, checksums=checksums and bool(link)
        )

    @property
    def touched(self) -> bool:
        """Whether the last transfer may have written into the engine's tensors."""
        return self._execution.touched

    def transfer(self, version: Version) -> int:
        """Fill every tensor of the engine; returns the bytes that were written here."""
        return self._execution.run()

    def verify(self) -> None:
        """Raise RuntimeError when a tensor was not filled or has moved."""
        self._execution.verify()
        for name, address in self._addresses.items():
            if self._target[name].data_ptr() != address:
                raise RuntimeError(f"{name} of the engine has moved to another address")

    def reread(self, number: int | None) -> list[str]:
        """The engine's tensors, of those whose turn it is, that are not what the trainer has.

        All ranks call together.
        """
        part, rank = sample_of(self._plan, number), self._rank
        return differing(part, rank, rank, self._target, link=self._link, source={rank: self._source()})

    def close(self) -> None:
        """Nothing to let go of."""
