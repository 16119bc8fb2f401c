"""A plan as `stretto plan` tells it: one table of numbers, as data and for people."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stretto.data.nearest import listed
from stretto.models.description import read_config
from stretto.models.registry import load_map_file, weight_map
from stretto.sync.layout import ITEM_BYTES, Atoms, Ints, Layout
from stretto.sync.plan import Plan
from stretto.sync.spec import Side, parse_side

_LINKS_SHOWN = 5


def planned(
    model: str,
    source: str,
    target: str,
    *,
    dtype: str | None = None,
    gigabytes_per_second: float = 50.0,
    colocate: bool = False,
    map_file: Path | None = None,
) -> dict[str, Any]:
    """The report on the plan from side `source` to side `target`, as a command line names them.

    `dtype` is that of a side which does not say its own; the configuration's when None. A rank sends and receives at
    most `gigabytes_per_second` (10^9 bytes each). With `colocate` rank r of both sides is one process. Raises
    ValueError for sides that cannot be read or do not divide the model, for a model without a map, and for a colocated
    target with more ranks than its source.
    """
    sides = parse_side(source), parse_side(target)
    if not 0 < gigabytes_per_second < float("inf"):
        raise ValueError(f"--link is {gigabytes_per_second:g}; it must be a number of GB/s above 0")
    if dtype is not None and dtype not in ITEM_BYTES:
        raise ValueError(f"there is no dtype {dtype!r} {listed(dtype, ITEM_BYTES)}")
    if map_file is not None:
        load_map_file(map_file)
    config = read_config(model)
    return plan_report(
        config,
        *sides,
        dtype=dtype or _dtype_of(config),
        gigabytes_per_second=gigabytes_per_second,
        colocate=colocate,
    )


def _dtype_of(config: Any) -> str:
    """The dtype of a configuration's checkpoint; bfloat16 when it does not say."""
    said = str(getattr(config.get_text_config(), "dtype", None) or config.dtype).removeprefix("torch.")
    return said if said in ITEM_BYTES else "bfloat16"


def plan_report(
    config: Any, source: Side, target: Side, *, dtype: str, gigabytes_per_second: float, colocate: bool = False
) -> dict[str, Any]:
    """The plan for a transformers configuration, in numbers that JSON can hold; see :func:`planned`."""
    atoms = Atoms.of(weight_map(config))
    begin, end = source.layout(atoms, dtype), target.layout(atoms, dtype)
    if colocate and end.ranks > begin.ranks:
        raise ValueError(
            f"--colocate puts rank r of the target on rank r of the source, and {end.title} has {_ranks(end.ranks)} "
            f"where {begin.title} has {_ranks(begin.ranks)}; leave it out, or make the sides equal"
        )
    plan = Plan.of(begin, end, target_at=range(end.ranks) if colocate else None)
    layers = atoms.weights.layer_count
    return {
        "model": type(config).__name__,
        "family": atoms.weights.family,
        "layers": layers,
        "colocate": colocate,
        **plan.summary(),
        "source_dtype": source.dtype or dtype,
        "target_dtype": target.dtype or dtype,
        "held_bytes": {"source": _spread(_held(begin)), "target": _spread(_held(end))},
        "sent_bytes": _spread(plan.sent_bytes()[plan.source_at]),
        "received_bytes": _spread(plan.received_bytes()[plan.target_at]),
        "link_bytes": _links(plan),
        "gigabytes_per_second": gigabytes_per_second,
        "least_seconds": plan.least_seconds(gigabytes_per_second * 1e9),
        "uneven_stages": {
            name: list(sizes)
            for name, side in (("source", source), ("target", target))
            if (sizes := side.uneven(layers)) is not None
        },
        "dropped": list(atoms.weights.dropped),
    }


def _held(layout: Layout) -> Ints:
    """Bytes of weights on each rank."""
    held = np.zeros(layout.ranks, dtype=np.int64)
    for ranks in layout.classes:
        held[ranks] = layout.local_bytes(int(ranks[0]))
    return held


