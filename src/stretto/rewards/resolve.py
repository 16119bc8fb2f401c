"""From the name of a reward in the run file to the function."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.rewards.builtin import BUILTINS


def resolve(name: str) -> Callable[..., Any]:
    """The function that `name` (``module:function``, ``file.py:function`` or a builtin) stands for.

    Importing it runs the user's code, so this belongs in a worker. Raises ValueError saying what to mend.
    """
    if name in BUILTINS:
        return BUILTINS[name]()
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        near = difflib.get_close_matches(name, BUILTINS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"reward {name!r} is not a name of the form module:function or file.py:function, "
            f"nor one of {', '.join(BUILTINS)}{hint}"
        )
    module = _load_file(where, name) if where.endswith(".py") else _load_module(where, name)
    return _attribute(module, attribute, name)


def short_names(specs: Sequence[str]) -> list[str]:
    """One name per reward for metrics, as short as is unique: `f`, else `module.f`, else the whole with dots.

    Raises ValueError when a reward is listed twice.
    """
    if twice := [spec for spec, count in Counter(specs).items() if count > 1]:
        raise ValueError(f"reward {twice[0]!r} is listed twice; list it once and raise its weight")
    ladders = [_names_of(spec) for spec in specs]
    counts = [Counter(rung) for rung in zip(*ladders, strict=True)]
    return [
        next((name for name, count in zip(ladder, counts, strict=True) if count[name] == 1), ladder[-1])
        for ladder in ladders
    ]


def _names_of(spec: str) -> tuple[str, str, str]:
    where, _, attribute = spec.rpartition(":")
    stem = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    return attribute, f"{stem}.{attribute}", spec.replace("/", ".").replace(":", ".")


def _load_file(where: str, name: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"reward {name!r}: there is no file {path}")
    # Files beside the reward file can be imported, as when it is run as a script.
    _add_to_path(str(path.parent))
    key = f"stretto_reward_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[key]
        raise _import_failed(name, error) from error
    return module


def _load_module(where: str, name: str) -> ModuleType:
    _add_to_path(str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{where}.".startswith(f"{error.name}."):
            raise ValueError(
                f"reward {name!r}: there is no module {error.name!r} on the Python path or in {Path.cwd()}; "
                "install it, or name the file: path/to/file.py:function"
            ) from error
        raise _import_failed(name, error) from error
    except BaseException as error:
        raise _import_failed(name, error) from error


def _add_to_path(directory: str) -> None:
    if directory not in sys.path:
        sys.path.append(directory)


def _import_failed(name: str, error: BaseException) -> ValueError:
    text = "".join(traceback.format_exception(error))
    return ValueError(f"reward {name!r} could not be imported:\n{text}")


def _attribute(module: ModuleType, attribute: str, name: str) -> Callable[..., Any]:
    public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, public, n=3, cutoff=0.4) or public[:5]
        there = f"; it has {', '.join(near)}" if near else "; it has no public functions"
        raise ValueError(f"reward {name!r}: {module.__file__} has no {attribute!r}{there}")
    value = getattr(module, attribute)
    if not callable(value):
        raise ValueError(f"reward {name!r}: {attribute!r} is a {type(value).__name__}, not a function")
    return value
