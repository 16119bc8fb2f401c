"""`--dry-run`: its numbers are those of the real parts, and it touches nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import ROWS, write_run

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from family_cases import CASES  # found by the path above

from stretto.config import RunConfig, load_config
from stretto.data.batching import cut
from stretto.engines.embedded import EmbeddedEngine
from stretto.models.checkpoint import load_model
from stretto.orchestration.footprint import Cut, Footprint, footprint, passes, slabs
from stretto.orchestration.footprint.probe import Probe
from stretto.orchestration.forecast import dry_run
from stretto.trainers.fsdp.build import build_policy
from stretto.types import FinishReason, Request, Rollout, Sampling
from stretto.world import World

ALONE = World(0, 1, torch.device("cpu"))
SMALL = slabs(2, 2, 2, 2, 8)


def config_for(directory: Path, checkpoint: Path, **sections: Any) -> RunConfig:
    return load_config(write_run(directory, checkpoint, **sections))


def forecast(directory: Path, model: Path, world: World = ALONE, **sections: Any) -> Footprint:
    config = config_for(directory, model, **sections)
    return known(footprint(model, config, world, SMALL, passes(config, 2, 2)))


def known(found: Footprint | None) -> Footprint:
    assert found is not None
    return found


def rollouts(groups: int, samples: int, prompt: int, new: int) -> list[Rollout]:
    """The longest batch that a run of this size can have."""
    return [
        Rollout(
            prompt_ids=tuple(range(2, 2 + prompt)),
            response_ids=tuple(range(5, 5 + new)),
            logprobs_T=(-1.0,) * new,
            loss_mask_T=(1,) * new,
            temperature=1.0,
            finish_reason=FinishReason.LENGTH,
            version_spans=(),
            group_id=group,
            seed=0,
            source_row=0,
        )
        for group in range(groups)
        for _ in range(samples)
    ]


@pytest.mark.parametrize("name", ["tiny_model", "smollm2_cut"])
def test_weights_gradients_and_optimizer_are_the_bytes_of_the_real_model(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(name)
    exact = sum(parameter.nbytes for parameter in load_model(model, torch.float32).parameters())
    found = forecast(tmp_path, model, algorithm={"kl_coef": 0.0})
    assert found.standing["master weights"] == found.training["gradients"] == exact
    assert found.standing["optimizer"] == 2 * exact
    assert found.standing["reference"] == found.standing["engine weights"] == found.training["gathered layers"] == 0


def test_a_reference_and_an_engine_of_another_dtype_have_weights_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    found = forecast(tmp_path, tiny_model, algorithm={"kl_coef": 0.1}, engine={"dtype": "bfloat16"})
    assert found.standing["reference"] == found.standing["master weights"]
    assert found.standing["engine weights"] == found.standing["master weights"] // 2


def test_two_processes_share_the_trainer_and_have_an_engine_each(tiny_model: Path, tmp_path: Path) -> None:
    found = forecast(tmp_path, tiny_model, World(0, 2, torch.device("cpu")))
    parameters = list(load_model(tiny_model, torch.float32).parameters())
    shard = sum(ceil(len(p) / 2) * p[0].numel() * 4 for p in parameters)
    assert found.standing["master weights"] == shard
    assert found.standing["engine weights"] == sum(p.nbytes for p in parameters)
    assert found.training["gathered layers"] > 0


def test_two_processes_have_buckets_between_them(tiny_model: Path, tmp_path: Path) -> None:
    assert forecast(tmp_path / "one", tiny_model).standing["transfer buffers"] == 0
    two = World(0, 2, torch.device("cpu"))
    found = forecast(tmp_path / "two", tiny_model, two)
    assert found.standing["transfer buffers"] == 2 * found.standing["master weights"], "one bucket each way has it all"


def test_buckets_are_a_quarter_of_what_a_transfer_may_take(smollm2_cut: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path, smollm2_cut, sync={"extra_mib": 8})
    found = known(footprint(smollm2_cut, config, World(0, 2, torch.device("cpu")), SMALL, passes(config, 2, 2)))
    assert found.standing["transfer buffers"] == 8 * 2**20


@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v3", "gemma-tied", "qwen3-vl"])
def test_families_with_experts_latents_and_towers_have_a_forecast(case: str, tmp_path: Path) -> None:
    CASES[case]().save_pretrained(tmp_path / "model")
    found = forecast(tmp_path, tmp_path / "model", trainer={"batching": "padded"})
    assert found.training["activations"] > 0
    assert found.rollout["KV cache"] > 0


@pytest.mark.parametrize(("groups", "samples", "new", "limit"), [(3, 4, 6, 64), (5, 2, 70, 3), (9, 2, 5, 2)])
def test_kv_bytes_are_those_of_the_engines_slabs_at_full_length(
    tiny_model: Path, tmp_path: Path, groups: int, samples: int, new: int, limit: int
) -> None:
    engine = EmbeddedEngine(
        tiny_model,
        None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        eos_ids=(),
        max_length=256,
        max_sequences=limit,
    )
    weights = load_model(tiny_model, torch.float32)
    engine.adopt({name: weights.get_parameter(name) for name in engine.layout().local(0)})
    requests = [Request(i, (5,) * (7 - i % 2), tuple(range(samples)), Sampling(new)) for i in range(groups)]
    generation: Any = engine.generate(requests, deadline_s=100)
    next(generation)
    batch = generation.gi_frame.f_locals["batch"]
    held = [*batch._prompts.values(), *batch._responses.values()]
    exact = sum(slab.keys.nbytes + slab.values.nbytes for slab in held)

    largest = slabs(groups, samples, 7, new, limit)
    config = config_for(tmp_path, tiny_model)
    found = known(footprint(tiny_model, config, ALONE, largest, Cut(1, 1, 1, 1)))
    assert found.rollout["KV cache"] == exact


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("budget", [5, 40, 300, 8192])
@pytest.mark.parametrize(("groups", "samples", "prompt", "new"), [(4, 8, 9, 6), (2, 3, 30, 1), (3, 4, 20, 200)])
def test_micro_batches_are_those_that_cutting_makes(
    tiny_model: Path, tmp_path: Path, batching: str, budget: int, groups: int, samples: int, prompt: int, new: int
) -> None:
    config = config_for(
        tmp_path,
        tiny_model,
        rollout={"prompts_per_step": groups, "samples_per_prompt": samples, "max_new_tokens": new},
        trainer={"batching": batching, "micro_batch_tokens": budget, "updates_per_batch": 1},
    )
    batch = rollouts(groups, samples, prompt, new)
    real = cut(batch, range(len(batch)), batching=config.trainer.batching, micro_batch_tokens=budget)
    found = passes(config, groups, prompt)
    assert found.length == max(part.input_ids_BL.shape[1] for part in real)
    assert found.rows * found.length >= max(part.input_ids_BL.numel() for part in real)
    assert found.loss_tokens >= max(len(part.predict_N) for part in real)
    # A last tree of a group that is shorter than the others can share a row, so there may be fewer.
    assert len(real) <= found.passes <= 2 * len(real)


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_activations_are_what_the_real_policy_keeps(tiny_model: Path, tmp_path: Path, batching: Any) -> None:
    trainer = {"batching": batching, "updates_per_batch": 1}
    config = config_for(tmp_path, tiny_model, trainer=trainer, rollout={"max_new_tokens": 40})
    (micro,) = cut(rollouts(4, 4, 20, 40), range(16), batching=batching, micro_batch_tokens=8192)
    policy = build_policy(tiny_model, config.trainer, ALONE)
    weights = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.model.base_model(
            input_ids=micro.input_ids_BL,
            position_ids=micro.position_ids_BL,
            attention_mask=policy.attention_mask(micro),
            use_cache=False,
        )
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert hidden.last_hidden_state.requires_grad
    found = known(footprint(tiny_model, config, ALONE, SMALL, passes(config, 4, 20))).training["activations"]
    assert 0.9 * real < found < 1.25 * real


def test_recomputation_keeps_less(tiny_model: Path, tmp_path: Path) -> None:
    plain = forecast(tmp_path / "a", tiny_model).training["activations"]
    assert (
        forecast(tmp_path / "b", tiny_model, trainer={"activation_checkpointing": True}).training["activations"] < plain
    )


def test_the_probe_sees_grouped_queries(tiny_model: Path) -> None:
    from stretto.engines.embedded.model import build_module

    probe = Probe(build_module(tiny_model), torch.float32, repeat=True)
    assert (probe.layers, probe.kv_values) == (3, 3 * 2 * 2 * 12)  # layers x (keys, values) x kv heads x head size


PEAK = """
import sys
from pathlib import Path
import torch
from stretto.config import load_config
from stretto.orchestration.footprint import footprint, passes, slabs
from stretto.orchestration.measure import peak_memory
from stretto.trainers.fsdp import FSDPTrainer
from stretto.types import Batch
from stretto.world import World

