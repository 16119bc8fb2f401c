from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import stretto as package
from stretto.cli import main, rollout_config, split_words
from stretto.config import ConfigError
from stretto.config.keys import keys

RUN = '[model]\npath = "m"\n[data]\nsource = "p.jsonl"\n[reward]\nfunctions = ["math_verify"]\n'


def flags(**given: object) -> argparse.Namespace:
    names = ("model", "prompts", "out", "reward", "samples", "max_new_tokens", "temperature", "limit", "seed", "chat")
    return argparse.Namespace(**dict.fromkeys(names) | {"model": "org/m", "prompts": "org/p", "overrides": []} | given)


@pytest.mark.parametrize(
    ("words", "own", "overrides"),
    [
        (["train", "r.toml"], ["train", "r.toml"], []),
        (["train", "--steps", "5", "r.toml"], ["train", "r.toml"], ["--steps", "5"]),
        (["train", "r.toml", "--a.b=1", "--dry-run"], ["train", "r.toml", "--dry-run"], ["--a.b=1"]),
        (["train", "r.toml", "--a.b", "-1"], ["train", "r.toml"], ["--a.b", "-1"]),
        (["train", "--resume", "d"], ["train", "--resume", "d"], []),
        (["train", "r.toml", "--replay=x", "--a.b", "v"], ["train", "r.toml", "--replay=x"], ["--a.b", "v"]),
        (["train", "r.toml", "--a.b", "--dry-run"], ["train", "r.toml", "--dry-run"], ["--a.b"]),
        (["rollout", "--model", "m", "--a.b", "v"], ["rollout", "--model", "m"], ["--a.b", "v"]),
        (["rollout", "--a.b=v", "--samples=4", "--chat"], ["rollout", "--samples=4", "--chat"], ["--a.b=v"]),
        (["rollout", "--rollout.stop", '["\\n"]', "-h"], ["rollout", "-h"], ["--rollout.stop", '["\\n"]']),
    ],
)
def test_overrides_are_told_from_the_options_of_the_verb(
    words: list[str], own: list[str], overrides: list[str]
) -> None:
    assert split_words(words) == (own, overrides)


def test_flags_of_rollout_become_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = rollout_config(
        flags(
            prompts="p.jsonl", reward=["r.py:f", "math_verify"], samples=4, temperature=0.5, limit=3, seed=9, chat=True
        )
    )
    assert config.data.source == str(tmp_path / "p.jsonl")
    assert config.reward.functions == [f"{tmp_path}/r.py:f", "math_verify"]
    assert (config.rollout.samples_per_prompt, config.rollout.temperature, config.seed) == (4, 0.5, 9)
    assert (config.data.limit, config.data.chat, config.data.shuffle) == (3, True, False)


def test_flags_of_rollout_that_are_left_out_keep_the_defaults() -> None:
    config = rollout_config(flags(prompts="reasoning_gym:chain_sum"))
    assert config.reward.functions == ["reasoning_gym"]
    assert config.data.limit is None
    assert config.rollout == type(config.rollout)()


def test_overrides_of_rollout_set_what_no_flag_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--rollout.stop",
        '["\\n"]',
        "--data.prompt_key=q",
        "--reward.functions",
        '["r.py:f"]',
        "--data.chat",
        "true",
    ]
    config = rollout_config(flags(prompts="p.jsonl", overrides=words))
    assert (config.rollout.stop, config.data.prompt_key, config.data.chat) == (["\n"], "q", True)
    assert config.reward.functions == [f"{tmp_path}/r.py:f"]
    generated = rollout_config(flags(prompts="reasoning_gym:chain_sum", overrides=["--data.args.size", "7"]))
    assert (generated.data.args, generated.reward.functions) == ({"size": 7}, ["reasoning_gym"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rollout.temperature", "-1"], "rollout.temperature is -1.0; rollout.temperature must be"),
        (["--data.promt_key", "q"], "unknown key data.promt_key; the nearest keys are data.prompt_key"),
        (["--rollout.stop"], "--rollout.stop needs a value"),
        (["--steps", "5"], "--steps does nothing in stretto rollout, which reads model, data, reward"),
        (["--trainer.lr", "5"], "--trainer.lr does nothing in stretto rollout"),
        (["--model.path", "x"], "--model.path is already set by --model; leave one"),
        (["--rollout.samples_per_prompt", "5"], "--rollout.samples_per_prompt is already set by --samples"),
        (["--data.shuffle", "true"], "--data.shuffle is already set by stretto rollout itself"),
    ],
)
def test_bad_overrides_of_rollout_are_named_as_the_user_wrote_them(words: list[str], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        rollout_config(flags(samples=4, reward=["m:f"], overrides=words))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"samples": 1, "reward": ["m:f"]}, "--samples is 1; --samples must be an integer >= 2"),
        ({"temperature": -1.0, "reward": ["m:f"]}, "--temperature is -1.0; --temperature must be"),
        ({"max_new_tokens": 0, "reward": ["m:f"]}, "--max-new-tokens is 0; --max-new-tokens must be"),
        ({}, "say how answers are scored: --reward SPEC"),
    ],
)
def test_bad_flags_of_rollout_are_named_as_the_user_wrote_them(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rollout_config(flags(**given))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "error: name a run file (stretto train RUN.toml)"),
        (["train", "no.toml"], "error: there is no run file no.toml"),
        (["train", "no.toml", "--dryrun"], "error: unknown option --dryrun; did you mean --dry-run?"),
        (["train", "--resume", "d", "--steps", "5"], "error: --resume goes on with the run's own configuration"),
        (["train", "run.toml", "--dry-run", "--replay", "r"], "error: --dry-run reads no rollouts"),
        (["train", "run.toml", "--steps", "0"], "error: steps is 0; steps must be an integer >= 1"),
        (["train", "run.toml", "--lr", "1"], "error: unknown key lr; the nearest keys are trainer.lr"),
        (["rollout", "--model", "m", "--prompts", "p.jsonl"], "error: say how answers are scored"),
        (["rollout", "--modle", "m"], "error: unknown option --modle; did you mean --model?"),
    ],
)
def test_bad_input_exits_with_2_and_one_sentence(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith(said)
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


def test_each_problem_of_a_file_has_a_line_of_its_own(
    stretto: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("steps = 0\n" + RUN)
    done = stretto("train", "run.toml", "--lr", "1")
    assert done.returncode == 2
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "error"]


@pytest.mark.parametrize("arguments", [[], ["fly"], ["export", "dir"], ["rollout"], ["train", "-x"], ["doctor", "x"]])
def test_a_bad_command_line_exits_with_2_and_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: stretto")


def test_the_version_is_the_package_s(stretto: Callable[..., CompletedProcess[str]]) -> None:
    done = stretto("--version")
    assert (done.returncode, done.stdout) == (0, f"stretto {package.__version__}\n")


def test_help_of_train_lists_every_key(stretto: Callable[..., CompletedProcess[str]]) -> None:
    done = stretto("train", "--help")
    assert done.returncode == 0
    assert "stretto train --resume RUN_DIR" in done.stdout
    assert all(f"  --{name}  (" in done.stdout for name in keys())


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom stretto.cli import main\n"
        f"try:\n    main({arguments})\nfinally:\n    print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False False"
