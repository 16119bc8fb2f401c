"""What a run does with its samples: every prompt, token and failed reward is accounted for."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from run_helpers import ROWS, lines, tokens_of, trained_rows, write_run

import stretto
from stretto.config import load_config
from stretto.errors import RunError

FAILING = """
def letters(completion):
    if completion[:1].isupper():
        raise KeyError("no such answer")
    if completion[:1].isdigit():
        return float("nan")
    return sum(c.isalpha() for c in completion) / max(1, len(completion))

def never(completion):
    return None
"""


def test_every_prompt_is_trained_on_once_an_epoch_and_no_heldout_one_ever(whole_run: Path) -> None:
    heldout = {sample["row"] for sample in lines(whole_run / "samples.jsonl") if sample["kind"] == "eval"}
    assert len(heldout) == 4
    consumed = [row for _, rows in sorted(trained_rows(whole_run).items()) for row in rows]
    rest = sorted(set(range(len(ROWS))) - heldout)
    assert (sorted(consumed[:20]), sorted(consumed[20:40])) == (rest, rest)
    assert consumed[:20] != consumed[20:40], "every epoch has an order of its own"
    assert len(consumed) == 48


def test_tokens_add_up_in_every_line(whole_run: Path) -> None:
    generated = 0.0
    for line in lines(whole_run / "metrics.jsonl")[1:]:
        generated += line["rollout/response_length_mean"] * 16
        assert line["tokens/generated"] == round(generated)
        assert line["tokens/generated"] == line["tokens/trained"] + line["tokens/dropped"] + line["tokens/in_flight"]
        assert (line["tokens/dropped"], line["tokens/in_flight"]) == (0, 0)


@pytest.fixture(scope="module")
def failing_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose reward fails for some samples; every sample of it is in samples.jsonl."""
    run_file = write_run(
        tmp_path_factory.mktemp("failing"),
        tiny_model,
        steps=4,
        reward={"max_failed_share": 1.0},
        rollout={"samples_per_prompt": 3},
        telemetry={"samples_per_step": 100},
    )
    (run_file.parent / "reward.py").write_text(FAILING)
    return stretto.train(load_config(run_file)).run_dir


def by_step_and_row(run_dir: Path, kind: str) -> dict[int, dict[int, list[dict[str, Any]]]]:
    found: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for sample in lines(run_dir / "samples.jsonl"):
        if sample["kind"] == kind:
            found[sample["step"]][sample["row"]].append(sample)
    return found


def test_a_failed_sample_shrinks_its_group_and_a_group_below_two_is_dropped(failing_run: Path) -> None:
    measured = {line["step"]: line for line in lines(failing_run / "metrics.jsonl")}
    ledger = {line["step"]: line for line in lines(failing_run / "ledger.jsonl")}
    tokens: Counter[str] = Counter()
    shrunk = small = 0
    for step, groups in by_step_and_row(failing_run, "train").items():
        reasons: Counter[str] = Counter()
        trained = []
        for row, samples in groups.items():
            good = [sample for sample in samples if sample["failure"] is None]
            tokens["generated"] += sum(map(tokens_of, samples))
            reasons.update(f"reward_{sample['failure']['kind']}" for sample in samples if sample["failure"])
            if len(good) >= 2:
                trained.append(row)
                shrunk += len(good) < 3
                tokens["trained"] += sum(map(tokens_of, good))
            else:
                small += 1
                reasons["group_too_small"] += len(good)
        assert sorted(ledger[step]["trained"]) == sorted(trained)
        assert {k: n for k, n in ledger[step]["dropped"].items() if n} == {k: n for k, n in reasons.items() if n}
        line = measured[step]
        assert (line["tokens/generated"], line["tokens/trained"]) == (tokens["generated"], tokens["trained"])
        assert line["tokens/dropped"] == tokens["generated"] - tokens["trained"]
        assert line["tokens/in_flight"] == 0
        samples = [sample for group in groups.values() for sample in group]
        rewards = [sample["reward"] for sample in samples if sample["failure"] is None]
        assert line["reward/mean"] == pytest.approx(sum(rewards) / len(rewards)), "a failure is never a 0.0"
        assert line["reward/failed_share"] == pytest.approx(1 - len(rewards) / len(samples))
    assert shrunk, "no group shrank"
    assert small, "no group was too small"


def test_a_failed_heldout_sample_is_no_zero(failing_run: Path) -> None:
    measured = {line["step"]: line for line in lines(failing_run / "metrics.jsonl")}
    for step, groups in by_step_and_row(failing_run, "eval").items():
        samples = [sample for group in groups.values() for sample in group]
        assert all((sample["reward"] is None) == (sample["failure"] is not None) for sample in samples)
        rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
        assert measured[step]["eval/failed_share"] == 1 - len(rewards) / len(samples)
        if rewards:
            assert measured[step]["eval/score"] == pytest.approx(sum(rewards) / len(rewards))
        else:
            assert "eval/score" not in measured[step]


def test_a_step_without_a_sample_left_stops_the_run(tmp_path: Path, tiny_model: Path) -> None:
    run_file = write_run(tmp_path, tiny_model, data={"heldout": 0}, eval=None, reward={"max_failed_share": 1.0})
    (tmp_path / "reward.py").write_text(FAILING)
    config = load_config(run_file, ["--reward.functions", f'["{tmp_path}/reward.py:never"]'])
    with pytest.raises(RunError, match=r"step 1 has no sample left to train on.*reward_abstained"):
        stretto.train(config)


def test_rewards_that_are_all_equal_move_nothing(tmp_path: Path, tiny_model: Path) -> None:
    run_file = write_run(tmp_path, tiny_model, steps=2, algorithm={"kl_coef": 0.0})
    (tmp_path / "reward.py").write_text("def letters(completion):\n    return 0.0\n")
    run_dir = stretto.train(load_config(run_file)).run_dir
    for line in lines(run_dir / "metrics.jsonl")[1:]:
        assert (line["reward/zero_variance_share"], line["train/grad_norm"], line["reward/failed_share"]) == (1, 0, 0)
        assert line["reward/mean"] == 0.0
