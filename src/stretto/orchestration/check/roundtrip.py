"""Values through the plans and back, bit by bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stretto.models.checkpoint import stored_dtype
from stretto.orchestration.check.bench import Bench
from stretto.orchestration.check.compare import (
    FileTensors,
    as_held,
    checkpoint_names,
    digests,
    first_named,
    same,
    scratch,
    shifted_tensors,
)
from stretto.orchestration.check.diagnose import Case, classify
from stretto.orchestration.check.reference import held_tensors
from stretto.orchestration.check.report import Failure, Outcome
from stretto.orchestration.engines import connect, connect_embedded
from stretto.sync.files import CheckpointFiles
from stretto.sync.fill import Filler
from stretto.sync.publication import Publisher
from stretto.sync.transports import EngineTransport
from stretto.world import local_part

_BUCKETS = 16
_LEAST_BYTES = 2**14


def round_trip(bench: Bench) -> Outcome:
    """Checkpoint to trainer, trainer to checkpoint, trainer to engine."""
    with CheckpointFiles(bench.probe.directory) as files:
        read = FileTensors(files)
        found = trainer_holds(bench, read)
        if broken := _first(bench, found):
            return broken
        exported = export(bench, "loaded")
        broken = _first(bench, files_hold(bench, exported, read) if bench.world.first else None)
    if broken:
        return broken
    unlike = _connect(bench)
    broken = _first(bench, unlike) or _first(bench, _published(bench)) or _first(bench, engine_holds(bench, exported))
    if broken:
        return broken
    if bench.world.first:
        shutil.rmtree(exported)
    if bench.publisher is None:
        engine = bench.settings.engine
        return Outcome("pass", f"checkpoint to trainer and back is bitwise; a live {engine} is not checked")
    how = "as transformers loads it" if bench.engine else "what it has not packed was read again"
    return Outcome("pass", f"bitwise: checkpoint, trainer and back; the engine ({bench.publisher.transport}), {how}")


def _first(bench: Bench, failure: Failure | None) -> Outcome | None:
    """The first rank's failure, on every rank."""
    found = next((one for one in bench.world.gather(failure) if one is not None), None)
    return None if found is None else Outcome("fail", f"{found.parameter}: {found.kind}", failure=found)


def _published(bench: Bench) -> Failure | None:
    """What a publication says of itself: a tensor that it did not fill."""
    try:
        bench.publish()
    except RuntimeError as error:
        name = first_named(str(error), bench.engine_layout().local(0)) if bench.generates else None
        return Failure(name, "a bucket or a move is missing: never written", str(error))
    return None


def _connect(bench: Bench) -> Failure | None:
    """Join both sides; how a server's parameters differ from what the map says of that engine."""
    if bench.server is not None:
        transport = connect(bench.trainer, bench.server, bench.config, bench.world)
        bench.publisher = Publisher(bench.server, transport)
        bench.stack.callback(bench.publisher.hang_up)
        lines = transport.unlike if isinstance(transport, EngineTransport) else []
        name = first_named("\n".join(lines), bench.atoms.names) if lines else None
        return Failure(name, "the server has other parameters", "\n".join(lines)) if lines else None
    if bench.engine is not None:
        # Small buckets: many are used, and each is used again, as in a large model.
        extra = max(_LEAST_BYTES, bench.engine.layout().local_bytes(bench.world.rank) // _BUCKETS)
        bench.publisher = Publisher(bench.engine, connect_embedded(bench.trainer, bench.engine, bench.world, extra))
    return None


def trainer_holds(
    bench: Bench, read: Mapping[str, Tensor], earlier: Mapping[str, Tensor] | None = None, *, rounded: bool = False
) -> Failure | None:
    """What this rank's tensors have other than the checkpoint `read`: copies of a box differ, or one is stale.

    `rounded` allows tensors to which something was added and taken away again a rounding.
    """
    layout, tensors = bench.local_layout(), bench.trainer.weights()
    if layout is None:
        return None
    source = bench.files_layout(stored_dtype(bench.probe.directory))
    filled = scratch(Filler(source, layout, bench.world.rank), tensors, read.__getitem__)
    shifted = shifted_tensors(layout) if rounded else set()
    for name, expected in filled.items():
        held = local_part(tensors[name].detach())
        if same(held, expected, rounded=name in shifted):
            continue
        case = Case(name, held, expected, filled, (earlier or {}).get(name), bench.settings.tp)
        kind, evidence = classify(case)
        pieces = checkpoint_names(layout, name)
        said = f"rank {bench.world.rank}'s {name} ({', '.join(pieces)}): {evidence}"
        return Failure(pieces[0] if pieces else name, kind, said)
    return None


def files_hold(bench: Bench, directory: Path, read: Mapping[str, Tensor]) -> Failure | None:
    """What the exported files have other than the checkpoint `read`, after a trainer's dtype and its +1."""
    target = bench.files_layout()
    layout = bench.local_layout() or target
    with CheckpointFiles(directory) as files:
        found = FileTensors(files)
        for name in target.local(0):
            if name not in found:
                return Failure(name, "never written", f"{name} is not among the exported files")
            expected = as_held(read[name], layout, target, name)
            if not torch.equal(found[name], expected):
                case = Case(name, found[name], expected, read, shards=bench.settings.tp)
                kind, evidence = classify(case)
                return Failure(name, kind, f"in the trainer's export: {evidence}")
    return None


def export(bench: Bench, name: str) -> Path:
    """The trainer's weights as a float32 checkpoint. All ranks call."""
    directory = bench.work / name
    if bench.world.first:
        directory.mkdir()
    bench.world.barrier()
    bench.trainer.export(directory, torch.float32)
    return directory


def engine_holds(bench: Bench, exported: Path, earlier: Mapping[str, Tensor] | None = None) -> Failure | None:
    """What the engines have other than transformers has of the exported checkpoint, in names, dtypes and bits.

    The first rank compares values; the others' engines must be like its own.
    """
    if bench.server is not None:
        return _server_holds(bench)
    if bench.engine is None:
        return None
    own = bench.engine.weights()
    marks = bench.world.gather(digests(own))
    if not bench.world.first:
        return None
    expected = held_tensors(exported, bench.dtype)
    for name, tensor in expected.items():
        if name not in own:
            return Failure(name, "a row is missing", f"transformers holds {name}, and the engine does not")
        if own[name].dtype == tensor.dtype and torch.equal(own[name].cpu(), tensor):
            continue
        kind, evidence = classify(Case(name, own[name], tensor, expected, (earlier or {}).get(name)))
        return Failure(name, kind, f"the engine's {evidence}")
    for rank, mark in enumerate(marks):
        if wrong := [name for name in mark if mark[name] != marks[0].get(name)]:
            said = f"rank {rank}'s engine has other values than rank 0's, which are right"
            return Failure(wrong[0], "not written, or written twice, on one rank", said)
    return None


def _server_holds(bench: Bench) -> Failure | None:
    """What a server has other than the trainer, in bits."""
    assert bench.publisher is not None, "it is connected"
    wrong = bench.world.union(bench.publisher.reread(None))
    if not wrong:
        return None
    return Failure(wrong[0], "not what was sent", f"the server has other values in {', '.join(wrong[:10])}")
