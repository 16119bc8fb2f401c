"""Options of a server are checked against its own parser, and spelled as it wants them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from stretto.engines import EngineError
from stretto.engines.server.options import PRINT_PARSER, Option, command_line, installed_options

PROGRAM = (
    """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("-tp", "--tp-size", "--tensor-parallel-size", dest="tp_size", type=int)
parser.add_argument("--quick", action="store_true")
parser.add_argument("--no-cache", dest="cache", action="store_false")
parser.add_argument("--eager", action=argparse.BooleanOptionalAction)
parser.add_argument("--loaders", nargs="*")
parser.add_argument("--extra")
print("something that the library says")
"""
    + PRINT_PARSER
)


@pytest.fixture(scope="module")
def known() -> Mapping[str, Option]:
    return installed_options(sys.executable, PROGRAM, "a server")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp_size": 2}, ["--tp-size", "2"]),
        ({"quick": True}, ["--quick"]),
        ({"quick": False}, []),
        ({"cache": False}, ["--no-cache"]),
        ({"cache": True}, []),
        ({"eager": True}, ["--eager"]),
        ({"eager": False}, ["--no-eager"]),
        ({"loaders": ["a", "b"]}, ["--loaders", "a", "b"]),
        ({"extra": {"a": [1]}}, ["--extra", '{"a": [1]}']),
        ({"extra": 0.5, "model": "x"}, ["--extra", "0.5", "--model", "x"]),
    ],
    ids=str,
)
def test_each_kind_of_option_is_spelled_as_its_parser_wants_it(
    known: Mapping[str, Option], given: dict[str, Any], words: list[str]
) -> None:
    assert command_line(given, {}, known, "engine.x") == words
    assert command_line({}, given, known, "engine.x") == words


def test_an_unknown_option_is_refused_with_the_nearest_name(known: Mapping[str, Option]) -> None:
    with pytest.raises(ValueError, match=r"engine\.x\.tp_sise is no option .* nearest are tp_size"):
        command_line({"tp_sise": 2}, {}, known, "engine.x")


@pytest.mark.parametrize("own", ["x", None])
def test_an_option_of_the_adapter_is_refused(known: Mapping[str, Option], own: str | None) -> None:
    with pytest.raises(ValueError, match=r"engine\.x\.model is set by the engine's adapter"):
        command_line({"model": "mine"}, {"model": own}, known, "engine.x")
    assert command_line({}, {"model": None}, known, "engine.x") == []


def test_a_server_that_lacks_what_the_adapter_needs_is_too_old(known: Mapping[str, Option]) -> None:
    with pytest.raises(EngineError, match="no option receiver, which the adapter needs"):
        command_line({}, {"receiver": "x"}, known, "engine.x")


def test_a_switch_is_true_or_false(known: Mapping[str, Option]) -> None:
    with pytest.raises(ValueError, match=r"engine\.x\.quick is true or false"):
        command_line({"quick": "yes"}, {}, known, "engine.x")


def test_an_interpreter_without_the_server_is_named() -> None:
    with pytest.raises(EngineError, match=r"(?s)is vLLM installed there \(engine\.python\).*No module named"):
        installed_options(sys.executable, "import no_such_module", "vLLM")
    with pytest.raises(EngineError, match="/no/such/python could not be asked"):
        installed_options("/no/such/python", "", "vLLM")
