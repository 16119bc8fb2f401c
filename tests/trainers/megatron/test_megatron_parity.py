"""Megatron-Core against transformers with the same checkpoint, the FSDP2 trainer on the same rollouts, and itself.

All that needs four ranks is here: a file has its processes to itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_helpers import (
    BATCH,
    BIASED,
    CENTRED,
    DENSE,
    EVERYTHING_ON,
    EXPERTS,
    LATENT,
    PP2,
    SETTINGS,
    SHARED,
    TP2,
    VOCABULARY,
    Setup,
    cut_like,
    gradient,
    mine,
    parameters_of,
    whole_gradient,
    with_behaviour,
)
from safetensors.torch import load_file
from torch import Tensor
from trainer_samples import new_trainer, run_config, share, worst

from ranks import Ranks
from stretto.orchestration.check.gradients import local_gradient, write_gradient
from stretto.types import Batch
from stretto.world import World

BOTH = TP2 | PP2
CUTS: list[tuple[int, str, dict[str, Any]]] = [
    (1, DENSE, {}),
    (2, DENSE, TP2),
    (2, DENSE, SHARED),
    (2, DENSE, PP2),
    (2, EXPERTS, {"ep": 2}),
    (2, BIASED, TP2),
    (2, CENTRED, TP2),
    (2, LATENT, SHARED),
    (4, DENSE, BOTH),
]
every_cut = pytest.mark.parametrize(("size", "kind", "sizes"), CUTS, ids=str)
PLAIN = {"old_logprobs": "trainer", "mismatch": "off"}
"""A loss to which the engine's log-probs are nothing."""


@pytest.fixture
def ranks(request: pytest.FixtureRequest, size: int) -> Ranks:
    """As many as the case says."""
    return request.getfixturevalue({1: "alone", 2: "pair", 4: "four"}[size])


def rows() -> list[list[int]]:
    """Token ids of a few samples; the lengths differ."""
    return [[*one.prompt_ids, *one.response_ids] for one in BATCH.rollouts[:6]]


def transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def logits(world: World, setup: Setup) -> list[Tensor]:
    """The logits of each of `rows` over the true vocabulary, on the ranks of the last stage."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    with setup.trainer(world) as trainer, torch.no_grad():
        found = []
        for ids in rows():
            # Ranks that share a sequence need an even one; what is behind a token does not change it.
            last = through_the_stages(trainer, torch.tensor([ids + [0] * (len(ids) % 2)]))
            if parallel_state.is_pipeline_last_stage():
                found.append(gather_from_tensor_model_parallel_region(last)[0, : len(ids), :VOCABULARY])
        return found


def through_the_stages(trainer: Any, ids_BL: Tensor) -> Tensor:
    """One forward pass by hand: what a stage gives goes to the next."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    (model,) = trainer._models
    if not parallel_state.is_pipeline_first_stage():
        received_LBD = torch.empty(ids_BL.shape[1], 1, model.config.hidden_size)
        dist.recv(received_LBD, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(received_LBD)
    out = model(ids_BL, torch.arange(ids_BL.shape[1])[None], None)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return out


@every_cut
def test_logits_are_those_of_transformers(
    ranks: Ranks, models: dict[str, Path], size: int, kind: str, sizes: dict[str, Any]
) -> None:
    model = transformers_model(models[kind])
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0] for ids in rows()]
    answers = [found for found in ranks.run(logits, Setup(models[kind], sizes)) if found]
    assert len(answers) == size // sizes.get("pp", 1)
    for found in answers:
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def transformers_gradient(directory: Path, batch: Batch, out: Path) -> dict[str, Tensor]:
    """The gradient of the trainers' loss by the names on disk: a loop over samples with all logits."""
    model = transformers_model(directory)
    tokens = sum(one.loss_tokens for one in batch.rollouts)
    for one, advantage in zip(batch.rollouts, batch.advantages, strict=True):
        logits_TV = model(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0] / one.temperature
        logprobs_TV = logits_TV[len(one.prompt_ids) - 1 : -1].log_softmax(-1)
        kept = torch.tensor(one.loss_mask_T, dtype=torch.bool)
        current = logprobs_TV.gather(-1, torch.tensor(one.response_ids)[:, None])[kept, 0]
        (-(current * advantage).sum() / tokens).backward()
    # In memory experts lie fused: transformers itself takes the gradients apart, as if they were weights.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        for buffer in model.buffers():
            buffer.zero_()
    model.save_pretrained(out)
    return load_file(out / "model.safetensors")


def checkpoint_gradient(world: World, setup: Setup, batch: Batch, out: Path) -> None:
    """Write the trainer's gradient as tensors of the checkpoint."""
    with setup.trainer(world) as trainer:
        write_gradient(trainer.layout(), local_gradient(trainer, mine(world, batch)), out, world)


