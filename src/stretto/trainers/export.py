"""Writing a trainer's weights as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from stretto.sync import files
from stretto.sync.binding import dtype_name
from stretto.sync.layout import Layout
from stretto.sync.layouts import checkpoint_layout
from stretto.world import World

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)


def export(
    directory: Path,
    layout: Layout,
    weights: Callable[[], Mapping[str, Tensor]],
    dtype: torch.dtype,
    source: Path,
    world: World,
) -> None:
    """Write the weights, rounded to `dtype`, with the settings and the tokenizer of `source`, where training started.

    All ranks call; the first one writes into the existing, empty `directory`.
    """
    files.export(directory, layout, _target(layout, dtype), world.rank, weights, world.device)
    _finish(directory, dtype, source, world)


def export_stream(
    directory: Path,
    layout: Layout,
    stream: Callable[[], Iterator[tuple[str, Tensor]]],
    dtype: torch.dtype,
    source: Path,
    world: World,
) -> None:
    """As `export`, of weights that come as whole tensors of the checkpoint (`layout` is the stream's).

    Raises RuntimeError when they are not those of the layout.
    """
    files.export_stream(directory, layout, _target(layout, dtype), stream, writes=world.first)
    _finish(directory, dtype, source, world)


def _target(layout: Layout, dtype: torch.dtype) -> Layout:
    return checkpoint_layout(layout.atoms, dtype_name(dtype))


def _finish(directory: Path, dtype: torch.dtype, source: Path, world: World) -> None:
    if world.first:
        _write_settings(directory, source, dtype)
        for pattern in _COPIED:
            for file in source.glob(pattern):
                shutil.copy2(file, directory / file.name)
    world.barrier()


def _write_settings(directory: Path, source: Path, dtype: torch.dtype) -> None:
    """The exported config.json is the source's own but for the dtype: training does not change the architecture."""
    settings = json.loads((source / "config.json").read_text())
    settings.pop("torch_dtype", None)
    settings["dtype"] = dtype_name(dtype)
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
