"""What the trainer computes, against transformers: log-probs, then gradients."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stretto.models.checkpoint import stored_dtype
from stretto.orchestration.check.bench import Bench, flat
from stretto.orchestration.check.compare import FileTensors, checkpoint_names, of_gradients, relative, scratch
from stretto.orchestration.check.diagnose import Case, classify
from stretto.orchestration.check.gradients import local_gradient, write_gradient
from stretto.orchestration.check.hypotheses import Hypothesis, hypotheses
from stretto.orchestration.check.pieces import Pieces, pieces_layout
from stretto.orchestration.check.reference import Reference
from stretto.orchestration.check.report import Failure, Outcome
from stretto.orchestration.check.samples import scored_rollouts, training_batch, with_logprobs
from stretto.sync.files import CheckpointFiles
from stretto.sync.fill import Filler, Read
from stretto.sync.layout import Layout
from stretto.types import Batch, Rollout
from stretto.world import local_part

BOUND = 1e-4
"""Of relative differences in float32."""
NOISE_FACTOR = 4.0
"""In bfloat16: so many times what transformers in bfloat16 is off from transformers in float32."""
_FEW = 4
"""Samples on which a hypothesis is tried first."""
_SEARCH_S = 600.0
"""After so long a search ends with what it has found."""
_HUGE = 1e4
_NEGLIGIBLE = 1e-6
"""Gradients smaller than this share of the largest are compared with that share: they are sums that cancel."""


def logits(bench: Bench) -> Outcome:
    """Log-probs of fixed samples, over all of the vocabulary's range; then with padded rows set to huge values."""
    rollouts = scored_rollouts(bench.tokens)
    expected = _expected(bench, rollouts)
    bound = BOUND if bench.exact else max(BOUND, NOISE_FACTOR * bench.noise)
    found = flat(bench.logprobs(rollouts))
    measured = relative(found, expected)
    padding = _padding(bench)
    padded = _padded_name(bench, padding)
    # Log-probs that are no numbers already are some other mistake, which the search below is for.
    if padded and all(map(math.isfinite, found)) and (leaked := _leak(bench, padding, rollouts, found)):
        why = f"with {_HUGE:g} in the padded rows of the vocabulary, log-probs change by {leaked:.1e}"
        return Outcome("fail", why, leaked, 0.0, Failure(padded, "padded rows of the vocabulary leak", why))
    if not measured <= bound:
        failure = search(bench, rollouts, expected, measured, bound)
        why = f"log-probs are {measured:.1e} off transformers' (bound {bound:.1e})"
        return Outcome("fail", why, measured, bound, failure)
    said = f"log-probs within {measured:.1e} of transformers' in float32 (bound {bound:.1e})"
    said += "" if bench.exact else f"; transformers in {bench.settings.dtype} is off by {bench.noise:.1e}"
    return Outcome("pass", said + ("; padded rows do not count" if padded else ""), measured, bound)


def _expected(bench: Bench, rollouts: Sequence[Rollout]) -> list[float]:
    """transformers' log-probs in float32, from the first rank; sets the bench's noise."""
    said = None
    if bench.world.first:
        bench.reference = Reference(bench.probe.directory, torch.float32, bench.world.device)
        values = flat(bench.reference.logprobs(rollouts))
        noise = 0.0
        if not bench.exact:
            lower = Reference(bench.probe.directory, bench.dtype, bench.world.device)
            noise = relative(flat(lower.logprobs(rollouts)), values)
        said = values, noise
    values, bench.noise = bench.world.from_first(said)
    return values


def _padding(bench: Bench) -> dict[str, Tensor]:
    """Where this rank's tensors have rows of the vocabulary that are padding: masks, by local name."""
    layout, tensors = bench.local_layout(), bench.trainer.weights()
    if layout is None:
        return {}
    source = bench.files_layout(stored_dtype(bench.probe.directory))
    with CheckpointFiles(bench.probe.directory) as files:
        filled = scratch(Filler(source, layout, bench.world.rank), tensors, files.read)
    masks = {name: known.isnan() for name, known in filled.items()}
    return {name: empty for name, empty in masks.items() if empty.any()}


