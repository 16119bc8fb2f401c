"""What `stretto new-model` infers of architectures of transformers, from tiny configurations and the meta device."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from stretto.models import registry
from stretto.models.description import Description, Tensor, describe
from stretto.models.language import Held, Piece, WeightMap, layers, row
from stretto.models.registry import load_map_file, weight_map
from stretto.models.scaffold import begin, source_of
from stretto.models.scaffold.bridges import installed_bridges
from stretto.models.scaffold.stacks import sort
from stretto.sync.layout import Atoms
from stretto.sync.layouts import checkpoint_layout, replica_layout

BASE: dict[str, Any] = {
    "vocab_size": 51,
    "hidden_size": 48,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
WHOLE: dict[str, dict[str, Any]] = {
    "OlmoConfig": {},
    "Olmo2Config": {},
    "GraniteConfig": {"attention_bias": True},
    "SmolLM3Config": {"tie_word_embeddings": True},
    "StableLmConfig": {"use_qkv_bias": True},
    "Phi3Config": {},
    "Starcoder2Config": {},
    "Gemma2Config": {"head_dim": 10},
    "NemotronConfig": {},
    "OlmoeConfig": {"num_experts": 5, **EXPERTS},
    "Glm4MoeConfig": {
        "n_routed_experts": 5,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        **EXPERTS,
    },
}
"""Architectures of which everything can be inferred for the files and for transformers."""
PARTIAL: dict[str, tuple[str, ...]] = {
    "GPT2Config": ("attn.c_attn.weight",),
    "GPTNeoXConfig": ("attention.query_key_value.weight", "embed_out.weight", "lm_head.weight [51, 48] in memory"),
    "MixtralConfig": ("experts.{e}.w1.weight", "mlp.experts.gate_up_proj"),
    "MambaConfig": ("mixer.A_log", "mixer.in_proj.weight", "mixer.conv1d.weight"),
    "GptOssConfig": ("self_attn.sinks", "mlp.experts.gate_up_proj_bias"),
    "FalconH1Config": ("mamba.in_proj.weight",),
    "BloomConfig": ("query_key_value.weight",),
    "BartConfig": ("model.decoder.layers.{n}.encoder_attn.q_proj.weight",),
    "DeepseekV2Config": ("kv_b_proj.weight",),
}
"""Others, with tensors that must be named as not inferred."""


def config_of(kind: str, **changes: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(**{**BASE, **changes})


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The families that a test declares are forgotten behind it."""
    registry.families()
    monkeypatch.setattr(registry, "_CLAIMS", {name: list(claims) for name, claims in registry._CLAIMS.items()})


def loaded(described: Description, directory: Path) -> WeightMap:
    """The map of the written file, as a user's file is loaded."""
    path = directory / "map.py"
    path.write_text(source_of(begin(described)))
    load_map_file(path)
    return weight_map(described.config)


def as_layouts_say(tensors: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (one.shape, one.dtype) for name, one in tensors.items()}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_map_that_is_inferred_whole_has_the_names_and_shapes_of_memory_and_of_files(
    kind: str, tmp_path: Path
) -> None:
    described = describe(config_of(kind, **WHOLE[kind]))
    atoms = Atoms.of(loaded(described, tmp_path))
    assert replica_layout(atoms, "bfloat16", 1).local(0) == as_layouts_say(described.memory)
    assert checkpoint_layout(atoms, "bfloat16").local(0) == as_layouts_say(described.files)


@pytest.mark.parametrize("kind", PARTIAL)
def test_what_is_not_inferred_is_named_and_the_map_refuses_until_it_is(kind: str, tmp_path: Path) -> None:
    described = describe(config_of(kind))
    draft = begin(described)
    for name in PARTIAL[kind]:
        assert [one for one in draft.unresolved if name in one], draft.unresolved
    with pytest.raises(ValueError, match="is not finished") as refused:
        loaded(described, tmp_path)
    assert all(one in str(refused.value) for one in draft.unresolved)


@pytest.mark.parametrize("kind", [*WHOLE, *PARTIAL])
def test_the_file_is_short_and_its_lines_fit(kind: str) -> None:
    source = source_of(begin(describe(config_of(kind, **WHOLE.get(kind, {})))))
    ast.parse(source)
    assert max(len(line) for line in source.splitlines()) <= 120
    assert len(source.splitlines()) < 90