@every_cut
def test_gradients_are_those_of_transformers(
    ranks: Ranks, models: dict[str, Path], kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    ranks.run(checkpoint_gradient, Setup(models[kind], sizes, PLAIN), BATCH, tmp_path / "ours")
    found = load_file(tmp_path / "ours" / "model.safetensors")
    expected = transformers_gradient(models[kind], BATCH, tmp_path / "theirs")
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        assert float((found[name] - theirs).norm()) <= 1e-5 * float(theirs.norm()), name
    assert sum(bool(theirs.any()) for theirs in expected.values()) > 0.8 * len(expected)


def in_megatrons_names(directory: Path, groups: int) -> dict[str, Tensor]:
    """The tensors of a Qwen checkpoint as whole tensors of Megatron, put together by hand."""
    found: dict[str, Tensor] = {}
    renamed = {
        "model.embed_tokens": "embedding.word_embeddings",
        "model.norm": "decoder.final_layernorm",
        "lm_head": "output_layer",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_norm": "self_attention.q_layernorm",
        "self_attn.k_norm": "self_attention.k_layernorm",
        "down_proj": "linear_fc2",
        "mlp.gate.": "mlp.router.",
        "mlp.experts": "mlp.experts.local_experts",
        "model.layers": "decoder.layers",
    }
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        new = name
        for old, other in renamed.items():
            new = new.replace(old, other)
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            rows = torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
            found[new.replace("self_attn.q_proj", "self_attention.linear_qkv")] = rows
        elif "gate_proj" in name:
            found[new.replace("gate_proj", "linear_fc1")] = torch.cat(
                [tensor, tensors[name.replace("gate_proj", "up_proj")]]
            )
        elif not any(f"{one}_proj" in name for one in ("k", "v", "up")):
            found[new] = tensor
    return found


def unlike(world: World, setup: Setup, whole: Mapping[str, Tensor]) -> tuple[set[str], list[str]]:
    """The names that this rank has of a whole model, and those that are not their part of it bit by bit."""
    with setup.trainer(world) as trainer:
        parameters = [(name, parameter) for _, name, parameter in parameters_of(trainer)]
        wrong = [name for name, one in parameters if not torch.equal(one, cut_like(name, one, whole[name]))]
        return {name for name, _ in parameters}, wrong


@pytest.mark.parametrize(("size", "kind", "sizes"), [*CUTS[1:-3], (4, DENSE, BOTH)], ids=str)
def test_every_rank_loads_its_part_of_the_checkpoint_bit_by_bit(
    ranks: Ranks, models: dict[str, Path], kind: str, sizes: dict[str, Any]
) -> None:
    whole = in_megatrons_names(models[kind], groups=2)
    answers = ranks.run(unlike, Setup(models[kind], sizes), whole)
    assert set().union(*(names for names, _ in answers)) == whole.keys()
    assert not [name for _, wrong in answers for name in wrong]


def recorded(logprobs: Sequence[Sequence[float]]) -> list[Batch]:
    """Batches of ten steps, sampled by a policy near the first one: all groups, two of them, the other two."""
    everything = with_behaviour(logprobs)
    parts = [everything, share(everything, range(5)), share(everything, range(5, 10))]
    return [parts[step % 3] for step in range(10)]


def losses(world: World, setup: Setup, batches: Sequence[Batch]) -> list[float]:
    with setup.trainer(world) as trainer:
        return [trainer.step(mine(world, batch)).metrics["train/loss"] for batch in batches]


@pytest.mark.parametrize("sizes", [TP2, PP2], ids=str)
def test_training_follows_the_fsdp_trainer(pair: Ranks, models: dict[str, Path], sizes: dict[str, Any]) -> None:
    algorithm = {"kl_coef": 0.1}
    config = run_config(SETTINGS | {"backend": "fsdp"}, algorithm, steps=16)
    trainer = new_trainer(models[DENSE], config)
    batches = recorded(trainer.logprobs(BATCH.rollouts))
    expected = [trainer.step(batch).metrics["train/loss"] for batch in batches]
    assert max(abs(one - other) for one, other in zip(expected[:3], expected[-4:], strict=False)) > 0.1
    for found in pair.run(losses, Setup(models[DENSE], sizes, algorithm), batches):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


MORE_CUTS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (2, DENSE, SHARED | {"activation_checkpointing": True}, EVERYTHING_ON),
    (2, DENSE, {"pp": 2, "vpp": 2}, EVERYTHING_ON),
    (2, DENSE, {}, EVERYTHING_ON),
    (2, EXPERTS, SHARED, {}),
    (2, EXPERTS, SHARED | {"ep": 2}, EVERYTHING_ON),
    (2, EXPERTS, {"etp": 2}, {}),
    (4, DENSE, SHARED | PP2, EVERYTHING_ON),
    (4, DENSE, TP2 | {"pp": 2, "vpp": 2}, {}),
    (4, EXPERTS, SHARED | {"ep": 2, "etp": 2}, {}),
    (4, EXPERTS, {"pp": 2, "ep": 2, "pp_layers": (1, 3)}, EVERYTHING_ON),
]


@pytest.mark.parametrize(("size", "kind", "sizes", "algorithm"), MORE_CUTS, ids=str)
def test_every_cut_of_the_model_has_the_gradient_of_one_rank(
    alone: Ranks,
    ranks: Ranks,
    models: dict[str, Path],
    kind: str,
    sizes: dict[str, Any],
    algorithm: dict[str, Any],
) -> None:
    ((batch, loss, expected, metrics),) = alone.run(whole_gradient, Setup(models[kind], algorithm=algorithm))
    parts = ranks.run(part_of_gradient, Setup(models[kind], sizes, algorithm), batch, expected)
    for part in parts:
        assert part["loss"] == pytest.approx(loss, rel=1e-5)
        assert part["worst"] < 1e-5
        assert part["metrics"] == parts[0]["metrics"]
    assert parts[0]["metrics"].keys() == metrics.keys()
    assert parts[0]["metrics"] == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def part_of_gradient(world: World, setup: Setup, batch: Batch, expected: Mapping[str, Tensor]) -> dict[str, Any]:
    with setup.trainer(world) as trainer:
        own = mine(world, batch)
        loss, found = gradient(trainer, own)
        here = {name: cut_like(name, parameter, expected[name]) for _, name, parameter in parameters_of(trainer)}
        return {"loss": loss, "worst": worst(found, here), "metrics": dict(trainer.step(own).metrics)}
