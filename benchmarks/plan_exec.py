"""Bringing Megatron's weights (tensor parallel 2, two GPUs) together as full tensors, against the rate of the link.

    torchrun --nproc-per-node 2 benchmarks/plan_exec.py [--extra-mib 512 ...] [--repeats 12] [--name N] [--tiny]

The shapes of Qwen3-4B, random weights, bf16, in Megatron-Core's own model where it can be built. A plan brings them to
rank 0 in checkpoint layout, to the embedded engine's memory on rank 0, and to one on each rank. Compared in the same
run: NCCL's broadcast of the same bytes in one buffer, the same buckets with nothing packed, an all-gather of every
parameter with its conversion, and Megatron-Bridge's export. Only bytes that cross the link count, in the busier
direction. After the timed runs everything is overwritten, brought over once more and compared bit by bit. On CPU (gloo)
with `--tiny` it shows that it runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from plan_exec_model import (
    DTYPE,
    Source,
    Tensors,
    check_equal,
    make_config,
    make_source,
    make_target,
    poison,
    random_model,
)
from plan_exec_peers import bridge_export, broadcast, buckets_alone, gather_and_convert
from plan_exec_profile import profile_run, stages
from record import write_result

from stretto.sync.execute import EXTRA_BYTES, Execution, over_group
from stretto.sync.layouts import checkpoint_layout, replica_layout
from stretto.sync.plan import Plan
from stretto.sync.program import Bucket
from stretto.world import World, join_world, leave_world

MIB = 2**20
GATHER, BRIDGE = "all-gather each and convert", "Megatron-Bridge export_hf_weights"
WARM_UP = 3
LIMIT_S = 480
"""A run that takes longer shows where it stands and ends."""


@dataclass(frozen=True)
class Bench:
    """What every measurement needs."""

    world: World
    config: Any
    full: Tensors
    source: Source
    repeats: int

    def seconds(self, run: Callable[[], object]) -> dict[str, Any]:
        """Wall-clock seconds of `run`, of the later rank each time; `host` until the call returned, its work queued."""
        rows = [self._one(run) for _ in range(WARM_UP + self.repeats)][WARM_UP:]
        ranks = self.world.gather(rows)
        wall, host = ([max(row[k] for row in run_rows) for run_rows in zip(*ranks, strict=True)] for k in (0, 1))
        return {
            "seconds": statistics.median(wall),
            "fastest": min(wall),
            "slowest": max(wall),
            "host_seconds": statistics.median(host),
            "runs": wall,
        }

    def _one(self, run: Callable[[], object]) -> tuple[float, float]:
        self.world.sum([0.0])  # all ranks begin together
        self.synchronize()
        started = time.perf_counter()
        kept = run()
        returned = time.perf_counter()
        self.synchronize()
        ended = time.perf_counter()
        del kept
        return ended - started, returned - started

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def plan(self, case: str) -> Plan:
        """The plan of a case."""
        atoms = self.source.layout.atoms
        if case == "checkpoint":
            return Plan.of(self.source.layout, checkpoint_layout(atoms, DTYPE), [0])
        at = list(range(self.world.size)) if case == "replicas" else [0]
        return Plan.of(self.source.layout, replica_layout(atoms, DTYPE, len(at)), at)


def measure_plan(bench: Bench, case: str, extra: int, profiled: bool) -> dict[str, Any]:
    """Time a plan with `extra` bytes of buckets, check every tensor it wrote, and see what memory it took."""
    world, plan = bench.world, bench.plan(case)
    rank = world.rank
    receives = rank in plan.target_at
    target = make_target(plan.target, rank if case == "replicas" else 0, world.device) if receives else {}
    before = _memory_reset(world)
    execution = Execution(
        plan,
        rank,
        lambda: {rank: bench.source.weights()},
        lambda: {rank: target} if receives else {},
        link=over_group(plan, device=world.device, extra_bytes=extra),
    )
    times = bench.seconds(execution.run)
    poison(target)
    execution.run()
    execution.verify()
    bench.synchronize()
    taken = _memory_peak(world) - before
    if receives:
        check_equal(target, bench.full, f"{case}, {extra // MIB} MiB")
    if profiled:
        stages(bench, plan, execution.program, target)
        profile_run(bench, execution)
    return (
        times
        | _sizes(world, plan, execution)
        | {
            "case": case,
            "extra_mib": extra // MIB,
            "peak_extra_mib": [one / MIB for one in world.gather(taken)] if world.device.type == "cuda" else None,
        }
    )


def _sizes(world: World, plan: Plan, execution: Execution) -> dict[str, Any]:
    """Bytes over the link and how they are cut."""
    buckets = _incoming(execution)
    of_first = [bucket.bytes for bucket in buckets]
    return world.from_first(
        {
            "moved_bytes": plan.moved_bytes,
            "link_bytes": max(plan.link_bytes().values()),
            "written_bytes": execution.program.bytes,
            "bucket_bytes": of_first,
            "moves_per_bucket": [len(bucket.moves) for bucket in buckets],
            "local_moves": len(execution.program.local),
        }
    )


def _incoming(execution: Execution) -> Sequence[Bucket]:
    return [bucket for buckets in execution.program.incoming.values() for bucket in buckets]


def _memory_reset(world: World) -> int:
    if world.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _memory_peak(world: World) -> int:
    return torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0


def measure_peer(
    bench: Bench, name: str, run: Callable[[], Tensors], run_kept: Callable[[], Tensors]
) -> dict[str, Any]:
    """Time one of the ways of others, and check what it makes. `run_kept` keeps it on every rank, to be checked."""
    times = bench.seconds(run)
    check_equal(run_kept(), bench.full, name)
    return times


def measure_gather(bench: Bench) -> dict[str, Any]:
    """The field's usual way; rank 0 alone keeps the tensors when it is timed."""
    keeps = (bench.world.first, True)
    runs = [gather_and_convert(bench.source, bench.config, bench.world, keep) for keep in keeps]
    return measure_peer(bench, "all-gather", *runs)