def test_sizes_are_read_from_the_configuration_and_never_retyped(tmp_path: Path) -> None:
    described = describe(config_of("SmolLM3Config"))
    loaded(described, tmp_path)
    wider = describe(
        config_of("SmolLM3Config", vocab_size=77, hidden_size=64, intermediate_size=40, num_hidden_layers=2)
    )
    atoms = Atoms.of(weight_map(wider.config))
    assert replica_layout(atoms, "bfloat16", 1).local(0) == as_layouts_say(wider.memory)


def test_a_dense_llama_like_model_is_blocks_alone() -> None:
    source = source_of(begin(describe(config_of("SmolLM3Config", tie_word_embeddings=True))))
    assert "    layer = [*norms(), *attention(), *gated_mlp()]\n" in source
    assert "*embedding(tied=c.tie_word_embeddings), *layers(c.num_hidden_layers, layer), final_norm()" in source
    assert "dropped=head_copy(tied=c.tie_word_embeddings)" in source
    assert "megatron=None" in source


def test_norms_that_are_centred_at_zero_are_found_by_what_they_do() -> None:
    centred = describe(config_of("GemmaConfig")).centred
    assert {"model.norm.weight", "model.layers.2.input_layernorm.weight"} <= centred
    assert not describe(config_of("SmolLM3Config")).centred
    assert not describe(config_of("StableLmConfig")).centred
    source = source_of(begin(describe(config_of("GemmaConfig"))))
    assert "*norms(add=1.0)" in source
    assert "final_norm(add=1.0)" in source


def test_norms_behind_a_part_are_not_taken_for_megatron_s() -> None:
    """OLMo 2 has a norm of the name post_attention_layernorm, but behind attention and not before the MLP."""
    draft = begin(describe(config_of("Olmo2Config")))
    assert {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"} <= set(draft.without_megatron)


def test_weights_with_inputs_as_rows_are_told_apart_even_where_they_are_square() -> None:
    axes = {piece.name: piece.axes for one in begin(describe(config_of("GPT2Config"))).rows for piece in one.pieces}
    assert axes["attn.c_proj.weight"] == "(g q d) h"
    axes = {piece.name: piece.axes for one in begin(describe(config_of("GPTNeoXConfig"))).rows for piece in one.pieces}
    assert axes["attention.dense.weight"] == "h (g q d)"


def test_layers_of_two_kinds_are_told_apart_by_a_key_of_the_configuration() -> None:
    source = source_of(begin(describe(config_of("Glm4MoeConfig", **WHOLE["Glm4MoeConfig"]))))
    assert "*layers(range(c.first_k_dense_replace), layer_0)" in source
    assert "*layers(range(c.first_k_dense_replace, c.num_hidden_layers), layer_1)" in source
    assert '"e": c.n_routed_experts' in source
    assert '"s": c.n_shared_experts * c.moe_intermediate_size' in source


def test_layers_are_the_numbers_that_count_as_many_as_the_model_has() -> None:
    weight = Tensor((4,), "bfloat16")
    names = ["tower.blocks.0.w", "tower.blocks.1.w", *(f"text.layers.{n}.w" for n in range(3)), "text.layers.1.odd"]
    stacks = sort(dict.fromkeys(names, weight), dict.fromkeys(names, weight), 3)
    assert stacks.prefix == "text.layers."
    assert [kind.numbers for kind in stacks.kinds] == [(0, 2), (1,)]
    assert set(stacks.files) == {"tower.blocks.0.w", "tower.blocks.1.w"}


def test_a_model_without_layers_is_only_listed() -> None:
    weight = Tensor((4,), "bfloat16")
    assert sort({"a.w": weight}, {"a.w": weight}, 2).prefix == ""


def test_a_map_that_says_what_it_lacks_is_refused_and_one_that_lacks_nothing_is_not() -> None:
    rows = (row(Piece("w", "h"), megatron=Held("w")), *layers(1, [row(Piece("x", "h"))]))

    @registry.family("int")
    def lacking(c: int) -> WeightMap:
        return WeightMap("odd", {"h": 2}, rows, 1, unresolved=("y [3]",) if c else ())

    with pytest.raises(ValueError, match=r"the odd map is not finished.*\n  y \[3\]"):
        weight_map(1)
    assert weight_map(0).rows == rows


def test_bridges_are_read_from_what_is_installed() -> None:
    pytest.importorskip("megatron.core")
    bridges = installed_bridges()
    if bridges is None:
        pytest.skip("megatron-bridge is not installed")
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"} <= bridges.architectures
    assert "SmolLM3ForCausalLM" not in bridges.architectures
