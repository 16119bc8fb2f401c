"""Weight maps against what transformers has in memory, what it writes to disk, and what Megatron-Core builds."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import CASES, ENGINE_ALONE, WITHOUT_MEGATRON
from torch import Tensor

from stretto.models import registry
from stretto.models.registry import load_map_file, weight_map
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import (
    EngineSizes,
    checkpoint_layout,
    engine_layout,
    fsdp_layout,
    megatron_layout,
    replica_layout,
)
from stretto.sync.parallel import MegatronSizes

DTYPE = "bfloat16"
_VOCABULARY = ("embed_tokens", "lm_head", "word_embeddings", "output_layer")
_BUILD_S = 240.0

BUILT = [name for name in CASES if name not in WITHOUT_MEGATRON | ENGINE_ALONE]

Specs = dict[str, tuple[tuple[int, ...], str]]


def atoms_of(name: str) -> Atoms:
    return Atoms.of(weight_map(CASES[name]()))


def random_model(config: Any) -> Any:
    """transformers' model of a configuration, in bfloat16 but for what it keeps in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal = type(config) in AutoModelForCausalLM._model_mapping
    kind = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    return kind.from_config(config, dtype=getattr(torch, DTYPE))


def specs(tensors: dict[str, Tensor]) -> Specs:
    return {name: (tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors.items()}


def held_in_memory(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers; tied ones once."""
    apart = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: one for name, one in model.state_dict().items() if name in apart}


def saved(model: Any, directory: Path) -> dict[str, Tensor]:
    """What transformers writes of a model."""
    from safetensors.torch import load_file

    model.save_pretrained(directory)
    return {name: one for file in directory.glob("*.safetensors") for name, one in load_file(file).items()}


@pytest.mark.parametrize("name", CASES)
def test_no_two_factors_of_a_tensor_have_one_length(name: str) -> None:
    """Otherwise a swap of the two would not be seen."""
    atoms = atoms_of(name)
    lengths = {
        p.name: [atoms.weights.size(f) for f in dict.fromkeys(p.factors) if not f.isdigit()] for p in atoms.pieces
    }
    assert not {piece: found for piece, found in lengths.items() if len(set(found)) < len(found)}


@pytest.mark.parametrize("name", CASES)
def test_memory_is_what_transformers_holds(name: str) -> None:
    with torch.device("meta"):
        model = random_model(CASES[name]())
    assert replica_layout(atoms_of(name), DTYPE, 1).local(0) == specs(held_in_memory(model))


@pytest.mark.parametrize("name", CASES)
def test_the_checkpoint_is_what_transformers_writes(name: str, tmp_path: Path) -> None:
    """Names, shapes and dtypes; then the values, bit by bit, from the files by way of the map into memory."""
    atoms, model = atoms_of(name), random_model(CASES[name]())
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        tensor.normal_()
    files, layout = saved(model, tmp_path), checkpoint_layout(atoms, DTYPE)
    assert layout.local(0) == specs(files)
    values = {index: torch.full((int(size.prod()),), torch.nan) for index, size in enumerate(atoms.sizes)}
    for atom, at, tensor, place in elements(layout):
        values[atom][at] = files[tensor].float().flatten()[place]
    memory = {key: torch.full_like(one, torch.nan) for key, one in held_in_memory(model).items()}
    for atom, at, tensor, place in elements(replica_layout(atoms, DTYPE, 1)):
        memory[tensor].view(-1)[place] = values[atom][at].to(memory[tensor].dtype)
    for key, one in held_in_memory(model).items():
        assert torch.equal(memory[key], one), key


@pytest.fixture(scope="module")
def megatron_models() -> dict[str, Specs | str]:
    """What Megatron-Core builds of every case it has, in a process of its own, since its stand-ins stay for good."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(_build_all).get(_BUILD_S)


def _build_all() -> dict[str, Specs | str]:
    from stretto.trainers.megatron import build, parallel
    from stretto.world import World

    sizes, device = MegatronSizes(), torch.device("cpu")
    torch.set_num_threads(1)
    parallel.start(sizes, World(0, 1, device))
    found: dict[str, Specs | str] = {}
    for name in BUILT:
        config = CASES[name]()
        options = weight_map(config).megatron or {}
        try:
            (model,) = build.build_model(config, sizes, options, dtype=getattr(torch, DTYPE), device=device)
        except Exception:
            found[name] = traceback.format_exc()
        else:
            found[name] = specs({key: one for key, one in model.state_dict().items() if isinstance(one, Tensor)})
    return found


@pytest.mark.parametrize("name", BUILT)
def test_megatron_is_what_megatron_core_builds(name: str, megatron_models: dict[str, Specs | str]) -> None:
    assert megatron_layout(atoms_of(name), DTYPE, MegatronSizes()).local(0) == megatron_models[name]


@pytest.mark.parametrize("name", sorted(WITHOUT_MEGATRON))
def test_what_megatron_core_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)megatron"):
        lay_out_and_configure(name)


def lay_out_and_configure(name: str) -> None:
    from stretto.trainers.megatron.provider import transformer_config

    atoms, sizes = atoms_of(name), MegatronSizes()
    megatron_layout(atoms, DTYPE, sizes)
    transformer_config(CASES[name](), sizes, atoms.weights.megatron or {}, dtype=torch.float32)


def test_transformer_engine_holds_the_norms_in_the_linear_behind_them() -> None:
    dense, latent, mixed = (te_names(name) for name in ("qwen3", "deepseek-v3", "qwen3-moe-mixed"))
    assert norms_of(dense, 0) == {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
    }
    up = {f"self_attention.linear_{what}_up_proj.layer_norm_weight" for what in ("q", "kv")}
    assert norms_of(latent, 0) == {"input_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"} | up
    assert norms_of(latent, 1) == {"input_layernorm.weight", "pre_mlp_layernorm.weight"} | up
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in mixed  # dense by mlp_only_layers
    assert "decoder.layers.3.pre_mlp_layernorm.weight" in mixed
    assert {f"decoder.layers.3.mlp.experts.local_experts.15.linear_fc{n}.weight" for n in (1, 2)} <= mixed
    grouped = te_names("qwen3-moe-mixed", grouped=True)
    assert {f"decoder.layers.3.mlp.experts.linear_fc{n}.weight15" for n in (1, 2)} <= grouped
    assert not [name for name in grouped if "local_experts" in name]


def te_names(name: str, grouped: bool = False) -> set[str]:
    return set(megatron_layout(atoms_of(name), DTYPE, MegatronSizes(te=True, grouped_experts=grouped)).local(0))


def norms_of(names: set[str], layer: int) -> set[str]:
    start = f"decoder.layers.{layer}."
    return {name.removeprefix(start) for name in names if name.startswith(start) and "norm" in name}


def test_engines_fuse_projections_and_stack_experts() -> None:
    """Names and shapes read off SGLang 0.5 and vLLM 0.32, which are not run here."""
    atoms = atoms_of("deepseek-v3")
    start, local = "model.layers.1.", engine_layout(atoms, DTYPE, EngineSizes("sglang", tp=2)).local(0)
    layer = {key.removeprefix(start): one for key, one in local.items() if key.startswith(start)}
    assert layer == {
        "input_layernorm.weight": ((48,), DTYPE),
        "post_attention_layernorm.weight": ((48,), DTYPE),
        "self_attn.fused_qkv_a_proj_with_mqa.weight": ((10 + 14 + 2, 48), DTYPE),
        "self_attn.q_a_layernorm.weight": ((10,), DTYPE),
        "self_attn.q_b_proj.weight": ((2 * (7 + 2), 10), DTYPE),
        "self_attn.kv_a_layernorm.weight": ((14,), DTYPE),
        "self_attn.kv_b_proj.weight": ((2 * (7 + 6), 14), DTYPE),
        "self_attn.o_proj.weight": ((48, 2 * 6), DTYPE),
        "mlp.gate.weight": ((8, 48), DTYPE),
        "mlp.gate.e_score_correction_bias": ((8,), "float32"),
        "mlp.experts.w13_weight": ((8, 2 * 6, 48), DTYPE),
        "mlp.experts.w2_weight": ((8, 48, 6), DTYPE),
        "mlp.shared_experts.gate_up_proj.weight": ((2 * 18, 48), DTYPE),
        "mlp.shared_experts.down_proj.weight": ((48, 18), DTYPE),
    }
    vllm = set(engine_layout(atoms, DTYPE, EngineSizes("vllm", tp=2)).local(0))
    assert {key.removeprefix(start) for key in vllm - set(local) if key.startswith(start)} == {
        "self_attn.fused_qkv_a_proj.weight",
        "mlp.experts.routed_experts.w13_weight",
        "mlp.experts.routed_experts.w2_weight",
    }


def layouts(name: str) -> Iterator[Layout]:
    atoms = atoms_of(name)
    yield checkpoint_layout(atoms, DTYPE)
    yield replica_layout(atoms, DTYPE, 2)
    yield fsdp_layout(atoms, DTYPE, 3)
    yield engine_layout(atoms, DTYPE, EngineSizes("sglang", tp=2, replicas=2))
    yield engine_layout(atoms, DTYPE, EngineSizes("vllm", tp=4))
    yield engine_layout(atoms, DTYPE, EngineSizes("sglang", tp=4, ep=2))
    if name not in WITHOUT_MEGATRON | ENGINE_ALONE:
        yield megatron_layout(atoms, DTYPE, MegatronSizes(tp=2, pp=2, ep=2, vocab_divisor=8))
    if name not in WITHOUT_MEGATRON:
        yield megatron_layout(atoms, DTYPE, MegatronSizes(dp=4, ep=2, etp=2, te=True))
        yield megatron_layout(atoms, DTYPE, MegatronSizes(tp=2, ep=2, te=True, grouped_experts=True))


@pytest.mark.parametrize("name", CASES)
def test_every_layout_holds_every_element_once(name: str) -> None:
    for layout in layouts(name):
        assert_covered(layout)
        for rank in range(layout.ranks):
            assert_filled(layout, rank)


def boxes(layout: Layout, rank: int | None = None) -> Iterator[int]:
    """Each distinct box (replicas once), or each box of a rank."""
    seen: set[tuple[int, bytes, bytes]] = set()
    table = layout.shards
    for index in range(len(table.atom)):
        box = int(table.atom[index]), table.start[index].tobytes(), table.size[index].tobytes()
        if (rank is None and box not in seen) or rank in layout.groups[table.holders[index]]:
            seen.add(box)
            yield index


def elements(layout: Layout, rank: int = 0) -> Iterator[tuple[int, Tensor, str, Tensor]]:
    """For each of a rank's boxes and tensors: the atom, where in it, the tensor's name, and where in that."""
    table = layout.shards
    for index in boxes(layout, rank):
        at, place, number = _places(layout, index)
        tensor = layout.tensors[table.tensor[index]]
        for one in np.unique(number):
            mine = number == one
            yield (
                int(table.atom[index]),
                torch.from_numpy(at[mine]),
                tensor.numbered(int(one)),
                torch.from_numpy(place[mine]),
            )


def _places(layout: Layout, index: int) -> tuple[Any, Any, Any]:
    """Of every element of a box: its place in the atom, in the tensor, and which of a numbered tensor."""
    table = layout.shards
    steps = np.indices(table.size[index]).reshape(layout.atoms.width, -1)
    at = np.ravel_multi_index(tuple(steps + table.start[index][:, None]), layout.atoms.sizes[table.atom[index]])
    place = table.offset[index] + table.stride[index] @ steps
    return at, place, table.first[index] + table.step[index] * steps[0]


def assert_covered(layout: Layout) -> None:
    """Over all ranks, every element of every atom is there, in one box."""
    counts = [np.zeros(int(size.prod()), dtype=int) for size in layout.atoms.sizes]
    for index in boxes(layout):
        np.add.at(counts[layout.shards.atom[index]], _places(layout, index)[0], 1)
    wrong = [name for name, count in zip(layout.atoms.names, counts, strict=True) if (count != 1).any()]
    assert not wrong, f"{layout.title}: {wrong}"


def assert_filled(layout: Layout, rank: int) -> None:
    """Every element of a rank's tensors is of one box; padded rows of the vocabulary, at the end, are of none."""
    local = layout.local(rank)
    counts = {name: torch.zeros(int(np.prod(shape)), dtype=torch.long) for name, (shape, _) in local.items()}
    for _, _, name, place in elements(layout, rank):
        counts[name].index_add_(0, place, torch.ones_like(place))
    for name, (shape, _) in local.items():
        rows = counts[name].view(shape)
        if any(part in name for part in _VOCABULARY) and rows.numel():
            rows = rows[: int(rows[:, 0].sum())]
        assert (rows == 1).all(), f"{layout.title}, rank {rank}: {name}"


def test_two_maps_for_one_configuration_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file of the user's goes before a shipped map; two files, and two shipped maps, contradict each other."""
    monkeypatch.setitem(registry._CLAIMS, "LlamaConfig", list(registry.families()["LlamaConfig"]))
    said = "from stretto.models.llama import llama\nfrom stretto.models.registry import family\n\n\n"
    said += "@family('LlamaConfig')\ndef rival(c):\n    return llama(c)\n"
    for directory in ("one", "two"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "rival.py").write_text(said)
    load_map_file(tmp_path / "one" / "rival.py")
    assert registry.claims(CASES["llama"]())[0].__qualname__ == "rival"
    load_map_file(tmp_path / "one" / "rival.py")
    assert weight_map(CASES["llama"]()).family == "llama"
    load_map_file(tmp_path / "two" / "rival.py")
    with pytest.raises(ValueError, match=r"2 weight maps claim LlamaConfig: .*one.*rival\.py.*two.*rival\.py"):
        weight_map(CASES["llama"]())


def test_a_map_is_for_one_exact_type_and_the_nearest_is_named() -> None:
    kind: type = type("MyLlamaConfig", (type(CASES["llama"]()),), {})
    with pytest.raises(ValueError, match=r"no weight map claims MyLlamaConfig \(nearest: LlamaConfig"):
        weight_map(kind())


def test_layers_behind_the_last_are_dropped_and_no_others() -> None:
    dropped = weight_map(CASES["deepseek-v3"]()).dropped
    assert [fnmatch("model.layers.3.eh_proj.weight", pattern) for pattern in dropped] == [True]
    assert not [name for name in atoms_of("deepseek-v3").names for pattern in dropped if fnmatch(name, pattern)]
    assert weight_map(CASES["deepseek-v3-plain-queries"]()).dropped == ()


def test_quantised_weights_are_refused() -> None:
    config = CASES["deepseek-v3"]()
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ValueError, match="quantised"):
        weight_map(config)
