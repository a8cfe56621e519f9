"""Notebooks: the .ipynb beside each source has the same cells and no error; each runs (slow), and says what it needs."""

from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(HERE.glob("[0-9]*.py"))
jupytext = pytest.importorskip("jupytext")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_has_the_cells_of_its_source(source):
    mine, built = jupytext.read(source, fmt="py:percent"), jupytext.read(source.with_suffix(".ipynb"))
    assert [cell.source for cell in mine.cells] == [cell.source for cell in built.cells], "run make notebooks"
    outputs = [output for cell in built.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs, "never run"
    assert not [cell for cell in built.cells if "%%" in cell.source]
    assert not [output for output in outputs if output.output_type == "error"]


@pytest.mark.parametrize(
    "source", [path for path in SOURCES if not path.stem.startswith("00")], ids=lambda path: path.stem
)
def test_it_says_what_it_needs_and_ends_by_asserting_what_it_said(source):
    cells = jupytext.read(source, fmt="py:percent").cells
    assert "Needs: " in cells[0].source
    assert "assert " in cells[-1].source


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_runs(source):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, source.name], cwd=HERE, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
