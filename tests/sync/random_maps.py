"""Weight maps of families that nobody has made, and parallel sizes that cut them, for hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from map_oracle import Side

from stretto.models.language import Held, Piece, Row, WeightMap, layers, row
from stretto.sync.layouts import EngineSizes
from stretto.sync.parallel import MegatronSizes

Draw = Callable[[Any], Any]

DTYPES = ("float32", "bfloat16")


def _yes(draw: Draw) -> bool:
    return draw(st.booleans())


@st.composite
def weight_maps(draw: Draw) -> WeightMap:
    """A family: what is fused, grouped, transposed, stacked, biased, centred at zero, kept in float32 or never cut."""
    count = draw(st.integers(1, 4))
    tied = _yes(draw)
    kinds = [_layer(draw) for _ in range(draw(st.integers(1, 2)))]
    numbers = [draw(st.integers(0, len(kinds) - 1)) for _ in range(count)]
    embed = Piece("embed.weight", "v h")
    top = [row(embed, megatron="embedding.weight", stage="first")]
    if tied:
        top.append(row(embed, megatron="head.weight", stage="last", tied=True))
    else:
        top.append(row(Piece("head.weight", "v h"), megatron="head.weight", stage="last"))
    if _yes(draw):
        top += _tower()
    body = [
        one
        for kind, rows in enumerate(kinds)
        if kind in numbers
        for one in layers([n for n in range(count) if numbers[n] == kind], rows)
    ]
    shift = draw(st.sampled_from([0.0, 1.0]))
    last = row(Piece("norm.weight", "h"), megatron=Held("final_norm.weight", add=shift), stage="last")
    return WeightMap("random", draw(_sizes()), (*top, *body, last), count, megatron={})


def _sizes() -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries(
        {
            "v": st.integers(5, 45),
            "h": st.sampled_from([2, 3, 6]),
            "g": st.integers(1, 16),
            "q": st.integers(1, 4),
            "d": st.integers(1, 3),
            "f": st.sampled_from([4, 12, 24]),
            "s": st.sampled_from([4, 12]),
            "e": st.sampled_from([2, 4, 6]),
            "m": st.sampled_from([4, 12]),
            "a": st.sampled_from([2, 4, 12]),
            "x": st.integers(1, 2),
            "w": st.sampled_from([2, 5]),
        }
    )


def _layer(draw: Draw) -> list[Row]:
    rows = [*_norm(draw), *_attention(draw), _scalar(draw)]
    rows += draw(st.sampled_from([_dense, _experts, _components]))(draw)
    return rows


def _norm(draw: Draw) -> list[Row]:
    shift = draw(st.sampled_from([0.0, 1.0]))
    name = "input_norm.weight"
    return [row(Piece(name, "h"), megatron=Held(name, add=shift), te=Held("qkv.norm_weight", add=shift))]


def _attention(draw: Draw) -> list[Row]:
    memory = Held("qkv_memory.weight", per=draw(st.sampled_from(["", "g"])), transpose=_yes(draw))
    together = row(
        Piece("q.weight", "(g q d) h"),
        Piece("k.weight", "(g d) h"),
        Piece("v.weight", "(g d) h"),
        megatron=Held("qkv.weight", per="g", order=draw(st.sampled_from(["", "d q"]))),
        memory=memory if _yes(draw) else None,
        engine=Held("qkv_proj.weight", transpose=_yes(draw)),
    )
    out = row(Piece("o.weight", "h (g q d)"), megatron=Held("proj.weight", transpose=_yes(draw)))
    bias = row(Piece("q.bias", "(g q d)"), Piece("k.bias", "(g d)"), megatron=Held("qkv.bias", per="g"))
    return [together, out, *([bias] if _yes(draw) else [])]


def _scalar(draw: Draw) -> Row:
    fixed = draw(st.sampled_from([None, "float32"]))
    return row(Piece("scale", "", dtype=fixed, buffer=_yes(draw)), megatron="scale", cut=False)


def _dense(draw: Draw) -> list[Row]:
    gate, up = Piece("gate.weight", "f h"), Piece("up.weight", "f h")
    memory = draw(st.sampled_from([None, Held("gate_up.weight"), Held("gate_up.weight", per="f", transpose=True)]))
    return [
        row(gate, up, megatron=Held("fc1.weight"), memory=memory, engine=Held("gate_up_proj.weight")),
        row(Piece("down.weight", "h f"), megatron="fc2.weight"),
        row(Piece("down.bias", "h"), megatron="fc2.bias", cut=False),
    ]


def _experts(draw: Draw) -> list[Row]:
    flip = _yes(draw)
    memory = Held("experts.gate_up", per=draw(st.sampled_from(["", "m"])), transpose=flip)
    return [
        row(Piece("router.weight", "e h", dtype="float32"), megatron="router.weight", cut=False),
        row(Piece("router.bias", "e", dtype="float32", buffer=True), megatron="router.bias", cut=False),
        row(
            Piece("experts.{e}.gate", "m h"),
            Piece("experts.{e}.up", "m h"),
            megatron=Held("experts.{e}.fc1"),
            grouped=Held("experts.fc1{e}"),
            memory=memory if _yes(draw) else None,
            engine=Held("experts.w13"),
        ),
        row(
            Piece("experts.{e}.down", "h m"),
            megatron=Held("experts.fc2", transpose=_yes(draw)) if _yes(draw) else "experts.{e}.fc2",
            memory=Held("experts.down", transpose=flip),
            engine=Held("experts.w2"),
        ),
        row(Piece("experts.{e}.scale", ""), megatron="experts.{e}.scale", engine=Held("experts.scale")),
        row(Piece("shared.weight", "s h"), megatron="shared.weight"),
    ]


def _components(draw: Draw) -> list[Row]:
    """Linear attention's projection: grouped by key head on disk, one component after another elsewhere."""
    pieces = (Piece("in[q]", "(a w) h"), Piece("in[v]", "(a x w) h"), Piece("in[b]", "a h"))
    return [
        row(
            *pieces, checkpoint=Held("in", per="a"), memory=Held("in", per="a"), engine=Held("in"), megatron=Held("in")
        ),
        row(
            Piece("conv[q]", "(a w) 1 x"),
            Piece("conv[v]", "(a x w) 1 x"),
            checkpoint=Held("conv"),
            megatron=Held("conv", transpose=_yes(draw)),
        ),
    ]


