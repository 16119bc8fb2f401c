"""Which weight map belongs to a checkpoint: found by the exact type of its configuration."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stretto.models.language import WeightMap

Builder = Callable[[Any], WeightMap]

_CLAIMS: dict[str, list[Builder]] = {}
_FROM_FILES = "stretto map file "
"""What the module names of map files begin with."""


def family(config_type: str) -> Callable[[Builder], Builder]:
    """Declare that a function makes the weight map of the transformers configuration class `config_type`."""

    def register(builder: Builder) -> Builder:
        claims = _CLAIMS.setdefault(config_type, [])
        # A file that is run again says the same anew.
        claims[:] = [one for one in claims if _name(one) != _name(builder)] + [builder]
        return builder

    return register


def _name(builder: Builder) -> tuple[str, str]:
    return builder.__module__, builder.__qualname__


def families() -> dict[str, list[Builder]]:
    """Every known configuration class with the maps that claim it (one, unless something is wrong)."""
    import stretto.models

    for module in pkgutil.iter_modules(stretto.models.__path__):
        if module.ispkg:
            continue
        importlib.import_module(f"stretto.models.{module.name}")
    return dict(_CLAIMS)


def load_map_file(path: Path) -> None:
    """Take in the families that the Python file `path` declares; they go before those that are shipped.

    Raises ValueError when it cannot be run.
    """
    if not path.is_file():
        raise ValueError(f"the map file {path} is not a file")
    if path.suffix != ".py":
        raise ValueError(f"the map file {path} is not a Python file (.py)")
    spec = importlib.util.spec_from_file_location(f"{_FROM_FILES}{path.resolve()}", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        raise ValueError(f"the map file {path} cannot be run: {type(error).__name__}: {error}") from error


def claims(config: Any) -> list[Builder]:
    """The maps that claim the exact type of a transformers configuration: the user's own, if there is one."""
    found = families().get(type(config).__name__, [])
    own = [one for one in found if one.__module__.startswith(_FROM_FILES)]
    return own or found


def weight_map(config: Any) -> WeightMap:
    """The weight map of a transformers configuration.

    Raises ValueError when no map claims its exact type (with the nearest known one), when two do, or when the one
    that does is not finished.
    """
    name = type(config).__name__
    found = claims(config)
    if len(found) > 1:
        where = ", ".join(f"{one.__module__}.{one.__qualname__}" for one in found)
        raise ValueError(f"{len(found)} weight maps claim {name}: {where}; remove all but one")
    if not found:
        near = get_close_matches(name, families(), n=1, cutoff=0.5)
        raise ValueError(
            f"no weight map claims {name}"
            + (f" (nearest: {near[0]}; a map is for one exact type)" if near else "")
            + "; run `stretto new-model` on the checkpoint to begin one"
        )
    _refuse_quantised(config)
    made = found[0](config)
    if made.unresolved:
        raise ValueError(
            f"the {made.family} map is not finished; give each of these a row and take it out of `unresolved`:\n  "
            + "\n  ".join(made.unresolved)
        )
    return made


def _refuse_quantised(c: Any) -> None:
    """Raise ValueError for a checkpoint with quantised weights, whose scales are functions of values."""
    if getattr(c, "quantization_config", None):
        raise ValueError(
            f"the checkpoint's {c.model_type} weights are quantised (config.quantization_config); "
            "use a bf16 or fp32 copy of it"
        )
