"""A run file and its overrides become a RunConfig; a RunConfig becomes a run file."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from stretto.config.keys import find_key
from stretto.config.overrides import assign, parse_value, split_overrides
from stretto.config.paths import resolve_path, resolve_paths
from stretto.config.problems import problems_of, unknown_key
from stretto.config.relevance import ignored_keys
from stretto.config.run import RunConfig


class ConfigError(ValueError):
    """What is wrong with a configuration: one line for each problem."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the TOML file `path` and apply the command-line arguments `overrides` (`--trainer.lr 2e-5` or with `=`).

    Files named in the run file are relative to it, those in overrides to the current directory; they come back
    absolute. Raises ConfigError naming every problem.
    """
    path = Path(path)
    raw = resolve_paths(_read(path), path.absolute().parent)
    try:
        pairs = split_overrides(overrides)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    unknown = [unknown_key(name) for name, _ in pairs if find_key(name) is None]
    for name, text in pairs:
        if find_key(name) is not None:
            assign(raw, name, resolve_path(name, parse_value(name, text), Path.cwd()))
    return _validate(raw, unknown)


def config_from_dict(raw: Mapping[str, Any]) -> RunConfig:
    """The configuration that the nested `raw` describes, with the errors of :func:`load_config`.

    Files it names are relative to the current directory.
    """
    return _validate(resolve_paths(copy.deepcopy(dict(raw)), Path.cwd()), [])


def dump_toml(config: RunConfig) -> str:
    """The resolved configuration as a run file that loads to an equal one from wherever it lies.

    Defaults are written out; keys without a value, and keys that the chosen parts would ignore, are left out.
    Raises ConfigError when a free table, such as `data.args`, holds what TOML cannot say.
    """
    ignored = ignored_keys(config)
    raw = resolve_paths(config.model_dump(), Path.cwd())
    top = {name: value for name, value in raw.items() if name not in _tables(raw)}
    tables = {
        section: {name: value for name, value in table.items() if _is_written(f"{section}.{name}", value, ignored)}
        for section, table in _tables(raw).items()
    }
    try:
        return tomli_w.dumps(top | tables)
    except TypeError as error:
        raise ConfigError(
            f"{_inexpressible(tables)} has a value that TOML cannot express ({error}); leave it out"
        ) from error


def _inexpressible(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The first key whose value TOML cannot say."""
    for section, table in tables.items():
        for name, value in table.items():
            try:
                tomli_w.dumps({name: value})
            except TypeError:
                return f"{section}.{name}"
    raise AssertionError("every key by itself is valid TOML")


def _tables(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: value for name, value in raw.items() if isinstance(value, dict)}


def _is_written(key: str, value: Any, ignored: set[str]) -> bool:
    return value is not None and key not in ignored


def _validate(raw: dict[str, Any], problems: list[str]) -> RunConfig:
    """Strict: `steps = "5"` or `steps = true` is a mistake in a file that has types."""
    try:
        config = RunConfig.model_validate(raw, strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(problems + problems_of(error))) from None
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError(f"there is no run file {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the run file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); a run file is TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_error(path, str(error))) from None


def _syntax_error(path: Path, message: str) -> str:
    place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if place is None:
        return f"{path}:{len(path.read_bytes().splitlines())}: not valid TOML: {message}"
    return f"{path}:{place[1]}: not valid TOML: {message[: place.start()]} (column {place[2]})"