sys.path.insert(0, sys.argv[3])
from test_forecast import rollouts

model, config, world = Path(sys.argv[1]), load_config(Path(sys.argv[2])), World(0, 1, torch.device("cpu"))
shape = config.rollout
found = footprint(model, config, world, slabs(1, 2, 1, 1, 2), passes(config, shape.prompts_per_step, 8))
batch = rollouts(shape.prompts_per_step, shape.samples_per_prompt, 8, shape.max_new_tokens)
FSDPTrainer(model, config, world).step(Batch(batch, [1.0, -1.0] * (len(batch) // 2)))
print(found.total, int(peak_memory(world)))
"""


def test_the_forecast_is_near_the_measured_peak(tmp_path: Path) -> None:
    """A wide vocabulary on a small model: 1,024 loss tokens in 16 chunks, all whose logits would take 0.4 GB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=49152, num_key_value_heads=1, tie_word_embeddings=True, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    run_file = write_run(
        tmp_path / "run",
        tmp_path / "model",
        rollout={"prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": 32},
        trainer={"updates_per_batch": 1, "logit_chunk_tokens": 64},
        algorithm={"kl_coef": 0.0},
    )
    command = [sys.executable, "-c", PEAK, tmp_path / "model", run_file, Path(__file__).parent]
    # Without this, glibc keeps freed arrays of a few MB for itself, and the peak is that of its habits, not of the run.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=200).stdout
    expected, measured = map(int, said.split()[-2:])
    assert 0.75 * measured < expected < 1.3 * measured, (expected / 2**30, measured / 2**30)


def tree(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file and directory below, with its size and time of change."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in directory.rglob("*")}


@pytest.mark.parametrize("model", ["tiny", "smollm2", "nobody/nothing"])
def test_a_dry_run_touches_nothing(tiny_model: Path, tmp_path: Path, model: str) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    run_file = write_run(here, tiny_model if model == "tiny" else Path(model))
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "STRETTO_"))}
    before, of_model = tree(tmp_path), tree(tiny_model)
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "train", run_file, "--dry-run"],
        env=outside | {"HOME": str(home), "STRETTO_CACHE": str(home / "cache"), "WORLD_SIZE": "2"},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path) == before
    assert tree(tiny_model) == of_model
    assert "processes        2 on cpu" in done.stdout
    assert ("master weights" in done.stdout) is (model == "tiny")
    assert ("is not here yet" in done.stdout) is (model != "tiny")


