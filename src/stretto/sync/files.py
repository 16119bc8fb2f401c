"""Checkpoints as one side of a plan: reading only what a rank needs, and writing a safetensors directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.sync.execute import Execution
from stretto.sync.layout import Layout, LocalTensor
from stretto.sync.plan import Plan
from stretto.sync.program import Move, moves_to
from stretto.sync.views import copy, view

_FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


class CheckpointFiles:
    """The tensors of a safetensors directory by name; a tensor is read when it is asked for.

    Raises ValueError when there are none, or one that an index names is missing.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def where(self) -> Mapping[str, Path]:
        """The file of every tensor."""
        index = self._directory / INDEX
        if index.is_file():
            table = json.loads(index.read_text())["weight_map"]
            return {name: self._directory / file for name, file in table.items()}
        files = sorted(self._directory.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self._directory} has no .safetensors file")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (not a mapping)

    def read(self, name: str) -> Tensor:
        """One tensor, on CPU."""
        if name not in self.where:
            raise ValueError(f"the checkpoint {self._directory} has no tensor {name}")
        return self._open(self.where[name]).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, from the file's header."""
        return tuple(self._open(self.where[name]).get_slice(name).get_shape())

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._opened:
            try:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"cannot read {file}: {type(error).__name__}: {error}") from error
        return self._opened[file]


def load(files: CheckpointFiles, source: Layout, target: Layout, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Fill the local `tensors` of one rank from files, one tensor of the checkpoint in memory at a time.

    `source` is the checkpoint's layout. Raises ValueError when the plan or a file does not fit.
    """
    plan = Plan.of(source, target, [0] * target.ranks, [0])
    needed: dict[str, list[Move]] = {}
    for move in moves_to(plan, rank):
        needed.setdefault(move.source.tensor, []).append(move)
    shapes = source.local(0)
    for name, moves in needed.items():
        whole = files.read(name).contiguous()
        if tuple(whole.shape) != shapes[name][0]:
            raise ValueError(f"{name} is {list(whole.shape)} on disk and {list(shapes[name][0])} by the weight map")
        with torch.no_grad():
            copy(
                [view(tensors[move.target.tensor].detach(), move.target, move.size) for move in moves],
                [view(whole, move.source, move.size) for move in moves],
                [move.shift for move in moves],
            )


def export(
    directory: Path,
    source: Layout,
    target: Layout,
    rank: int,
    tensors: Callable[[], Mapping[str, Tensor]],
    device: torch.device,
) -> None:
    """Write the checkpoint `target` to safetensors files in `directory`; all ranks of `source` call, the first one
    writes.

    One file at a time is whole in the first rank's memory. Raises OSError or SafetensorError when it cannot be written.
    """
    whole = Plan.of(source, target, [0])
    parts = list(_parts(target))
    for number, part in enumerate(parts, 1):
        written = {name: _empty(one) for one in part for name in one.names()} if rank == 0 else {}
        execution = Execution(
            whole.only({one.name for one in part}),
            rank,
            lambda: {rank: tensors()},
            lambda written=written: {0: written},
            device=device,
        )
        execution.run()
        execution.verify()
        if rank == 0:
            _save(written, directory / _file(number, len(parts)))
    if rank == 0 and len(parts) > 1:
        _write_index(directory, parts, target.local_bytes(0))


def _parts(target: Layout) -> Iterator[list[LocalTensor]]:
    """The tensors of each file, in the order of the map."""
    part: list[LocalTensor] = []
    used = 0
    for one in target.tensors:
        if part and used + one.bytes > _FILE_BYTES:
            yield part
            part, used = [], 0
        part.append(one)
        used += one.bytes
    yield part


def _empty(one: LocalTensor) -> Tensor:
    return torch.empty(one.shape, dtype=getattr(torch, one.dtype))


def _file(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})


def _write_index(directory: Path, parts: list[list[LocalTensor]], total: int) -> None:
    table = {
        name: _file(number, len(parts)) for number, part in enumerate(parts, 1) for one in part for name in one.names()
    }
    text = {"metadata": {"total_size": total}, "weight_map": table}
    (directory / INDEX).write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
