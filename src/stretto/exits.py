"""How a command ends: its exit code, and what it says when something went wrong."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable

from stretto.errors import RunError

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

# The machine's state and not a bug: a traceback would only hide the sentence.
_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


def exit_code(verb: Callable[[], int]) -> int:
    """Call `verb` and return its exit code; an exception is reported on standard error and becomes one.

    ValueError (the user's input) is 2; RunError, a full or read-only disk, and bugs are 1; Ctrl-C is 130. Only bugs
    show a traceback, unless STRETTO_DEBUG=1 asks for it always.
    """
    try:
        return verb()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ValueError as error:
        if speaks():
            _complain(error, "error: ")
        return BAD_INPUT
    except RunError as error:
        _complain(error, _prefix())
        return FAILED
    except OSError as error:
        if error.errno not in _MACHINE:
            traceback.print_exc()
        else:
            _complain(error, _prefix())
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED


def speaks() -> bool:
    """Whether this process says what all ranks of a torchrun group would say: one on each host does."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0


def _prefix() -> str:
    rank = os.environ.get("RANK", "0")
    return "error: " if rank == "0" else f"error (rank {rank}): "


def _complain(error: Exception, prefix: str) -> None:
    from stretto.config import ConfigError

    if os.environ.get("STRETTO_DEBUG") == "1":
        traceback.print_exc()
    message = str(error) or type(error).__name__
    # Each line of a ConfigError is a problem of its own.
    lines = message.splitlines() if isinstance(error, ConfigError) else [message]
    for line in lines:
        print(f"{prefix}{line}", file=sys.stderr)
    if _is_foreign(error):
        print("(STRETTO_DEBUG=1 shows where this was raised)", file=sys.stderr)


def _is_foreign(error: Exception) -> bool:
    """Whether it was raised outside this package: then the message may mean little without its place."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and not frames[-1][0].f_globals.get("__name__", "").startswith("stretto.")
