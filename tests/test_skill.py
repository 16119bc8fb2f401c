"""The agent skill is small enough to be read whole, and every command in it does what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main
from stretto.models import registry

SKILL = (Path(__file__).parents[1] / "skills" / "model-integration" / "SKILL.md").read_text()
_, HEADER, BODY = SKILL.split("---\n", 2)
COMMANDS = re.findall(r"`stretto ([a-z-]+ MODEL[^`]*)`", BODY)
HERE, RANKS = [one for one in COMMANDS if "--trainer megatron" not in one], COMMANDS[-4:]
"""Those that this process runs, and those for which Megatron-Core takes processes of its own."""

# MODEL is a family that no map claims, so that there is a file to write: Llama's structure under another name. For
# --ep 2 it has to have experts; that family is shipped, and the file next to it declares nothing.
DENSE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "sliding_window": None,
}
EXPERTS = {
    **{name: value for name, value in DENSE.items() if name != "sliding_window"},
    "head_dim": 6,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def tokens(text: str) -> int:
    """More than a tokenizer makes of it: every four letters, every mark; no less than a third of the characters."""
    return max(len(re.findall(r"\w{1,4}|[^\w\s]", text)), -(-len(text) // 3))


def words(command: str, model: str) -> list[str]:
    return shlex.split(command.replace("MODEL", model))


def stretto(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def integrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which steps 1 to 3 are done: dense/ and experts/ with their my_family.py."""
    import transformers

    directory = tmp_path_factory.mktemp("skill")
    for name, kind, sizes in (("dense", "MistralConfig", DENSE), ("experts", "Qwen3MoeConfig", EXPERTS)):
        config: Any = getattr(transformers, kind)(**sizes)
        config.save_pretrained(directory / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory / "dense")
        assert main(words(COMMANDS[0], "config.json")) == 0
    file = directory / "dense" / "my_family.py"
    begun = file.read_text()
    assert "unresolved" not in begun
    assert "megatron=None" in begun
    file.write_text(begun.replace("megatron=None", "megatron={}"))
    (directory / "experts" / "my_family.py").write_text("")
    return directory


def test_it_is_short() -> None:
    import yaml

    header = yaml.safe_load(HEADER)
    assert set(header) == {"name", "description"}
    assert header["name"] == "model-integration"
    assert tokens(header["description"]) <= 60
    assert tokens(BODY) < 2500


def test_every_command_is_run_below() -> None:
    assert len(COMMANDS) == len(re.findall(r"stretto (?:new-model|plan|check) ", BODY))
    assert [*HERE, *RANKS] == COMMANDS
    assert [one.split("MODEL --map my_family.py ")[-1] for one in RANKS] == [
        "--trainer megatron",
        *(f"--trainer megatron --{size} 2" for size in ("tp", "pp", "ep")),
    ]


def test_the_commands_before_megatron(integrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has run already."""
    monkeypatch.chdir(integrated / "dense")
    for command in HERE[1:]:
        claims = {name: list(builders) for name, builders in registry.families().items()}
        monkeypatch.setattr(registry, "_CLAIMS", claims)
        assert main(words(command, "config.json")) == 0, command


@pytest.mark.parametrize("command", RANKS)
def test_the_commands_for_megatron(integrated: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(integrated / ("experts" if "--ep" in command else "dense"))
    done = stretto(*words(command, "config.json"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_rung_is_1_and_the_parameter_is_named(integrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(integrated / "dense")
    wrong = Path("my_family.py").read_text().replace("norm()", "norm(add=1.0)").replace("norms()", "norms(add=1.0)")
    assert wrong.count("add=1.0") == 2
    Path("wrong.py").write_text(wrong)
    command = RANKS[0].replace("my_family.py", "wrong.py")
    done = stretto(*words(command, "config.json"))
    assert done.returncode == 1, done.stderr
    assert "layernorm.weight" in done.stdout.partition("first wrong parameter:")[2].splitlines()[0]


def test_what_cannot_begin_is_2_and_one_line(
    integrated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(integrated / "dense")
    assert main(words(HERE[1].replace("my_family.py", "nowhere.py"), "config.json")) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_files_and_settings_that_it_names_exist() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(r"`([\w./-]+/[\w.-]*)`", BODY)
    assert named
    assert [one for one in named if not (root / one).exists() and not (root / "src" / one).exists()] == []