def _spread(values: Ints) -> dict[str, Any]:
    """Each rank's number, and the least, the mean and the most of them."""
    return {
        "least": int(values.min()),
        "mean": float(values.mean()),
        "most": int(values.max()),
        "ranks": values.tolist(),
    }


def _links(plan: Plan) -> list[dict[str, Any]]:
    """Bytes from a process to another, most first. A process is named by its rank of the source, if it has one."""
    names = {int(process): f"target {rank}" for rank, process in enumerate(plan.target_at)}
    names |= {int(process): f"source {rank}" for rank, process in enumerate(plan.source_at)}
    links = sorted(plan.link_bytes().items(), key=lambda link: (-link[1], link[0]))
    return [{"from": names[a], "to": names[b], "bytes": count} for (a, b), count in links]


def print_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Print it, for a program or for a person."""
    if as_json:
        print(json.dumps(report))
        return
    # A pipe has no width: lines are left whole there.
    width = max(120, shutil.get_terminal_size().columns)
    Console(width=width, highlight=False, soft_wrap=True).print(render(report))


def render(report: dict[str, Any]) -> RenderableType:
    """The report for a terminal."""
    lines = [
        f"{report['model']}: {report['layers']} layers, {report['tensors']} tensors, family {report['family']}",
        f"source  {report['source']}, {_ranks(report['source_ranks'])}, {report['source_dtype']}",
        f"target  {report['target']}, {_ranks(report['target_ranks'])}, {report['target_dtype']}{_where(report)}",
    ]
    for side, sizes in report["uneven_stages"].items():
        lines.append(
            f"        the {side}'s {report['layers']} layers do not divide over {len(sizes)} stages: "
            f"{'/'.join(map(str, sizes))}, the first get one more (pp_layers=... sets it)"
        )
    return Group(Text("\n".join(lines)), _table(report), Text("\n".join([*_totals(report), *_top_links(report)])))


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _where(report: dict[str, Any]) -> str:
    return ", on the source's devices" if report["colocate"] else ""


def _table(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("GB of a rank")
    for column in ("least", "mean", "most"):
        table.add_column(column, justify="right")
    held = report["held_bytes"]
    rows = {
        "held by the source": held["source"],
        "held by the target": held["target"],
        "sent": report["sent_bytes"],
        "received": report["received_bytes"],
    }
    for name, spread in rows.items():
        table.add_row(name, *(_gigabytes(spread[column]) for column in ("least", "mean", "most")))
    return table


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.3f}"


def _totals(report: dict[str, Any]) -> list[str]:
    moved, needed = report["moved_bytes"], report["target_bytes"]
    busiest, bound = report["busiest_sender_bytes"], report["busiest_sender_bound_bytes"]
    ratio = f" ({busiest / bound:.2f} x)" if bound else ""
    rest = "; the rest is on its device already" if moved < needed else ""
    dropped = ", ".join(report["dropped"]) or "nothing"
    return [
        "",
        f"moved      {_gigabytes(moved)} GB of the target's {_gigabytes(needed)} GB{rest}",
        f"           {report['sends']:,} transfers of {report['pieces']:,} pieces, over {report['links']:,} links",
        f"busiest    one rank sends {_gigabytes(busiest)} GB; no sharing gets below {_gigabytes(bound)} GB{ratio}",
        f"time       at least {report['least_seconds']:.4g} s at {report['gigabytes_per_second']:g} GB/s a rank",
        f"dropped    {dropped}",
        f"digest     {report['digest']}",
    ]


def _top_links(report: dict[str, Any]) -> list[str]:
    links = report["link_bytes"]
    if not links:
        return []
    shown = [f"           {one['from']} -> {one['to']}  {_gigabytes(one['bytes'])} GB" for one in links[:_LINKS_SHOWN]]
    left = len(links) - len(shown)
    return ["links      (most bytes first)", *shown, *([f"           ... and {left:,} more"] if left > 0 else [])]
