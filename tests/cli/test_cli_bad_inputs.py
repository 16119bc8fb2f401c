"""Bad input, row by row: what is wrong, the exit code, and what the command has to say about it.

The command runs in this process, so that torch is imported once. Code 2: the input is wrong and nothing was started;
code 1: a run that had started had to stop.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w

from stretto.cli import main

REWARDS = """
import os, time

def good(completion):
    return sum(c.isalpha() for c in completion) / max(1, len(completion))

def raises(completion):
    raise RuntimeError("no verdict")

def hangs(completion):
    time.sleep(600)

def nan(completion):
    return float("nan")

def short(prompts, completions, **kwargs):
    return [1.0]

def dies(completion):
    os._exit(3)

def text(completion):
    return "good"

def raises_at_times(completion, answer):
    if answer == "a":
        raise RuntimeError("no verdict")
    return 0.5

def grows(completion):
    return time.monotonic()

value = 3
"""


class Bench:
    """A directory with a run that works, for a row of the table to spoil."""

    def __init__(self, path: Path, model: Path, patch: pytest.MonkeyPatch):
        self.path, self.model, self._patch = path, model, patch
        (path / "rewards.py").write_text(REWARDS)
        self.rows([{"prompt": f"{a}{b}", "answer": a} for a in "abcdef" for b in "xy"])

    def rows(self, rows: list[Any]) -> None:
        """Replace the data."""
        (self.path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run_file(self, **sections: Any) -> str:
        """A run file with `sections` laid over those that work."""
        usual: dict[str, Any] = {
            "steps": 2,
            "run_dir": str(self.path / "run"),
            "model": {"path": str(self.model)},
            "data": {"source": "rows.jsonl"},
            "reward": {"functions": ["rewards.py:good"]},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 3},
            "trainer": {"lr": 1e-3},
            "checkpoint": {"every": 1},
        }
        for name, value in sections.items():
            usual[name] = {**usual.get(name, {}), **value} if isinstance(value, dict) else value
        path = self.path / "run.toml"
        path.write_text(tomli_w.dumps(usual))
        return str(path)

    def train(self, **sections: Any) -> list[str]:
        """The words of `stretto train` on such a run file."""
        return ["train", self.run_file(**sections)]

    def reward(self, name: str, **settings: Any) -> list[str]:
        """... whose reward is the function `name` of rewards.py."""
        return self.train(reward={"functions": [f"rewards.py:{name}"], **settings})

    def without(self, package: str) -> Bench:
        """The same where `package` is not installed."""
        self._patch.setitem(sys.modules, package, None)
        return self

    def rollout(self, *words: str) -> list[str]:
        """The words of a `stretto rollout` that works, and `words`."""
        source, reward = self.path / "rows.jsonl", f"{self.path / 'rewards.py'}:good"
        usual = ["--model", str(self.model), "--prompts", str(source), "--reward", reward, "--max-new-tokens", "2"]
        return ["rollout", *usual, *words]

    def copy_of_model(self) -> Path:
        """A copy of the model to spoil."""
        return Path(shutil.copytree(self.model, self.path / "model"))

    def finished_run(self) -> Path:
        """A run of two steps that ended well."""
        assert main(self.train()) == 0
        return self.path / "run"


@pytest.fixture
def bench(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, tiny_model, monkeypatch)


def no_run_file(bench: Bench) -> list[str]:
    return ["train", str(bench.path / "absent.toml")]


def broken_toml(bench: Bench) -> list[str]:
    (bench.path / "run.toml").write_text('name = "x"\nsteps = = 3\n')
    return ["train", str(bench.path / "run.toml")]


def data_line_is_no_json(bench: Bench) -> list[str]:
    (bench.path / "rows.jsonl").write_text('{"prompt": "a", "answer": "a"}\n{"prompt": "b", \n')
    return bench.train()


def empty_data(bench: Bench) -> list[str]:
    bench.rows([])
    return bench.train()


def missing_column(bench: Bench) -> list[str]:
    bench.rows([{"promt": "a", "answer": "a"}])
    return bench.train()


def row_without_a_column(bench: Bench) -> list[str]:
    bench.rows([{"prompt": "a", "answer": "a"}, {"prompt": "b"}])
    return bench.train()


def reward_wants_a_column(bench: Bench) -> list[str]:
    bench.rows([{"prompt": "a"}, {"prompt": "b"}])
    return bench.reward("raises_at_times")


def over_long_prompt(bench: Bench) -> list[str]:
    bench.rows([{"prompt": "a", "answer": "a"}, {"prompt": "abcdefgh", "answer": "b"}])
    return bench.train(data={"max_prompt_tokens": 5})


def filter_leaves_nothing(bench: Bench) -> list[str]:
    return bench.train(data={"max_prompt_tokens": 1, "over_long": "drop"})


def model_without_config(bench: Bench) -> list[str]:
    (directory := bench.copy_of_model()).joinpath("config.json").unlink()
    return bench.train(model={"path": str(directory)})


def model_with_broken_config(bench: Bench) -> list[str]:
    (directory := bench.copy_of_model()).joinpath("config.json").write_text("{")
    return bench.train(model={"path": str(directory)})


def truncated_weights(bench: Bench) -> list[str]:
    weights = (directory := bench.copy_of_model()) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return bench.train(model={"path": str(directory)})


def weights_that_do_not_fit(bench: Bench) -> list[str]:
    config = (directory := bench.copy_of_model()) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 4, "layer_types": None}))
    return bench.train(model={"path": str(directory)})


def model_without_tokenizer(bench: Bench) -> list[str]:
    for file in (directory := bench.copy_of_model()).glob("tokenizer*"):
        file.unlink()
    return bench.train(model={"path": str(directory)})


def directory_below_a_file(bench: Bench) -> list[str]:
    return bench.train(run_dir=str(bench.path / "rewards.py" / "run"))


def directory_of_another_run(bench: Bench) -> list[str]:
    bench.finished_run()
    return bench.train()


def resume_of_no_run(bench: Bench) -> list[str]:
    (bench.path / "elsewhere").mkdir()
    return ["train", "--resume", str(bench.path / "elsewhere")]


def resume_with_a_torn_state(bench: Bench) -> list[str]:
    state = bench.finished_run() / "checkpoints" / "step_00000002" / "state"
    for file in state.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:2000])
    return ["train", "--resume", str(bench.path / "run")]


def resume_without_metadata(bench: Bench) -> list[str]:
    (bench.finished_run() / "checkpoints" / "step_00000002" / "state" / ".metadata").unlink()
    return ["train", "--resume", str(bench.path / "run")]


def resume_with_a_torn_run_json(bench: Bench) -> list[str]:
    (bench.finished_run() / "checkpoints" / "step_00000002" / "run.json").write_text('{"step": 2, "inc')
    return ["train", "--resume", str(bench.path / "run")]


def resume_with_a_foreign_run_json(bench: Bench) -> list[str]:
    (bench.finished_run() / "checkpoints" / "step_00000002" / "run.json").write_text('{"step": 2}')
    return ["train", "--resume", str(bench.path / "run")]


def export_of_an_absent_step(bench: Bench) -> list[str]:
    return ["export", str(bench.finished_run()), str(bench.path / "out"), "--step", "7"]


def export_onto_something(bench: Bench) -> list[str]:
    (bench.path / "out").mkdir()
    return ["export", str(bench.finished_run()), str(bench.path / "out")]


def broken_replay(bench: Bench) -> list[str]:
    (bench.path / "rollouts.jsonl").write_text('{"prompt_ids": [1]}\n')
    return [*bench.train(), "--replay", str(bench.path / "rollouts.jsonl")]


def rollout_onto_something(bench: Bench) -> list[str]:
    (bench.path / "out.jsonl").write_text("precious")
    return bench.rollout("--out", str(bench.path / "out.jsonl"))


def label_beside_an_answer(bench: Bench) -> list[str]:
    bench.rows([{"prompt": "a", "answer": "long", "final": "short"}])
    return bench.train(data={"label_key": "final"})


class Row(NamedTuple):
    """`make` returns the words of a command that must end with `code` and say every text of `said` on stderr."""

    name: str
    make: Callable[[Bench], list[str]]
    code: int
    said: tuple[str, ...]


TABLE = (
    Row("no run file", no_run_file, 2, ("there is no run file", "absent.toml")),
    Row("TOML syntax", broken_toml, 2, ("run.toml:2: not valid TOML",)),
    Row(
        "unknown key",
        lambda b: b.train(trainer={"lrate": 1.0}),
        2,
        ("unknown key trainer.lrate", "trainer.lr,"),
    ),
    Row("wrong type", lambda b: b.train(steps="5"), 2, ('steps is "5"; steps must be an integer >= 1',)),
    Row("bad range", lambda b: b.train(rollout={"samples_per_prompt": 1}), 2, ("samples_per_prompt is 1", ">= 2")),
    Row("bad choice", lambda b: b.train(algorithm={"loss": "ppo"}), 2, ('algorithm.loss is "ppo"', "ppo_clip")),
    Row(
        "ignored key",
        lambda b: b.train(algorithm={"kl_estimator": "k1"}),
        2,
        ("algorithm.kl_estimator is ignored because algorithm.kl_coef is 0",),
    ),
    Row("missing key", lambda b: b.train(data={"source": ""}), 2, ("data.source",)),
    Row("no data file", lambda b: b.train(data={"source": "no.jsonl"}), 2, ("no.jsonl does not exist",)),
    Row("empty data", empty_data, 2, ("rows.jsonl has no rows",)),
    Row("broken data line", data_line_is_no_json, 2, ("rows.jsonl, line 2: not JSON",)),
    Row("missing column", missing_column, 2, ("rows.jsonl", "promt", "data.prompt_key")),
    Row("row without a column", row_without_a_column, 2, ("row 1", "no column 'answer'")),
    Row("reward wants a column", reward_wants_a_column, 2, ("raises_at_times asks for `answer`",)),
    Row("over-long prompt", over_long_prompt, 2, ("row 1", "8 tokens", "data.max_prompt_tokens = 5")),
    Row(
        "prompt + response too long",
        lambda b: b.train(rollout={"max_new_tokens": 255}),
        2,
        ("the longest prompt has 2 tokens", "rollout.max_new_tokens = 255", "more than the model's 256"),
    ),
    Row("filter leaves nothing", filter_leaves_nothing, 2, ("nothing is left to train on", "max_prompt_tokens")),
    Row("too few for heldout", lambda b: b.train(data={"heldout": 12}), 2, ("data.heldout = 12", "12 distinct")),
    Row(
        "unknown reasoning_gym dataset",
        lambda b: b.train(data={"source": "reasoning_gym:chain_sums"}, reward={"functions": ["reasoning_gym"]}),
        2,
        ("reasoning_gym has no dataset 'chain_sums'", "chain_sum"),
    ),
    Row("no model", lambda b: b.train(model={"path": str(b.path / "gone")}), 2, ("gone is not a directory",)),
    Row("no config.json", model_without_config, 2, ("has no config.json",)),
    Row("broken config.json", model_with_broken_config, 2, ("cannot read", "config.json")),
    Row("truncated weights", truncated_weights, 2, ("cannot load the checkpoint",)),
    Row("weights that do not fit", weights_that_do_not_fit, 2, ("does not fit its model", "layers.3")),
    Row("no tokenizer", model_without_tokenizer, 2, ("cannot load a tokenizer from",)),
    Row("no reward file", lambda b: b.train(reward={"functions": ["no.py:good"]}), 2, ("there is no file", "no.py")),
    Row("no reward function", lambda b: b.reward("god"), 2, ("has no 'god'", "good")),
    Row("reward is no function", lambda b: b.reward("value"), 2, ("'value' is a int, not a function",)),
    Row("reward raises", lambda b: b.reward("raises"), 1, ("reward raises crash", "row ", "no verdict")),
    Row("reward hangs", lambda b: b.reward("hangs", timeout_s=0.2), 1, ("reward hangs timeout", "row ", "0.2 s")),
    Row("reward is NaN", lambda b: b.reward("nan"), 1, ("reward nan not_finite", "row ")),
    Row("reward of wrong length", lambda b: b.reward("short"), 1, ("reward short wrong_length", "row ", "1 values")),
    Row("reward of wrong type", lambda b: b.reward("text"), 1, ("reward text wrong_type", "row ")),
    Row("reward kills its process", lambda b: b.reward("dies"), 1, ("reward dies crash", "row ", "exited with code 3")),
    Row("directory below a file", directory_below_a_file, 2, ("cannot make the run directory",)),
    Row("directory of another run", directory_of_another_run, 2, ("already holds a run", "--resume")),
    Row("resume of no run", resume_of_no_run, 2, ("is not a run directory",)),
    Row("torn state", resume_with_a_torn_state, 2, ("cannot read the checkpoint", "step_00000002")),
    Row("state without metadata", resume_without_metadata, 2, ("cannot read the checkpoint", "step_00000002")),
    Row("torn run.json", resume_with_a_torn_run_json, 2, ("cannot read the checkpoint", "step_00000002")),
    Row("foreign run.json", resume_with_a_foreign_run_json, 2, ("cannot read the checkpoint", "step_00000002")),
    Row("export of an absent step", export_of_an_absent_step, 2, ("no checkpoint of step 7; it has 2",)),
    Row("export onto something", export_onto_something, 2, ("out exists",)),
    Row(
        "plan from an unknown side",
        lambda b: ["plan", str(b.model), "--source", "megatrom:tp=2", "--target", "embedded"],
        2,
        ("there is no side 'megatrom'", "did you mean 'megatron'"),
    ),
    Row(
        "plan with an unknown size",
        lambda b: ["plan", str(b.model), "--source", "fsdp:rank=2", "--target", "embedded"],
        2,
        ("fsdp has no key 'rank'", "did you mean 'ranks'"),
    ),
    Row(
        "plan with sizes that do not divide",
        lambda b: ["plan", str(b.model), "--source", "megatron:tp=4", "--target", "embedded"],
        2,
        ("tp=4 does not divide the model's 2 kv heads",),
    ),
    Row(
        "plan with stages that do not add up",
        lambda b: ["plan", str(b.model), "--source", "megatron:pp=2,pp_layers=2/2", "--target", "embedded"],
        2,
        ("pp_layers adds up to 4 and the model has 3 layers",),
    ),
    Row(
        "plan of no model",
        lambda b: ["plan", str(b.path / "gone"), "--source", "fsdp", "--target", "embedded"],
        2,
        ("gone is neither a checkpoint directory nor a config.json",),
    ),
    Row(
        "plan with a map that is no Python",
        lambda b: [
            *("plan", str(b.model), "--source", "fsdp", "--target", "embedded"),
            *("--map", str(b.path / "rows.jsonl")),
        ],
        2,
        ("rows.jsonl is not a Python file",),
    ),
    Row("new-model of no model", lambda b: ["new-model", str(b.path)], 2, ("has no config.json",)),
    Row("export of no run", lambda b: ["export", str(b.path), str(b.path / "x")], 2, ("has no checkpoint",)),
    Row(
        "no replay file",
        lambda b: [*b.train(), "--replay", str(b.path / "no.jsonl")],
        2,
        ("cannot read the recorded rollouts", "no.jsonl"),
    ),
    Row("label beside an answer", label_beside_an_answer, 2, ("data.label_key = 'final'", "'answer'")),
    Row(
        "no tensorboard",
        lambda b: b.without("tensorboard").train(telemetry={"tensorboard": True}),
        2,
        ("telemetry.tensorboard needs the package tensorboard", "pip install tensorboard"),
    ),
    Row(
        "no wandb",
        lambda b: b.without("wandb").train(telemetry={"wandb": "project"}),
        2,
        ("telemetry.wandb needs the package wandb", "pip install wandb"),
    ),
    Row("rollout onto something", rollout_onto_something, 2, ("out.jsonl exists", "--out")),
    Row(
        "rollout into no directory",
        lambda b: b.rollout("--out", str(b.path / "no" / "out.jsonl")),
        2,
        ("there is no directory", "--out"),
    ),
    Row(
        "rollout below a file",
        lambda b: b.rollout("--out", str(b.path / "rows.jsonl" / "out.jsonl")),
        2,
        ("cannot write", "--out"),
    ),
    Row(
        "rollout with a key it does not read",
        lambda b: b.rollout("--trainer.lr", "1"),
        2,
        ("--trainer.lr does nothing in stretto rollout",),
    ),
    Row("rollout of an unknown key", lambda b: b.rollout("--rollout.stp", "x"), 2, ("unknown key rollout.stp",)),
    Row("broken replay file", broken_replay, 2, ("rollouts.jsonl, line 1: not a recorded rollout",)),
)


@pytest.mark.parametrize("row", TABLE, ids=[row.name.replace(" ", "-") for row in TABLE])
def test_bad_input_ends_with_its_code_and_says_what_is_wrong(
    row: Row, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    words = row.make(bench)
    existed = (bench.path / "run").exists()
    capsys.readouterr()
    assert main(words) == row.code
    complaint = capsys.readouterr().err
    assert all(text in complaint for text in row.said), complaint
    assert 'File "' not in complaint or "rewards.py" in complaint, "no traceback but the reward's own"
    assert existed or row.code == 1 or not (bench.path / "run").exists(), "bad input leaves nothing behind"


def test_rollouts_go_to_a_new_file_and_a_failure_before_the_first_leaves_none(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    out = bench.path / "out.jsonl"
    assert main(bench.rollout("--out", str(out), "--data.prompt_key", "no_such_column")) == 2
    assert "no_such_column" in capsys.readouterr().err
    assert not out.exists()
    assert main(bench.rollout("--out", str(out), "--samples", "2", "--rollout.stop", '["a"]', "--limit", "3")) == 0
    assert len(out.read_text().splitlines()) == 6


def test_rollout_in_several_processes_is_refused(bench: Bench) -> None:
    out = bench.path / "out.jsonl"
    words = ["--nproc-per-node", "2", "-m", "stretto", *bench.rollout("--out", str(out))]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "stretto rollout runs in one process, not 2" in done.stderr
    assert not out.exists()


def test_failures_below_the_share_are_counted_and_never_a_zero(bench: Bench) -> None:
    words = bench.reward("raises_at_times", max_failed_share=0.5)
    run_file = Path(words[1])
    run_file.write_text(run_file.read_text().replace("prompts_per_step = 2", "prompts_per_step = 12"))
    assert main(words) == 0
    for line in (bench.path / "run" / "metrics.jsonl").read_text().splitlines()[1:]:
        measured = json.loads(line)
        assert measured["reward/failed_share"] == pytest.approx(2 / 12)
        assert measured["reward/failed/crash"] == pytest.approx(2 / 12)
        assert (measured["reward/mean"], measured["reward/std"]) == (0.5, 0.0)


class Disk(NamedTuple):
    """A directory whose disk can be filled under a running process, and emptied again."""

    path: Path
    fill: Callable[[int], None]
    mend: Callable[[], None]


def limit_files(pid: int) -> None:
    """Let the process write no file that is as long as a checkpoint's."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, 50_000))


