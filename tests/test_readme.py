"""The README's Python runs as it stands, and its commands exist."""

import re
from pathlib import Path

import jax

from fedjax_tp import algorithms

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_in_the_readme_runs(capsys, monkeypatch):
    monkeypatch.setattr(algorithms, "REGISTRY", dict(algorithms.REGISTRY))
    first, *others = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(first, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"pooled accuracy 0\.\d+", printed)
    for block in others:
        exec(compile(block, "README.md", "exec"), {})


def test_the_algorithm_that_the_readme_adds_is_a_registered_one(
    monkeypatch, small_task
):
    monkeypatch.setattr(algorithms, "REGISTRY", dict(algorithms.REGISTRY))
    block = README.split("### Adding one")[1].split("```python\n")[1].split("```")[0]
    assert len(block.splitlines()) < 40
    exec(compile(block, "README.md", "exec"), {})
    assert algorithms.resolve("prox_per, fedavg") == ("prox_per", "fedavg")
    setting = algorithms.Setting(small_task, 3)
    added = algorithms.REGISTRY["prox_per"](setting)
    kept = added.init_kept(added.init(jax.random.key(0)))
    assert [leaf.shape for leaf in jax.tree.leaves(kept)] == [(3,), (3, 3)]


def test_every_algorithm_is_in_the_table():
    for name in algorithms.REGISTRY:
        assert f"`{name}`" in README


def test_no_figure_is_missing():
    notes = (Path(__file__).parent.parent / "BUILD_NOTES.md").read_text()
    assert not re.search(r"@[A-Z_]+@", README + notes)


def test_every_experiment_is_in_the_table():
    from experiments.__main__ import describe

    for module, _ in describe():
        assert f"`{module}`" in README


def test_every_make_target_named_exists():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
