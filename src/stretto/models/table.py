"""The table of families in the documentation: `python -m stretto.models.table`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from stretto.models.language import WeightMap
from stretto.models.registry import families, weight_map

_HEAD = """# Families

Made by `make docs` from the maps in `stretto/models/`. A family is found by the exact type of the checkpoint's config;
any other model that transformers holds in memory as it is on disk trains with FSDP2 and the embedded engine without a
map. See [Integrate a model](integrate-a-model.md).

| config | map | lines | Megatron-Core | tensors that no side reads |
|---|---|---|---|---|
"""


def families_markdown() -> str:
    """A row for every config class that a shipped map claims, from the map of its default configuration."""
    return _HEAD + "\n".join(_row(name, builders[0]) for name, builders in sorted(families().items()))


def _row(name: str, builder: Any) -> str:
    import transformers

    file = Path(inspect.getsourcefile(builder) or "")
    lines = len(file.read_text().splitlines())
    made = weight_map(getattr(transformers, name)())
    dropped = ", ".join(f"`{pattern}`" for pattern in made.dropped) or "none"
    return f"| `{name}` | `models/{file.name}` | {lines} | {_megatron(made)} | {dropped} |"


def _megatron(made: WeightMap) -> str:
    """What of Megatron-Core the map has."""
    if made.megatron is None:
        return "no"
    local = all("megatron" in row.held for row in made.rows if set(row.held) & {"te", "grouped"})
    return "yes" if local else "with Transformer Engine's layers alone"


if __name__ == "__main__":
    print(families_markdown())
