from __future__ import annotations

from pathlib import Path

import pytest

from stretto.config import RunConfig, config_from_dict, dump_toml, load_config

TEXT = """
run_dir = "out"
[model]
path = "model"
map = "maps/mine"
[data]
source = "rows.jsonl"
[eval]
source = "held.parquet"
[reward]
functions = ["score.py:f", "package.module:f", "math_verify"]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file in project/, while the current directory is elsewhere/."""
    for directory in ("project/model", "elsewhere/other"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "project/run.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


def test_files_of_a_run_file_are_relative_to_it(project: Path) -> None:
    config = load_config(Path("../project/run.toml"))
    assert config.model.path == str(project / "model")
    assert config.data.source == str(project / "rows.jsonl")
    assert config.eval.source == str(project / "held.parquet")
    assert config.reward.functions == [f"{project}/score.py:f", "package.module:f", "math_verify"]
    assert config.model.map == str(project / "maps/mine")
    assert config.run_dir == "out"


def test_the_directory_of_published_weights_is_relative_to_the_run_file(project: Path) -> None:
    file = project / "run.toml"
    file.write_text(TEXT + '[engine]\nbackend = "vllm"\n[sync]\ntransport = "disk"\ndirectory = "weights"\n')
    assert load_config(file).sync.directory == str(project / "weights")


def test_files_of_overrides_are_relative_to_the_current_directory(project: Path) -> None:
    arguments = ["--model.path", "other", "--data.source=more.jsonl", "--reward.functions", '["../s.py:g"]']
    arguments += ["--model.map", "../m.py"]
    config = load_config(project / "run.toml", arguments)
    here = project.parent / "elsewhere"
    assert config.model.path == str(here / "other")
    assert config.data.source == str(here / "more.jsonl")
    assert config.reward.functions == [f"{project.parent}/s.py:g"]
    assert config.model.map == str(project.parent / "m.py")


@pytest.mark.parametrize("name", ["org/model", "smollm2", "model", "/absolute/model"])
def test_names_that_are_no_files_here_stay(project: Path, name: str) -> None:
    (project.parent / "elsewhere/smollm2").mkdir()
    assert load_config(project / "run.toml", ["--model.path", name]).model.path == name


def test_a_spelling_that_can_only_be_a_path_is_one_though_nothing_is_there(project: Path) -> None:
    config = load_config(project / "run.toml", ["--model.path", "../gone"])
    assert config.model.path == str(project.parent / "gone")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("python3", "python3"),
        ("venv/bin/python", "{}/venv/bin/python"),
        ("/opt/venv/bin/python", "/opt/venv/bin/python"),
    ],
)
def test_an_interpreter_is_a_command_or_a_file_relative_to_the_run_file(project: Path, given: str, meant: str) -> None:
    (project / "venv/bin").mkdir(parents=True)
    (project / "venv/bin/python").symlink_to("/usr/bin/env")  # as in a virtual environment, where the link matters
    (project / "run.toml").write_text(f'{TEXT}[engine]\nbackend = "vllm"\npython = "{given}"\n')
    assert load_config(project / "run.toml").engine.python == meant.format(project)


def test_a_dumped_file_means_the_same_from_anywhere(project: Path) -> None:
    made = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"source": "rows.jsonl"}, "reward": {"functions": ["r.py:f"]}}
    )
    (project / "config.toml").write_text(dump_toml(made))
    loaded = load_config(project / "config.toml")
    assert loaded.data.source == str(project.parent / "elsewhere/rows.jsonl")
    assert loaded == config_from_dict(made.model_dump(exclude_unset=True))
