"""Sides that hold whole tensors: the checkpoint's files, the embedded engine; and FSDP2, which cuts them by rows."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.models.language import Held, Piece
from stretto.sync.layout import Atoms, Layout, LayoutBuilder, at_layer
from stretto.sync.storage import Stored, View, rows_of, store


def checkpoint_layout(atoms: Atoms, dtype: str) -> Layout:
    """The tensors on disk, as one rank: every process can read every file."""
    return _whole("checkpoint", atoms, "checkpoint", 1, dtype)


def replica_layout(atoms: Atoms, dtype: str, replicas: int) -> Layout:
    """The embedded engine: each rank holds all tensors as transformers has them in memory."""
    return _whole(f"embedded(replicas={replicas})", atoms, "memory", replicas, dtype)


def loader_layout(atoms: Atoms, dtype: str, ranks: int) -> Layout:
    """Engines that load by themselves: each rank is given all tensors of the checkpoint."""
    return _whole(f"loader(ranks={ranks})", atoms, "checkpoint", ranks, dtype)


def fsdp_layout(atoms: Atoms, dtype: str, ranks: int) -> Layout:
    """FSDP2: the rows of each tensor in equal chunks, as ``torch.chunk`` cuts them; the last ranks may get none.

    Buffers and scalars are whole on every rank.
    """
    build = LayoutBuilder(f"fsdp(ranks={ranks})", atoms, ranks, dtype)
    kinds = [build.new_class([rank]) for rank in range(ranks)]
    for row in atoms.weights.rows:
        for held, pieces in row.tensors("memory"):
            stored = store(atoms.weights, held, pieces)
            whole = pieces[0].buffer or not stored.shape
            cells = [(stored.shape, [[view] for view in stored.views])] * ranks if whole else _row_cells(stored, ranks)
            for layer in row.layers or (None,):
                for rank, (shape, cut) in enumerate(cells):
                    tensor = build.tensor(kinds[rank], at_layer(held.name, layer), stored, pieces, shape)
                    for piece, views in zip(pieces, cut, strict=True):
                        for view in views:
                            build.shard(tensor, at_layer(piece.name, layer), view, held, build.group([rank]))
    return build.build()


def _row_cells(stored: Stored, ranks: int) -> list[tuple[tuple[int, ...], list[list[View]]]]:
    """For each rank the shape of its rows, and their boxes of each view."""
    rows = stored.shape[0]
    chunk = -(-rows // ranks)
    cells = []
    for rank in range(ranks):
        start, stop = (min(rows, chunk * edge) for edge in (rank, rank + 1))
        cut = rows_of(stored.views, stored.row_stride, start, stop) if stop > start else [[] for _ in stored.views]
        cells.append(((stop - start, *stored.shape[1:]), cut))
    return cells


def _whole(title: str, atoms: Atoms, side: str, ranks: int, dtype: str) -> Layout:
    build = LayoutBuilder(title, atoms, ranks, dtype)
    everyone = range(ranks)
    kind, group = build.new_class(everyone), build.group(everyone)
    for held, pieces, layer in _tensors(atoms, side):
        _add_whole(build, kind, group, store(atoms.weights, held, pieces), held, pieces, layer)
    return build.build()


def _add_whole(
    build: LayoutBuilder,
    kind: int,
    group: int,
    stored: Stored,
    held: Held,
    pieces: tuple[Piece, ...],
    layer: int | None,
) -> None:
    tensor = build.tensor(kind, at_layer(held.name, layer), stored, pieces, stored.shape)
    for piece, view in zip(pieces, stored.views, strict=True):
        build.shard(tensor, at_layer(piece.name, layer), view, held, group)


def _tensors(atoms: Atoms, side: str) -> Iterator[tuple[Held, tuple[Piece, ...], int | None]]:
    """Every tensor of a side with its pieces and its layer."""
    for row in atoms.weights.rows:
        for held, pieces in row.tensors(side):
            for layer in row.layers or (None,):
                yield held, pieces, layer
