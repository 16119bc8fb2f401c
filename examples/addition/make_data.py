"""Writes addition.jsonl: one-example addition prompts, every pair of a two-digit and a one-digit number once.

Usage: python examples/addition/make_data.py [OUT.jsonl]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

EXAMPLE = (23, 4)


def rows() -> list[dict[str, str]]:
    """The 899 pairs with X in 10..99 and Y in 0..9, without the worked example, whose answer the prompt gives away."""
    x_example, y_example = EXAMPLE
    head = f"{x_example} + {y_example} = {x_example + y_example}\n"
    pairs = [(x, y) for x in range(10, 100) for y in range(10) if (x, y) != EXAMPLE]
    return [{"prompt": f"{head}{x} + {y} =", "answer": str(x + y)} for x, y in pairs]


def main() -> None:
    """Write the rows to the path given, or beside this file."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("addition.jsonl")
    out.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