def fill_with(filler: Path) -> None:
    """Leave room on the disk for metrics, but not for a checkpoint."""
    with open(filler, "wb", buffering=0) as file:
        file.write(bytes(max(0, shutil.disk_usage(filler.parent).free - 300_000)))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A small tmpfs where one can be mounted; elsewhere a limit on the size of files fails writes the same way."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        yield Disk(path, limit_files, lambda: None)
        return
    filler = path / "filler"
    yield Disk(path, lambda _: fill_with(filler), filler.unlink)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def run_until_full(bench: Bench, disk: Disk, mark: str, **sections: Any) -> Path:
    """Fill the disk under a run as soon as `mark` exists in its directory; the run must end with 1 and a sentence."""
    run_dir = disk.path / "run"
    run_file = bench.run_file(steps=300, run_dir=str(run_dir), **sections)
    command = [sys.executable, "-m", "stretto", "train", run_file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while not (run_dir / mark).exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        disk.fill(process.pid)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "could not be written" in said
    assert "Traceback" not in said
    assert not list(run_dir.rglob(".writing-*")), "what could not be finished takes no room"
    return run_dir


def test_a_full_disk_stops_the_run_and_costs_no_checkpoint(bench: Bench, disk: Disk) -> None:
    run_dir = run_until_full(bench, disk, "checkpoints/latest.json", checkpoint={"every": 2})
    kept = [entry for entry in (run_dir / "checkpoints").iterdir() if entry.name.startswith("step_")]
    assert len(kept) == 1
    disk.mend()
    step = int(kept[0].name.removeprefix("step_"))
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace("steps = 300", f"steps = {step + 2}", 1))
    assert main(["train", "--resume", str(run_dir)]) == 0
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(step + 3))


def test_a_full_disk_costs_no_best_model(bench: Bench, disk: Disk, tiny_model: Path) -> None:
    run_dir = run_until_full(
        bench,
        disk,
        "best/best.json",
        data={"heldout": 2},
        eval={"every": 1},
        checkpoint={"every": 0},
        reward={"functions": ["rewards.py:grows"]},
    )
    weights = (run_dir / "best" / "model.safetensors").stat().st_size
    assert weights == (tiny_model / "model.safetensors").stat().st_size
