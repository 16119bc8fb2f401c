from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from stretto.config import ConfigError
from stretto.errors import RunError
from stretto.exits import exit_code


@pytest.fixture(autouse=True)
def _no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "STRETTO_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def ending(error: BaseException) -> int:
    def verb() -> int:
        raise error

    return exit_code(verb)


@pytest.mark.parametrize(
    ("error", "code", "first"),
    [
        (ConfigError("a is 1\nb is 2"), 2, "error: a is 1\nerror: b is 2\n"),
        (ValueError("no such file x"), 2, "error: no such file x\n"),
        (ValueError(), 2, "error: ValueError\n"),
        (RunError("3 bad steps in a row; lower trainer.lr"), 1, "error: 3 bad steps in a row; lower trainer.lr\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            1,
            "error: [Errno 28] No space left on device: '/x'\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_expected_error_has_its_code_and_no_traceback(
    error: BaseException, code: int, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending(error) == code
    said = capsys.readouterr().err
    assert said.startswith(first)
    assert "Traceback" not in said


@pytest.mark.parametrize("error", [TypeError("x"), AssertionError("x"), RuntimeError("x"), OSError(errno.EIO, "x")])
def test_a_bug_shows_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(error) == 1
    assert capsys.readouterr().err.startswith("Traceback")


def test_the_code_of_a_verb_is_the_code_of_the_command() -> None:
    assert [exit_code(lambda: 0), exit_code(lambda: 1)] == [0, 1]


def test_debugging_shows_the_traceback_of_an_expected_error_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRETTO_DEBUG", "1")
    assert ending(RunError("stopped")) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert "error: stopped\n" in said


def test_an_error_from_elsewhere_says_how_to_find_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: int("x")) == 2
    assert "STRETTO_DEBUG=1" in capsys.readouterr().err


def test_one_rank_of_a_group_reports_what_all_of_them_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert ending(ConfigError("a is 1")) == 2
    assert capsys.readouterr().err == ""
    assert ending(RunError("rank 1 lost its disk")) == 1
    assert capsys.readouterr().err.startswith("error (rank 1): rank 1 lost its disk\n")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ending(ConfigError("only this host lacks the file")) == 2
    assert capsys.readouterr().err.startswith("error: only this host lacks the file")


def test_ctrl_c_ends_with_130_and_no_traceback() -> None:
    code = (
        "import sys, time\nfrom stretto.exits import exit_code\n"
        "def verb():\n    print('ready', flush=True)\n    time.sleep(60)\n    return 0\n"
        "sys.exit(exit_code(verb))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "interrupted\n")


def test_a_reader_that_goes_away_is_no_crash() -> None:
    code = (
        "import sys\nfrom stretto.exits import exit_code\n"
        "def verb():\n    sys.stdin.readline()\n    print('x' * 100_000)\n    return 0\n"
        "sys.exit(exit_code(verb))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        os.close(process.stdout.fileno())
        process.stdout = None
        _, said = process.communicate(b"go\n", timeout=60)
    assert (process.returncode, said) == (1, b"")
