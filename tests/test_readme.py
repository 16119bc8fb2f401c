"""README as a new user reads it: nothing missing, every file and key real, every command accepted."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from stretto.cli import _parser, split_words
from stretto.config import config_from_dict

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in their order."""
    parts = re.split(r"^```(.*)\n", README, flags=re.MULTILINE)
    # Split with a group: text, language, block, "", text, language, block, "", ...
    return [block for name, block in zip(parts[1::4], parts[2::4], strict=True) if name == language]


def commands() -> list[str]:
    lines = [line.partition(" #")[0].strip() for block in blocks("") for line in block.splitlines()]
    return [line.replace(" [--step N]", "") for line in lines if line.startswith("stretto ")]


def test_links_lead_somewhere_and_nothing_is_left_open() -> None:
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert targets
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []
    assert "@@" not in README


def test_run_files_are_valid() -> None:
    assert [config_from_dict(tomllib.loads(block)).steps for block in blocks("toml")] == [100]


def test_python_is_valid_and_guarded() -> None:
    for block in blocks("python"):
        ast.parse(block)
        assert 'if __name__ == "__main__":' in block


@pytest.mark.parametrize("command", commands())
def test_commands_are_accepted(command: str) -> None:
    words = shlex.split(command)[1:]
    own, _ = split_words(words) if words[0] in ("train", "rollout") else (words, [])
    _parser().parse_args(own)


def test_every_verb_is_shown() -> None:
    verbs = {"train", "rollout", "check", "plan", "new-model", "export", "doctor"}
    assert {shlex.split(command)[1] for command in commands()} == verbs
