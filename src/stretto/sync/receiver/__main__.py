"""`python -m stretto.sync.receiver --directory DIR --port N`, beside an engine that publications reach over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from stretto.sync.parcels.calling import KEY
from stretto.sync.parcels.folder import Folder
from stretto.sync.receiver.app import serve


def main() -> int:
    """Serve until the process is told to end. Exit code 2, with a sentence, for what a user can mend."""
    parser = argparse.ArgumentParser(prog="python -m stretto.sync.receiver", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="where parcels go; best in memory (a tmpfs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: on every interface")
    parser.add_argument("--port", type=int, default=0, help="port to listen at; a free one when left out")
    parser.add_argument("--key-file", type=Path, help=f"file with the key, when it is not in {KEY}")
    words = parser.parse_args()
    try:
        key = _key(words.key_file)
        folder = Folder(words.directory.resolve())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        serve(folder, key, words.host, words.port)
    except OSError as error:
        print(f"error: cannot listen at {words.host}:{words.port}: {error.strerror}", file=sys.stderr)
        return 2
    finally:
        folder.close()
    return 0


def _key(file: Path | None) -> str:
    """What the trainer has to know. ValueError when there is none."""
    try:
        key = os.environ.get(KEY, "") if file is None else file.read_text()
    except OSError as error:
        raise ValueError(f"cannot read the key in {file}: {error.strerror}") from error
    if not key.strip():
        raise ValueError(f"there is no key: set {KEY}, here and where the trainer runs, to a secret of your own")
    return key.strip()


if __name__ == "__main__":
    sys.exit(main())
