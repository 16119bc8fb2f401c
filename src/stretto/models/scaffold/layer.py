"""The parts of one kind of layer."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.models.scaffold.factors import NORM, Sizes, axes_of
from stretto.models.scaffold.parts import Pool, call, piece_text, row_text
from stretto.models.scaffold.stacks import NUMBERED

_UP = ("mlp.c_fc", "mlp.fc1", "mlp.up_proj", "mlp.dense_h_to_4h", "fc1")
_DOWN = ("mlp.c_proj", "mlp.fc2", "mlp.down_proj", "mlp.dense_4h_to_h", "fc2")


def layer_parts(pool: Pool, sizes: Sizes, centred: frozenset[str], transposed: frozenset[str]) -> None:
    """Take the tensors of a layer from `pool`: blocks first, then what has names of its own, then rows by shape."""
    add = 1.0 if "input_layernorm.weight" in centred else None
    _norms(pool, add)
    _attention(pool, 1.0 if "self_attn.q_norm.weight" in centred else None)
    _gated(pool)
    _routed(pool)
    _fused(pool)
    _plain_mlp(pool)
    rows_by_shape(pool, sizes, transposed)


def _norms(pool: Pool, add: float | None) -> None:
    """Megatron's two norms, when the layer has these two before its parts and no other (some norm behind a part)."""
    whole = {n for n, one in pool.files.items() if NORM.search(n) and "attn" not in n and n.endswith(".weight")}
    if whole != {"input_layernorm.weight", "post_attention_layernorm.weight"}:
        return
    routed = any(".experts." in name for name in pool.files)
    if pool.take(call("norms", add=add, experts=routed or None)):
        mlp_te = "pre_mlp_layernorm.bias" if routed else "mlp.linear_fc1.layer_norm_bias"
        for name, megatron, te in (
            ("input_layernorm.bias", "input_layernorm.bias", "self_attention.linear_qkv.layer_norm_bias"),
            ("post_attention_layernorm.bias", "pre_mlp_layernorm.bias", mlp_te),
        ):
            pool.take(row_text(name, "h", megatron=megatron, te=te if te != megatron else None))


def _attention(pool: Pool, add: float | None) -> None:
    """q, k, v and o, with the biases they have, and norms of heads where they are as long as one."""
    bias, output = (f"self_attn.{name}_proj.bias" in pool.files or None for name in "qo")
    plain = call("attention", bias=bias, output_bias=output)
    normed = call("attention", bias=bias, output_bias=output, qk_norm=True, add=add)
    _ = ("self_attn.q_norm.weight" in pool.files and pool.take(normed)) or pool.take(plain)


def _gated(pool: Pool) -> None:
    """Every gated MLP of the layer: its own, and shared experts."""
    for name in [n.removesuffix(".gate_proj.weight") for n in pool.files if n.endswith(".gate_proj.weight")]:
        megatron = "mlp.shared_experts" if "shared" in name else None
        given = [name] if name != "mlp" else []
        _ = pool.take(call("gated_mlp", *given, megatron=megatron)) or pool.take(
            call("gated_mlp", *given, rows="s", megatron=megatron)
        )


def _routed(pool: Pool) -> None:
    """Experts and their router, with or without a bias of its choice."""
    if pool.take(call("experts")):
        pool.take(call("router"))
        name = "mlp.gate.e_score_correction_bias"
        if bias := pool.files.get(name):
            dtype = None if bias.dtype == "bfloat16" else bias.dtype
            pool.take(row_text(name, "e", dtype=dtype, megatron="mlp.router.expert_bias", cut=False))


def _fused(pool: Pool) -> None:
    """q, k and v, and gate and up, one after another in one tensor, as the names qkv_proj and gate_up_proj mean."""
    for kind, columns in (("weight", " h"), ("bias", "")):
        qkv = {"q": f"(g q d){columns}", "k": f"(g d){columns}", "v": f"(g d){columns}"}
        pool.take(_joined(f"self_attn.qkv_proj.{kind}", qkv, f"self_attention.linear_qkv.{kind}", per="g"))
        halves = {"gate": f"f{columns}", "up": f"f{columns}"}
        pool.take(_joined(f"mlp.gate_up_proj.{kind}", halves, f"mlp.linear_fc1.{kind}"))
    for name, axes, megatron in (
        ("self_attn.o_proj.weight", "h (g q d)", "self_attention.linear_proj.weight"),
        ("self_attn.o_proj.bias", "h", "self_attention.linear_proj.bias"),
        ("mlp.down_proj.weight", "h f", "mlp.linear_fc2.weight"),
    ):
        pool.take(row_text(name, axes, megatron=megatron))


def _joined(name: str, parts: Mapping[str, str], megatron: str, per: str | None = None) -> str:
    """A row of pieces that lie one after another in the tensor `name`."""
    pieces = [piece_text(f"{name}[{one}]", axes) for one, axes in parts.items()]
    files, held = call("Held", name), call("Held", megatron, per=per)
    return f"row({', '.join(pieces)}, checkpoint={files}, megatron={held})"


def _plain_mlp(pool: Pool) -> None:
    """An MLP without a gate, by the names that its two layers have in use."""
    if any("gate" in name for name in pool.files):
        return
    for names, weight, bias, megatron in ((_UP, "f h", "f", "linear_fc1"), (_DOWN, "h f", "h", "linear_fc2")):
        for name in names:
            if pool.take(row_text(f"{name}.weight", weight, megatron=f"mlp.{megatron}.weight")):
                pool.take(row_text(f"{name}.bias", bias, megatron=f"mlp.{megatron}.bias"))


def rows_by_shape(pool: Pool, sizes: Sizes, transposed: frozenset[str] = frozenset()) -> None:
    """A row for each tensor whose axes have one meaning, without a Megatron column; norms and routers are not cut."""
    for name, one in list(pool.files.items()):
        shape = one.shape
        if NUMBERED.search(name):
            continue  # of a stack that is not the decoder: a row for each number would be no map
        if "{e}" in name:
            if "expert" not in name or shape[0] != sizes.lengths.get("e"):
                continue
            shape = shape[1:]
        axes = axes_of(name, shape, sizes, transposed=name in transposed)
        if axes is not None:
            whole = (NORM.search(name) and axes != "h") or ("e" in axes and "{e}" not in name)
            dtype = None if one.dtype == "bfloat16" else one.dtype
            pool.take(row_text(name, axes, dtype=dtype, cut=False if whole else None))
