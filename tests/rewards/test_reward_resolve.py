"""Names that cannot be loaded say what to do; the builtins score."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from reward_helpers import DEADLINE_S, FILE, example

from stretto.config.sections import RewardConfig
from stretto.rewards import RewardPool, Sample
from stretto.rewards.adapters import adapt
from stretto.rewards.resolve import resolve


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/file.py:f", "there is no file .*missing/file.py"),
        (f"{FILE}:simpel", "no 'simpel'; it has simple"),
        (f"{FILE}:NOT_CALLABLE", "is a int, not a function"),
        ("no_such_module.sub:f", "no module 'no_such_module'"),
        ("json.no_such_part:f", "no module 'json.no_such_part'"),
        ("json:dumsp", "no 'dumsp'; it has dump, dumps"),
        ("math_verfy", "did you mean math_verify"),
        ("f.py:", "not a name of the form"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(name)


def test_a_module_function_is_found_also_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_here.py").write_text("def f(completion): return 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert resolve("rewards_here:f")(completion="x") == 2


@pytest.mark.parametrize("body", ["raise KeyError('from the file')", "import nothing_like_this", "raise SystemExit(3)"])
def test_check_shows_the_traceback_of_an_import_that_raises(tmp_path: Path, body: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(f"{body}\n")
    pool = RewardPool(RewardConfig(functions=[f"{file}:f"]))
    with pool, pytest.raises(ValueError, match="could not be imported") as raised:
        pool.check()
    assert body in str(raised.value)


def test_check_says_when_importing_kills_the_worker(tmp_path: Path) -> None:
    file = tmp_path / "deadly.py"
    file.write_text("import os\nos._exit(5)\n")
    pool = RewardPool(RewardConfig(functions=[f"{file}:f"]))
    with pool, pytest.raises(ValueError, match=r"died while it was importing .*deadly\.py"):
        pool.check()


@pytest.mark.parametrize(("name", "package"), [("math_verify", "math-verify"), ("reasoning_gym", "reasoning-gym")])
def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"needs the package {name}, .* pip install {package}$"):
        resolve(name)


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("27", "so it is $27$", 1.0),
        ("27", "23 + 4 = 28", 0.0),
        ("2\\pi", "the answer is $2$", 0.0),
        ("2\\pi", "the answer is $2 \\pi$", 1.0),
        ("$\\frac{1}{2}$", "0.5", 1.0),
        ("1,000", "\\boxed{1000}", 1.0),
        (5, "", 0.0),
        ("5", "\\frac{{", 0.0),
    ],
)
def test_math_verify_compares_expressions(answer: object, completion: str, reward: float) -> None:
    assert resolve("math_verify")(completion, answer) == reward


def test_math_verify_refuses_an_expected_answer_without_an_expression() -> None:
    with pytest.raises(ValueError, match="no expression in the expected answer"):
        resolve("math_verify")("5", "")


def test_builtins_score_in_a_worker(open_pool: Callable[..., RewardPool]) -> None:
    import reasoning_gym

    args = {"size": 3, "seed": 1}
    entry = reasoning_gym.create_dataset("chain_sum", **args)[0]
    right, fields = entry["answer"], {"answer": entry["answer"]}
    fields["reasoning_gym"] = {"dataset": "chain_sum", "args": args, "entry": entry}
    texts = [right, f"so <answer> {right} </answer>", "<answer>nothing</answer>", "999999"]
    samples = [Sample("q", text, (1,), fields) for text in texts]
    with RewardPool(RewardConfig(functions=["reasoning_gym", "math_verify", example("other_simple")])) as pool:
        pool.check(columns=fields)
        scores = pool.submit(samples).result(DEADLINE_S)
    assert [score.parts["reasoning_gym"] for score in scores] == [1.0, 1.0, 0.0, 0.0]
    assert [score.parts["math_verify"] for score in scores] == [1.0, 1.0, 0.0, 0.0]


def test_builtins_say_which_column_they_miss() -> None:
    with pytest.raises(ValueError, match=r"`answer`.* gold"):
        adapt(resolve("math_verify"), "math_verify").check_columns(["gold"])
