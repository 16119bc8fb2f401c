"""Megatron-Bridge's names: what they stream is bit by bit what raw names export, and what the engine then has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_helpers import move_vectors
from torch import Tensor
from trainer_samples import ALONE, mixed_batch, run_config, share

from ranks import Ranks
from stretto.sync import files
from stretto.sync.coordinates import atoms_of
from stretto.sync.layouts import checkpoint_layout, replica_layout
from stretto.sync.transports import StreamTransport
from stretto.types import Version
from stretto.world import World

VOCABULARY = 96
BATCH = mixed_batch(VOCABULARY)
SETTINGS: dict[str, Any] = {"backend": "megatron", "dtype": "float32", "micro_batch_tokens": 40, "lr": 1e-3}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rope_theta": 5000.0,
}
MAPPED = {"qwen3": True, "llama": False, "qwen2": True}
"""Families that both a weight map and the bridge know, and whether the head is tied here."""


def write_model(directory: Path, family: str, *, tied: bool) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    window = {"sliding_window": None} if family == "mistral" else {}
    config = AutoConfig.for_model(family, **SHAPE, **window, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    move_vectors(model)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by family; no weight map has mistral."""
    directory = tmp_path_factory.mktemp("bridge-models")
    return {f: write_model(directory / f, f, tied=tied) for f, tied in (MAPPED | {"mistral": False}).items()}


@contextmanager
def opened(directory: Path, world: World, names: str, sizes: dict[str, int]) -> Iterator[Any]:
    from stretto.trainers.megatron import open_megatron

    config = run_config(SETTINGS | sizes | {"names": names}, {"old_logprobs": "trainer", "mismatch": "off"}, steps=8)
    with open_megatron(directory, config, world) as trainer:
        yield trainer


def mine(world: World) -> Any:
    return share(BATCH, range(world.rank, len(BATCH.rollouts), world.size))