def test_what_is_printed_is_a_run_file_of_the_same_run(tiny_model: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path, tiny_model)
    (tmp_path / "again.toml").write_text(dry_run(config))
    assert load_config(tmp_path / "again.toml") == config


def test_shapes_are_those_of_the_data(tiny_model: Path, tmp_path: Path) -> None:
    text = dry_run(config_for(tmp_path, tiny_model))
    assert f"4, of at most 2 tokens (of {len(ROWS) - 4} to train on)" in text
    assert "16 = 4 x 4, of at most 6 tokens: 96" in text
    assert "16 responses at a time, of 4 prompts" in text


def test_data_that_would_fill_a_cache_is_not_read(tiny_model: Path, tmp_path: Path) -> None:
    text = dry_run(config_for(tmp_path, tiny_model, data={"source": "somebody/data", "max_prompt_tokens": 33}))
    assert "at most 33 tokens (data.max_prompt_tokens; the data was not read)" in text
    assert "KV cache" in text


@pytest.mark.parametrize(
    ("model", "sections", "said"),
    [
        ("tiny", {"data": {"source": "missing.jsonl"}}, "missing.jsonl does not exist"),
        ("nobody/nothing", {"data": {"source": "missing.jsonl"}}, "missing.jsonl does not exist"),
        ("../missing", {}, "missing is not a directory"),
        ("tiny", {"rollout": {"max_new_tokens": 500}}, "lower data.max_prompt_tokens or rollout.max_new_tokens"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_said(
    tiny_model: Path, tmp_path: Path, model: str, sections: dict[str, Any], said: str
) -> None:
    config = config_for(tmp_path, tiny_model if model == "tiny" else Path(model), **sections)
    with pytest.raises(ValueError, match=said):
        dry_run(config)


def test_a_model_that_the_engine_cannot_serve_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.glob("*.json"):
        (model / file.name).write_bytes(file.read_bytes())
    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    (model / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="full-attention"):
        dry_run(config_for(tmp_path / "run", model))
