"""The forecast for the Megatron trainer, against what the real one holds on its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import write_run

from ranks import Ranks

for helpers in ("trainers", "trainers/megatron", "models", "check"):
    sys.path.insert(0, str(Path(__file__).parents[1] / helpers))

from megatron_helpers import BATCH, DENSE, EXPERTS, mine, write_models  # noqa: E402  # found by the path above

from stretto.config import RunConfig, load_config  # noqa: E402
from stretto.orchestration.footprint import Cut, Footprint, footprint, slabs  # noqa: E402
from stretto.orchestration.footprint.megatron import under_way  # noqa: E402
from stretto.orchestration.forecast import dry_run  # noqa: E402
from stretto.sync.parallel import MegatronSizes  # noqa: E402
from stretto.world import World  # noqa: E402

SMALL = slabs(2, 2, 2, 2, 8)
ONE_ROW = Cut(1, 8, 4, 1)
SAMPLES = range(5)
HIDDEN, MLP, VOCABULARY, QUERY, KEY, HEAD, LAYERS = 32, 48, 97, 32, 16, 8, 4
"""Of `megatron_helpers.write_models`."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by kind."""
    return write_models(tmp_path_factory.mktemp("models"))


def config_for(directory: Path, model: Path, trainer: dict[str, Any], **sections: Any) -> RunConfig:
    usual = {"backend": "megatron", "updates_per_batch": 1}
    rollout = {"max_new_tokens": 16}
    return load_config(write_run(directory, model, trainer=usual | trainer, rollout=rollout, **sections))


def forecasts(_: World, model: Path, ranks: int, configs: list[RunConfig], micro: Cut) -> list[Footprint | None]:
    """A job: forecasts for processes of a world of another size than the one that this runs in."""
    world = World(0, ranks, torch.device("cpu"))
    return [footprint(model, config, world, SMALL, micro) for config in configs]


def one_forecast(alone: Ranks, model: Path, ranks: int, config: RunConfig, micro: Cut = ONE_ROW) -> Footprint:
    ((found,),) = alone.run(forecasts, model, ranks, [config], micro)
    assert found is not None
    return found


@contextmanager
def trainer_of(world: World, model: Path, config: RunConfig) -> Iterator[Any]:
    from stretto.trainers.megatron import open_megatron

    with open_megatron(model, config, world) as trainer:
        yield trainer


def held(world: World, model: Path, config: RunConfig) -> dict[str, int]:
    """A job: the bytes that the real trainer has on this rank after a step, by their names in a forecast."""
    with trainer_of(world, model, config) as trainer:
        trainer.step(mine(world, BATCH))
        weights = list(trainer.weights().values())
        optimizer = [one for part in trainer._optimizer.parts() for one in _state(part)]
        return {
            "weights": sum(one.nbytes for one in weights),
            "gradients": sum(one.main_grad.nbytes for one in weights if hasattr(one, "main_grad")),
            "optimizer": sum(one.nbytes for one in optimizer),
        }


