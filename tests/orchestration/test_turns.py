"""Who gives back which memory: the least that fits, and a refusal with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import write_run

from stretto.config import RunConfig, load_config
from stretto.config.sections import MemoryConfig
from stretto.models.checkpoint import load_model
from stretto.orchestration.footprint import Footprint, ServerFootprint, Sizes
from stretto.orchestration.room import lines, room_for
from stretto.orchestration.turns import decide
from stretto.world import World

PROCESS = Footprint(standing={"weights": 16, "optimizer": 32}, rollout={}, training={"gradients": 16, "activations": 8})
SERVER = ServerFootprint(weights=8, wanted=20, least=1, rest=4, counts_rest=False)


def given_pool(pool: int) -> ServerFootprint:
    return ServerFootprint(weights=8, wanted=20, least=1, rest=4, counts_rest=False, pool=pool)


def needed(size: float) -> int:
    """A device on which `size` just fits."""
    return int(size / 0.95) + 1


@pytest.mark.parametrize(
    ("device", "release", "offload", "pool"),
    [
        (needed(16 + 32 + 24 + 8 + 4 + 20), "nothing", False, 20),
        (needed(16 + 32 + 24 + 8 + 4), "kv", False, 20),  # 84 while training, 80 while generating
        (needed(16 + 32 + 24 + 4), "all", True, 20),  # 76: with the optimizer, only 16 would be left for the pool
    ],
)
def test_the_least_that_fits_is_given_back(device: int, release: str, offload: bool, pool: int) -> None:
    turns = decide(PROCESS, SERVER, MemoryConfig(), device)
    assert (turns.release, turns.offload) == (release, offload)
    assert turns.pool == pool


def test_a_large_pool_sends_the_optimizer_to_the_host() -> None:
    turns = decide(PROCESS, given_pool(60), MemoryConfig(), 100)
    assert (turns.release, turns.offload, turns.share) == ("kv", True, None)
    assert turns.generating == 16 + 8 + 4 + 60
    assert turns.learning == 16 + 32 + 24 + 8 + 4


def test_the_share_leaves_the_pool_beside_weights_and_for_vllm_the_rest() -> None:
    assert decide(PROCESS, SERVER, MemoryConfig(), 1000).share == 0.028
    vllm = ServerFootprint(weights=8, wanted=20, least=1, rest=4, counts_rest=True)
    assert decide(PROCESS, vllm, MemoryConfig(), 1000).share == 0.032


@pytest.mark.parametrize("pool", [None, 60])
def test_what_does_not_fit_is_refused_with_the_numbers(pool: int | None) -> None:
    server = SERVER if pool is None else given_pool(pool)
    with pytest.raises(ValueError, match=r"does not fit on a device .* optimizer 0\.0.* set memory\.refuse = false"):
        decide(PROCESS, server, MemoryConfig(), 70)


def test_a_pool_of_our_choice_is_smaller_where_there_is_no_room() -> None:
    turns = decide(PROCESS, SERVER, MemoryConfig(release="nothing"), needed(100))
    assert (turns.pool, turns.learning) == (16, 100)


def test_what_the_user_says_is_kept() -> None:
    turns = decide(PROCESS, SERVER, MemoryConfig(release="all", offload="always"), 10_000)
    assert (turns.release, turns.offload) == ("all", True)
    turns = decide(PROCESS, SERVER, MemoryConfig(release="nothing", offload="always"), 10_000)
    assert (turns.release, turns.offload) == ("nothing", True)
    with pytest.raises(ValueError, match=r'memory\.release = "nothing"'):
        decide(PROCESS, SERVER, MemoryConfig(release="nothing"), needed(80))


sizes = st.integers(0, 50)


@given(
    st.tuples(sizes, sizes, sizes),
    st.tuples(sizes, st.integers(1, 50), sizes, st.none() | sizes),
    st.integers(1, 400),
    st.sampled_from(["auto", "nothing", "kv", "all"]),
    st.sampled_from(["auto", "never", "always"]),
)
def test_turns_fit_the_device_and_hold_at_least_one_response(
    process: tuple[int, int, int],
    server: tuple[int, int, int, int | None],
    device: int,
    release: Any,
    offload: Any,
) -> None:
    weights, wanted, rest, pool = server
    beside = ServerFootprint(weights, wanted, min(3, wanted), rest, False, pool)
    trainer = Footprint({"weights": process[0], "optimizer": process[1]}, {}, {"gradients": process[2]})
    try:
        turns = decide(trainer, beside, MemoryConfig(release=release, offload=offload), device)
    except ValueError:
        return
    assert turns.peak <= 0.95 * device
    assert turns.pool >= beside.least if pool is None else turns.pool == pool
    kept = process[0] + (0 if turns.offload else process[1])
    assert turns.generating == kept + weights + rest + turns.pool
    held = {"nothing": weights + turns.pool, "kv": weights, "all": 0}[turns.release]
    assert turns.learning == sum(process) + rest + held
    assert release in ("auto", turns.release)
    assert offload == "auto" or turns.offload == (offload == "always")


def config_for(directory: Path, model: Path, **sections: Any) -> RunConfig:
    return load_config(write_run(directory, model, **sections))


CUDA = World(0, 1, torch.device("cuda", 0))
SIZES = Sizes(8, 4, 5, 5)


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_servers_forecast_has_the_bytes_of_the_model(tiny_model: Path, tmp_path: Path, backend: str) -> None:
    config = config_for(tmp_path, tiny_model, engine={"backend": backend, "dtype": "float32", "max_sequences": 3})
    room = room_for(config, tiny_model, CUDA, SIZES, 2**36)
    server = room.forecast.server
    assert server is not None
    model = load_model(tiny_model, torch.float32)
    vocabulary, width = model.get_input_embeddings().weight.shape
    padding = -vocabulary % 64 * width * 4
    assert server.weights == sum(p.nbytes for p in model.parameters()) + padding
    token = 3 * 2 * 2 * 12 * 4  # layers x (keys, values) x kv heads x head size, float32
    longest = 5 + config.rollout.max_new_tokens
    assert (server.least, server.wanted) == (longest * token, 3 * longest * token)
    assert room.turns is not None
    assert room.turns.release == "nothing"
    text = "\n".join(lines(room, CUDA))
    assert "the server gives back nothing" in text
    assert "needed by 1 process and the server; it fits" in text


def test_a_run_that_does_not_fit_is_said_with_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    served = config_for(tmp_path / "a", tiny_model, engine={"backend": "sglang"})
    assert "does NOT fit" in "\n".join(lines(room_for(served, tiny_model, CUDA, SIZES, 2**20), CUDA))
    embedded = config_for(tmp_path / "b", tiny_model)
    alone = World(0, 1, torch.device("cpu"))
    refusal = room_for(embedded, tiny_model, alone, SIZES, 2**20).refusal
    assert refusal is not None
    assert 'engine.backend = "sglang" or "vllm"' in refusal


def test_a_run_that_does_not_fit_is_refused_before_its_first_step(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stretto
    from stretto.orchestration import live

    monkeypatch.setattr(live, "free_bytes", lambda world: 2**20)
    with pytest.raises(ValueError, match=r"GiB needed, 0\.0 available; .*--dry-run"):
        stretto.train(config_for(tmp_path / "a", tiny_model))
    changed = config_for(tmp_path / "b", tiny_model, memory={"refuse": False}, steps=1)
    stretto.train(changed)


def test_where_nothing_trains_the_engine_has_the_memory_for_itself(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stretto.orchestration import live
    from stretto.orchestration.launch import rollout

    monkeypatch.setattr(live, "free_bytes", lambda world: 2**20)
    rollout(config_for(tmp_path, tiny_model), tmp_path / "rollouts.jsonl")
    assert (tmp_path / "rollouts.jsonl").read_text().count("\n") > 0
