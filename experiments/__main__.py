"""Lists the experiments: `python -m experiments`."""

import ast
import pkgutil
from pathlib import Path

import experiments

_PLUMBING = {
    "__main__",
    "cli",
    "driver",
    "flags",
    "host_kept",
    "lab",
    "launch",
    "looks",
    "results",
    "setup",
    "sweep",
    "trained",
}
_PLUMBING |= {"bench.timing", "bench.torch_fedtp"}
_PLUMBING |= {
    f"quantized.{name}" for name in ("clients", "language", "qa", "sentiment")
}


def describe() -> list[tuple[str, str]]:
    """(module, first line of its docstring) for each experiment, by name."""
    found = []
    for module in pkgutil.walk_packages(experiments.__path__, "experiments."):
        name = module.name.removeprefix("experiments.")
        if module.ispkg or name in _PLUMBING:
            continue
        path = Path(experiments.__path__[0], *name.split(".")).with_suffix(".py")
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        found.append((module.name, (docstring or "").splitlines()[0]))
    return found


if __name__ == "__main__":
    rows = describe()
    width = max(len(name) for name, _ in rows)
    for name, question in rows:
        print(f"python -m {name:<{width}}  {question}")
