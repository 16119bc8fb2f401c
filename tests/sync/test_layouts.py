"""Layouts against functions written by hand, as training code that knows one model writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from map_oracle import Side, local_tensors, random_values
from torch import Tensor

from stretto.models.language import Held, Piece, Row, WeightMap
from stretto.models.registry import weight_map
from stretto.sync.execute import Execution
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import EngineSizes
from stretto.sync.parallel import MegatronSizes
from stretto.sync.plan import Plan

Tensors = dict[str, Tensor]

GROUPED: dict[str, Any] = {
    "vocab_size": 51,
    "hidden_size": 48,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {**GROUPED, "moe_intermediate_size": 12, "num_experts": 16, "num_experts_per_tok": 4}
LATENT: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "q_lora_rank": 11,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 2,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
CASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama-tied": lambda: transformers.LlamaConfig(**GROUPED | {"tie_word_embeddings": True}),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED | {"hidden_size": 80, "num_hidden_layers": 2}),
    "gemma": lambda: transformers.GemmaConfig(**GROUPED | {"num_hidden_layers": 2}),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS),
    "qwen3-moe-mixed": lambda: transformers.Qwen3MoeConfig(
        **EXPERTS | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**LATENT),
}
"""No two factors of a case have one length; 8 heads are in 2 kv groups."""

FAMILIES = ("llama", "llama-tied", "qwen3-moe")
"""Two that are fused differently and, with 8 heads in 2 kv groups, cut at most in two by Megatron."""


def checkpoint(config: Any) -> Tensors:
    """Random tensors of a whole checkpoint, from transformers' own names and shapes."""
    random = torch.Generator().manual_seed(1)
    whole = Side("checkpoint").layout(Atoms.of(weight_map(config))).local(0)
    return {name: torch.randn(shape, generator=random) for name, (shape, _) in whole.items()}