def _state(part: Any) -> Iterator[torch.Tensor]:
    for slots in part.optimizer.state.values():
        yield from (slots[name] for name in ("exp_avg", "exp_avg_sq"))
    yield from (one for group in part.shard_fp32_from_float16_groups for one in group if one is not None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stage_of_half_the_layers_on_half_the_heads_is_what_a_hand_counts(
    alone: Ranks, models: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    found = one_forecast(
        alone, models[DENSE], 4, config_for(tmp_path, models[DENSE], {"tp": 2, "pp": 2, "dtype": dtype})
    )
    cut = HIDDEN * (QUERY + 2 * KEY) + QUERY * HIDDEN + 3 * MLP * HIDDEN
    layer = cut // 2 + 2 * HIDDEN + 2 * HEAD
    head = (VOCABULARY + 1) // 2 * HIDDEN + HIDDEN
    values = LAYERS // 2 * layer + head
    size = {"float32": 4, "bfloat16": 2}[dtype]
    assert found.standing["weights"] == found.standing["reference"] == values * size
    assert found.standing["gradients"] == values * 4
    assert found.standing["optimizer"] == values * (8 if dtype == "float32" else 12)
    whole = LAYERS * (cut + 2 * HIDDEN + 2 * HEAD) + VOCABULARY * HIDDEN + HIDDEN
    assert found.standing["engine weights"] == whole * 4


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (DENSE, {"tp": 2, "pp": 2}),
        (DENSE, {"tp": 2, "pp": 2, "dtype": "bfloat16"}),
        (DENSE, {"pp": 2, "vpp": 2}),
        (EXPERTS, {"ep": 2, "pp": 2}),
        (EXPERTS, {"ep": 4, "dtype": "bfloat16"}),
        (EXPERTS, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    ],
)
def test_weights_gradients_and_optimizer_are_those_of_the_largest_stage(
    four: Ranks, alone: Ranks, models: dict[str, Path], tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    config = config_for(tmp_path, models[kind], sizes, algorithm={"kl_coef": 0.0})
    ranks = four.run(held, models[kind], config)
    found = one_forecast(alone, models[kind], 4, config)
    stage = next(one for one in ranks if one["weights"] == found.standing["weights"])
    assert found.standing["gradients"] == stage["gradients"]
    # Shards of several ranks end where their padded buffer is cut, not where a tensor ends.
    assert found.standing["optimizer"] == pytest.approx(stage["optimizer"], rel=0.03)
    assert sum(stage.values()) > 0.99 * max(sum(one.values()) for one in ranks)


def buffers(world: World, model: Path, config: RunConfig) -> int:
    """A job: the bytes of the real transport's buckets on this rank after a publication."""
    from stretto.engines.embedded import EmbeddedEngine
    from stretto.orchestration.engines import connect_embedded
    from stretto.types import Version

    engine = EmbeddedEngine(
        model,
        None,
        device=world.device,
        dtype=torch.float32,
        eos_ids=(),
        max_length=64,
        max_sequences=2,
        replicas=world.size,
    )
    with trainer_of(world, model, config) as trainer:
        transport: Any = connect_embedded(trainer, engine, world, config.sync.extra_mib * 2**20)
        transport.transfer(Version(0, 1))
        link = transport._execution._link
        return link.held_bytes if link else 0


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {}])
def test_buckets_are_there_when_bytes_travel(
    four: Ranks, alone: Ranks, models: dict[str, Path], tmp_path: Path, sizes: dict[str, Any]
) -> None:
    config = config_for(tmp_path, models[DENSE], sizes, algorithm={"kl_coef": 0.0})
    real = max(four.run(buffers, models[DENSE], config))
    expected = one_forecast(alone, models[DENSE], 4, config).standing["transfer buffers"]
    assert (expected > 0) is (real > 0) is bool(sizes)
    assert real <= expected <= 4 * real