def _tower() -> list[Row]:
    """A part that is before the layers and whole everywhere, though its axes have the letters that are cut."""
    return [
        row(Piece("tower.patch", "w h x x"), megatron="tower.patch", cut=False, stage="first"),
        *layers(
            2,
            [row(Piece("up", "f w"), Piece("side", "f w"), memory=Held("both"), megatron=Held("both"), cut=False)],
            prefix="tower.{layer}.",
            megatron="tower.{layer}.",
            stage="first",
        ),
    ]


def _divides(parts: int, sizes: dict[str, int], factors: str) -> bool:
    return all(sizes[factor] % parts == 0 for factor in factors)


def megatron_sides(weights: WeightMap) -> st.SearchStrategy[Side]:
    return _megatron(weights).flatmap(lambda sizes: st.sampled_from(DTYPES).map(lambda d: Side("megatron", sizes, d)))


@st.composite
def _megatron(draw: Draw, weights: WeightMap) -> MegatronSizes:
    tp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if _divides(n, dict(weights.sizes), "gfsa")]))
    stages = draw(st.integers(1, weights.layer_count))
    pp, vpp = draw(st.sampled_from([(stages, 1), *((stages // n, n) for n in (2,) if not stages % n and stages > n)]))
    dp = draw(st.integers(1, 4))
    ways = [
        (ep, etp)
        for ep in (1, 2, 3)
        for etp in (1, 2)
        if not tp * dp % (ep * etp) and not weights.sizes["e"] % ep and not weights.sizes["m"] % etp
    ]
    ep, etp = draw(st.sampled_from(ways))
    te, grouped = draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    uneven = draw(_composition(weights.layer_count, stages)) if draw(st.booleans()) else ()
    return MegatronSizes(tp, pp, vpp, ep, etp, dp, uneven, draw(st.sampled_from([1, 4])), te, grouped)


@st.composite
def _composition(draw: Draw, total: int, parts: int) -> tuple[int, ...]:
    edges = sorted(draw(st.permutations(range(1, total)))[: parts - 1])
    return tuple(b - a for a, b in zip([0, *edges], [*edges, total], strict=True))


def engine_sides(weights: WeightMap) -> st.SearchStrategy[Side]:
    return _engine(weights).flatmap(lambda sizes: st.sampled_from(DTYPES).map(lambda d: Side(sizes.backend, sizes, d)))


@st.composite
def _engine(draw: Draw, weights: WeightMap) -> EngineSizes:
    sizes = dict(weights.sizes)
    ways = [
        (tp, ep)
        for tp in (1, 2, 3, 4, 6, 8, 12)
        for ep in (1, 2, 3)
        if _divides(tp, sizes, "fsa") and _heads_divide(tp, sizes) and not tp % ep
        if _divides(ep, sizes, "e") and _divides(tp // ep, sizes, "m")
    ]
    tp, ep = draw(st.sampled_from(ways))
    backend = draw(st.sampled_from(["sglang", "vllm"]))
    return EngineSizes(backend, tp, ep, draw(st.integers(1, 2)), draw(st.sampled_from([1, 16])))


def _heads_divide(tp: int, sizes: dict[str, int]) -> bool:
    g, q = sizes["g"], sizes["q"]
    return g % tp == 0 or (tp > g and tp % g == 0 and q % (tp // g) == 0)


def sides(weights: WeightMap) -> st.SearchStrategy[Side]:
    """Either end of a plan."""
    dtypes = st.sampled_from(DTYPES)
    return st.one_of(
        megatron_sides(weights),
        engine_sides(weights),
        st.builds(lambda n, d: Side("fsdp", n, d), st.integers(1, 7), dtypes),
        st.builds(lambda n, d: Side("embedded", n, d), st.integers(1, 3), dtypes),
        st.builds(lambda d: Side("checkpoint", 1, d), dtypes),
    )


@st.composite
def journeys(draw: Draw) -> tuple[WeightMap, Side, Side]:
    """A family, where its weights come from, and where they go."""
    weights = draw(weight_maps())
    return weights, draw(sides(weights)), draw(sides(weights))
