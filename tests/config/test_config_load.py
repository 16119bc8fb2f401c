from __future__ import annotations

from pathlib import Path

import pytest

from stretto.config import ConfigError, RunConfig, config_from_dict, load_config
from stretto.config import keys as keys_module

MINIMAL = """
[model]
path = "org/model"
[data]
source = "org/prompts"
[reward]
functions = ["math_verify"]
"""


def write(directory: Path, text: str = MINIMAL, name: str = "run.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def test_a_minimal_file_has_the_defaults_everywhere_else(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert (config.model.path, config.data.source, config.steps) == ("org/model", "org/prompts", 100)
    assert config.trainer == RunConfig.model_fields["trainer"].default


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--trainer.lr", "2e-5"], "trainer.lr", 2e-5),
        (["--trainer.lr=2e-5"], "trainer.lr", 2e-5),
        (["--trainer.lr", "1"], "trainer.lr", 1.0),
        (["--steps", "5"], "steps", 5),
        (["--name", "123"], "name", "123"),
        (["--run_dir=a=b"], "run_dir", "a=b"),
        (["--data.shuffle", "false"], "data.shuffle", False),
        (["--data.chat", "True"], "data.chat", True),
        (["--model.max_length", "77"], "model.max_length", 77),
        (["--data.system", "12"], "data.system", "12"),
        (["--trainer.schedule", "cosine"], "trainer.schedule", "cosine"),
        (["--reward.functions", '["math_verify","m:f"]', "--reward.weights", "[1, -2]"], "reward.weights", [1.0, -2.0]),
        (["--reward.functions", "['m:f']"], "reward.functions", ["m:f"]),
        (["--trainer.betas", "[0.8, 0.9]"], "trainer.betas", (0.8, 0.9)),
        (
            ["--trainer.backend=megatron", "--trainer.pp=3", "--trainer.pp_layers=[1, 2, 1]"],
            "trainer.pp_layers",
            (1, 2, 1),
        ),
        (["--model.map", "/maps/m"], "model.map", "/maps/m"),
        (["--rollout.stop_ids", "[1, 2]"], "rollout.stop_ids", [1, 2]),
        (["--rollout.stop", '["--", "\\n"]'], "rollout.stop", ["--", "\n"]),
        (["--steps", "5", "--steps", "6"], "steps", 6),
    ],
)
def test_an_override_has_the_type_of_its_key(tmp_path: Path, arguments: list[str], key: str, value: object) -> None:
    config = load_config(write(tmp_path), arguments)
    found: object = config
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_an_override_beats_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "steps = 7\n" + MINIMAL)
    assert load_config(path).steps == 7
    assert load_config(path, ["--steps", "8"]).steps == 8


def test_entries_of_a_table_are_overridden_one_by_one_or_as_a_whole(tmp_path: Path) -> None:
    text = MINIMAL.replace("org/prompts", "reasoning_gym:gsm_symbolic") + "[data.args]\nsize = 5\n"
    path = write(tmp_path, text)
    one = load_config(path, ["--data.args.kind", "hard", "--data.args.deep.x", "[1.5]"])
    assert one.data.args == {"size": 5, "kind": "hard", "deep": {"x": [1.5]}}
    assert load_config(path, ["--data.args", '{"seed": 3}']).data.args == {"seed": 3}
    assert load_config(path, ["--data.args", "{seed = 3}"]).data.args == {"seed": 3}


