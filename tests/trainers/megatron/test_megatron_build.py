"""Models that Megatron-Core builds from a config alone: what each rank holds, and that cutting changes no gradient."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from ranks import Ranks
from stretto.sync.parallel import MegatronSizes
from stretto.world import World

pytest.importorskip("megatron.core")

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
NORMED = {"qk_layernorm": True}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
Shapes = dict[str, list[int]]


def qwen3(**changes: Any) -> PretrainedConfig:
    return Qwen3Config(**{**SMALL, "head_dim": 8, "tie_word_embeddings": False, **changes})


def qwen3_moe(**changes: Any) -> PretrainedConfig:
    return Qwen3MoeConfig(**{**SMALL, "head_dim": 8, **EXPERTS, **changes})


def deepseek(**changes: Any) -> PretrainedConfig:
    return DeepseekV3Config(**{**LATENT, **changes})


def built(config: PretrainedConfig, sizes: MegatronSizes, options: dict[str, Any], rank: int) -> list[Shapes]:
    """Shapes of what `rank` of a make-believe group holds, chunk by chunk."""
    with _make_believe(sizes, rank):
        return [_shapes(chunk) for chunk in _build(config, sizes, options)]


@contextmanager
def _make_believe(sizes: MegatronSizes, rank: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=sizes.ranks, store=FakeStore())
    try:
        with _groups(sizes, World(rank, sizes.ranks, torch.device("cpu"))):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _groups(sizes: MegatronSizes, world: World) -> Iterator[None]:
    from stretto.trainers.megatron import parallel

    parallel.start(sizes, world)
    try:
        yield
    finally:
        parallel.stop()


def _build(config: PretrainedConfig, sizes: MegatronSizes, options: dict[str, Any], **keys: Any) -> list[Any]:
    from stretto.trainers.megatron.build import build_model

    cut = sizes.tp > 1
    keys = {"dtype": torch.float32, "sequence_parallel": cut, **keys}
    return build_model(config, sizes, options, device=torch.device("cpu"), **keys)


def _shapes(chunk: Any) -> Shapes:
    kept = set(chunk.state_dict())
    tensors = [*chunk.named_parameters(), *((name, value) for name, value in chunk.named_buffers() if name in kept)]
    return {name: list(value.shape) for name, value in tensors}


@pytest.fixture(scope="module")
def aside() -> Iterator[ProcessPoolExecutor]:
    """A process of its own, without a group: Megatron's stand-ins stay out of the tests' process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def shapes(aside: ProcessPoolExecutor) -> Any:
    def of(config: PretrainedConfig, options: dict[str, Any], rank: int = 0, **sizes: Any) -> list[Shapes]:
        return aside.submit(built, config, MegatronSizes(**sizes), options, rank).result(timeout=120)

    return of


def test_a_dense_model_has_the_names_and_shapes_of_its_config(shapes: Any) -> None:
    (chunk,) = shapes(qwen3(num_hidden_layers=1), NORMED)
    layer = "decoder.layers.0."
    assert chunk == {
        "embedding.word_embeddings.weight": [50, 32],
        layer + "input_layernorm.weight": [32],
        layer + "self_attention.linear_qkv.weight": [(4 + 2 + 2) * 8, 32],
        layer + "self_attention.linear_proj.weight": [32, 4 * 8],
        layer + "self_attention.q_layernorm.weight": [8],
        layer + "self_attention.k_layernorm.weight": [8],
        layer + "pre_mlp_layernorm.weight": [32],
        layer + "mlp.linear_fc1.weight": [2 * 48, 32],
        layer + "mlp.linear_fc2.weight": [32, 48],
        "decoder.final_layernorm.weight": [32],
        "output_layer.weight": [50, 32],
    }