def kept(world: World, model: Path, config: RunConfig) -> tuple[Cut, int]:
    """A job: a micro-batch, and the bytes that this rank's layers keep for its backward pass."""
    from stretto.trainers.megatron.passes import _headless

    saved: dict[int, torch.Tensor] = {}
    with trainer_of(world, model, config) as trainer:
        weights = {one.untyped_storage()._cdata for one in trainer.weights().values()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage()._cdata not in weights:
                saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        (chunk,) = trainer._models
        (micro,) = trainer._cut(trainer._passes, BATCH.rollouts, SAMPLES)
        with _headless(chunk), torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            chunk(micro.input_ids_BL, micro.position_ids_BL, None)
    return Cut(*micro.input_ids_BL.shape, 4, 1), sum(one.untyped_storage().nbytes() for one in saved.values())


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (DENSE, {"tp": 2}),
        (DENSE, {"tp": 2, "dtype": "bfloat16"}),
        (DENSE, {"tp": 2, "sequence_parallel": True}),
        (EXPERTS, {"tp": 2, "sequence_parallel": True, "dtype": "bfloat16"}),
        (EXPERTS, {"ep": 2}),
    ],
)
def test_activations_are_what_the_real_layers_keep(
    four: Ranks, alone: Ranks, models: dict[str, Path], tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    config = config_for(tmp_path, models[kind], sizes | {"micro_batch_tokens": 2000})
    found = four.run(kept, models[kind], config)
    micro, real = found[0][0], max(size for _, size in found)
    expected = one_forecast(alone, models[kind], 4, config, micro).training["activations"]
    assert 0.95 * real < expected < 1.2 * real


def deepest(world: World, model: Path, config: RunConfig, count: int) -> tuple[int, int]:
    """A job: how many of `count` micro-batches, of each chunk apart, this rank had under way; and its stage."""
    from megatron.core import parallel_state

    with trainer_of(world, model, config) as trainer:
        passes, now, most = trainer._passes, 0, 0
        forward = passes._forward

        def counted(*args: Any) -> tuple[torch.Tensor, Any]:
            nonlocal now, most
            hidden, finish = forward(*args)
            now += 1
            most = max(most, now)
            hidden.register_hook(back)
            return hidden, finish

        def back(_: torch.Tensor) -> None:
            nonlocal now
            now -= 1

        passes._forward = counted
        passes.run(passes.fillers()[:1] * count, lambda _, logprobs, __: logprobs.sum(), backward=True)
        return most, parallel_state.get_pipeline_model_parallel_rank()


@pytest.mark.parametrize("sizes", [{"pp": 4}, {"pp": 2, "vpp": 2}, {"pp": 2}])
@pytest.mark.parametrize("count", [2, 6])
def test_as_many_micro_batches_are_under_way_as_the_schedule_has(
    four: Ranks, models: dict[str, Path], tmp_path: Path, sizes: dict[str, int], count: int
) -> None:
    real = MegatronSizes(**sizes, dp=4 // sizes["pp"])
    config = config_for(tmp_path, models[DENSE], sizes, algorithm={"kl_coef": 0.0})
    for most, stage in four.run(deepest, models[DENSE], config, count):
        assert most <= under_way(real, stage, count) * real.vpp <= most + 1


def said(_: World, config: RunConfig, ranks: int) -> str:
    """A job: the dry run of a process of so many, or why there is none."""
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        return dry_run(config)
    except ValueError as error:
        return f"refused: {error}"
    finally:
        del os.environ["WORLD_SIZE"]


def test_a_dry_run_knows_the_memory_and_puts_the_samples_of_a_replica_together(
    alone: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    (text,) = alone.run(said, config_for(tmp_path, tiny_model, {"tp": 2}), 4)
    assert "8 rows x 17 tokens" in text, "two of four groups, of four samples each"
    for part in ("weights", "gradients", "optimizer", "engine weights", "transfer buffers", "activations", "total"):
        assert f"#   {part} " in text


@pytest.mark.parametrize(
    ("trainer", "ranks", "why"),
    [
        ({"tp": 2}, 3, "trainer.tp = 2 x trainer.pp = 1 does not divide the 3 processes of the run"),
        ({"tp": 4}, 4, "tp = 4 does not divide the 2 key-value heads"),
        ({"pp": 4}, 4, "3 layers leave one of 4 stages empty"),
        ({"ep": 2}, 2, "llama has no experts"),
    ],
)
def test_a_dry_run_refuses_what_the_trainer_refuses(
    alone: Ranks, tiny_model: Path, tmp_path: Path, trainer: dict[str, Any], ranks: int, why: str
) -> None:
    (text,) = alone.run(said, config_for(tmp_path, tiny_model, trainer), ranks)
    assert text.startswith("refused: ")
    assert why in text


def rung(world: World, directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A job: the last rung of a check."""
    from check_cases import report_of

    return report_of(world, "llama", directory, settings, None)["rungs"][-1]


def test_the_check_holds_the_forecast_against_what_was_seen(four: Ranks, tmp_path: Path) -> None:
    for found in four.run(rung, tmp_path, {"trainer": "megatron", "tp": 2, "pp": 2}):
        assert (found["name"], found["status"]) == ("memory", "pass"), found
        assert 0.5 < found["measured"] < found["bound"]
