"""A trainer and an engine with the tensors of a small Llama, for publications as files."""

from __future__ import annotations

from pathlib import Path

import torch
from inside_engine import EngineRanks
from torch import Tensor

from stretto.sync.coordinates import atoms_of
from stretto.sync.files import CheckpointFiles
from stretto.sync.layouts import checkpoint_layout, loader_layout
from stretto.sync.session import Destination, Source
from stretto.sync.transports.files import FileOptions


class Llama:
    """The tensors of a checkpoint with a tied head, as a trainer has them, and an engine that holds the head too."""

    def __init__(self, directory: Path):
        self.atoms = atoms_of(directory)
        with CheckpointFiles(directory) as held:
            self.values = {name: held.read(name).clone() for name in held.where}
        head = {"lm_head.weight": torch.zeros_like(self.values["model.embed_tokens.weight"])}
        self.engine = EngineRanks([self.values | head], window=2**16)

    def source(self) -> Source:
        return Source(checkpoint_layout(self.atoms, "float32"), lambda: self.values)

    def destination(self, engines: int = 1) -> Destination:
        loader = loader_layout(self.atoms, "float32", engines)
        return Destination(self.engine, 1, loader, loader)

    def options(self, delta: bool, timeout_s: float = 30.0) -> FileOptions:
        return FileOptions(checkpoint_layout(self.atoms, "float32"), delta, 4096, timeout_s)

    def rows(self, rank: int) -> dict[str, Tensor]:
        """What FSDP2 holds of them on one of two ranks."""
        held = {name: one.chunk(2) for name, one in self.values.items()}
        return {name: parts[rank] for name, parts in held.items() if rank < len(parts)}

    def change(self, step: int) -> None:
        """Some elements of every second tensor."""
        self.values = {name: one.clone() for name, one in self.values.items()}
        for index, one in enumerate(self.values.values()):
            if index % 2 == step % 2:
                one.view(-1)[step::30] += 1.0

    def wrong(self) -> list[str]:
        expected = self.values | {"lm_head.weight": self.values["model.embed_tokens.weight"]}
        return [name for name, one in self.engine.tensors(0).items() if not torch.equal(one, expected[name])]
