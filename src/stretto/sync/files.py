"""Checkpoints as one side of a plan: reading the tensors that a rank needs, and writing a safetensors directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.sync.binding import check_targets
from stretto.sync.coverage import differences
from stretto.sync.fill import Filler
from stretto.sync.gathering import Gathering, GatherStream, GatherTensors
from stretto.sync.layout import Layout

_FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


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
            try:
                return {n: self._directory / file for n, file in json.loads(index.read_text())["weight_map"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"cannot read {index}: {type(error).__name__}: {error}") from error
        # Some repositories have the weights twice: for transformers, and in one file for others.
        files = [self._directory / SINGLE] if (self._directory / SINGLE).is_file() else self._others()
        if not files:
            raise ValueError(f"{self._directory} has no .safetensors file")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (not a mapping)

    def _others(self) -> list[Path]:
        return sorted(self._directory.glob("*.safetensors"))

    def read(self, name: str) -> Tensor:
        """One tensor, on CPU."""
        self._slice(name)
        return self._open(self.where[name]).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def check_names(self, expected: Collection[str], dropped: Sequence[str]) -> None:
        """Raise ValueError unless the files have the `expected` tensors, and others only of a `dropped` pattern."""
        surplus = [name for name in self.where if not any(fnmatchcase(name, pattern) for pattern in dropped)]
        lines = [
            *differences("the files lack", sorted(set(expected) - set(self.where)), surplus),
            *differences("nothing reads", sorted(set(surplus) - set(expected)), expected),
        ]
        if lines:
            raise ValueError(
                f"the checkpoint {self._directory} does not have the tensors of its weight map:\n  "
                + "\n  ".join(lines)
            )

    def _slice(self, name: str) -> Any:
        """What the header says of a tensor; nothing of it is read yet."""
        from safetensors import SafetensorError

        if name not in self.where:
            raise ValueError(f"the checkpoint {self._directory} has no tensor {name}")
        try:
            return self._open(self.where[name]).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self.where[name]} has no tensor {name}, though {INDEX} says so") from error

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

    `source` is the checkpoint's layout. Raises ValueError when the plan, a file or a tensor does not fit, or when
    nothing reads a tensor of the files that the map does not drop.
    """
    check_targets(target, rank, tensors)
    files.check_names(source.local(0), source.atoms.weights.dropped)
    shapes = source.local(0)

    def read(name: str) -> Tensor:
        whole = files.read(name)
        if tuple(whole.shape) != shapes[name][0]:
            raise ValueError(f"{name} is {list(whole.shape)} on disk and {list(shapes[name][0])} by the weight map")
        return whole

    Filler(source, target, rank).fill(tensors, read)


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
    _write(directory, target, GatherTensors(source, target, rank, tensors, device, _FILE_BYTES), writes=rank == 0)


def export_stream(
    directory: Path,
    source: Layout,
    target: Layout,
    stream: Callable[[], Iterable[tuple[str, Tensor]]],
    *,
    writes: bool,
) -> None:
    """Write the checkpoint `target` from a stream of its tensors in `source`'s dtypes, in the order in which they come.

    All ranks call, since the stream is gathered from them; the one that `writes` has one file at a time in memory.
    Raises RuntimeError when the stream is not whole, on every rank and after its end.
    """
    _write(directory, target, GatherStream(source, target, stream, _FILE_BYTES, keeps=writes), writes=writes)


def _write(directory: Path, target: Layout, gathering: Gathering, *, writes: bool) -> None:
    written: list[list[str]] = []
    for window in gathering:
        if writes:
            _save(window, directory / _unnumbered(len(written)))
            written.append(list(window))
    if writes:
        for index in range(len(written)):
            (directory / _unnumbered(index)).rename(directory / _file(index + 1, len(written)))
        _write_index(directory, written, target.local_bytes(0))


def _unnumbered(index: int) -> str:
    """Name of a file while it is not known how many there will be."""
    return f"part-{index}.safetensors"


def _file(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})


def _write_index(directory: Path, parts: list[list[str]], total: int) -> None:
    """Which file has which tensor, when there are several."""
    if len(parts) == 1:
        return
    table = {name: _file(number, len(parts)) for number, part in enumerate(parts, 1) for name in part}
    text = {"metadata": {"total_size": total}, "weight_map": table}
    (directory / INDEX).write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
