"""The first rungs: is there a map, does it name what both sides really have, does one side fill the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from stretto.engines.embedded import EmbeddedEngine
from stretto.engines.embedded.model import checkpoint_tensors
from stretto.models.checkpoint import empty_model, load_config, stored_dtype
from stretto.models.registry import claims, load_map_file
from stretto.orchestration.check import live
from stretto.orchestration.check.bench import Bench
from stretto.orchestration.check.compare import first_named
from stretto.orchestration.check.report import Failure, Outcome
from stretto.orchestration.training import open_trainer
from stretto.sync.binding import tensor_differences
from stretto.sync.coordinates import atoms_of
from stretto.sync.coverage import differences
from stretto.sync.files import CheckpointFiles
from stretto.sync.layout import Layout
from stretto.sync.plan import Plan

_MAX_SEQUENCES = 8
_NAMED = re.compile(r"the layout (?:has|does not have) (\S+)|(\S+) is \[.* and its layout says")
_SAYS = " and its layout says "
_COVERAGE = ("does not fill", "does not hold the model once")


def family(bench: Bench) -> Outcome:
    """Which weight map the configuration has, by its exact type."""
    settings = bench.settings
    if settings.map_file is not None:
        load_map_file(Path(settings.map_file))
    kind = type(load_config(bench.probe.directory)).__name__
    found = claims(bench.hf_config)
    raw = settings.trainer == "megatron" and settings.names == "raw"
    if not found and (raw or settings.engine != "embedded"):
        who = "the megatron trainer with raw names" if raw else settings.engine
        why = f"no weight map claims {kind}, and {who} needs one: `stretto new-model {settings.model}` begins it"
        return Outcome("fail", why, failure=Failure(None, "no weight map", why))
    try:
        bench.atoms = atoms_of(bench.probe.directory, settings.map_file)
    except ValueError as error:
        return Outcome("fail", str(error), failure=Failure(None, "the weight map cannot be made", str(error)))
    weights = bench.atoms.weights
    if raw and weights.megatron is None:
        why = (
            f"the {weights.family} map has no Megatron-Core model; use --trainer fsdp, or give its "
            "WeightMap `megatron=` (the settings that TransformerConfig needs, {} when it computes as Llama)"
        )
        return Outcome("fail", why, failure=Failure(None, "no Megatron model", why))
    if not found:
        return Outcome("pass", f"no map claims {kind}: every tensor is itself, which is enough here")
    where = f"{found[0].__module__}.{found[0].__qualname__}"
    return Outcome("pass", f"{weights.family} ({where}): {len(weights.rows)} rows, {len(bench.atoms.names)} tensors")


def mapped(bench: Bench) -> Outcome:
    """The files, the trainer's and the engine's real tensors against their layouts: names, shapes, dtypes."""
    layout = bench.files_layout(stored_dtype(bench.probe.directory))
    if lines := _file_differences(bench, layout):
        return _unlike("the checkpoint's files", lines)
    try:
        bench.trainer = bench.stack.enter_context(open_trainer(bench.probe.directory, bench.config, bench.world))
    except ValueError as error:
        if any(words in str(error) for words in _COVERAGE):
            bench.late = str(error)
            return Outcome("pass", "the checkpoint has what its layout says; the trainer's plan is looked at next")
        return _unlike("the trainer", str(error).splitlines())
    layout, tensors = bench.local_layout(), len(bench.trainer.weights())
    if layout is not None and (lines := tensor_differences(layout, bench.world.rank, bench.trainer.weights())):
        return _unlike(layout.title, lines)
    if bench.settings.live:
        who = bench.settings.engine
        return live.start(bench) or Outcome("pass", f"{tensors} tensors of the trainer; a live {who} serves the model")
    if bench.settings.engine != "embedded":
        said = f"{tensors} tensors of the trainer; a live {bench.settings.engine} is not checked"
        return Outcome("pass", said)
    return _embedded(bench, tensors)


def _embedded(bench: Bench, tensors: int) -> Outcome:
    directory, text = bench.probe.directory, bench.settings.dtype
    try:
        bench.engine = EmbeddedEngine(
            directory,
            None,
            device=bench.world.device,
            dtype=bench.dtype,
            eos_ids=(),
            max_length=bench.tokens.longest,
            max_sequences=_MAX_SEQUENCES,
            map_file=bench.settings.map_file,
            replicas=bench.world.size,
        )
    except ValueError as error:
        return Outcome("fail", str(error), failure=Failure(None, "the engine cannot serve this model", str(error)))
    bench.stack.callback(bench.engine.close)
    layout = bench.engine.layout()
    held = {name: tuple(one.shape) for name, one in checkpoint_tensors(empty_model(directory)).items()}
    expected = {name: shape for name, (shape, _) in layout.local(bench.world.rank).items()}
    if lines := _unlike_names(expected, held) + _unlike_shapes(expected, held):
        return _unlike(layout.title, lines)
    return Outcome(
        "pass", f"{tensors} tensors of the trainer and {len(held)} of the engine ({text}), as their layouts say"
    )


def _file_differences(bench: Bench, layout: Layout) -> list[str]:
    expected = {name: shape for name, (shape, _) in layout.local(0).items()}
    dropped = bench.atoms.weights.dropped
    with CheckpointFiles(bench.probe.directory) as files:
        names = [name for name in files.where if not any(fnmatch(name, pattern) for pattern in dropped)]
        found = {name: files.shape(name) for name in names}
    return _unlike_names(expected, found) + _unlike_shapes(expected, found)


def _unlike_names(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    """Two-sided; the nearest candidates are among those that the other side has alone, when there are any."""
    missing, surplus = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    return [
        *differences("the layout has", missing, surplus or found),
        *differences("the layout does not have", surplus, missing or expected),
    ]


def _unlike_shapes(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name} is {list(found[name])} and its layout says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]


def _unlike(who: str, lines: Sequence[str]) -> Outcome:
    text = "\n".join(lines)
    named = next((found[1] or found[2] for line in lines if (found := _NAMED.search(line))), None)
    return Outcome("fail", f"{who}: {text}", failure=Failure(named, _likely(text), text))


def _likely(text: str) -> str:
    """What a list of differences looks like."""
    if _NAMED.search(text) is None:
        return "it cannot be built"
    if _SAYS not in text:
        if "layout does not have" in text and "the layout has" in text:
            return "another name"
        return "a row is missing" if "layout does not have" in text else "a row too much"
    line = next(line for line in text.splitlines() if _SAYS in line)
    found, _, said = line.partition(_SAYS)
    return (
        "wrong dtype" if found.partition("]")[0].split("[")[-1] == said.partition("]")[0].strip("[") else "wrong shape"
    )


def planned(bench: Bench) -> Outcome:
    """Both plans: every element read, every element written, once."""
    names = bench.atoms.names
    try:
        trainer, engine = bench.trainer_layout(), bench.engine_layout()
        local = trainer if bench.late is not None else bench.local_layout() or trainer
        load = Plan.of(bench.files_layout(), local, [0] * local.ranks, [0])
        embedded = bench.settings.engine == "embedded"
        sync = Plan.of(trainer, engine, range(bench.world.size) if embedded else None)
    except ValueError as error:
        text = str(error)
        failure = Failure(first_named(text, names), "an element is not written, written twice or not read", text)
        return Outcome("fail", text, failure=failure)
    if bench.late is not None:
        return Outcome(
            "fail", bench.late, failure=Failure(first_named(bench.late, names), "incomplete plan", bench.late)
        )
    digests = bench.world.gather((load.digest, sync.digest))
    if len(set(digests)) > 1:
        return Outcome("fail", f"the ranks made different plans: {digests}")
    loaded, moved = int(load.send_bytes.sum()), int(sync.send_bytes.sum())
    said = (
        f"checkpoint to trainer {loaded:,} bytes ({load.digest[:12]}); trainer to {bench.settings.engine} {moved:,} "
        f"bytes, {sync.moved_bytes:,} of them between processes ({sync.digest[:12]})"
    )
    return Outcome("pass", said)
