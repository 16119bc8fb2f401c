"""Checkpoints as a side of a plan: what is read of them, what is written, and what is said when either cannot be."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stretto.models.language import Held, Piece, WeightMap, layers, row
from stretto.sync import files
from stretto.sync.files import INDEX, CheckpointFiles, export, load
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import checkpoint_layout, fsdp_layout, replica_layout

CPU = torch.device("cpu")


def expert_model() -> Atoms:
    """Two experts that the files have apart and the memory stacked, gate over up; a bias that stays float32."""
    experts = row(
        Piece("experts.{e}.gate", "m h"),
        Piece("experts.{e}.up", "m h"),
        memory=Held("experts.gate_up"),
    )
    rows = (
        row(Piece("embed", "v h")),
        *layers(2, [experts, row(Piece("bias", "e", dtype="float32", buffer=True))], prefix="layers.{layer}."),
    )
    sizes = {"v": 5, "h": 4, "e": 2, "m": 3}
    dropped = ("mtp.*", "embed_copy")
    return Atoms.of(WeightMap(family="test", sizes=sizes, rows=rows, layer_count=2, dropped=dropped))


MODEL = expert_model()
NAMES = {
    "embed": (5, 4),
    **{f"layers.{i}.experts.{e}.{half}": (3, 4) for i in range(2) for e in range(2) for half in ("gate", "up")},
    **{f"layers.{i}.bias": (2,) for i in range(2)},
}


def on_disk() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


def in_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as the map's memory column has them, put together by hand."""
    found = {"embed": tensors["embed"]}
    for layer in ("layers.0.", "layers.1."):
        found[layer + "bias"] = tensors[layer + "bias"]
        found[layer + "experts.gate_up"] = torch.stack(
            [torch.cat([tensors[f"{layer}experts.{e}.{half}"] for half in ("gate", "up")]) for e in range(2)]
        )
    return found


