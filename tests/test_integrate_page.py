"""docs/integrate-a-model.md: its maps are the files, its tables the code, its transcripts what the commands say."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cli import _parser, main
from stretto.models import blocks, language, registry
from stretto.orchestration.check.ladder import LADDER
from stretto.sync.layouts import cuts

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "integrate-a-model.md").read_text()
UNSHIPPED = """
import sys
from stretto.cli import main
from stretto.models import registry
registry.families()
del registry._CLAIMS["Phi3Config"]
sys.exit(main(sys.argv[1:]))
"""
"""The command as it was before Phi-3 had a map."""
_LINE = re.compile(r"^(.+?) +(pass|fail|skipped) +[0-9.]+ ")


def rows(head: str) -> list[list[str]]:
    """The cells of the table under this header."""
    table = PAGE.partition(f"\n{head}\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert table, head
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def transcript(start: str) -> tuple[list[str], str]:
    """The one block that shows a command beginning so: its words, and what it printed."""
    ((command, shown),) = re.findall(rf"```\n\$ stretto ({re.escape(start)}[^\n]*)\n(.*?)\n```", PAGE, flags=re.DOTALL)
    return shlex.split(command), shown


def ends(text: str) -> list[tuple[str, str]]:
    """Each rung of a printed report with how it ended."""
    return [found.groups() for line in text.splitlines() if (found := _LINE.match(line))]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the page's config.json."""
    (config,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "phi3").mkdir()
    (tmp_path / "phi3" / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def unshipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No map claims Phi3Config."""
    claims = {name: list(builders) for name, builders in registry.families().items() if name != "Phi3Config"}
    monkeypatch.setattr(registry, "_CLAIMS", claims)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_maps_on_the_page_are_the_files() -> None:
    blocks_ = re.findall(r"`(src/stretto/models/\w+\.py)`:\n\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert [name for name, _ in blocks_] == ["src/stretto/models/qwen3.py", "src/stretto/models/phi3.py"]
    assert PAGE.count("```python") == len(blocks_)
    for name, text in blocks_:
        assert (ROOT / name).read_text() == text, name
    assert f"These {len(blocks_[1][1].splitlines())} lines are the whole map" in PAGE


def test_the_tables_are_the_code() -> None:
    assert [row[0].strip("`") for row in rows("| letter | what it counts | cut by |")] == list(
        dict.fromkeys(factor for factor in cuts._MEANING if factor != "q")
    )
    rungs = [row[0] for row in rows("| rung | what is compared | typical cause when it breaks |")]
    assert rungs == [name for name, _ in LADDER]


def test_every_word_of_the_language_is_explained() -> None:
    told = " ".join(
        row[0] for head in ("| in a row | it means |", "| in the `WeightMap` | it means |") for row in rows(head)
    )
    words = {name for name, one in inspect.signature(language.row).parameters.items() if one.kind == one.KEYWORD_ONLY}
    words |= {one.name for kind in (language.Held, language.WeightMap) for one in dataclasses.fields(kind)}
    words |= {one.name for one in dataclasses.fields(language.Piece) if one.default is not dataclasses.MISSING}
    assert {word for word in words - {"name", "family"} if f"{word}=" not in told} == set()
    shared = re.findall(r"`(\w+)", PAGE.partition("`stretto/models/blocks.py`: ")[2].partition("This is")[0])
    assert shared
    assert [name for name in shared if not callable(getattr(blocks, name, None)) and len(name) > 1] == []


def test_the_commands_on_the_page_are_accepted() -> None:
    shown = re.findall(r"^(?:\$ )?stretto (.*)$", PAGE, flags=re.MULTILINE)
    shown += re.findall(r"`stretto ([\w-]+ \S.*?)`", PAGE)
    assert {words.split()[0] for words in shown} == {"check", "plan", "new-model"}
    for words in shown:
        _parser().parse_args(shlex.split(words))


@pytest.mark.usefixtures("example", "unshipped")
def test_new_model_says_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    words, shown = transcript("new-model")
    assert main(words) == 0
    said = capsys.readouterr().out.strip()
    about_bridge = re.compile(r"bridge names .*")  # by what is installed
    assert about_bridge.sub("", said) == about_bridge.sub("", shown)
    begun = Path("my_phi3.py").read_text()
    done = (ROOT / "src/stretto/models/phi3.py").read_text()
    for line in begun.splitlines():
        if "Piece(" in line or "Held(" in line:
            assert line in done.splitlines()


@pytest.mark.usefixtures("example", "unshipped")
def test_fsdp_does_without_a_map(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "phi3/config.json", "--trainer", "fsdp"]) == 0
    assert [end for _, end in ends(capsys.readouterr().out)].count("fail") == 0


def test_the_failing_check_is_the_one_shown(example: Path) -> None:
    words, shown = transcript("check phi3/config.json --map")
    done = (ROOT / "src/stretto/models/phi3.py").read_text()
    (example / "my_phi3.py").write_text(done.replace(', per="g"', ""))
    (example / "unshipped.py").write_text(UNSHIPPED)
    found = run("unshipped.py", *words)
    assert found.returncode == 1, found.stderr
    assert ends(found.stdout) == ends(shown)
    named = re.compile(r"first wrong parameter: .*(?=with a checkpoint changed)", re.DOTALL)
    (said,), (expected,) = named.findall(found.stdout), named.findall(shown)
    assert said.split() == expected.split()


@pytest.mark.usefixtures("example")
def test_the_passing_check_is_the_one_shown() -> None:
    words, shown = transcript("check phi3/config.json --trainer")
    found = run("-m", "stretto", *words)
    assert found.returncode == 0, found.stdout + found.stderr
    assert ends(found.stdout) == ends(shown) == [(name, "pass") for name, _ in LADDER]
