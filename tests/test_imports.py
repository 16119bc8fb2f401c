"""DESIGN section 4: imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "stretto"

BOTTOM = {"types", "config", "errors", "files", "lifeline", "memory"}
MIDDLE = {"algorithms", "models", "sync", "data", "rewards"}
SIDES = BOTTOM | MIDDLE | {"telemetry", "world"}
EVERYTHING_BUT_THE_COMMAND = SIDES | {"trainers", "engines", "orchestration", ""}
# What each part may import beside itself; "" is the package itself (`stretto.train`).
ALLOWED = {
    **dict.fromkeys(BOTTOM, BOTTOM),
    "world": {"lifeline"},
    **dict.fromkeys(MIDDLE, BOTTOM | MIDDLE),
    "sync": BOTTOM | MIDDLE | {"world"},
    "telemetry": BOTTOM | {""},
    "trainers": SIDES,
    "engines": SIDES,
    "orchestration": EVERYTHING_BUT_THE_COMMAND,
    "": EVERYTHING_BUT_THE_COMMAND,
    "exits": BOTTOM,
    "doctor": BOTTOM | MIDDLE,
    "cli": EVERYTHING_BUT_THE_COMMAND | {"exits", "doctor"},
    "__main__": {"cli"},
}


def violations(source: Path) -> list[str]:
    """`file: part imports part` for each import below `source` (the package) that points the wrong way."""
    found: list[str] = []
    for path in sorted(source.rglob("*.py")):
        module = _module(path.relative_to(source))
        part = module.split(".")[0]
        for target in _imports(ast.parse(path.read_text()), module, path.name == "__init__.py", source):
            if target != part and target not in ALLOWED.get(part, set()):
                found.append(f"{path.relative_to(source)}: {part or 'stretto'} imports {target or 'stretto'}")
    return found


def _module(path: Path) -> str:
    """Dotted name below the package: `engines/base.py` is engines.base, `__init__.py` is empty."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST, module: str, is_package: bool, source: Path) -> Iterator[str]:
    """The parts that a file imports, wherever in it: at its top, in a function or for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            # `from stretto import cli` names a part where `from stretto import train` does not.
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "stretto" else [base]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "stretto":
                part = rest.split(".")[0]
                yield part if (source / part).is_dir() or (source / f"{part}.py").is_file() else ""


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    here = ["stretto", *module.split(".")] if module else ["stretto"]
    up = node.level - (1 if is_package else 0)
    parents = here[: len(here) - up] if up else here
    return ".".join([*parents, *((node.module or "").split(".") if node.module else [])])


def test_imports_point_one_way() -> None:
    assert violations(SOURCE) == []


def test_every_part_has_a_rule() -> None:
    parts = {_module(path.relative_to(SOURCE)).split(".")[0] for path in SOURCE.rglob("*.py")}
    assert parts <= set(ALLOWED), "say in ALLOWED what the new part may import"


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("algorithms/policy.py", "from stretto.trainers.fsdp import step", "algorithms imports trainers"),
        ("trainers/fsdp.py", "import stretto.engines.base", "trainers imports engines"),
        ("engines/base.py", "from stretto.orchestration import launch", "engines imports orchestration"),
        ("types.py", "def f():\n    from stretto.data import load", "types imports data"),
        ("config/run.py", "if TYPE_CHECKING:\n    from stretto.models import find", "config imports models"),
        ("rewards/pool.py", "from stretto import telemetry", "rewards imports telemetry"),
        ("sync/plan.py", "from ..engines import base", "sync imports engines"),
        ("data/__init__.py", "from .. import telemetry", "data imports telemetry"),
        ("orchestration/launch.py", "from stretto.cli import main", "orchestration imports cli"),
        ("models/llama.py", "from stretto import train", "models imports stretto"),
        ("errors.py", "from stretto import cli", "errors imports cli"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, line: str, said: str) -> None:
    for part in ("telemetry", "engines", "trainers", "orchestration", "models", "data", "algorithms"):
        (tmp_path / part).mkdir()
    (tmp_path / "cli.py").write_text("from stretto import train\nimport stretto.orchestration.launch\nimport torch\n")
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    assert violations(tmp_path) == [f"{file}: {said}"]


@pytest.mark.parametrize("module", ["stretto", "stretto.types", "stretto.config", "stretto.errors", "stretto.cli"])
def test_the_bottom_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}\nprint([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"
