"""Optimizer steps on Megatron-Core: one gradient however the model is cut over ranks and the batch over passes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_ranks import Ranks
from trainer_samples import mixed_batch, run_config, share

from stretto.sync.parallel import MegatronSizes
from stretto.types import Batch
from stretto.world import World

VOCABULARY = 97
BATCH = mixed_batch(VOCABULARY)
SETTINGS: dict[str, Any] = {"dtype": "float32", "batching": "padded", "micro_batch_tokens": 40, "lr": 1e-3}
EVERYTHING_ON: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.02, "aggregation": "sequence_mean"}
DENSE, EXPERTS = "dense", "experts"
TP2, PP2 = MegatronSizes(tp=2, vocab_divisor=4), MegatronSizes(pp=2, vocab_divisor=4)


class Setup:
    """What a trainer is made of, as it travels to the ranks."""

    def __init__(
        self,
        directory: Path,
        sizes: MegatronSizes,
        *,
        sequence_parallel: bool = False,
        trainer: Mapping[str, Any] | None = None,
        algorithm: Mapping[str, Any] | None = None,
    ):
        self.directory, self.sizes, self.sequence_parallel = directory, sizes, sequence_parallel
        self.config = run_config(SETTINGS | dict(trainer or {}), algorithm, steps=8)

    @contextmanager
    def trainer(self, world: World) -> Iterator[Any]:
        """A trainer whose weights do not depend on the sizes."""
        from stretto.trainers.megatron import parallel
        from stretto.trainers.megatron.trainer import MegatronTrainer

        try:
            trainer = MegatronTrainer(
                self.directory,
                self.config,
                world,
                sizes=self.sizes,
                options={"qk_layernorm": True},
                sequence_parallel=self.sequence_parallel,
            )
            fill(trainer)
            yield trainer
        finally:
            parallel.stop()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Configurations alone, by kind: the weights come from `fill`."""
    return write_models(tmp_path_factory.mktemp("megatron-models"))