def buffers(layout: Layout, rank: int = 0) -> dict[str, Tensor]:
    return {
        name: torch.full(shape, torch.nan, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in layout.local(rank).items()
    }


def single(directory: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


def indexed(directory: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A file for each tensor, with an index."""
    table = {name: f"part-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in table.items():
        save_file({name: tensors[name]}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return directory


def filled(directory: Path, target: Layout, rank: int = 0) -> dict[str, Tensor]:
    tensors = buffers(target, rank)
    with CheckpointFiles(directory) as opened:
        load(opened, checkpoint_layout(MODEL, "float32"), target, rank, tensors)
    return tensors


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[n].dtype == other[n].dtype and one[n].equal(other[n]) for n in one)


@pytest.mark.parametrize("write", [single, indexed])
def test_files_fill_what_the_memory_holds(tmp_path: Path, write) -> None:
    tensors = on_disk()
    assert same(filled(write(tmp_path, tensors), replica_layout(MODEL, "float32", 1)), in_memory(tensors))


def test_a_cast_is_rounded_once_and_a_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    tensors = on_disk()
    found = filled(single(tmp_path, tensors), replica_layout(MODEL, "bfloat16", 1))
    for name, tensor in in_memory(tensors).items():
        assert found[name].equal(tensor if name.endswith("bias") else tensor.bfloat16()), name


def test_the_dtype_on_disk_is_the_files_own_and_not_what_the_settings_say(tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in on_disk().items()}
    found = filled(single(tmp_path, tensors), replica_layout(MODEL, "float32", 1))
    assert same(found, {name: tensor.float() for name, tensor in in_memory(tensors).items()})


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_each_rank_reads_its_own_rows(tmp_path: Path, ranks: int) -> None:
    tensors = on_disk()
    single(tmp_path, tensors)
    target = fsdp_layout(MODEL, "float32", ranks)
    parts = [filled(tmp_path, target, rank) for rank in range(ranks)]
    for name, whole in in_memory(tensors).items():
        if name.endswith("bias"):
            assert all(part[name].equal(whole) for part in parts), "a buffer is whole on every rank"
        else:
            assert torch.cat([part[name] for part in parts]).equal(whole)


def test_a_rank_reads_only_the_tensors_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = on_disk()
    read: list[str] = []
    real = CheckpointFiles.read
    monkeypatch.setattr(CheckpointFiles, "read", lambda self, name: read.append(name) or real(self, name))
    filled(indexed(tmp_path, tensors), fsdp_layout(MODEL, "float32", 2), 1)
    second = {"embed"} | {name for name in NAMES if "experts.1." in name} | {"layers.0.bias", "layers.1.bias"}
    assert sorted(read) == sorted(second), "each once"


def test_a_directory_without_tensors_is_named(tmp_path: Path) -> None:
    with CheckpointFiles(tmp_path) as opened, pytest.raises(ValueError, match=rf"{tmp_path} has no \.safetensors"):
        opened.read("embed")


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    tensors = on_disk()
    del tensors["layers.1.experts.0.up"]
    single(tmp_path, tensors)
    with CheckpointFiles(tmp_path) as opened, pytest.raises(ValueError, match=rf"{tmp_path} has no tensor layers\.1"):
        opened.read("layers.1.experts.0.up")
    with pytest.raises(ValueError, match=r"the files lack layers\.1\.experts\.0\.up"):
        filled(tmp_path, replica_layout(MODEL, "float32", 1))


def test_tensors_that_nothing_reads_are_an_error_unless_the_map_drops_them(tmp_path: Path) -> None:
    tensors = on_disk() | {"layers.0.biass": torch.ones(2), "mtp.0.weight": torch.ones(1), "embed_copy": torch.ones(1)}
    single(tmp_path, tensors)
    with pytest.raises(ValueError) as caught:
        filled(tmp_path, replica_layout(MODEL, "float32", 1))
    assert [line.strip() for line in str(caught.value).splitlines()] == [
        f"the checkpoint {tmp_path} does not have the tensors of its weight map:",
        "nothing reads layers.0.biass (nearest there: layers.0.bias)",
    ]


def test_names_on_either_side_are_named_with_the_nearest_on_the_other(tmp_path: Path) -> None:
    tensors = on_disk()
    tensors["layers.1.biass"] = tensors.pop("layers.1.bias")
    with pytest.raises(ValueError) as caught:
        filled(single(tmp_path, tensors), replica_layout(MODEL, "float32", 1))
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "the files lack layers.1.bias (nearest there: layers.1.biass)",
        "nothing reads layers.1.biass (nearest there: layers.1.bias)",
    ]


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = on_disk() | {"embed": torch.ones(4, 5)}
    with pytest.raises(ValueError, match=r"embed is \[4, 5\] on disk and \[5, 4\] by the weight map"):
        filled(single(tmp_path, tensors), replica_layout(MODEL, "float32", 1))


def test_a_file_that_the_index_names_and_is_gone_or_broken_is_named(tmp_path: Path) -> None:
    indexed(tmp_path, on_disk())
    (tmp_path / "part-3.safetensors").write_bytes(b"no header")
    with pytest.raises(ValueError, match=r"cannot read .*part-3\.safetensors"):
        filled(tmp_path, replica_layout(MODEL, "float32", 1))
    (tmp_path / "part-3.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*part-3\.safetensors"):
        filled(tmp_path, replica_layout(MODEL, "float32", 1))
    save_file({"something": torch.ones(1)}, tmp_path / "part-3.safetensors")
    with pytest.raises(ValueError, match=r"part-3\.safetensors has no tensor layers\.0\.experts\.1\.gate, though"):
        filled(tmp_path, replica_layout(MODEL, "float32", 1))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": ["embed"]}', '{"metadata": {}}'])
def test_an_index_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    indexed(tmp_path, on_disk())
    (tmp_path / INDEX).write_text(text)
    with CheckpointFiles(tmp_path) as opened, pytest.raises(ValueError, match=rf"cannot read .*{INDEX}"):
        opened.read("embed")


def test_shapes_come_from_the_header(tmp_path: Path) -> None:
    with CheckpointFiles(single(tmp_path, on_disk())) as opened:
        assert {name: opened.shape(name) for name in opened.where} == NAMES
        with pytest.raises(ValueError, match="has no tensor nothing"):
            opened.shape("nothing")


def exported(directory: Path, weights: Mapping[str, Tensor], dtype: str = "float32") -> dict[str, Tensor]:
    """What an export of one rank's memory leaves on disk, by name, whichever file it is in."""
    source, target = fsdp_layout(MODEL, "float32", 1), checkpoint_layout(MODEL, dtype)
    export(directory, source, target, 0, lambda: weights, CPU)
    with CheckpointFiles(directory) as opened:
        return {name: opened.read(name) for name in opened.where}


def test_an_export_gives_back_the_checkpoint(tmp_path: Path) -> None:
    tensors = on_disk()
    assert same(exported(tmp_path, in_memory(tensors)), tensors)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_an_export_in_another_dtype_is_rounded_once(tmp_path: Path) -> None:
    tensors = on_disk()
    expected = {name: tensor if name.endswith("bias") else tensor.bfloat16() for name, tensor in tensors.items()}
    assert same(exported(tmp_path, in_memory(tensors), "bfloat16"), expected)


def test_a_large_export_has_several_files_and_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_FILE_BYTES", 100)
    tensors = on_disk()
    assert same(exported(tmp_path, in_memory(tensors)), tensors)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    parts = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(parts) > 3
    assert parts == [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    assert set(index["weight_map"].values()) == set(parts)


def test_a_rank_without_a_tensor_that_its_layout_has_exports_nothing(tmp_path: Path) -> None:
    weights = in_memory(on_disk())
    del weights["layers.1.experts.gate_up"]
    with pytest.raises(ValueError, match=r"has no tensor layers\.1\.experts\.gate_up at rank 0"):
        exported(tmp_path, weights)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_is_an_error_that_says_so(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(63 * 1024))
    with pytest.raises((OSError, SafetensorError), match="No space left"):
        exported(small_disk, in_memory(on_disk()))
