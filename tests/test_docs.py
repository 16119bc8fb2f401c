"""The pages under docs are true: the generated ones are up to date, and the snippets run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import split_words
from stretto.config.help import keys_markdown
from stretto.config.keys import keys
from stretto.data.columns import CONVENTIONS, DETECTED
from stretto.models.table import families_markdown
from stretto.rewards.adapters import adapt
from stretto.rewards.sample import Sample
from stretto.telemetry.metrics import METRICS, metrics_markdown

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONCEPTS = (DOCS / "concepts.md").read_text()


WRITTEN = [("configuration.md", keys_markdown), ("metrics.md", metrics_markdown), ("families.md", families_markdown)]


@pytest.mark.parametrize(("page", "write"), WRITTEN)
def test_generated_pages_are_up_to_date(page: str, write: Callable[[], str]) -> None:
    assert (DOCS / page).read_text() == write() + "\n", "run `make docs`"


@pytest.mark.parametrize(("page", "names"), [("configuration.md", keys()), ("metrics.md", METRICS)])
def test_generated_pages_have_a_whole_row_for_every_name(page: str, names: dict[str, Any]) -> None:
    rows = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")]
    assert [re.findall(r"`([^`]+)`", row)[0] for row in rows] == list(names)
    columns = 4 if page == "configuration.md" else 3
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {columns + 2}


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", CONCEPTS, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("at", "style", "scores"), [(0, "sample", [1.0, 0.0]), (1, "trl", [0.25, 0.5]), (2, "verl", [1.0, 0.0])]
)
def test_reward_snippets_are_called_as_the_page_says(at: int, style: str, scores: list[float]) -> None:
    space: dict[str, Any] = {}
    exec(snippets()[at], space)
    (function,) = (value for name, value in space.items() if name != "__builtins__")
    fields = {"answer": "42", "data_source": "sums"}
    samples = [Sample("6 * 7 =", text, (1,), fields) for text in (" 42", "7")]
    adapter = adapt(function, function.__name__)
    assert adapter.style == style
    assert adapter.score(samples) == scores


def test_there_is_no_snippet_that_is_not_run() -> None:
    assert len(snippets()) == 3


def test_the_page_names_only_keys_metrics_and_files_that_exist() -> None:
    quoted = re.findall(r"`([^`\n]+)`", CONCEPTS)
    sections = {name.partition(".")[0] for name in keys() if "." in name}
    named = [
        q.split(" ")[0] for q in quoted if q.partition(".")[0] in sections and not q.endswith((".py", "ground_truth"))
    ]
    assert named
    assert set(named) <= set(keys())
    groups = {name.partition("/")[0] for name in METRICS}
    metrics = re.findall(rf"\b(?:{'|'.join(groups)})/[a-z_]+", CONCEPTS)
    assert {name for name in metrics if "/base" not in name} <= set(METRICS)
    files = [q for q in quoted if q.startswith("stretto/")]
    assert files
    assert all((ROOT / "src" / file).is_file() for file in files)


def test_the_table_of_formats_is_the_code() -> None:
    table = {
        row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", CONCEPTS, flags=re.MULTILINE)
    }
    ticked = {name: [re.findall(r"`([^`]+)`", cell) for cell in row] for name, row in table.items()}
    assert set(ticked) == set(CONVENTIONS)
    for name, convention in CONVENTIONS.items():
        prompt, answer, recognised = ticked[name]
        assert tuple(prompt) == convention.prompt
        assert tuple(answer) == convention.answer
        assert set(recognised) == set().union(*(columns for columns, format in DETECTED if format == name))
    assert list(ticked) == list(dict.fromkeys(format for _, format in DETECTED))


def test_commands_on_the_page_are_ones_that_the_program_takes() -> None:
    (line,) = re.findall(r"-m stretto (train .*)", CONCEPTS)
    own, overrides = split_words(line.split())
    assert not overrides
    assert (ROOT / own[1]).is_file()
    assert shutil.which("torchrun", path=Path(sys.executable).parent) is not None
    assert "`stretto train --resume RUN_DIR`" in CONCEPTS


def test_the_page_is_short() -> None:
    assert len(CONCEPTS.splitlines()) <= 140
