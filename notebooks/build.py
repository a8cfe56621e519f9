"""Run every notebook from its percent-format source and write the .ipynb beside it.

    python notebooks/build.py [NAME …]

A notebook that raises stops the build. Execution counts and times are dropped, so that the files change only with content.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def build(source: Path) -> Path:
    """Execute one notebook and write it with its outputs."""
    notebook = jupytext.read(source, fmt="py:percent")  # left to guess, it takes the cell marks for text
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.get("metadata", {}).pop("execution", None)
    notebook.metadata.pop("jupytext", None)
    target = source.with_suffix(".ipynb")
    nbformat.write(notebook, target)
    return target


def main() -> None:
    chosen = sys.argv[1:] or sorted(path.stem for path in HERE.glob("[0-9]*.py"))
    for name in chosen:
        print(f"{build(HERE / f'{name}.py').relative_to(HERE.parent)} runs")


if __name__ == "__main__":
    main()
