"""A family without a weight map: every tensor is itself, which is enough for FSDP2 and the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import lines, metrics, start, write_run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, Olmo2Config, OlmoeConfig

import stretto
from stretto.config import load_config
from stretto.models.checkpoint import load_config as load_settings
from stretto.models.maps import map_of
from stretto.models.registry import claims
from stretto.orchestration.forecast import dry_run

SHAPE: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES = {
    "olmo2": lambda: Olmo2Config(**SHAPE, num_key_value_heads=2),
    "olmo2-tied": lambda: Olmo2Config(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
    "gpt-neox": lambda: GPTNeoXConfig(**SHAPE, tie_word_embeddings=False),
}


MAP = """
from stretto.models.language import Piece, WeightMap, layers, row
from stretto.models.registry import family

LAYER = {
    "self_attn.q_proj.weight": "a h", "self_attn.k_proj.weight": "k h", "self_attn.v_proj.weight": "k h",
    "self_attn.o_proj.weight": "h a", "self_attn.q_norm.weight": "a", "self_attn.k_norm.weight": "k",
    "post_attention_layernorm.weight": "h", "post_feedforward_layernorm.weight": "h",
    "mlp.gate_proj.weight": "f h", "mlp.up_proj.weight": "f h", "mlp.down_proj.weight": "h f",
}

@family("Olmo2Config")
def olmo2(c):
    head = c.hidden_size // c.num_attention_heads
    sizes = {"v": c.vocab_size, "h": c.hidden_size, "f": c.intermediate_size, "a": c.hidden_size}
    whole = [row(Piece(f"model.{n}.weight", axes)) for n, axes in (("embed_tokens", "v h"), ("norm", "h"))]
    rows = [*whole, row(Piece("lm_head.weight", "v h"))]
    rows += layers(c.num_hidden_layers, [row(Piece(name, axes)) for name, axes in LAYER.items()])
    sizes["k"] = c.num_key_value_heads * head
    return WeightMap(family="olmo2", sizes=sizes, rows=tuple(rows), layer_count=c.num_hidden_layers)
"""


def saved(config: Any, directory: Path, tiny_model: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(directory)
    return directory


def run(directory: Path, model: Path, **engine: Any) -> Path:
    return stretto.train(load_config(one_step(directory, model, engine=engine))).run_dir


def one_step(directory: Path, model: Path, /, **sections: Any) -> Path:
    return write_run(
        directory,
        model,
        steps=1,
        rollout={"prompts_per_step": 4, "samples_per_prompt": 2},
        trainer={"lr": 1e-2, "updates_per_batch": 1, "warmup_steps": 0},
        eval=None,
        data={"heldout": 0},
        checkpoint={"every": 0},
        **sections,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_trains_and_its_export_loads(family: str, dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    model = saved(FAMILIES[family](), tmp_path / "model", tiny_model)
    assert not claims(load_settings(model)), "it has a map by now: take another"
    run_dir = run(tmp_path, model, dtype=dtype)
    measured = lines(run_dir / "metrics.jsonl")[-1]
    assert measured["train/grad_norm"] > 0
    assert measured["mismatch/logprob_diff_max"] < (1e-4 if dtype == "float32" else 0.3)
    exported = run_dir / "checkpoints" / "step_00000001" / "hf"
    before, after = load_file(model / "model.safetensors"), load_file(exported / "model.safetensors")
    assert after.keys() == before.keys()
    assert {str(tensor.dtype) for tensor in after.values()} == {f"torch.{dtype}"}
    assert not any(torch.equal(before[name].to(after[name].dtype), after[name]) for name in before)
    _, found = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_a_copy_of_the_tied_head_in_the_files_is_dropped(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stretto.cli import main

    model = saved(FAMILIES["olmo2-tied"](), tmp_path / "model", tiny_model)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    words = ["rollout", "--model", str(model), "--prompts", str(write_run(tmp_path, model).parent / "rows.jsonl")]
    words += ["--out", str(tmp_path / "out.jsonl"), "--limit", "2", "--rollout.max_new_tokens", "3"]
    words += ["--reward", f"{tmp_path}/reward.py:letters"]
    assert main(words) == 0, capsys.readouterr().err
    assert lines(tmp_path / "out.jsonl")


def test_a_family_that_transformers_changes_as_it_loads_is_sent_to_a_map(tiny_model: Path, tmp_path: Path) -> None:
    config = OlmoeConfig(**SHAPE, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
    model = saved(config, tmp_path / "model", tiny_model)
    with pytest.raises(ValueError, match=r"olmoe models need a weight map: .*mlp\.experts\.\w+ .*stretto new-model"):
        map_of(model)
    for start_it in (lambda: run(tmp_path, model), lambda: dry_run(load_config(tmp_path / "run.toml"))):
        with pytest.raises(ValueError, match="olmoe models need a weight map"):
            start_it()
    assert not (tmp_path / "run").exists(), "it is said before a run directory is made"


def test_a_map_of_ones_own_is_read_from_beside_the_run_file(tiny_model: Path, tmp_path: Path) -> None:
    """In processes of their own: a family that was declared stays so."""
    model = saved(FAMILIES["olmo2"](), tmp_path / "model", tiny_model)
    run_file = one_step(tmp_path, model, model={"map": "olmo2.py"})
    lacking = MAP.replace('"self_attn.q_norm.weight": "a", ', "")
    for text, code in ((lacking, 2), (MAP, 0)):
        (tmp_path / "olmo2.py").write_text(text)
        with start("train", run_file) as process:
            said, _ = process.communicate(timeout=240)
        assert process.returncode == code, said
        if code:
            assert "the weight map does not describe fsdp(ranks=1)" in said
            assert (
                "the layout does not have model.layers.0.self_attn.q_norm.weight (nearest there: model.layers" in said
            )
    mapped = metrics(tmp_path / "run")
    assert mapped == metrics(run(tmp_path / "without", model)), "the same weights by another way"
