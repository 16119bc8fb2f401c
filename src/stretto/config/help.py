"""The keys of a run file as `stretto train --help` prints them, and as docs/configuration.md.

`python -m stretto.config.help > docs/configuration.md` writes that page.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable

from stretto.config.keys import Key, keys, sections
from stretto.config.run import RunConfig

_WIDTH = 100
_INTRODUCTION = """Written by `python -m stretto.config.help`: edit the models in `stretto.config`, not this page.

A run file is TOML. Every key can also be given on the command line, as `--trainer.lr 2e-5` or `--trainer.lr=2e-5`.
Files named in a run file are relative to it, those on the command line to the current directory. A key that is unknown,
or that the chosen parts would ignore, is an error."""


def keys_help() -> str:
    """Every key with its type, choices or range, its default and its sentence, section by section."""
    blocks = [f"keys of RUN.toml (each is an override too: --trainer.lr 2e-5)\n\n{RunConfig.__doc__}"]
    blocks += [_entry(key) for key in keys().values() if "." not in key.name]
    for section, model in sections().items():
        blocks.append(f"\n[{section}] {model.__doc__}")
        blocks += [_entry(key) for key in keys().values() if key.name.startswith(f"{section}.")]
    return "\n".join(blocks)


def keys_markdown() -> str:
    """The same as a Markdown page, one table a section."""
    lines = ["# Configuration", "", str(RunConfig.__doc__), "", _INTRODUCTION, ""]
    lines += _table([key for key in keys().values() if "." not in key.name])
    for section, model in sections().items():
        lines += ["", f"## [{section}]", "", str(model.__doc__), ""]
        lines += _table([key for key in keys().values() if key.name.startswith(f"{section}.")])
    return "\n".join(lines)


def _table(rows: Iterable[Key]) -> list[str]:
    cells = [(f"`{key.name}`", key.accepts, _default(key), key.sentence) for key in rows]
    head = ["| key | accepts | default | |", "|---|---|---|---|"]
    return head + ["| " + " | ".join(_cell(text) for text in row) + " |" for row in cells]


def _cell(text: str) -> str:
    """A bar or a line break would tear the row."""
    return " ".join(text.replace("|", "\\|").split())


def _entry(key: Key) -> str:
    sentence = textwrap.fill(key.sentence, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{key.name}  ({key.accepts}; {_default(key)})\n{sentence}"


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "no default" if key.default is None else f"default {json.dumps(key.default)}"


if __name__ == "__main__":
    print(keys_markdown())
