"""Mistakes that somebody could make, each as a context in which it has been made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from stretto.engines.embedded import engine as embedded
from stretto.models import maps
from stretto.models.language import MEGATRON_SIDES, Held, Row, WeightMap
from stretto.sync import execute, freight
from stretto.sync.layouts import megatron
from stretto.sync.transports import PlannedTransport

FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}
Edit = Callable[[Row], Sequence[Row]]


def fault(make: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    FAULTS[make.__name__] = contextmanager(make)
    return make


@contextmanager
def patched(owner: Any, **replacements: Any) -> Iterator[None]:
    before = {name: vars(owner)[name] for name in replacements}
    for name, value in replacements.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def edited(edit: Edit) -> AbstractContextManager[None]:
    """The family's map with each row replaced by what `edit` makes of it."""
    right = maps.weight_map

    def wrong(config: Any) -> WeightMap:
        found = right(config)
        return replace(found, rows=tuple(new for row in found.rows for new in edit(row)))

    return patched(maps, weight_map=wrong)


def has(row: Row, *endings: str) -> bool:
    return any(piece.name.endswith(endings) for piece in row.pieces)


def with_held(row: Row, sides: Sequence[str], change: Callable[[Held], Held]) -> Row:
    held = {side: tuple(map(change, one)) if side in sides else one for side, one in row.held.items()}
    return replace(row, held=MappingProxyType(held))


def only_sides(row: Row, keep: Callable[[str], bool]) -> Row:
    return replace(row, held=MappingProxyType({side: held for side, held in row.held.items() if keep(side)}))


def turned(row: Row, side: str) -> list[Row]:
    """The pieces of a fused tensor of `side` (Megatron's: of all its spellings) the other way round."""
    sides = MEGATRON_SIDES if side == "megatron" else (side,)
    there = replace(only_sides(row, lambda one: one in sides), pieces=row.pieces[::-1])
    return [only_sides(row, lambda one: one not in sides), there]


# In the map: Megatron's column.


@fault
def gate_and_up_swapped() -> Iterator[None]:
    with edited(lambda row: turned(row, "megatron") if has(row, "mlp.gate_proj.weight") else [row]):
        yield


@fault
def qkv_not_interleaved() -> Iterator[None]:
    """All queries, all keys, all values, as if there were one group."""
    with edited(
        lambda row: (
            [with_held(row, MEGATRON_SIDES, lambda h: replace(h, per=""))] if has(row, "q_proj.weight") else [row]
        )
    ):
        yield


@fault
def no_plus_one() -> Iterator[None]:
    with edited(lambda row: [with_held(row, MEGATRON_SIDES, lambda h: replace(h, add=0.0))]):
        yield


@fault
def expert_transposed() -> Iterator[None]:
    with edited(
        lambda row: (
            [with_held(row, MEGATRON_SIDES, lambda h: replace(h, transpose=True))]
            if has(row, "experts.{e}.down_proj.weight")
            else [row]
        )
    ):
        yield


@fault
def query_and_key_norms_swapped() -> Iterator[None]:
    """Each name of the one in Megatron is the other's."""
    names = {"q_layernorm": "k_layernorm", "k_layernorm": "q_layernorm"}

    def other(held: Held) -> Held:
        for ours, theirs in names.items():
            if ours in held.name:
                return replace(held, name=held.name.replace(ours, theirs))
        return held

    with edited(lambda row: [with_held(row, MEGATRON_SIDES, other)]):
        yield


@fault
def bias_dropped() -> Iterator[None]:
    with edited(lambda row: [] if has(row, "q_proj.bias") else [row]):
        yield


@fault
def router_bias_without_its_dtype() -> Iterator[None]:
    def edit(row: Row) -> list[Row]:
        if not has(row, "e_score_correction_bias"):
            return [row]
        return [replace(row, pieces=tuple(replace(piece, dtype=None) for piece in row.pieces))]

    with edited(edit):
        yield


@fault
def megatron_name_misspelled() -> Iterator[None]:
    with edited(
        lambda row: [
            with_held(
                row, MEGATRON_SIDES, lambda h: replace(h, name=h.name.replace("linear_proj", "linear_projection"))
            )
        ]
    ):
        yield


# In the map: what transformers has in memory.


@fault
def stacked_gate_and_up_swapped() -> Iterator[None]:
    with edited(lambda row: turned(row, "memory") if has(row, "experts.{e}.gate_proj.weight") else [row]):
        yield


# In the layout.


@fault
def norm_of_the_next_layer() -> Iterator[None]:
    right = megatron._Builder._copies

    def wrong(self: Any, row: Row, stage: int) -> Iterator[Any]:
        found = list(right(self, row, stage))
        if not has(row, "input_layernorm.weight"):
            return iter(found)
        layers = [layer for layer, *_ in found]
        return iter([(n, *rest) for n, (_, *rest) in zip(layers[1:] + layers[:1], found, strict=True)])

    with patched(megatron._Builder, _copies=wrong):
        yield


@fault
def stages_swapped() -> Iterator[None]:
    right = megatron._Builder.__init__

    def wrong(self: Any, *args: Any) -> None:
        right(self, *args)
        self._layers = self._layers[::-1]

    with patched(megatron._Builder, __init__=wrong):
        yield


@fault
def stage_overlaps() -> Iterator[None]:
    """The second stage begins one layer too early, and the last layer is nobody's."""
    right = megatron._Builder.__init__

    def wrong(self: Any, *args: Any) -> None:
        right(self, *args)
        self._layers = [[range(1)], [range(1)]]

    with patched(megatron._Builder, __init__=wrong):
        yield


