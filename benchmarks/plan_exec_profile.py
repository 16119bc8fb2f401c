"""Where a plan's time goes: its copies on their own, as they are and with wider elements, and a trace of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from plan_exec_model import Tensors
from torch import Tensor

from stretto.sync.plan import Plan
from stretto.sync.program import Bucket, Move, Program
from stretto.sync.views import Views, copy

if TYPE_CHECKING:
    from plan_exec import Bench

    from stretto.sync.execute import Execution

Pairs = list[tuple[Tensor, Tensor]]


def stages(bench: Bench, plan: Plan, program: Program, target: Tensors) -> None:
    """Print how long each kind of copy takes on this rank with nothing on the link, and how many are one piece."""
    rank = bench.world.rank
    source = Views("source", plan.source, [(move, move.source) for move in program.read()])
    into = Views("target", plan.target, [(move, move.target) for move in program.written()])
    held = bench.source.weights()
    lines = [
        f"rank {rank}: the trainer's weights() {_host(bench, bench.source.weights)}, "
        f"binding the source {_host(bench, lambda: source.bind({rank: held}))}, "
        f"the target {_host(bench, lambda: into.bind({rank: target} if target else {}))}"
    ]
    outgoing = [bucket for buckets in program.outgoing.values() for bucket in buckets]
    incoming = [bucket for buckets in program.incoming.values() for bucket in buckets]
    kinds = {
        "local": [(into[move], source[move]) for move in program.local],
        "pack": [(slot, source[move]) for move, slot in _slots(outgoing, bench)],
        "unpack": [(into[move], slot) for move, slot in _slots(incoming, bench)],
    }
    for name, pairs in kinds.items():
        times = [bench.seconds(lambda p=p: _copy(p)) for p in (pairs, [_wide(*pair) for pair in pairs])]
        if pairs:
            lines.append(_describe(name, pairs, [one["seconds"] for one in times]))
    for text in bench.world.gather("\n  ".join(lines)):
        if bench.world.first:
            print(text, flush=True)


def _host(bench: Bench, call: Callable[[], object]) -> str:
    return f"{bench.seconds(call)['host_seconds'] * 1e3:.2f} ms"


def _copy(pairs: Pairs) -> None:
    if pairs:
        copy([to for to, _ in pairs], [of for _, of in pairs], [0.0] * len(pairs))


def _slots(buckets: Sequence[Bucket], bench: Bench) -> list[tuple[Move, Tensor]]:
    """Each move with its place in a buffer that all the buckets share."""
    buffer = torch.empty(max((b.bytes for b in buckets), default=0), dtype=torch.uint8, device=bench.world.device)
    return [
        (move, buffer[at : at + move.bytes].view(getattr(torch, move.dtype)).view(move.size))
        for bucket in buckets
        for move, at in zip(bucket.moves, bucket.offsets, strict=True)
    ]


def _describe(name: str, pairs: Pairs, seconds: Sequence[float]) -> str:
    size = sum(of.numel() * of.element_size() for _, of in pairs)
    whole = sum(to.is_contiguous() and of.is_contiguous() for to, of in pairs)
    rates = " and ".join(f"{one * 1e3:.2f} ms ({2 * size / one / 1e9:,.0f} GB/s)" for one in seconds)
    return f"{name}: {len(pairs)} copies, {whole} of one piece, {size / 1e9:.3f} GB: {rates} with wider elements"


def _wide(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends as integers of eight bytes where their innermost runs and addresses allow it."""
    keep = [axis for axis, size in enumerate(source.shape) if size != 1] or [source.ndim - 1]
    views = [
        torch.as_strided(t, [t.shape[a] for a in keep], [t.stride(a) for a in keep], t.storage_offset())
        for t in (target, source)
    ]
    if target.dtype == source.dtype and all(map(_fits, views)):
        return views[0].view(torch.int64), views[1].view(torch.int64)
    return target, source


def _fits(view: Tensor) -> bool:
    lengths = (view.shape[-1], view.storage_offset(), *view.stride()[:-1])
    aligned = not any(length * view.element_size() % 8 for length in lengths) and view.data_ptr() % 8 == 0
    return view.stride(-1) == 1 and aligned


def profile_run(bench: Bench, execution: Execution) -> None:
    """Print torch's profile of one run on each rank, and how many kernels it launched for a bucket."""
    from torch.profiler import ProfilerActivity, profile

    cuda = bench.world.device.type == "cuda"
    bench.world.sum([0.0])
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        execution.run()
        bench.synchronize()
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    shown = found.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=60)
    on_device = sum("CUDA" in str(event.device_type) for event in found.events() or ())
    buckets = [b for links in (execution.program.outgoing, execution.program.incoming) for b in links.values()]
    count = max(1, sum(map(len, buckets)))
    text = f"rank {bench.world.rank}: {on_device} operations on the device, {count} buckets\n{shown}"
    for one in bench.world.gather(text):
        if bench.world.first:
            print(one, flush=True)
