"""The README's Python runs as it stands, and its commands exist."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_in_the_readme_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"pooled accuracy 0\.\d+", printed)


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
