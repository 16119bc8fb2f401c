"""Recorded rollouts: written bit by bit, and trained on without an engine."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import lines, metrics, write_run
from transformers import AutoTokenizer

import stretto
from stretto.cli import main
from stretto.config import load_config
from stretto.orchestration.model import Model
from stretto.orchestration.sources import read_groups
from stretto.types import FinishReason, Rollout, Version, VersionSpan

IDS = st.integers(0, 2**31)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    length = draw(st.integers(0, 5))
    return Rollout(
        prompt_ids=tuple(draw(st.lists(IDS, max_size=4))),
        response_ids=tuple(draw(st.lists(IDS, min_size=length, max_size=length))),
        logprobs_T=tuple(draw(st.lists(FLOATS, min_size=length, max_size=length))),
        loss_mask_T=tuple(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))),
        temperature=draw(FLOATS),
        finish_reason=draw(st.sampled_from(FinishReason)),
        version_spans=tuple(
            VersionSpan(Version(*pair), 0, length) for pair in draw(st.lists(st.tuples(IDS, IDS), max_size=2))
        ),
        group_id=draw(IDS),
        seed=draw(st.integers(0, 2**63 - 1)),
        source_row=draw(IDS),
        reward=draw(st.none() | FLOATS),
        reward_parts=draw(st.dictionaries(st.text(), FLOATS, max_size=3)),
    )


def bits(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


@given(rollouts())
def test_a_rollout_survives_json_bit_by_bit(rollout: Rollout) -> None:
    line = rollout.to_json()
    assert "\n" not in line
    read = Rollout.from_json(line)
    assert read == rollout
    assert bits(read.logprobs_T) == bits(rollout.logprobs_T)
    assert isinstance(read.version_spans[0].version if read.version_spans else Version(0, 0), Version)
    assert isinstance(read.finish_reason, FinishReason)


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of the first 9 prompts, three samples each; a run file and its data lie beside them."""
    directory = tmp_path_factory.mktemp("recorded")
    write_run(directory, tiny_model)
    out = directory / "rollouts.jsonl"
    words = ["rollout", "--model", tiny_model, "--prompts", directory / "rows.jsonl", "--out", out, "--limit", 9]
    words += ["--reward", f"{directory}/reward.py:letters", "--samples", 3, "--max-new-tokens", 5, "--seed", 4]
    assert main([str(word) for word in words]) == 0
    return out


def model_of(directory: Path) -> Model:
    return Model(directory, AutoTokenizer.from_pretrained(directory), 256)


def test_the_command_records_scored_groups_of_the_first_prompts(recorded: Path, tiny_model: Path) -> None:
    groups = read_groups(recorded, model_of(tiny_model))
    assert [len(group) for group in groups.values()] == [3] * 9
    assert [group[0].source_row for group in groups.values()] == list(range(9))
    assert all(len({one.seed for one in group}) == 3 for group in groups.values())
    assert all(one.reward is not None and one.logprobs_T for group in groups.values() for one in group)


def test_recorded_rollouts_are_trained_on_without_an_engine(recorded: Path, tiny_model: Path, tmp_path: Path) -> None:
    run_file = write_run(tmp_path, tiny_model, checkpoint={"every": 1, "keep": 5})
    for name in ("rows.jsonl", "reward.py"):
        (tmp_path / name).unlink()  # nobody may ask for them
    assert main(["train", str(run_file), "--replay", str(recorded)]) == 0
    run_dir = tmp_path / "run"
    measured = metrics(run_dir)
    assert sorted(measured) == [0, 1, 2], "nine groups are two steps of four prompts"
    groups = list(read_groups(recorded, model_of(tiny_model)).values())
    for step in (1, 2):
        samples = [one for group in groups[4 * step - 4 : 4 * step] for one in group]
        rewards = [one.reward for one in samples if one.reward is not None]
        assert measured[step]["reward/mean"] == pytest.approx(sum(rewards) / 12)
        assert measured[step]["rollout/response_length_mean"] == sum(len(one.response_ids) for one in samples) / 12
        assert measured[step]["train/grad_norm"] > 0
    assert measured[1]["mismatch/logprob_diff_max"] < 1e-5, "the recording model is the one that is trained"
    # Going on from its first checkpoint reads the recording again.
    shutil.rmtree(run_dir / "checkpoints" / "step_00000002")
    assert main(["train", "--resume", str(run_dir)]) == 0
    assert metrics(run_dir) == measured


def test_a_replay_of_the_samples_of_a_step_is_that_step(recorded: Path, tiny_model: Path, tmp_path: Path) -> None:
    """The gradient is a function of the record alone: the log-probs, not the engine, are what is trained on."""
    run_file = write_run(
        tmp_path,
        tiny_model,
        steps=1,
        seed=4,
        data={"heldout": 0, "shuffle": False},
        eval=None,
        rollout={"prompts_per_step": 9, "samples_per_prompt": 3, "max_new_tokens": 5},
    )
    live = stretto.train(load_config(run_file, ["--name", "live"]))
    replayed = stretto.train(load_config(run_file, ["--name", "replayed"]), replay=recorded)
    first, second = (metrics(result.run_dir)[1] for result in (live, replayed))
    assert {name: first[name] for name in second if not name.startswith("sync/")} == {
        name: value for name, value in second.items() if not name.startswith("sync/")
    }


def spoilt(recorded: Path, directory: Path, **changes: object) -> Path:
    records = lines(recorded)
    records[1] |= changes
    path = directory / "spoilt.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": None}, "line 2: the rollout has no reward; record with stretto rollout --reward"),
        ({"reward": "high"}, "line 2: the reward is 'high', not a finite number"),
        ({"reward": float("nan")}, "line 2: the reward is nan, not a finite number"),
        ({"logprobs_T": [float("nan")] * 5}, "line 2: the log-prob is nan, not a finite number"),
        ({"logprobs_T": [-1.0]}, "line 2: a rollout needs one log-prob and one mask value per response token"),
        ({"finish_reason": "tired"}, "line 2: 'tired' is not a valid FinishReason"),
        ({"version_spans": 3}, "line 2: not a recorded rollout"),
        (
            {"response_ids": [9999] * 5, "logprobs_T": [-1.0] * 5, "loss_mask_T": [1] * 5},
            "line 2: token id 9999 is outside the model's vocabulary of 98",
        ),
        ({"prompt_ids": []}, "line 2: a rollout needs a prompt and a response of at least one token each"),
        ({"prompt_ids": [5] * 300}, "line 2: prompt and response are longer than the model's 256 tokens"),
        ({"prompt_ids": [5, 6]}, "line 2: group 0 has two prompts: were two recordings put into one file?"),
        ({"loss_mask_T": [1, 1, 2, 1, 1]}, "line 2: loss_mask_T has values other than 0 and 1"),
        ({"temperature": 0}, "line 2: the temperature is 0, not a number above 0"),
        ({"tokenizer": "another"}, "line 2: recorded with another tokenizer"),
    ],
)
def test_a_spoilt_record_is_named(
    changes: dict[str, object],
    said: str,
    recorded: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_file = write_run(tmp_path, tiny_model)
    assert main(["train", str(run_file), "--replay", str(spoilt(recorded, tmp_path, **changes))]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_recording_of_too_few_groups_is_refused(
    recorded: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run(tmp_path, tiny_model, rollout={"prompts_per_step": 10})
    assert main(["train", str(run_file), "--replay", str(recorded)]) == 2
    assert "holds 9 groups of recorded rollouts, fewer than rollout.prompts_per_step = 10" in capsys.readouterr().err