@fault
def experts_of_the_other_rank() -> Iterator[None]:
    right = megatron._Builder.__init__

    def wrong(self: Any, *args: Any) -> None:
        right(self, *args)
        self._places = [{**place, "ep": (place["ep"] + 1) % self._sizes.ep} for place in self._places]

    with patched(megatron._Builder, __init__=wrong):
        yield


@fault
def down_projection_of_the_other_rank() -> Iterator[None]:
    right = megatron._Builder._cells

    def wrong(self: Any, axes: dict[str, str], ranks: Sequence[int]) -> Iterator[Any]:
        found = list(right(self, axes, ranks))
        if not getattr(self, "_turn", False) or len(found) < 2:
            return iter(found)
        holders = [one[2] for one in found]
        return iter([(*one[:2], who) for one, who in zip(found, holders[1:] + holders[:1], strict=True)])

    right_add = megatron._Builder._add

    def add(self: Any, row: Row, *args: Any) -> None:
        self._turn = has(row, "mlp.down_proj.weight")
        right_add(self, row, *args)

    with patched(megatron._Builder, _cells=wrong, _add=add):
        yield


# In the trainer.


@fault
def padding_not_masked() -> Iterator[None]:
    from stretto.trainers.megatron.logprobs import VocabShard

    right = VocabShard.of.__func__  # type: ignore[attr-defined]

    def wrong(cls: Any, vocabulary: int, padded: int, group: Any) -> Any:
        return right(cls, padded, padded, group)

    with patched(VocabShard, of=classmethod(wrong)):
        yield


@fault
def tied_head_stays_behind() -> Iterator[None]:
    """The last stage's copy of the embedding is not updated by a step."""
    from stretto.trainers.megatron.optimizer import Stepper

    right = Stepper.apply

    def wrong(self: Any, rate: float) -> None:
        heads = [p for chunk in self._chunks for n, p in chunk.named_parameters() if "output_layer" in n]
        before = [head.detach().clone() for head in heads]
        right(self, rate)
        for head, old in zip(heads, before, strict=True):
            head.data.copy_(old)

    with patched(Stepper, apply=wrong):
        yield


@fault
def norm_gradients_doubled() -> Iterator[None]:
    """As if they had been summed over two ranks that have the same."""
    from stretto.trainers.megatron.optimizer import Stepper

    right = Stepper.finish_gradient

    def wrong(self: Any) -> None:
        right(self)
        for chunk in self._chunks:
            for name, parameter in chunk.named_parameters():
                if "pre_mlp_layernorm" in name:
                    parameter.main_grad.mul_(2)

    with patched(Stepper, finish_gradient=wrong):
        yield


# In what carries the weights, and in the engine.


@contextmanager
def publishing() -> Iterator[Callable[[], bool]]:
    """Tells whether a publication is on its way: buckets carry exports too."""
    right, now = PlannedTransport.transfer, [False]

    def noticed(self: Any, version: Any) -> int:
        now[0] = True
        try:
            return right(self, version)
        finally:
            now[0] = False

    with patched(PlannedTransport, transfer=noticed):
        yield lambda: now[0]


@fault
def bucket_skipped() -> Iterator[None]:
    """It arrives, and nobody unpacks it; the books say otherwise."""
    right = execute.Execution._load

    with publishing() as under_way:

        def wrong(self: Any, index: int, buckets: Any, views: Any, way: str, peer: int) -> Any:
            load = right(self, index, buckets, views, way, peer)
            if way == "out" or index or not under_way():
                return load
            return replace(load, copies=freight.Copies([], [], []))

        with patched(execute.Execution, _load=wrong):
            yield


@fault
def bucket_forgotten() -> Iterator[None]:
    """It is not even marked as written."""
    right = execute.Execution.run

    with publishing() as under_way:

        def wrong(self: Any) -> int:
            done = right(self)
            for buckets in self._program.incoming.values() if under_way() else ():
                self._written -= set(map(id, buckets[0].moves))
            return done

        with patched(execute.Execution, run=wrong):
            yield


@fault
def bucket_twice() -> Iterator[None]:
    """The second bucket's places get the first one's bytes."""
    right = execute.Execution._load

    with publishing() as under_way:

        def wrong(self: Any, index: int, buckets: Any, views: Any, way: str, peer: int) -> Any:
            load = right(self, index, buckets, views, way, peer)
            if way == "out" or index != 1 or not under_way():
                return load
            first = self._link.buffer("in", 0, peer, max(bucket.bytes for bucket in buckets))
            mixed = freight.freight(buckets[1], first, views, "in", straight=True, trailer=0)
            return replace(load, copies=mixed.copies)

        with patched(execute.Execution, _load=wrong):
            yield


@fault
def engine_served_stale_weights() -> Iterator[None]:
    """The second publication carries nothing and says that all is well."""
    right = PlannedTransport.transfer

    def wrong(self: Any, version: Any) -> int:
        return right(self, version) if version.number == 1 else 0

    with patched(PlannedTransport, transfer=wrong):
        yield


@fault
def temperature_forgotten() -> Iterator[None]:
    right = embedded.draw

    def wrong(logits_NV: Any, draws: Any) -> Any:
        return right(logits_NV, replace(draws, temperature_N=torch.ones_like(draws.temperature_N)))

    with patched(embedded, draw=wrong):
        yield