def test_only_qwen2_has_a_bias_and_it_is_that_of_q_k_and_v(shapes: Any) -> None:
    (chunk,) = shapes(Qwen2Config(**SMALL), {"add_qkv_bias": True})
    assert {name for name in chunk if name.endswith("bias")} == {
        f"decoder.layers.{layer}.self_attention.linear_qkv.bias" for layer in (0, 1)
    }
    (chunk,) = shapes(LlamaConfig(**SMALL), {})
    assert not [name for name in chunk if name.endswith("bias")]


def test_tensor_parallel_ranks_share_heads_rows_and_a_padded_vocabulary(shapes: Any) -> None:
    (chunk,) = shapes(qwen3(), NORMED, rank=1, tp=2, vocab_divisor=8)
    layer = "decoder.layers.1."
    assert chunk["embedding.word_embeddings.weight"] == [64 // 2, 32]
    assert chunk["output_layer.weight"] == [64 // 2, 32]
    assert chunk[layer + "self_attention.linear_qkv.weight"] == [(2 + 1 + 1) * 8, 32]
    assert chunk[layer + "self_attention.linear_proj.weight"] == [32, 2 * 8]
    assert chunk[layer + "mlp.linear_fc1.weight"] == [48, 32]
    assert chunk[layer + "mlp.linear_fc2.weight"] == [32, 24]
    assert chunk[layer + "input_layernorm.weight"] == [32]


@pytest.mark.parametrize("pp_layers", [(), (1, 4, 2)])
def test_pipeline_stages_hold_the_layers_that_the_sizes_say(shapes: Any, pp_layers: tuple[int, ...]) -> None:
    sizes = MegatronSizes(pp=3, pp_layers=pp_layers)
    for stage, (layers,) in enumerate(sizes.layers(7)):
        (chunk,) = shapes(qwen3(num_hidden_layers=7), NORMED, rank=stage, pp=3, pp_layers=pp_layers)
        assert _layers(chunk) == len(layers)
        assert ("embedding.word_embeddings.weight" in chunk) == (stage == 0)
        assert ("output_layer.weight" in chunk) == ("decoder.final_layernorm.weight" in chunk) == (stage == 2)


def test_virtual_stages_are_chunks_of_a_rank(shapes: Any) -> None:
    sizes = MegatronSizes(pp=2, vpp=2, pp_layers=(1, 2, 1, 3))
    for stage in (0, 1):
        chunks = shapes(qwen3(num_hidden_layers=7), NORMED, rank=stage, pp=2, vpp=2, pp_layers=(1, 2, 1, 3))
        assert [_layers(chunk) for chunk in chunks] == [len(layers) for layers in sizes.layers(7)[stage]]
        assert ["embedding.word_embeddings.weight" in chunk for chunk in chunks] == [stage == 0, False]
        assert ["output_layer.weight" in chunk for chunk in chunks] == [False, stage == 1]


def _layers(chunk: Shapes) -> int:
    return len({name.split(".")[2] for name in chunk if name.startswith("decoder.layers.")})


def test_a_tied_head_is_stored_only_where_the_embedding_is_not(shapes: Any) -> None:
    tied = qwen3(tie_word_embeddings=True)
    assert "output_layer.weight" not in shapes(tied, NORMED)[0]
    assert "output_layer.weight" not in shapes(tied, NORMED, rank=0, pp=2)[0]
    assert shapes(tied, NORMED, rank=1, pp=2)[0]["output_layer.weight"] == [50, 32]


def test_expert_parallel_ranks_hold_their_experts_and_their_part_of_each(shapes: Any) -> None:
    expert = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc{}.weight"
    (chunk,) = shapes(qwen3_moe(), NORMED, rank=1, dp=2, ep=2)
    assert chunk[expert.format(1, 1)] == [2 * 24, 32]
    assert expert.format(2, 1) not in chunk
    assert chunk["decoder.layers.1.mlp.router.weight"] == [4, 32]
    (chunk,) = shapes(qwen3_moe(), NORMED, rank=1, tp=2, etp=2)
    assert chunk[expert.format(3, 1)] == [24, 32]
    assert chunk[expert.format(3, 2)] == [32, 12]


def test_layers_without_experts_are_those_of_the_config(shapes: Any) -> None:
    (chunk,) = shapes(qwen3_moe(num_hidden_layers=4, mlp_only_layers=[0], decoder_sparse_step=2), NORMED)
    routed = [layer for layer in range(4) if f"decoder.layers.{layer}.mlp.router.weight" in chunk]
    assert routed == [1, 3]
    # Across stages too: the dense layer is the first of the model and not of each stage.
    (second,) = shapes(qwen3_moe(mlp_only_layers=[0]), NORMED, rank=1, pp=2)
    assert "decoder.layers.0.mlp.router.weight" in second


def test_latent_attention_keeps_its_down_projections_whole(shapes: Any) -> None:
    (chunk,) = shapes(deepseek(), SIGMOID, rank=1, tp=2, ep=2)
    attention = "decoder.layers.1.self_attention."
    assert chunk[attention + "linear_q_down_proj.weight"] == [12, 32]
    assert chunk[attention + "linear_kv_down_proj.weight"] == [16 + 4, 32]
    assert chunk[attention + "linear_q_up_proj.weight"] == [2 * (8 + 4), 12]
    assert chunk[attention + "linear_kv_up_proj.weight"] == [2 * (8 + 6), 16]
    assert chunk[attention + "linear_proj.weight"] == [32, 2 * 6]
    assert chunk["decoder.layers.1.mlp.router.expert_bias"] == [8]
    assert chunk["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"] == [2 * 2 * 20 // 2, 32]
    assert not [name for name in chunk if "local_tokens" in name]


@pytest.mark.parametrize(
    ("config", "options", "sizes", "says"),
    [
        (qwen3(), NORMED, {"tp": 4}, "key-value heads"),
        (qwen3(), NORMED, {"ep": 2, "dp": 2}, "has no experts"),
        (qwen3_moe(), NORMED, {"ep": 3, "dp": 3}, "does not divide the 4 experts"),
        (qwen3_moe(), NORMED, {"grouped_experts": True}, "Transformer Engine"),
        (qwen3(), NORMED, {"te": True}, "Transformer Engine"),
        (qwen3(), {"qk_norm": True}, {}, "qk_norm"),
        (qwen3(attention_bias=True), NORMED, {}, "attention_bias"),
        (qwen3(hidden_act="relu"), NORMED, {}, "relu"),
        (deepseek(topk_group=3), SIGMOID, {}, "4 // 3"),
        (deepseek(norm_topk_prob=False), SIGMOID, {}, "sigmoid"),
        (LlamaConfig(**SMALL, rope_parameters=DYNAMIC), {}, {}, "dynamic"),
    ],
)
def test_what_megatron_cannot_do_is_refused(
    shapes: Any, config: PretrainedConfig, options: dict[str, Any], sizes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        shapes(config, options, **sizes)


def places(sizes: MegatronSizes) -> list[dict[str, int]]:
    """Megatron's own coordinates of every rank of a make-believe group."""
    found = []
    for rank in range(sizes.ranks):
        with _make_believe(sizes, rank):
            from megatron.core import parallel_state as state

            found.append(
                {
                    "tp": state.get_tensor_model_parallel_rank(),
                    "dp": state.get_data_parallel_rank(),
                    "pp": state.get_pipeline_model_parallel_rank(),
                    "etp": state.get_expert_tensor_parallel_rank(),
                    "ep": state.get_expert_model_parallel_rank(),
                    "edp": state.get_expert_data_parallel_rank(),
                }
            )
    return found


def test_ranks_stand_where_the_sizes_place_them(aside: ProcessPoolExecutor) -> None:
    for sizes in (MegatronSizes(tp=2, pp=2, dp=4, ep=2, etp=2), MegatronSizes(tp=2, pp=2, dp=2, ep=4)):
        found = aside.submit(places, sizes).result(timeout=120)
        assert found == [sizes.place(rank) for rank in range(sizes.ranks)]


def refused(sizes: MegatronSizes) -> None:
    from stretto.trainers.megatron import parallel

    parallel.start(sizes, World(0, 1, torch.device("cpu")))


def test_sizes_that_do_not_make_up_the_world_are_refused(aside: ProcessPoolExecutor) -> None:
    with pytest.raises(ValueError, match="start 2 or change the sizes"):
        aside.submit(refused, MegatronSizes(tp=2)).result(timeout=120)


# Below, a whole model on each of two ranks, and then its parts on them, compute one loss.

TOKENS_BS = torch.arange(24).view(2, 12) * 7 % 49 + 1
WEIGHTS_BSV = torch.randn(2, 12, 50, generator=torch.Generator().manual_seed(2))


def worst_gradient(world: World, config: PretrainedConfig, options: dict[str, Any], sizes: MegatronSizes) -> float:
    """Largest difference of a gradient between this rank's part of the model and the whole, relative."""
    whole, expected = _whole(world, config, options)
    with _groups(sizes, world):
        (model,) = _build(config, sizes, options)
        names = {name: _in_the_whole(name, model, sizes.place(world.rank)) for name in _tensors(model)}
        _fill(model, {name: _part(whole[names[name]], value, world) for name, value in _tensors(model).items()})
        rows = slice(world.rank, world.rank + 1) if sizes.dp > 1 else slice(None)
        columns = slice(world.rank * 25, world.rank * 25 + 25) if sizes.tp > 1 else slice(None)
        _loss(model, rows, columns).backward()
        differences = []
        for name, value in model.named_parameters():
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            if _partial(name, value, sizes):
                dist.all_reduce(gradient)
            target = _part(expected[names[name]], value, world)
            differences.append(((gradient - target).abs().max() / target.abs().max()).item())
    return max(differences)


def _whole(
    world: World, config: PretrainedConfig, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of a fixed draw, and the gradients of the loss of a whole model that has them."""
    sizes = MegatronSizes(dp=world.size)
    with _groups(sizes, world):
        (model,) = _build(config, sizes, options)
        draw = torch.Generator().manual_seed(1)
        whole = {name: torch.randn(value.shape, generator=draw) * 0.2 for name, value in _tensors(model).items()}
        _fill(model, whole)
        _loss(model, slice(None), slice(None)).backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return whole, gradients


def _tensors(model: Any) -> dict[str, Tensor]:
    kept = {name: value for name, value in model.named_buffers() if name.endswith("expert_bias")}
    return {**dict(model.named_parameters()), **kept}


def _fill(model: Any, values: dict[str, Tensor]) -> None:
    for name, tensor in _tensors(model).items():
        tensor.data.copy_(values[name])


def _loss(model: Any, rows: slice, columns: slice) -> Tensor:
    return (_logits(model, TOKENS_BS[rows]) * WEIGHTS_BSV[rows, :, columns]).sum()


def _logits(model: Any, tokens_BS: Tensor) -> Tensor:
    return model(tokens_BS, torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS), None)


def _in_the_whole(name: str, model: Any, place: dict[str, int]) -> str:
    """The name of a rank's tensor in the whole model: its experts are numbered from nought."""
    head, found, tail = name.partition("local_experts.")
    if not found:
        return name
    number, _, rest = tail.partition(".")
    held = len(model.get_submodule(head + "local_experts"))
    return f"{head}local_experts.{int(number) + place['ep'] * held}.{rest}"


def _part(whole: Tensor, like: Tensor, world: World) -> Tensor:
    """This rank's part of a tensor that is cut in two along one axis, gate and up apart."""
    if whole.shape == like.shape:
        return whole
    axis, stride = like.partition_dim, like.partition_stride  # type: ignore[reportAttributeAccessIssue]
    return torch.cat([piece.chunk(2, axis)[world.rank] for piece in whole.chunk(stride, axis)], axis)


def _partial(name: str, value: Tensor, sizes: MegatronSizes) -> bool:
    """Whether a gradient is a sum over ranks: of tokens at dp > 1 (not an expert's), of sequence parts at tp > 1."""
    if sizes.dp > 1:
        return "local_experts" not in name
    heads_apart = "q_layernorm" in name or "k_layernorm" in name
    return getattr(value, "sequence_parallel", False) or heads_apart


@pytest.mark.parametrize(
    ("config", "options", "sizes"),
    [
        (Qwen2Config(**SMALL, tie_word_embeddings=True), {"add_qkv_bias": True}, MegatronSizes(tp=2)),
        (qwen3_moe(), NORMED, MegatronSizes(tp=2, etp=2)),
        (deepseek(), SIGMOID, MegatronSizes(tp=2, ep=2)),
    ],
    ids=["tied-tp", "tp-etp", "latent-tp-ep"],
)
def test_gradients_do_not_depend_on_the_cut(
    pair: Ranks, config: PretrainedConfig, options: dict[str, Any], sizes: MegatronSizes
) -> None:
    assert max(pair.run(worst_gradient, config, options, sizes)) < 1e-5


def first_draws(world: World, sizes: MegatronSizes) -> dict[str, Tensor]:
    """The weights that every rank holds whole, as they are first drawn."""
    torch.manual_seed(world.rank)
    with _groups(sizes, world):
        (model,) = _build(deepseek(), sizes, SIGMOID)
        return {
            name: value.detach()
            for name, value in model.named_parameters()
            if not getattr(value, "tensor_model_parallel", False) and "local_experts" not in name
        }


def test_replicas_are_drawn_alike(pair: Ranks) -> None:
    ours, theirs = pair.run(first_draws, MegatronSizes(tp=2, ep=2))
    assert "decoder.layers.1.mlp.router.weight" in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def worst_stage(world: World, config: PretrainedConfig, options: dict[str, Any], keys: dict[str, Any]) -> float:
    """Largest difference of a gradient of the last stage's layers from the whole model's, relative; 0 on stage 0."""
    whole, expected = _whole(world, config, options)
    sizes = MegatronSizes(pp=2, pp_layers=(1, 2))
    with _groups(sizes, world):
        (stage,) = _build(config, sizes, options, **keys)
        shift = sizes.layers(3)[world.rank][0].start
        _fill(stage, {name: whole[_in_the_model(name, shift, whole)] for name in _tensors(stage)})
        if world.rank == 0:
            dist.send(_logits(stage, TOKENS_BS).detach(), 1)
            return 0.0
        hidden = torch.empty(TOKENS_BS.shape[1], TOKENS_BS.shape[0], config.hidden_size)
        dist.recv(hidden, 0)
        stage.set_input_tensor(hidden.requires_grad_())
        _loss(stage, slice(None), slice(None)).backward()
        return max(
            ((value.grad - target).abs().max() / target.abs().max()).item()
            for name, value in stage.named_parameters()
            if "decoder" in name
            for target in [expected[_in_the_model(name, shift, whole)]]
        )


def _in_the_model(name: str, shift: int, whole: dict[str, Tensor]) -> str:
    parts = name.split(".")
    if parts[1] == "layers":
        parts[2] = str(int(parts[2]) + shift)
    renamed = ".".join(parts)
    return renamed if renamed in whole else "embedding.word_embeddings.weight"


@pytest.mark.parametrize("keys", [{}, {"recompute": True}], ids=str)
def test_two_uneven_stages_with_a_tied_head_compute_what_one_does(pair: Ranks, keys: dict[str, Any]) -> None:
    tied = qwen3(tie_word_embeddings=True, num_hidden_layers=3)
    assert max(pair.run(worst_stage, tied, NORMED, keys)) < 1e-5