def test_options_of_a_server_pass_through_from_a_file_and_from_overrides(tmp_path: Path) -> None:
    table = '[engine]\nbackend = "sglang"\n[engine.sglang]\nmem_fraction_static = 0.6\nlora_paths = ["a", "b"]\n'
    overrides = ["--engine.sglang.attention_backend", "fa3", "--engine.sglang.mem_fraction_static=0.7"]
    options = load_config(write(tmp_path, MINIMAL + table), overrides).engine.sglang
    assert options == {"mem_fraction_static": 0.7, "lora_paths": ["a", "b"], "attention_backend": "fa3"}


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trainer.lrr", "trainer.lr"),
        ("lr", "trainer.lr"),
        ("trainr.lr", "trainer.lr"),
        ("trainer.max-bad-steps", "trainer.max_bad_steps"),
        ("rollout.max_tokens", "rollout.max_new_tokens"),
        ("step", "steps"),
        ("algorithm.clip_hi", "algorithm.clip_high"),
        ("trainer.tensor_model_parallel_size", "trainer.tp"),
        ("trainer.expert_model_parallel_size", "trainer.ep"),
        ("engine.tensor_parallel_size", "engine.tp"),
        ("engine.gpu_memory_utilization", "engine.vllm"),
        ("rollout.tensor_model_parallel_size", "engine.tp"),
    ],
)
def test_an_unknown_key_names_the_nearest_in_a_file_and_as_override(tmp_path: Path, key: str, nearest: str) -> None:
    section, _, name = key.rpartition(".")
    path = write(tmp_path)
    (override,) = problems(path, f"--{key}", "1")
    assert override.startswith(f"unknown key {key}; the nearest keys are {nearest}")
    table = f"[{section}]\n{name} = 1\n"
    written = write(tmp_path, MINIMAL + table if section else f"{name} = 1\n" + MINIMAL)
    assert problems(written) == [override]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "steps is 0; steps must be an integer >= 1"),
        (["--steps", "many"], 'steps is "many"; steps must be an integer >= 1'),
        (["--steps", "1.5"], 'steps is "1.5"; steps must be an integer >= 1'),
        (["--seed", "-1"], "seed is -1; seed must be an integer >= 0 and < 2147483648"),
        (["--trainer.lr", "inf"], "trainer.lr is Infinity; trainer.lr must be a number >= 0 and finite"),
        (["--rollout.top_p", "1.5"], "rollout.top_p is 1.5; rollout.top_p must be a number > 0 and <= 1"),
        (["--data.shuffle", "yes"], 'data.shuffle is "yes"; data.shuffle must be true or false'),
        (
            ["--trainer.schedule", "step"],
            'trainer.schedule is "step"; trainer.schedule must be one of "constant", "linear", "cosine"',
        ),
        (
            ["--reward.functions", "math_verify"],
            'reward.functions is "math_verify"; reward.functions must be a list of texts that is not empty',
        ),
        (
            ["--reward.functions", "[]"],
            "reward.functions is []; reward.functions must be a list of texts that is not empty",
        ),
        (["--reward.weights", '["x"]'], 'reward.weights[0] is "x"; reward.weights must be a list of numbers'),
        (
            ["--trainer.betas", "[0.9, 1.0]"],
            "trainer.betas[1] is 1.0; trainer.betas must be a list of 2 numbers >= 0 and < 1",
        ),
        (
            ["--trainer.backend=megatron", "--trainer.pp=2", "--trainer.pp_layers", "[2, 0]"],
            "trainer.pp_layers[1] is 0; trainer.pp_layers must be a list of integers >= 1",
        ),
        (["--engine.url", "host:8000"], 'engine.url is "host:8000"; engine.url must be text like ^https?://[^/ ]+'),
        (["--engine.url", "http://"], 'engine.url is "http://"; engine.url must be text like ^https?://[^/ ]+'),
        (["--engine.sglang", "3"], "engine.sglang is 3; engine.sglang must be a table"),
        (["--name", "a/b"], 'name is "a/b"; name must be text like ^[A-Za-z0-9_][A-Za-z0-9._-]*$'),
        (["--name", ".."], 'name is ".."; name must be text like ^[A-Za-z0-9_][A-Za-z0-9._-]*$'),
        (["--model.path", ""], 'model.path is ""; model.path must be text that is not empty'),
        (["--checkpoint", "5"], "checkpoint is a section; its keys are checkpoint.every, checkpoint.keep"),
        (["--steps"], "--steps needs a value: --steps VALUE"),
        (["--steps", "--seed", "1"], "--steps needs a value: --steps VALUE"),
        (["steps=5"], "unexpected argument steps=5; an override looks like --trainer.lr 2e-5"),
    ],
)
def test_a_bad_override_says_what_was_given_and_what_is_accepted(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    assert problems(write(tmp_path), *arguments) == [said]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('lr = "2e-5"', 'trainer.lr is "2e-5"; trainer.lr must be a number >= 0'),
        ("warmup_steps = true", "trainer.warmup_steps is true; trainer.warmup_steps must be an integer >= 0"),
        ("warmup_steps = 1.0", "trainer.warmup_steps is 1.0; trainer.warmup_steps must be an integer >= 0"),
        ("lr = 2024-01-01", 'trainer.lr is "2024-01-01"; trainer.lr must be a number >= 0'),
        (
            "activation_checkpointing = 1",
            "trainer.activation_checkpointing is 1; trainer.activation_checkpointing must",
        ),
        ("lr = {peak = 1}", 'trainer.lr is {"peak": 1}; trainer.lr must be a number >= 0'),
    ],
)
def test_types_of_a_file_are_not_converted(tmp_path: Path, line: str, said: str) -> None:
    (problem,) = problems(write(tmp_path, f"{MINIMAL}[trainer]\n{line}\n"))
    assert problem.startswith(said)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, 'steps = "5"\nrollout = 3\n' + MINIMAL.replace("source", "sauce"))
    found = problems(path, "--trainer.lrr", "1", "--trainer.lr", "-1")
    for key in ("unknown key trainer.lrr", "steps is", "rollout is 3; it must be a section", "data.source is missing"):
        assert sum(line.startswith(key) for line in found) == 1, (key, found)
    assert "unknown key data.sauce; the nearest keys are data.source" in "\n".join(found)
    assert len(found) == 6, found


def test_missing_sections_name_the_keys_they_need() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({})
    lines = str(caught.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["model.path", "data.source", "reward.functions"]
    assert all(" is missing; it is " in line for line in lines)


def test_a_syntax_error_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, "steps = 5\nname = \n")
    assert problems(path) == [f"{path}:2: not valid TOML: Invalid value (column 8)"]
    unfinished = write(tmp_path, 'steps = 5\nname = "a')
    assert problems(unfinished)[0].startswith(f"{unfinished}:2: not valid TOML")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path / "no.toml") == [f"there is no run file {tmp_path / 'no.toml'}"]
    assert problems(tmp_path) == [f"cannot read the run file {tmp_path}: Is a directory"]
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = '\xff'")
    assert problems(binary) == [f"{binary} is not UTF-8 text (byte 5); a run file is TOML"]


def test_a_dictionary_is_not_changed_by_loading_it() -> None:
    raw = {"model": {"path": "m"}, "data": {"source": "x.jsonl"}, "reward": {"functions": ["r.py:f"]}}
    assert config_from_dict(raw).data.source.endswith("/x.jsonl")
    assert raw == {"model": {"path": "m"}, "data": {"source": "x.jsonl"}, "reward": {"functions": ["r.py:f"]}}


def test_names_of_other_libraries_lead_to_ours() -> None:
    assert set(keys_module._ELSEWHERE.values()) <= set(keys_module.keys())
    for theirs, ours in keys_module._ELSEWHERE.items():
        name = theirs if "." in theirs else f"trainer.{theirs}"
        assert keys_module.nearest(name, keys_module.keys())[0] == ours
