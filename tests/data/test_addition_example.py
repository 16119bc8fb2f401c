"""The addition example: its file is what its script writes, and its reward is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "addition"


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"addition_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "make_data.py", tmp_path / "out.jsonl"], check=True)
    assert (tmp_path / "out.jsonl").read_bytes() == (FOLDER / "addition.jsonl").read_bytes()


def test_every_pair_but_the_worked_example_is_there_once_with_its_sum() -> None:
    rows = [json.loads(line) for line in (FOLDER / "addition.jsonl").read_text().splitlines()]
    pairs = []
    for row in rows:
        example, question = row["prompt"].split("\n")
        x, y = (int(part) for part in question.removesuffix(" =").split(" + "))
        assert example == "23 + 4 = 27"
        assert row["answer"] == str(x + y)
        pairs.append((x, y))
    assert sorted(pairs) == [(x, y) for x in range(10, 100) for y in range(10) if (x, y) != (23, 4)]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [(" 27", 1.0), ("27\n30 + 1 = 31", 1.0), (" 27.", 0.0), (" 270", 0.0), ("\n27", 0.0), ("", 0.0), (" 2 7", 0.0)],
)
def test_the_reward_is_for_exactly_the_answer_on_the_first_line(completion: str, reward: float) -> None:
    exact = load("reward").exact
    assert exact(prompts=["?"], completions=[completion], answer=["27"], unused=[None]) == [reward]
