from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from stretto import doctor
from stretto.doctor import Check, Requirement, can_train, render, report, requirements


def test_doctor_says_that_training_can_run_here(stretto: Callable[..., CompletedProcess[str]]) -> None:
    done = stretto("doctor")
    assert done.returncode == 0, done.stdout
    for part in ("python", "torch", "transformers", "smollm2", "wandb", "cache"):
        assert re.search(rf"(?m)^(ok|note) +{part} ", done.stdout), part
    assert done.stdout.endswith("Training can run here.\n")


def test_every_declared_requirement_is_looked_at() -> None:
    declared = [line for line in metadata.requires("stretto") or [] if 'extra == "dev"' not in line]
    assert [requirement.package for requirement in requirements()] == [re.split("[>;]", line)[0] for line in declared]
    assert all(requirement.minimum != "0" for requirement in requirements())
    assert {requirement.extra for requirement in requirements()} == {
        None,
        "data",
        "rewards",
        "tensorboard",
        "wandb",
        "demo",
        "megatron",
        "ray",
    }
    assert {requirement.package for requirement in requirements()} <= {check.part for check in report()}


@pytest.mark.parametrize(
    ("requirement", "purpose"),
    [
        (Requirement("megatron-core", "0.16", "megatron"), 'trainer.backend = "megatron"'),
        (Requirement("einops", "0.8", "megatron"), 'trainer.names = "bridge"'),
    ],
)
def test_packages_of_megatron_say_what_they_are_for(
    monkeypatch: pytest.MonkeyPatch, requirement: Requirement, purpose: str
) -> None:
    monkeypatch.setattr(doctor, "requirements", lambda: [requirement])
    (check,) = (check for check in report() if check.part == requirement.package)
    assert f"(for {purpose})" in check.found


def test_a_missing_bridge_has_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.bridges, "installed_bridges", lambda: None)
    (check,) = (check for check in report() if check.part == "megatron-bridge")
    assert not check.ok
    assert not check.required
    assert check.fix == "pip install --no-deps megatron-bridge"


@pytest.mark.parametrize(
    ("requirement", "found", "fix"),
    [
        (Requirement("no-such-package", "1.2", None), "not installed", "pip install 'no-such-package>=1.2'"),
        (Requirement("pytest", "999.1", None), "is older than 999.1", "pip install 'pytest>=999.1'"),
        (
            Requirement("no-such-package", "1", "wandb"),
            "not installed (for telemetry.wandb)",
            "pip install 'no-such-package>=1'",
        ),
    ],
)
def test_a_missing_or_old_package_has_its_fix(
    monkeypatch: pytest.MonkeyPatch, requirement: Requirement, found: str, fix: str
) -> None:
    monkeypatch.setattr(doctor, "requirements", lambda: [requirement])
    check = next(check for check in report() if check.part == requirement.package)
    assert not check.ok
    assert found in check.found
    assert check.fix == fix
    assert can_train(report()) is (requirement.extra is not None)


def test_only_what_training_needs_decides_the_verdict() -> None:
    optional = Check("wandb", False, "not installed", "pip install it")
    needed = Check("torch", False, "not installed", "pip install torch", required=True)
    assert can_train([optional])
    assert not can_train([optional, needed])
    text = render([optional, needed]).splitlines()
    assert text[0].split() == ["note", "wandb", "not", "installed"]
    assert text[3].split() == ["fix:", "pip", "install", "torch"]
    assert text[-1] == "Training cannot run here: mend what says FAIL."


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRETTO_CACHE", "/proc/stretto")
    text = render(report())
    assert re.search(r"(?m)^note +cache +/proc/stretto: .*\n +fix: export STRETTO_CACHE=", text)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "new" / "deep"))
    assert re.search(rf"(?m)^ok +cache +{tmp_path}/new/deep: ", render(report()))


def test_more_threads_than_cores_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    (check,) = (check for check in report() if check.part == "threads")
    assert not check.ok
    assert "export OMP_NUM_THREADS=" in check.fix
