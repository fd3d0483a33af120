"""Imports point downwards, and importing the library is cheap and silent."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "types": 0,
    "tree": 0,
    "data": 1,
    "models": 1,
    "hypernetwork": 2,
    "finetuning": 2,
    "algorithms": 3,
    "simulation": 4,
    "inference": 5,
    "analysis": 5,
    "io": 5,
    "experiments": 6,
}
# Files and rooms that io may know: the vocabulary, and what it writes.
IO_MAY_IMPORT = {"types", "tree", "data", "io"}


def rooms_imported(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[0] == "experiments":
                rooms.add("experiments")
            elif parts[0] == "fedjax_tp" and len(parts) > 1:
                rooms.add(parts[1])
    return rooms & LAYERS.keys()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "fedjax_tp").rglob("*.py")), ids=lambda p: p.stem
)
def test_imports_point_downwards(path):
    inside = path.relative_to(ROOT / "fedjax_tp")
    room = inside.parts[0].removesuffix(".py")
    if room == "__init__":
        assert "io" not in rooms_imported(path)
        assert "experiments" not in rooms_imported(path)
    elif room == "io":
        assert rooms_imported(path) <= IO_MAY_IMPORT
    else:
        assert all(LAYERS[r] <= LAYERS[room] for r in rooms_imported(path))
        assert "io" not in rooms_imported(path)


def test_importing_the_library_loads_nothing_heavy():
    code = (
        "import sys, fedjax_tp; heavy = {'tensorflow', 'tensorflow_datasets', "
        "'matplotlib', 'orbax', 'sklearn', 'PIL'}; print(heavy & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_every_public_function_says_what_it_does():
    missing = []
    for path in (ROOT / "fedjax_tp").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if not is_definition or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None:
                missing.append(f"{path.name}:{node.name}")
    assert missing == []
