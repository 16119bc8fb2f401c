"""A real server, started on the probe, for the rungs that an engine has to climb."""

from __future__ import annotations

import json
from pathlib import Path

from stretto.engines import EngineError
from stretto.engines.server import ServerEngine
from stretto.models.checkpoint import load_tokenizer
from stretto.orchestration.check.bench import Bench
from stretto.orchestration.check.report import Failure, Outcome
from stretto.orchestration.engines import open_engine
from stretto.orchestration.model import Model

_LONGEST = 256
"""Tokens of a sequence: the samples are short, and a server reserves memory for all of it."""


def start(bench: Bench) -> Outcome | None:
    """Give the bench its server; the outcome when there is none."""
    directory = bench.work / "served"
    if bench.world.first:
        _serve_from(bench.probe.directory, directory, bench.tokens.vocabulary)
    bench.world.barrier("making the server's directory")
    model = Model(directory, load_tokenizer(directory), min(bench.tokens.longest, _LONGEST))
    try:
        server = open_engine(bench.config, bench.world, model, bench.stack)
    except (EngineError, ValueError) as error:
        return Outcome("fail", str(error), failure=Failure(None, "the server does not serve this model", str(error)))
    assert isinstance(server, ServerEngine)
    bench.server = server
    return None


def _serve_from(probe: Path, directory: Path, vocabulary: int) -> None:
    """The probe's files, with a tokenizer where it has none, which no server goes without: token n is the word tn."""
    directory.mkdir()
    for file in probe.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    if (probe / "tokenizer_config.json").exists():
        return
    from tokenizers import Tokenizer, models

    words = {f"t{number}": number for number in range(vocabulary)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