def measure_bridge(bench: Bench) -> dict[str, Any]:
    """Megatron-Bridge's export, or why it cannot run here."""
    reason, runs = "", []
    try:
        keeps = (bench.world.first, True)
        runs = [bridge_export(bench.source, bench.config, bench.full, keep) for keep in keeps]
        runs[0]()
    except Exception as error:  # whatever an optional package fails with is the answer
        reason = f"{type(error).__name__}: {error}"
    reason = next((one for one in bench.world.gather(reason) if one), "")
    return {"not_available": reason} if reason else measure_peer(bench, BRIDGE, *runs)


def run(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """All measurements. The broadcast is timed first and last, and the faster of the two is the yardstick."""
    world = bench.world
    size = max(bench.plan("checkpoint").link_bytes().values())
    links = [bench.seconds(broadcast(size, world))]
    plans = [
        measure_plan(bench, "checkpoint", extra * MIB, args.profile and index == 0)
        for index, extra in enumerate(args.extra_mib)
    ]
    plans += [measure_plan(bench, case, EXTRA_BYTES, False) for case in ("embedded", "replicas")]
    for one in plans:
        if one["case"] == "checkpoint":
            one["buckets_alone"] = bench.seconds(buckets_alone(one["bucket_bytes"], world))
    links.append(bench.seconds(broadcast(size, world)))
    peers = {GATHER: measure_gather(bench)}
    rate = size / min(one["seconds"] for one in links)
    for one in plans:
        one["bytes_per_s"] = one["link_bytes"] / one["seconds"]
        one["of_broadcast"] = one["bytes_per_s"] / rate
    return {"broadcast": {"bytes": size, "bytes_per_s": rate, "runs": links}, "plans": plans, "peers": peers}


def table(result: dict[str, Any]) -> str:
    """The result, a line for each measurement."""
    link = result["broadcast"]
    lines = [
        f"source: {result['source']}",
        f"{'':<44} {'GB':>6} {'ms':>8} {'fastest':>8} {'slowest':>8} {'host':>7} {'GB/s':>7} {'of bcast':>8}"
        "  extra MiB seen, by rank",
    ]
    for place, one in zip(("first", "last"), link["runs"], strict=True):
        lines.append(_line(f"broadcast, one buffer ({place})", link["bytes"], one, link["bytes_per_s"]))
    for one in result["plans"]:
        title = f"plan to {one['case']}, {one['extra_mib']} MiB, {len(one['bucket_bytes'])} buckets"
        seen = one["peak_extra_mib"]
        tail = "  " + " / ".join(f"{value:.0f}" for value in seen) if seen else ""
        lines.append(_line(title, one["link_bytes"], one, link["bytes_per_s"]) + tail)
        if "buckets_alone" in one:
            lines.append(
                _line("  its buckets, nothing packed", one["link_bytes"], one["buckets_alone"], link["bytes_per_s"])
            )
    for name, one in result["peers"].items():
        if "seconds" in one:
            lines.append(_line(name, link["bytes"], one, link["bytes_per_s"]))
        else:
            lines.append(f"{name}: not available: {one['not_available']}")
    return "\n".join(lines)


def _line(title: str, size: int, one: dict[str, Any], best: float) -> str:
    rate = size / one["seconds"]
    times = "".join(f" {one[key] * 1e3:>8.2f}" for key in ("seconds", "fastest", "slowest"))
    host = one["host_seconds"] * 1e3
    return f"{title:<44} {size / 1e9:>6.3f}{times} {host:>7.2f} {rate / 1e9:>7.2f} {rate / best:>8.2f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [EXTRA_BYTES // MIB, 64, 128, 256, 1024]
    parser.add_argument("--extra-mib", type=int, nargs="+", default=sizes, help="memory for buckets, one run for each")
    parser.add_argument("--repeats", type=int, default=12, help="runs counted, after the warm-up")
    parser.add_argument("--source", choices=("auto", "megatron", "layout"), default="auto", help="the trainer's side")
    parser.add_argument("--name", default="plan_exec", help="name of the result's file")
    parser.add_argument("--profile", action="store_true", help="show where the first plan's time goes")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, nothing written")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table and keep the result."""
    args = parse()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    world = join_world(0.0)
    if world.size != 2:
        raise SystemExit("this needs two processes: torchrun --nproc-per-node 2 benchmarks/plan_exec.py")
    config = make_config(args.tiny)
    full = random_model(config, world)
    bench = Bench(world, config, full, make_source(full, config, world, args.source), args.repeats)
    result = {"settings": vars(args), "source": bench.source.kind, "device": world.device.type, **run(bench, args)}
    keep(result, world, args)
    result["peers"][BRIDGE] = measure_bridge(bench)  # last: what it may break is kept
    keep(result, world, args)
    leave_world()


def keep(result: dict[str, Any], world: World, args: argparse.Namespace) -> None:
    """Print the table and write the result, on the first rank."""
    link = result["broadcast"]
    for one in result["peers"].values():
        if "seconds" in one:
            one["bytes_per_s"] = link["bytes"] / one["seconds"]
            one["of_broadcast"] = one["bytes_per_s"] / link["bytes_per_s"]
    if world.first:
        print(table(result), flush=True)
        if not args.tiny:
            print(write_result(args.name, result), flush=True)


if __name__ == "__main__":
    main()