def _padded_name(bench: Bench, padding: Mapping[str, Tensor]) -> str | None:
    """The checkpoint's name of a tensor with padding on any rank; None without."""
    layout = bench.local_layout()
    own = [", ".join(checkpoint_names(layout, name)) for name in padding] if layout is not None else []
    return next((name for names in bench.world.gather(own) for name in names if name), None)


def _leak(bench: Bench, padding: Mapping[str, Tensor], rollouts: Sequence[Rollout], found: Sequence[float]) -> float:
    """How far log-probs move from `found` while the padding is huge; it is zero afterwards, as it was."""
    _fill(bench, padding, _HUGE)
    leaked = relative(flat(bench.logprobs(rollouts)), found)
    _fill(bench, padding, 0.0)
    return leaked


@torch.no_grad()
def _fill(bench: Bench, padding: Mapping[str, Tensor], value: float) -> None:
    tensors = bench.trainer.weights()
    for name, empty in padding.items():
        local_part(tensors[name].detach())[empty] = value


def search(
    bench: Bench,
    rollouts: Sequence[Rollout],
    expected: Sequence[float],
    measured: float,
    bound: float,
    deadline_s: float = _SEARCH_S,
) -> Failure:
    """Which change of the checkpoint makes the trainer right: all ranks try the same ones, in order.

    After `deadline_s` by the first rank's clock the search ends with the nearest so far.
    """
    start, late = time.monotonic(), False
    layout, weights = bench.local_layout(), bench.atoms.weights
    if layout is None:
        return Failure(None, "the model is built otherwise", "no weight map says which tensor is which")
    tensors, nearest = bench.trainer.weights(), (measured, "none")
    tried = 0
    stored = stored_dtype(bench.probe.directory)
    on_disk, apart = bench.files_layout(stored), pieces_layout(bench.atoms, stored)
    with CheckpointFiles(bench.probe.directory) as files:
        read, filler = Pieces(on_disk, apart, files.read).read, Filler(apart, layout, bench.world.rank)
        cut = max(bench.settings.tp, bench.settings.ep)
        for one in hypotheses(weights, bench.sides, shards=cut, stages=bench.settings.stages):
            if late := bench.world.from_first(time.monotonic() - start > deadline_s):
                break
            tried += 1
            now = _difference_under(bench, one, filler, tensors, read, rollouts[:_FEW], expected)
            if now <= bound:  # few samples screen, all of them confirm
                now = _difference_under(bench, one, filler, tensors, read, rollouts, expected)
            if now <= bound:
                said = f"with a checkpoint changed accordingly, log-probs are {now:.1e} off instead of {measured:.1e}"
                return Failure(", ".join(one.parameters), one.kind, said)
            nearest = min(nearest, (now, f"{', '.join(one.parameters)}: {one.kind}"))
    said = f"{tried} mistakes of one row were tried and none explains it"
    said += f"; the search ended after {deadline_s:.0f} s with others untried" if late else ""
    said += f"; nearest ({nearest[0]:.1e}): {nearest[1]}" if late or nearest[0] < measured / 2 else ""
    kind = "not found in time" if late else "not a single mistake in the map, or the model is built otherwise"
    return Failure(None, kind, said)


def _difference_under(
    bench: Bench,
    one: Hypothesis,
    filler: Filler,
    tensors: Mapping[str, Tensor],
    read: Read,
    rollouts: Sequence[Rollout],
    expected: Sequence[float],
) -> float:
    changed = one.change(read)
    filler.fill(tensors, changed.__getitem__, changed)
    found = flat(bench.logprobs(rollouts))
    filler.fill(tensors, read, changed)
    return relative(found, expected[: len(found)])


