"""The contract of every trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from stretto.sync.layout import Layout
from stretto.types import Batch, Rollout


@dataclass(frozen=True)
class StepReport:
    """What a batch did to the model: metrics over all ranks, equal on each, and whether the weights changed.

    `bad_updates` counts optimizer steps that were skipped for a non-finite loss or gradient; `skipped_groups` are the
    groups of this rank that they would have trained on.
    """

    metrics: Mapping[str, float]
    updates: int
    bad_updates: int
    skipped_groups: frozenset[int] = frozenset()


class Trainer(Protocol):
    """Learns from batches. All ranks call every method together, each with its share of the samples."""

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
        """Log-probs of each rollout's loss tokens at its temperature, in order, from the current weights."""
        ...

    def step(self, batch: Batch) -> StepReport:
        """The optimizer step(s) of one batch. The result does not depend on how the batch is cut."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's tensors of the current model weights by the layout's local names; nothing is copied."""
        ...

    def layout(self) -> Layout:
        """Which boxes of the checkpoint every rank's `weights` are."""
        ...

    def offload(self) -> None:
        """Move to host memory what only `step` needs, when that frees device memory."""
        ...

    def onload(self) -> None:
        """Undo `offload`."""
        ...

    def save(self, directory: Path) -> None:
        """Write all that `load` needs to continue exactly, into an existing empty directory."""
        ...

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote, also with another number of ranks."""
        ...

    def export(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the weights, rounded to `dtype`, as a Hugging Face checkpoint, into an existing empty directory."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """What a trainer has besides when its weights leave it only as whole tensors of the checkpoint, one after another.

    Its layout, on one rank, is that of the stream; its `weights` are local tensors of which the layout says nothing.
    """

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the current weights with its name, once, in the layout's dtype, on every rank in one order.

        All ranks take it to the end together. A tensor may share memory with the model and is not kept or changed.
        """
        ...