def write_models(directory: Path) -> dict[str, Path]:
    from transformers import Qwen3Config, Qwen3MoeConfig

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
    Qwen3Config(**shape, tie_word_embeddings=True).save_pretrained(directory / DENSE)
    Qwen3MoeConfig(**shape, **experts, tie_word_embeddings=False).save_pretrained(directory / EXPERTS)
    return {kind: directory / kind for kind in (DENSE, EXPERTS)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A process of its own: Megatron's stand-ins for CUDA stay out of this one."""
    yield from ranks(1, tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks of one gloo group."""
    yield from ranks(4, tmp_path_factory)


def ranks(size: int, directories: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(size, directories.mktemp(f"ranks-{size}"))
    yield made
    made.close()


def named_parameters(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters by the name that they would have on a single rank."""
    from megatron.core import parallel_state

    expert_rank = parallel_state.get_expert_model_parallel_rank()
    for model in trainer._models:
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
            if "local_experts" in parts:
                place = parts.index("local_experts") + 1
                held = model.config.num_moe_experts // model.config.expert_model_parallel_size
                parts[place] = str(int(parts[place]) + expert_rank * held)
            name = ".".join(parts)
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield name, parameter


def fill(trainer: Any) -> None:
    """Random weights that depend on the name alone, also those of the reference model (a little different)."""
    with torch.no_grad():
        for name, parameter in named_parameters(trainer):
            parameter.copy_(cut_like(parameter, whole_weight(name, parameter)))
        if trainer._reference is not None:
            for theirs, own in zip(trainer._reference._models, trainer._models, strict=True):
                for parameter, value in zip(theirs.parameters(), own.parameters(), strict=True):
                    parameter.copy_(value * 1.02)
    trainer._optimizer.reload()


def whole_weight(name: str, parameter: Tensor) -> Tensor:
    shape = list(parameter.shape)
    if (dim := split_dim(parameter)) is not None:
        shape[dim] *= split_ranks(parameter)[1]
    if "word_embeddings" in name or "output_layer" in name:
        shape[0] = VOCABULARY
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 1 + 0.2 * values if values.ndim == 1 else 0.2 * values


def cut_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """The part of a whole tensor that a parameter of this rank holds; vocabularies are padded with zeros."""
    if (dim := split_dim(parameter)) is None:
        return whole
    rank, size = split_ranks(parameter)
    missing = parameter.shape[dim] * size - whole.shape[dim]
    if missing:
        whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
    return torch.cat(whole.chunk(size * parameter.partition_stride, dim)[rank::size], dim)  # type: ignore[attr-defined]


def split_dim(parameter: Any) -> int | None:
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def split_ranks(parameter: Any) -> tuple[int, int]:
    """Rank and size of the tensor-parallel group of the parameter."""
    from megatron.core import parallel_state

    if getattr(parameter, "allreduce", True):
        group = parallel_state.get_tensor_model_parallel_group()
    else:
        group = parallel_state.get_expert_tensor_parallel_group()
    return group.rank(), group.size()


def mine(world: World, batch: Batch) -> Batch:
    """This rank's share: whole groups, so that some ranks have much and others little."""
    return share(batch, [i for i, one in enumerate(batch.rollouts) if one.group_id % world.size == world.rank])


def with_behaviour(logprobs: list[tuple[float, ...]]) -> Batch:
    """The batch with behaviour log-probs a little off the trainer's own."""
    rollouts = []
    for one, kept in zip(BATCH.rollouts, logprobs, strict=True):
        values = iter(kept)
        noisy = tuple(next(values) + 0.1 * math.sin(7 * t) if m else math.nan for t, m in enumerate(one.loss_mask_T))
        rollouts.append(replace(one, logprobs_T=noisy))
    return Batch(rollouts, BATCH.advantages)


def gradient(trainer: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient (this rank's parts, by the names of a single rank) of a batch whose shares were put together."""
    from megatron.core.distributed import finalize_model_grads

    from stretto.trainers.updates import plan_updates

    def finish() -> None:
        # All of the gradient on every replica, and not the part that a distributed optimizer would read.
        finalize_model_grads(trainer._chunks, force_all_reduce=True)

    trainer._optimizer.finish_gradient = finish
    (update,) = plan_updates(batch, trainer._config, trainer._objective, trainer._replicas)
    loss, _ = trainer._accumulate(batch, update, None)
    found = {name: parameter.main_grad.clone() for name, parameter in named_parameters(trainer)}
    trainer._clear()
    return loss, found


# On one rank: what every cut is compared with.


def whole_gradient(world: World, setup: Setup) -> tuple[Batch, float, dict[str, Tensor], dict[str, float]]:
    with setup.trainer(world) as trainer:
        batch = with_behaviour(trainer.logprobs(BATCH.rollouts))
        loss, found = gradient(trainer, batch)
        unpadded = {name: g[:VOCABULARY] if len(g) > VOCABULARY + 2 else g for name, g in found.items()}
        return batch, loss, unpadded, dict(trainer.step(batch).metrics)


def plain_gradient(world: World, setup: Setup) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The trainer's log-probs and gradient, and those of a loop over samples with all logits and torch's autograd."""
    with setup.trainer(world) as trainer:
        found = [value for part in trainer.logprobs(BATCH.rollouts) for value in part]
        batch = with_behaviour(trainer.logprobs(BATCH.rollouts))
        _, gradients = gradient(trainer, batch)
        (model,) = trainer._models
        tokens = sum(one.loss_tokens for one in batch.rollouts)
        expected, loss = [], torch.zeros(())
        for one, advantage in zip(batch.rollouts, batch.advantages, strict=True):
            ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
            logits_TV = model(ids, torch.arange(ids.shape[1])[None], None)[0, :, :VOCABULARY] / one.temperature
            logprobs_TV = logits_TV[len(one.prompt_ids) - 1 : -1].log_softmax(-1)
            kept = torch.tensor(one.loss_mask_T, dtype=torch.bool)
            current = logprobs_TV.gather(-1, torch.tensor(one.response_ids)[:, None])[kept, 0]
            weight = (current.detach() - torch.tensor(one.logprobs_T)[kept]).exp().clamp(max=2)
            loss = loss - (current * advantage * weight).sum() / tokens
            expected += current.tolist()
        loss.backward()
        plain = {name: parameter.main_grad.clone() for name, parameter in named_parameters(trainer)}
        return found, expected, gradients, plain


@pytest.mark.parametrize("kind", [DENSE, EXPERTS])
def test_one_rank_is_a_plain_loop_over_samples(alone: Ranks, models: dict[str, Path], kind: str) -> None:
    setup = Setup(models[kind], MegatronSizes(vocab_divisor=4))
    ((found, expected, gradients, plain),) = alone.run(plain_gradient, setup)
    assert found == pytest.approx(expected, abs=2e-5)
    assert worst(gradients, plain) < 1e-5


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of any parameter, relative to that parameter's gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


# On several ranks.

CUTS: list[tuple[str, MegatronSizes, bool]] = [
    (DENSE, TP2, False),
    (DENSE, TP2, True),
    (DENSE, PP2, False),
    (DENSE, MegatronSizes(pp=2, vpp=2, vocab_divisor=4), False),
    (DENSE, MegatronSizes(dp=2, vocab_divisor=4), False),
    (EXPERTS, MegatronSizes(dp=2, ep=2, vocab_divisor=4), False),
    (EXPERTS, MegatronSizes(tp=2, ep=2, vocab_divisor=4), True),
    (DENSE, MegatronSizes(tp=2, pp=2, vocab_divisor=4), True),
    (DENSE, MegatronSizes(tp=2, pp=2, vpp=2, vocab_divisor=4), False),
    (DENSE, MegatronSizes(tp=2, dp=2, vocab_divisor=4), False),
    (EXPERTS, MegatronSizes(tp=2, ep=2, etp=2, dp=2, vocab_divisor=4), True),
    (EXPERTS, MegatronSizes(pp=2, ep=2, dp=2, pp_layers=(1, 3), vocab_divisor=4), False),
]


@pytest.mark.parametrize("algorithm", [{}, EVERYTHING_ON], ids=["plain", "everything"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut[0]}-{name(cut[1])}{'-sp' * cut[2]}")
def test_every_cut_of_the_model_has_the_gradient_of_one_rank(
    alone: Ranks,
    pair: Ranks,
    four: Ranks,
    models: dict[str, Path],
    cut: tuple[str, MegatronSizes, bool],
    algorithm: dict[str, Any],
) -> None:
    kind, sizes, sequence_parallel = cut
    single = Setup(models[kind], MegatronSizes(vocab_divisor=4), algorithm=algorithm)
    ((batch, loss, expected, metrics),) = alone.run(whole_gradient, single)
    setup = Setup(models[kind], sizes, sequence_parallel=sequence_parallel, algorithm=algorithm)
    for part in {2: pair, 4: four}[sizes.ranks].run(part_of_gradient, setup, batch, expected):
        assert part["loss"] == pytest.approx(loss, rel=1e-5)
        assert part["worst"] < 1e-5
        assert part["metrics"].keys() == metrics.keys()
        assert part["metrics"] == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def name(sizes: MegatronSizes) -> str:
    return "".join(f"{key}{value}" for key, value in vars(sizes).items() if key in ("tp", "pp", "vpp", "ep", "etp", "dp") and value > 1)


def part_of_gradient(world: World, setup: Setup, batch: Batch, expected: Mapping[str, Tensor]) -> dict[str, Any]:
    with setup.trainer(world) as trainer:
        shares = trainer._groups.over_replica(mine(world, batch))
        together = Batch([r for s in shares for r in s.rollouts], [a for s in shares for a in s.advantages])
        loss, found = gradient(trainer, together)
        here = {name: cut_like(parameter, expected[name]) for name, parameter in named_parameters(trainer)}
        del trainer._optimizer.finish_gradient
        report = trainer.step(mine(world, batch))
        assert world.from_first(report) == replace(report, skipped_groups=world.from_first(report).skipped_groups)
        return {"loss": loss, "worst": worst(found, here), "metrics": dict(report.metrics)}
