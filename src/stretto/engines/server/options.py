"""Options of the server that pass through the run file, checked against the installed version's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from stretto.engines.base import EngineError

# Ends every dialect's `list_options`: prints what the argparse parser `parser` takes.
PRINT_PARSER = """
import json
print()
print(json.dumps({
    action.dest: {"flags": list(action.option_strings), "kind": type(action).__name__}
    for action in parser._actions if action.option_strings and action.dest != "help"
}))
"""


@dataclass(frozen=True)
class Option:
    """How an option is spelled on the command line; `kind` is the name of its argparse action."""

    flags: tuple[str, ...]
    kind: str


@cache
def installed_options(python: str, program: str, name: str, timeout_s: float = 180.0) -> Mapping[str, Option]:
    """The server's options by their Python names, asked of its own interpreter. EngineError when it does not say."""
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{python} could not be asked for the options of {name}: {error}") from error
    if done.returncode:
        raise EngineError(
            f"{python} could not be asked for the options of {name}; is {name} installed there (engine.python)?\n"
            + "\n".join(done.stderr.splitlines()[-8:])
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return {dest: Option(tuple(one["flags"]), one["kind"]) for dest, one in found.items()}


def command_line(
    given: Mapping[str, Any], own: Mapping[str, Any], known: Mapping[str, Option], section: str
) -> list[str]:
    """The arguments for the user's options and the adapter's. ValueError for an unknown or a refused one."""
    for name in given:
        if name in own:
            raise ValueError(f"{section}.{name} is set by the engine's adapter itself; leave it out")
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise ValueError(f"{section}.{name} is no option of the installed server{hint}")
    words: list[str] = []
    for name, value in {**given, **{name: value for name, value in own.items() if value is not None}}.items():
        if name not in known:
            raise EngineError(f"the installed server has no option {name}, which the adapter needs: it is too old")
        words += _words(f"{section}.{name}", value, known[name])
    return words


def _words(name: str, value: Any, option: Option) -> list[str]:
    negative = [one for one in option.flags if one.startswith("--no-")]
    positive = [one for one in option.flags if one not in negative] or negative
    spelled = "--" + name.rpartition(".")[2].replace("_", "-")
    flag = spelled if spelled in positive else max(positive, key=len)
    if option.kind.endswith("StoreTrueAction"):
        return _switch(name, value, [flag], [])
    if option.kind.endswith("StoreFalseAction"):
        return _switch(name, value, [], [flag])
    if isinstance(value, bool) and negative:
        return [flag if value else negative[0]]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def _switch(name: str, value: Any, on: list[str], off: list[str]) -> list[str]:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is true or false, not {value!r}")
    return on if value else off
