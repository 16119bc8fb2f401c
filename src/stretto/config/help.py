"""The keys of a run file as `stretto train --help` prints them."""

from __future__ import annotations

import json
import textwrap

from stretto.config.keys import Key, keys, sections
from stretto.config.run import RunConfig

_WIDTH = 100


def keys_help() -> str:
    """Every key with its type, choices or range, its default and its sentence, section by section."""
    blocks = [f"keys of RUN.toml (each is an override too: --trainer.lr 2e-5)\n\n{RunConfig.__doc__}"]
    blocks += [_entry(key) for key in keys().values() if "." not in key.name]
    for section, model in sections().items():
        blocks.append(f"\n[{section}] {model.__doc__}")
        blocks += [_entry(key) for key in keys().values() if key.name.startswith(f"{section}.")]
    return "\n".join(blocks)


def _entry(key: Key) -> str:
    sentence = textwrap.fill(key.sentence, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{key.name}  ({key.accepts}; {_default(key)})\n{sentence}"


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "no default" if key.default is None else f"default {json.dumps(key.default)}"
