"""The options that the adapter sets, spelled as SGLang spells them."""

from __future__ import annotations

import argparse


class ServerArgs:
    """As in SGLang."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """As in SGLang."""
        for name in ("model-path", "dtype", "host", "sampling-defaults", "crash"):
            parser.add_argument(f"--{name}")
        for name in ("context-length", "max-running-requests", "port"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--tensor-parallel-size", "--tp-size", dest="tp_size", type=int)
        parser.add_argument("--custom-weight-loader", nargs="*")
        parser.add_argument("--skip-tokenizer-init", action="store_true")
        parser.add_argument("--enable-memory-saver", action="store_true")
