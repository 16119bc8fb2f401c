"""What runs on a GPU: bf16 compute over fp32 masters, the embedded engine, and a whole run. Skipped without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stretto.config import RunConfig
from stretto.engines.embedded import EmbeddedEngine
from stretto.models.checkpoint import end_of_sequence_ids, load_model, load_tokenizer
from stretto.orchestration.engines import connect_embedded
from stretto.sync.execute import EXTRA_BYTES
from stretto.sync.publication import Publisher
from stretto.trainers.fsdp import FSDPTrainer
from stretto.trainers.fsdp.state import optimizer_tensors
from stretto.types import Batch, Request, Rollout, Sampling, Version
from stretto.world import World, leave_world, local_part

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def config_for(model: Path, **sections: dict) -> RunConfig:
    return RunConfig(model={"path": str(model)}, data={"source": "x.jsonl"}, reward={"functions": ["r"]}, **sections)


def engine_for(model: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> EmbeddedEngine:
    tokenizer = load_tokenizer(model)
    return EmbeddedEngine(
        model,
        tokenizer,
        device=device,
        dtype=dtype,
        eos_ids=end_of_sequence_ids(model, tokenizer),
        max_length=256,
        max_sequences=32,
    )


def requests_for(prompts: list[int], samples: int, **sampling: float) -> list[Request]:
    return [
        Request(
            i,
            tuple((7 * i + k) % 90 + 2 for k in range(length)),
            tuple(range(10 * i, 10 * i + samples)),
            Sampling(**sampling),
        )
        for i, length in enumerate(prompts)
    ]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-4), (torch.bfloat16, 0.15)])
def test_engine_logprobs_are_those_of_transformers(tiny_model: Path, dtype: torch.dtype, bound: float) -> None:
    device = torch.device("cuda")
    model = load_model(tiny_model, dtype).to(device)
    engine = engine_for(tiny_model, device, dtype)
    engine.adopt({name: model.get_parameter(name) for name in engine.layout().local(0)})
    requests = requests_for([3, 17, 40, 5], 6, max_new_tokens=30, temperature=0.7)
    for done in engine.generate(requests, deadline_s=60):
        prompt = requests[done.request_id].prompt_ids
        ids = torch.tensor([prompt + done.response_ids], device=device)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0].float() / 0.7, -1)[len(prompt) - 1 : -1]
        expected = logprobs.gather(-1, torch.tensor(done.response_ids, device=device)[:, None])[:, 0].cpu()
        assert (expected - torch.tensor(done.logprobs_T)).abs().mean() < bound


def test_training_in_bf16_keeps_fp32_masters_and_fills_the_engine(tiny_model: Path) -> None:
    world = World(0, 1, torch.device("cuda", 0))
    config = config_for(tiny_model, trainer={"lr": 1e-3})
    trainer = FSDPTrainer(tiny_model, config, world)
    engine = engine_for(tiny_model, world.device)
    publisher = Publisher(engine, connect_embedded(trainer, engine, world, EXTRA_BYTES))
    assert publisher.transport == "local"
    publisher.open(Version(1, 0))
    publisher.close()
    requests = requests_for([5, 9], 4, max_new_tokens=12)
    rollouts = [
        Rollout(
            requests[done.request_id].prompt_ids,
            done.response_ids,
            done.logprobs_T,
            (1,) * len(done.response_ids),
            1.0,
            done.finish_reason,
            done.version_spans,
            done.request_id,
            done.seed,
            0,
            1.0,
        )
        for done in engine.generate(requests, deadline_s=60)
    ]
    report = trainer.step(Batch(rollouts, [1.0 if i % 2 else -1.0 for i in range(len(rollouts))]))
    assert report.updates == 1
    assert report.metrics["mismatch/logprob_diff_mean"] < 0.15
    publisher.open(Version(1, 1))
    assert publisher.close() > 0
    for name, tensor in trainer.weights().items():
        whole = tensor.full_tensor()
        assert whole.dtype == torch.float32
        assert torch.equal(engine.weights()[name], whole.to(torch.bfloat16)), name
    offload_frees_the_optimizers_memory(trainer)
    trainer.step(Batch(rollouts, [0.5] * len(rollouts)))
    leave_world()


@torch.no_grad()
def offload_frees_the_optimizers_memory(trainer: FSDPTrainer) -> None:
    state = [local_part(tensor) for tensor in optimizer_tensors(trainer._optimizer)]
    values, size = [tensor.clone() for tensor in state], sum(tensor.nbytes for tensor in state)
    before = torch.cuda.memory_allocated()
    trainer.offload()
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in state)
    assert before - torch.cuda.memory_allocated() >= size > 0
    trainer.onload()
    assert all(torch.equal(tensor, value) for tensor, value in zip(state, values, strict=True))


def test_a_whole_run(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import stretto

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} =", "answer": "a"}) + "\n" for i in range(40))
    )
    (tmp_path / "r.py").write_text("def f(completion, answer):\n    return float(completion.count(answer))\n")
    result = stretto.train(
        RunConfig.model_validate(
            {
                "steps": 3,
                "run_dir": "run",
                "model": {"path": str(tiny_model)},
                "data": {"source": "data.jsonl", "heldout": 8},
                "reward": {"functions": ["r.py:f"]},
                "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8},
                "trainer": {"lr": 1e-3},
            }
        )
    )
    assert result.steps == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[-1]["tokens/generated"] == lines[-1]["tokens/trained"] + lines[-1]["tokens/dropped"]