def gradients(bench: Bench) -> Outcome:
    """The gradient of one batch, parameter by parameter, in the checkpoint's coordinates."""
    layout = bench.local_layout()
    if layout is None:
        return Outcome("skipped", "no weight map says which gradient is of which parameter")
    batch = training_batch(bench.tokens)
    values = bench.world.from_first(bench.reference.logprobs(batch.rollouts) if bench.reference else None)
    batch = Batch(with_logprobs(batch.rollouts, values), batch.advantages)
    mine = slice(bench.world.rank, None, bench.world.size)
    found = local_gradient(bench.trainer, Batch(batch.rollouts[mine], batch.advantages[mine]))
    theirs, ours = bench.work / "gradient-transformers", bench.work / "gradient-trainer"
    write_gradient(layout, found, ours, bench.world)
    outcome = _compare(bench, batch, theirs, ours) if bench.world.first else None
    bench.reference = None
    outcome = bench.world.from_first(outcome)
    if outcome.status == "pass" and (failure := _copies_differ(bench, of_gradients(layout), found, ours)):
        outcome = Outcome("fail", f"{failure.parameter}: {failure.kind}", failure=failure)
    if bench.world.first:
        shutil.rmtree(theirs)
    return outcome


def _compare(bench: Bench, batch: Batch, theirs: Path, ours: Path) -> Outcome:
    assert bench.reference is not None
    bench.reference.write_gradient(batch, theirs)
    lower = None
    if not bench.exact:
        lower = bench.work / "gradient-lower"
        Reference(bench.probe.directory, bench.dtype, bench.world.device).write_gradient(batch, lower)
    with CheckpointFiles(theirs) as a, CheckpointFiles(ours) as b, CheckpointFiles(lower or theirs) as c:
        return _worst(bench, FileTensors(a), FileTensors(b), FileTensors(c))


def _worst(
    bench: Bench, expected: Mapping[str, Tensor], found: Mapping[str, Tensor], lower: Mapping[str, Tensor]
) -> Outcome:
    """Each parameter's difference over its bound; of those above it, the worst is named."""
    names = [name for name in bench.files_layout().local(0) if name in expected]
    floor = _NEGLIGIBLE * max(float(expected[name].norm()) for name in names)
    ratios: dict[str, tuple[float, float, float]] = {}
    for name in names:
        size = max(float(expected[name].norm()), floor)
        off = float((found[name] - expected[name]).norm()) / size
        bound = max(BOUND, NOISE_FACTOR * float((lower[name].float() - expected[name]).norm()) / size)
        off = off if math.isfinite(off) else math.inf
        ratios[name] = (off / bound, off, bound)
    worst = max(ratios, key=lambda name: ratios[name])
    ratio, off, bound = ratios[worst]
    if ratio <= 1:
        return Outcome(
            "pass", f"{len(names)} parameters, the worst {worst}: {off:.1e} off (bound {bound:.1e})", off, bound
        )
    kind, _ = classify(Case(worst, found[worst], expected[worst], shards=bench.settings.tp))
    wrong = [name for name in names if ratios[name][0] > 1]
    said = f"gradients of {len(wrong)} of {len(names)} parameters are off: {', '.join(wrong[:8])}"
    failure = Failure(worst, f"gradient: {kind}", said)
    return Outcome("fail", f"{worst}: gradient {off:.1e} off (bound {bound:.1e})", off, bound, failure)


def _copies_differ(bench: Bench, layout: Layout, found: Mapping[str, Tensor], directory: Path) -> Failure | None:
    """Every rank's copy of a gradient must be the one that was compared: else replicas would drift apart."""
    failure = None
    with CheckpointFiles(directory) as files:
        filled = scratch(Filler(of_gradients(bench.files_layout()), layout, bench.world.rank), found, files.read)
    for name, expected in filled.items():
        known = ~expected.isnan()
        size = max(float(expected[known].norm()), 1e-12)
        if float((found[name] - expected)[known].norm()) > BOUND * size and failure is None:
            kind, evidence = classify(Case(name, found[name], expected, shards=bench.settings.tp))
            pieces = checkpoint_names(layout, name)
            said = f"rank {bench.world.rank}'s gradient of {name} is not its replicas': {evidence}"
            failure = Failure(pieces[0] if pieces else name, f"gradient: {kind}", said)
    return next((one for one in bench.world.gather(failure) if one), None)