def read(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def by_raw(world: World, directory: Path, sizes: dict[str, int], out: Path) -> list[tuple[float, ...]]:
    """Export before and after a step with raw names; returns this rank's log-probs."""
    with opened(directory, world, "raw", sizes) as trainer:
        logprobs = trainer.logprobs(mine(world).rollouts)
        trainer.export(made(out / "raw-0", world), torch.float32)
        trainer.step(mine(world))
        trainer.export(made(out / "raw-1", world), torch.bfloat16)
        return logprobs


def by_bridge(
    world: World, directory: Path, sizes: dict[str, int], out: Path
) -> tuple[list[tuple[float, ...]], list[dict[str, Tensor]]]:
    """The same with the bridge's, and what an engine then has, before and after the step."""
    from stretto.engines.embedded import EmbeddedEngine
    from stretto.orchestration.engines import connect_embedded

    with opened(directory, world, "bridge", sizes) as trainer:
        engine = EmbeddedEngine(
            directory,
            None,
            device=world.device,
            dtype=torch.float32,
            eos_ids=(),
            max_length=64,
            max_sequences=4,
            replicas=world.size,
        )
        transport = connect_embedded(trainer, engine, world, 2**20)
        assert transport.name == "stream"
        served = []
        logprobs = trainer.logprobs(mine(world).rollouts)
        for number, dtype in enumerate((torch.float32, torch.bfloat16)):
            assert transport.transfer(Version(0, number)) > 0
            transport.verify()
            served.append({name: tensor.clone() for name, tensor in engine.weights().items()})
            trainer.export(made(out / f"bridge-{number}", world), dtype)
            trainer.step(mine(world))
        return logprobs, served


def made(directory: Path, world: World) -> Path:
    if world.first:
        directory.mkdir()
    return directory


def transformers_logprobs(directory: Path) -> list[Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for one in BATCH.rollouts:
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0] / one.temperature
        logprobs_TV = logits_TV[len(one.prompt_ids) - 1 : -1].log_softmax(-1)
        kept = torch.tensor(one.loss_mask_T, dtype=torch.bool)
        found.append(logprobs_TV.gather(-1, torch.tensor(one.response_ids)[:, None])[kept, 0])
    return found


def assert_close(logprobs: list[tuple[float, ...]], directory: Path) -> None:
    for ours, theirs in zip(logprobs, transformers_logprobs(directory), strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=1e-5)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_alike(ranks: Ranks, directory: Path, sizes: dict[str, int], out: Path) -> list[tuple[float, ...]]:
    """The bridge's trainer against the raw one at every rank; returns the log-probs of all samples."""
    raw = ranks.run(by_raw, directory, sizes, out)
    bridge = ranks.run(by_bridge, directory, sizes, out)
    assert [logprobs for logprobs, _ in bridge] == raw
    exports = [read(out / f"raw-{number}") for number in range(2)]
    for number in range(2):
        assert_same(read(out / f"bridge-{number}"), exports[number])
    assert not torch.equal(exports[0]["model.norm.weight"].bfloat16(), exports[1]["model.norm.weight"])
    for _, (before, after) in bridge:
        assert_same(before, exports[0])
        assert_same({name: tensor.bfloat16() for name, tensor in after.items()}, exports[1])
    together: list[tuple[float, ...]] = [()] * len(BATCH.rollouts)
    for rank, (logprobs, _) in enumerate(bridge):
        together[rank :: len(bridge)] = logprobs
    return together


@pytest.mark.parametrize("family", MAPPED)
def test_bridge_names_do_what_raw_names_do(alone: Ranks, models: dict[str, Path], family: str, tmp_path: Path) -> None:
    assert_close(assert_alike(alone, models[family], {}, tmp_path), models[family])


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_bridge_names_do_what_raw_names_do_on_two_ranks(
    pair: Ranks, models: dict[str, Path], sizes: dict[str, int], tmp_path: Path
) -> None:
    assert_close(assert_alike(pair, models["qwen3"], sizes, tmp_path), models["qwen3"])


def test_a_model_without_a_weight_map_trains_with_bridge_names(
    alone: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    ((logprobs, (before, after)),) = alone.run(by_bridge, models["mistral"], {}, tmp_path)
    assert_close(logprobs, models["mistral"])
    assert_same(before, read(models["mistral"]))
    assert_same(read(tmp_path / "bridge-0"), before)
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


def refusal(world: World, directory: Path, sizes: dict[str, int]) -> str:
    try:
        with opened(directory, world, "bridge", sizes):
            return ""
    except ValueError as error:
        return str(error)


def test_what_the_bridge_cannot_carry_is_refused(alone: Ranks, pair: Ranks, tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "olmo2").mkdir()
    AutoConfig.for_model("olmo2", **SHAPE, architectures=["Olmo2ForCausalLM"]).save_pretrained(tmp_path / "olmo2")
    (said,) = alone.run(refusal, tmp_path / "olmo2", {})
    assert "does not know Olmo2ForCausalLM" in said
    assert 'trainer.names = "raw"' in said
    assert "stretto new-model" in said
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    (tmp_path / "moe").mkdir()
    config = AutoConfig.for_model("qwen3_moe", **SHAPE, **experts, architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(tmp_path / "moe")
    (said,) = alone.run(refusal, tmp_path / "moe", {})
    assert "exports experts only from Transformer Engine" in said
    odd = SHAPE | {"vocab_size": VOCABULARY + 1}
    (tmp_path / "odd").mkdir()
    AutoConfig.for_model("qwen3", **odd, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path / "odd")
    assert all("does not divide the 97 rows" in said for said in pair.run(refusal, tmp_path / "odd", {"tp": 2}))


def swapped(world: World, directory: Path, broken: Path) -> str:
    """What the trainer says when the bridge reads another checkpoint than the one that the run names."""
    from stretto.trainers.megatron import bridge

    real = bridge.import_bridge()

    class Other:
        @staticmethod
        def from_hf_pretrained(_: str) -> Any:
            return real.from_hf_pretrained(str(broken))

    kept, bridge.import_bridge = bridge.import_bridge, lambda: Other
    try:
        return refusal(world, directory, {})
    finally:
        bridge.import_bridge = kept


def test_wrong_bits_are_found_before_the_first_step(alone: Ranks, models: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for family, named in (
        ("qwen3", "decoder.layers.1.mlp.linear_fc1.weight at rank 0"),
        ("mistral", "model.layers.1.mlp.gate_proj.weight has other bits"),
    ):
        broken = tmp_path / family
        broken.mkdir()
        tensors = read(models[family])
        gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
        save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
        (broken / "config.json").write_text((models[family] / "config.json").read_text())
        (said,) = alone.run(swapped, models[family], broken)
        assert named in said


def test_a_missing_bridge_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.trainers.megatron import bridge_import

    monkeypatch.setattr(bridge_import, "_NEEDED", ("omegaconf", "a_package_that_is_not_there"))
    with pytest.raises(ValueError, match=r"needs a_package_that_is_not_there: pip install 'stretto\[megatron\]'"):
        bridge_import.require_bridge()


def transport_of(directory: Path, stream: list[tuple[str, Tensor]]) -> tuple[StreamTransport, dict[str, Tensor]]:
    atoms = atoms_of(directory)
    target = replica_layout(atoms, "bfloat16", 1)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, (shape, _) in target.local(0).items()}
    return StreamTransport(checkpoint_layout(atoms, "float32"), target, ALONE.rank, lambda: stream, tensors), tensors


def test_a_stream_is_rounded_into_the_engines_tensors_from_any_strides(models: dict[str, Path]) -> None:
    expected = read(models["qwen3"])
    strided = [(name, t.t().contiguous().t() if t.ndim == 2 else t) for name, t in expected.items()]
    transport, tensors = transport_of(models["qwen3"], strided)
    assert transport.transfer(Version(0, 1)) == sum(2 * t.numel() for t in tensors.values())
    transport.verify()
    assert_same(tensors, {name: tensor.bfloat16() for name, tensor in expected.items()})


def test_a_stream_that_is_not_whole_is_told_by_name(models: dict[str, Path]) -> None:
    tensors = read(models["qwen3"])
    lost, twice, wide = "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"
    stream = [(name, t.double() if name == wide else t) for name, t in tensors.items() if name != lost]
    transport, _ = transport_of(models["qwen3"], [*stream, ("model.normal.weight", tensors[lost]), stream[0]])
    assert stream[0][0] == twice
    transport.transfer(Version(0, 1))
    with pytest.raises(RuntimeError) as caught:
        transport.verify()
    said = str(caught.value)
    assert f"nothing came for {lost} (nearest there: model.normal.weight)" in said
    assert "the layout does not have model.normal.weight" in said
    assert f"{twice} came 2 times" in said
    assert f"{wide} is [48, 32] float64" in said


def test_a_stream_is_written_in_files_of_bounded_size(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(models["llama"])
    atoms = atoms_of(models["llama"])
    monkeypatch.setattr(files, "_FILE_BYTES", 20_000)
    source, target = (checkpoint_layout(atoms, dtype) for dtype in ("float32", "bfloat16"))
    files.export_stream(tmp_path, source, target, expected.items, writes=True)
    written = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(written) > 2
    assert written[-1] == f"model-{len(written):05}-of-{len(written):05}.safetensors"
    assert all((tmp_path / name).stat().st_size < 25_000 for name in written)
    with files.CheckpointFiles(tmp_path) as reader:
        found = {name: reader.read(name) for name in reader.where}
    assert_same(found, {name: tensor.bfloat16() for name, tensor in expected.items()})
    (tmp_path / "lacking").mkdir()
    del expected["lm_head.weight"]
    with pytest.raises(RuntimeError, match=r"nothing came for lm_head\.weight"):
        files.export_stream(tmp_path / "lacking", source, target, expected.items, writes=True)
