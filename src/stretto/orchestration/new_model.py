"""`stretto new-model`: which way a model becomes trainable, and a map file with what could be inferred."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.files import write_aside
from stretto.models.description import describe, read_config
from stretto.models.registry import claims
from stretto.models.scaffold import Draft, begin, source_of
from stretto.models.scaffold.bridges import INSTALL, installed_bridges

_UNUSUAL = re.compile(r"multiplier|logits_scaling|softcap|no_rope|partial_rotary")
_SHOWN = 6


def new_model(model: str, out: Path | None = None) -> str:
    """Say which path applies to `model` and write its map to `out` (None: MODEL_TYPE_map.py here).

    Nothing is written when a map exists. Raises ValueError for a model that transformers cannot build, and when `out`
    exists.
    """
    config = read_config(model)
    if found := claims(config):
        where = ", ".join(f"{one.__module__}.{one.__qualname__}" for one in found)
        return f"{type(config).__name__} has a weight map ({where}); nothing is written. Next:\n  stretto check {model}"
    out = out or Path(f"{config.model_type}_map.py")
    if out.exists():
        raise ValueError(f"{out} exists; name another file with --out")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"there is no directory {out.absolute().parent} for --out")
    draft = begin(describe(config))
    write_aside(out, source_of(draft))
    return "\n".join([*_summary(draft), "", *_ways(draft, config), "", *_next(draft, model, out)])


def _summary(draft: Draft) -> Iterator[str]:
    described = draft.described
    kinds = f" of {len(draft.layers)} kinds" if len(draft.layers) > 1 else ""
    layers = getattr(described.config.get_text_config(), "num_hidden_layers", 0)
    yield f"{described.architecture} ({type(described.config).__name__}): no weight map claims it"
    yield f"{len(described.files)} tensors in files, {len(described.memory)} in memory, {layers} layers{kinds}"


def _ways(draft: Draft, config: Any) -> Iterator[str]:
    same = draft.described.files == draft.described.memory
    how = "names and shapes in memory are those on disk" if same else "memory is not like the files: the map says how"
    yield f"FSDP2, embedded engine   {'ready' if not draft.unresolved else 'finish the map'}; {how}"
    yield f"Megatron, bridge names   {_bridge(draft.described.architecture)}"
    lacking = draft.without_megatron
    if lacking or draft.unresolved:
        yield f"Megatron, raw names      give {_some([*lacking, *draft.unresolved])} a Megatron column"
    else:
        yield "Megatron, raw names      every row has a column; say in `megatron` which settings the model needs"
    c = config.get_text_config()
    unusual = {key: value for key, value in c.to_dict().items() if value and _UNUSUAL.search(key)}
    if unusual:
        keys = ", ".join(f"{key} = {value}" for key, value in unusual.items())
        yield f"                         (Megatron-Core may lack {keys})"


def _bridge(architecture: str) -> str:
    bridges = installed_bridges()
    if bridges is None:
        return f"Megatron-Bridge is not installed, so it is not known whether it has this model: {INSTALL}"
    if architecture in bridges.architectures:
        return f'megatron-bridge {bridges.version} has this model: trainer.names = "bridge"'
    return f"megatron-bridge {bridges.version} does not have this model"


def _some(names: list[str]) -> str:
    left = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {left} more" if left > 0 else "")


def _next(draft: Draft, model: str, out: Path) -> Iterator[str]:
    rows = sum(1 for _ in draft.rows)
    if draft.unresolved:
        yield f"Wrote {out}: {rows} rows. Not inferred, so that the map refuses to be used until they have a row:"
        yield from (f"  {one}" for one in draft.unresolved)
    else:
        yield f"Wrote {out}: {rows} rows, nothing unresolved. What names and shapes do not tell, the check does. Next:"
        yield f"  stretto check {model} --map {out}"