def carried(source: Layout, target: Layout, tensors: dict[int, Tensors]) -> dict[int, Tensors]:
    """What a plan makes of the source's tensors; what it leaves alone stays NaN."""
    plan = Plan.of(source, target, [0] * target.ranks, [0] * source.ranks)
    filled = {
        rank: {
            name: torch.full(shape, torch.nan, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in target.local(rank).items()
        }
        for rank in range(target.ranks)
    }
    execution = Execution(plan, 0, lambda: tensors, lambda: filled)
    execution.run()
    execution.verify()
    return filled


def chunk_rows(one: Tensor, parts: int, index: int) -> Tensor:
    return one.chunk(parts, dim=0)[index]


def padded_rows(one: Tensor, multiple: int) -> Tensor:
    """The vocabulary's rows, and rows of NaN up to a multiple."""
    missing = -len(one) % multiple
    return torch.cat([one, torch.full((missing, one.shape[1]), torch.nan)])


def interleaved(c: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Megatron's qkv: for each kv group its queries, its key and its value."""
    groups, d = c.num_key_value_heads, c.head_dim
    parts = [one.view(groups, -1, d, c.hidden_size) for one in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, c.hidden_size)


def megatron_rank(c: Any, full: Tensors, sizes: MegatronSizes, tp: int, ep: int, stage: int, layers: range) -> Tensors:
    """Everything that one Megatron rank holds (expert tensor parallel size 1)."""
    mine: Tensors = {}
    head = full["model.embed_tokens.weight"] if c.tie_word_embeddings else full["lm_head.weight"]
    vocabulary = sizes.tp * sizes.vocab_divisor
    if stage == 0:
        rows = padded_rows(full["model.embed_tokens.weight"], vocabulary)
        mine["embedding.word_embeddings.weight"] = chunk_rows(rows, sizes.tp, tp)
    if stage == sizes.pp - 1:
        mine["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if sizes.pp > 1 or not c.tie_word_embeddings:
            mine["output_layer.weight"] = chunk_rows(padded_rows(head, vocabulary), sizes.tp, tp)
    for number, layer in enumerate(layers):
        theirs = {
            name.removeprefix(f"model.layers.{layer}."): one
            for name, one in full.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        ours = megatron_layer(c, theirs, sizes.tp, tp, sizes.ep, ep)
        mine |= {f"decoder.layers.{number}.{name}": one for name, one in ours.items()}
    return mine


def megatron_layer(c: Any, full: Tensors, tp_size: int, tp: int, ep_size: int, ep: int) -> Tensors:
    q, k, v = (full[f"self_attn.{name}_proj.weight"] for name in "qkv")
    mine = {
        "input_layernorm.weight": full["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": full["post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": chunk_rows(interleaved(c, q, k, v), tp_size, tp),
        "self_attention.linear_proj.weight": full["self_attn.o_proj.weight"].chunk(tp_size, dim=1)[tp],
    }
    if "self_attn.q_norm.weight" in full:
        mine["self_attention.q_layernorm.weight"] = full["self_attn.q_norm.weight"]
        mine["self_attention.k_layernorm.weight"] = full["self_attn.k_norm.weight"]
    if "mlp.gate.weight" not in full:
        gate, up = (chunk_rows(full[f"mlp.{name}_proj.weight"], tp_size, tp) for name in ("gate", "up"))
        mine["mlp.linear_fc1.weight"] = torch.cat([gate, up])
        mine["mlp.linear_fc2.weight"] = full["mlp.down_proj.weight"].chunk(tp_size, dim=1)[tp]
        return mine
    mine["mlp.router.weight"] = full["mlp.gate.weight"]
    each = c.num_experts // ep_size
    for number, expert in enumerate(range(each * ep, each * (ep + 1))):
        theirs, ours = f"mlp.experts.{expert}.", f"mlp.experts.local_experts.{number}."
        gate, up, down = (full[f"{theirs}{name}_proj.weight"] for name in ("gate", "up", "down"))
        mine[f"{ours}linear_fc1.weight"] = torch.cat([gate, up])
        mine[f"{ours}linear_fc2.weight"] = down
    return mine


def engine_rank(c: Any, full: Tensors, tp_size: int, tp: int) -> Tensors:
    """Everything that one rank of SGLang or vLLM holds: experts by their rows, kv heads again where there are few."""
    mine: Tensors = {}
    for name, one in full.items():
        stem = name.rpartition(".")[0].rpartition(".")[0]
        if "embed_tokens" in name or "lm_head" in name:
            mine[name] = chunk_rows(padded_rows(one, 64), tp_size, tp)
        elif name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight")):
            mine[name] = one.chunk(tp_size, dim=1)[tp]
        elif name.endswith("q_proj.weight"):
            mine[f"{stem}.qkv_proj.weight"] = engine_qkv(c, full, stem, tp_size, tp)
        elif name.endswith("mlp.gate_proj.weight"):
            both = [chunk_rows(full[f"{stem}.{part}_proj.weight"], tp_size, tp) for part in ("gate", "up")]
            mine[f"{stem}.gate_up_proj.weight"] = torch.cat(both)
        elif ".experts.0.gate_proj" in name:
            stem = stem.removesuffix(".0")
            mine |= engine_experts(c, full, stem, tp_size, tp)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj", ".experts.")):
            mine[name] = one
    return mine


def engine_qkv(c: Any, full: Tensors, stem: str, tp_size: int, tp: int) -> Tensor:
    q, k, v = (full[f"{stem}.{name}_proj.weight"] for name in "qkv")
    if tp_size > c.num_key_value_heads:
        copies = tp_size // c.num_key_value_heads
        k, v = (one.view(-1, c.head_dim, c.hidden_size).repeat_interleave(copies, 0).flatten(0, 1) for one in (k, v))
    return torch.cat([chunk_rows(one, tp_size, tp) for one in (q, k, v)])


def engine_experts(c: Any, full: Tensors, stem: str, tp_size: int, tp: int) -> Tensors:
    w13, w2 = [], []
    for expert in range(c.num_experts):
        gate, up, down = (full[f"{stem}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        w13.append(torch.cat([chunk_rows(gate, tp_size, tp), chunk_rows(up, tp_size, tp)]))
        w2.append(down.chunk(tp_size, dim=1)[tp])
    return {f"{stem}.w13_weight": torch.stack(w13), f"{stem}.w2_weight": torch.stack(w2)}


def in_memory(c: Any, full: Tensors) -> Tensors:
    """transformers stacks the experts of a layer."""
    mine = {name: one for name, one in full.items() if ".experts." not in name}
    for layer in range(c.num_hidden_layers if len(mine) < len(full) else 0):
        stem = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([full[f"{stem}{expert}.{name}_proj.weight"] for expert in range(c.num_experts)])
            for name in ("gate", "up", "down")
        )
        mine[f"{stem}gate_up_proj"] = torch.cat([gate, up], dim=1)
        mine[f"{stem}down_proj"] = down
    return mine


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tp", "pp", "ep", "dp"), [(1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 2, 1), (1, 3, 4, 4), (2, 1, 4, 2)]
)
def test_megatron_ranks_hold_what_its_field_says(family: str, tp: int, pp: int, ep: int, dp: int) -> None:
    c = CASES[family]()
    full, atoms = checkpoint(c), Atoms.of(weight_map(c))
    sizes = MegatronSizes(tp=tp, pp=pp, ep=ep, dp=dp, vocab_divisor=8, pp_layers=(2, 1) if pp == 2 else ())
    layout = Side("megatron", sizes).layout(atoms)
    filled = carried(Side("checkpoint").layout(atoms), layout, {0: full})
    stages = {1: [range(3)], 2: [range(2), range(2, 3)], 3: [range(1), range(1, 2), range(2, 3)]}[pp]
    for rank in range(pp * dp * tp):
        stage, inside = divmod(rank, dp * tp)
        expected = megatron_rank(c, full, sizes, inside % tp, inside % ep, stage, stages[stage])
        assert_same(filled[rank], expected)
    assert_same(carried(layout, Side("checkpoint").layout(atoms), filled)[0], full)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_engine_ranks_hold_what_the_engines_load(family: str, tp: int, backend: str) -> None:
    c = CASES[family]()
    full, atoms = checkpoint(c), Atoms.of(weight_map(c))
    layout = Side(backend, EngineSizes(backend, tp, replicas=2)).layout(atoms)
    filled = carried(Side("checkpoint").layout(atoms), layout, {0: full})
    for rank in range(2 * tp):
        expected = engine_rank(c, full, tp, rank % tp)
        if backend == "vllm":
            expected = {name.replace(".experts.w", ".experts.routed_experts.w"): one for name, one in expected.items()}
        assert_same(filled[rank], expected)
    assert_same(carried(layout, Side("checkpoint").layout(atoms), filled)[0], full)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_fsdp_ranks_hold_the_chunks_that_torch_makes(family: str, ranks: int) -> None:
    c = CASES[family]()
    full, atoms = checkpoint(c), Atoms.of(weight_map(c))
    layout = Side("fsdp", ranks).layout(atoms)
    filled = carried(Side("checkpoint").layout(atoms), layout, {0: full})
    chunks = {name: one.chunk(ranks) for name, one in in_memory(c, full).items()}
    for rank in range(ranks):
        mine = {name: parts[rank] if rank < len(parts) else parts[0][:0] for name, parts in chunks.items()}
        assert_same(filled[rank], mine)
    assert_same(carried(layout, Side("checkpoint").layout(atoms), filled)[0], full)


def test_virtual_stages_take_turns() -> None:
    c = CASES["qwen3-moe-mixed"]()
    atoms = Atoms.of(weight_map(c))
    sizes = MegatronSizes(pp=2, vpp=2, pp_layers=(1, 2, 1, 1))
    layout = Side("megatron", sizes).layout(atoms)
    full = checkpoint(c)
    filled = carried(Side("checkpoint").layout(atoms), layout, {0: full})
    norms = {(0, "vp0", 0): 0, (1, "vp0", 0): 1, (1, "vp0", 1): 2, (0, "vp1", 0): 3, (1, "vp1", 0): 4}
    for (rank, chunk, number), layer in norms.items():
        found = filled[rank][f"{chunk}.decoder.layers.{number}.input_layernorm.weight"]
        assert torch.equal(found, full[f"model.layers.{layer}.input_layernorm.weight"])
    assert "vp0.embedding.word_embeddings.weight" in filled[0]
    assert "vp1.output_layer.weight" in filled[1]
    assert len([name for one in filled.values() for name in one if "input_layernorm" in name]) == 5


def test_a_layout_prints_its_sizes() -> None:
    atoms = Atoms.of(weight_map(CASES["llama"]()))
    assert str(Side("megatron", MegatronSizes(tp=2, dp=2)).layout(atoms)).startswith("megatron(tp=2, dp=2): 4 ranks, ")


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (Side("megatron", MegatronSizes(tp=4)), "megatron: tp=4 does not divide the model's 2 kv heads"),
        (Side("megatron", MegatronSizes(ep=3, dp=3)), "ep=3 does not divide the model's 16 experts"),
        (Side("megatron", MegatronSizes(pp=4)), "3 layers leave one of 4 stages empty"),
        (Side("megatron", MegatronSizes(pp=2, pp_layers=(1, 1))), "adds up to 2 and the model has 3 layers"),
        (Side("megatron", MegatronSizes(dp=5, etp=5)), "etp=5 does not divide the model's 12 rows of an expert"),
        (Side("sglang", EngineSizes("sglang", 3)), "sglang: tp=3 is not a multiple of the model's 2 kv heads"),
        (Side("sglang", EngineSizes("sglang", 16)), "tp=16 does not divide the model's 4 query heads of a kv head"),
        (Side("vllm", EngineSizes("vllm", 8)), "vllm: tp=8 does not divide the model's 12 rows of an expert"),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(side: Side, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        side.layout(Atoms.of(weight_map(CASES["qwen3-moe"]())))


# One row of a map is spoiled in turn, in every way that could be a slip of somebody who writes one.

JOURNEYS = (
    ("megatron", Side("checkpoint"), Side("megatron", MegatronSizes(tp=2, pp=2, ep=2))),
    ("te", Side("megatron", MegatronSizes(tp=2, ep=2, te=True)), Side("checkpoint")),
    ("engine", Side("checkpoint"), Side("sglang", EngineSizes("sglang", 2))),
    ("grouped", Side("megatron", MegatronSizes(pp=2, dp=2, ep=2, te=True, grouped_experts=True)), Side("embedded")),
    ("memory", Side("fsdp", 2), Side("checkpoint")),
    ("checkpoint", Side("checkpoint"), Side("embedded", 2)),
)


def changed(row: Row, side: str, change: Callable[[Held], Held]) -> Row:
    """The row with its tensors of one side changed."""
    held = {**row.held, side: tuple(change(one) for one in row.held[side])}
    return replace(row, held=MappingProxyType(held))


def without(row: Row, side: str) -> Row:
    return replace(row, held=MappingProxyType({key: one for key, one in row.held.items() if key != side}))


def with_axes(row: Row, change: Callable[[str], str]) -> Row:
    return replace(row, pieces=tuple(replace(piece, axes=change(piece.axes)) for piece in row.pieces))


def first_renamed(axes: str, factor: str) -> str:
    """The first factor of the axes is another one."""
    old = axes.replace("(", " ").split()[0]
    return axes.replace(old, factor, 1)


def swapped_factors(axes: str) -> str:
    """Factors inside the first axis in the opposite order."""
    inside = axes[axes.find("(") + 1 : axes.find(")")] if "(" in axes else axes
    return axes.replace(inside, " ".join(reversed(inside.split())), 1)


def corruptions(row: Row, side: str) -> Iterator[tuple[str, Row | None]]:
    """What the row is mistaken for, named; None when it is forgotten."""
    if side not in row.held:
        return
    yield "forgotten", None
    yield "missing on this side", without(row, side)
    yield "whole instead of cut, or cut instead of whole", replace(row, cut=not row.cut)
    yield "wrong factor", with_axes(row, lambda axes: first_renamed(axes, "q"))
    yield "axes permuted", with_axes(row, lambda axes: " ".join(reversed(Piece("", axes).axes.split(" ", 1))))
    yield "factors permuted", with_axes(row, swapped_factors)
    yield "transposed", changed(row, side, lambda one: replace(one, transpose=not one.transpose))
    yield "add", changed(row, side, lambda one: replace(one, add=0.0 if one.add else 1.0))
    yield "name of another", changed(row, side, lambda one: replace(one, name="model.norm.weight"))
    if row.layers:
        yield "one layer less", replace(row, layers=row.layers[:-1])
        yield "off by one layer", replace(row, layers=tuple(layer + 1 for layer in row.layers))
    if len(row.held[side]) == 1 and len(row.pieces) > 1:
        yield (
            "members swapped",
            replace(
                row,
                pieces=(row.pieces[1], row.pieces[0], *row.pieces[2:]),
                held=MappingProxyType(
                    {key: (one[1], one[0], *one[2:]) if len(one) > 1 else one for key, one in row.held.items()}
                ),
            ),
        )
        yield "per", changed(row, side, lambda one: replace(one, per="" if one.per else row.pieces[0].factored[0][0]))


@dataclass(frozen=True)
class Truth:
    """What a map means on two sides: their layouts, and what every rank of them holds."""

    weights: WeightMap
    sides: tuple[Side, Side]

    @cached_property
    def layouts(self) -> tuple[Layout, Layout]:
        atoms = Atoms.of(self.weights)
        begin, end = self.sides
        return begin.layout(atoms), end.layout(atoms)

    @cached_property
    def specs(self) -> list[Any]:
        return [layout.local(rank) for layout in self.layouts for rank in range(layout.ranks)]

    @cached_property
    def held(self) -> tuple[dict[int, Tensors], dict[int, Tensors]]:
        begin, end = (self.tensors(side, layout.ranks) for side, layout in zip(self.sides, self.layouts, strict=True))
        return begin, end

    def tensors(self, side: Side, ranks: int) -> dict[int, Tensors]:
        values = random_values(self.weights)
        return {rank: local_tensors(self.weights, side, rank, values) for rank in range(ranks)}


def found_out(true: Truth, spoiled: Truth) -> str | None:
    """How a spoiled map is found out when it is used on both sides of a plan; None when it is not."""
    try:
        specs = spoiled.specs
        Plan.of(*spoiled.layouts)
    except ValueError:
        return "refused"
    if specs != true.specs:
        return "other tensors than the model's"
    begin, end = true.held
    filled = carried(*spoiled.layouts, begin)
    return None if equal(filled, end) else "other values"


def means_the_same(true: Truth, spoiled: Truth) -> bool:
    """Whether the slip is none: in what these sides do not use, or between names that mean one thing."""
    return all(equal(mine, other) for mine, other in zip(true.held, spoiled.held, strict=True))


def equal(some: dict[int, Tensors], others: dict[int, Tensors]) -> bool:
    return all(
        some[rank].keys() == others[rank].keys()
        and all(torch.equal(one.nan_to_num(), others[rank][name].nan_to_num()) for name, one in some[rank].items())
        for rank in some
    )


@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: journey[0])
@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "deepseek-v3", "gemma"])
def test_every_slip_in_a_map_is_refused_or_found(family: str, journey: tuple[str, Side, Side]) -> None:
    column, begin, end = journey
    true = Truth(weight_map(CASES[family]()), (begin, end))
    found: Counter[str] = Counter()
    missed = []
    for index, row in enumerate(true.weights.rows):
        for what, instead in corruptions(row, column):
            rows = (*true.weights.rows[:index], *([instead] if instead else []), *true.weights.rows[index + 1 :])
            spoiled = replace(true, weights=replace(true.weights, rows=rows))
            if how := found_out(true, spoiled):
                found[how] += 1
            elif not means_the_same(true, spoiled):
                missed.append((row.pieces[0].name, what))
    assert not missed
    assert found["refused"] > 20
    assert found["other values"] > 3
