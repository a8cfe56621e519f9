"""Result folders: whole files, provenance, never overwritten."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from interp import record


def test_a_folder_holds_tables_figures_and_provenance(tmp_path):
    class Drawing:
        def savefig(self, path, dpi):
            path.write_bytes(b"png")

    table = pd.DataFrame({"a": [1, 2]})
    folder = record.save(tmp_path / "run", {"t": table}, {"f": Drawing()}, config={"steps": 3}, seed=4)
    assert {path.name for path in folder.iterdir()} == {"t.parquet", "f.png", "provenance.json"}
    assert pd.read_parquet(folder / "t.parquet").equals(table)
    about = json.loads((folder / "provenance.json").read_text())
    assert about["config"] == {"steps": 3} and about["seed"] == 4 and about["rows"] == {"t": 2}
    assert {"commit", "uncommitted", "command", "versions", "machine", "finished"} <= set(about)
    assert about["versions"]["torch"] and about["machine"]["threads"] == 1


def test_results_are_never_overwritten(tmp_path):
    record.save(tmp_path / "run", {"t": pd.DataFrame({"a": [1]})})
    with pytest.raises(FileExistsError, match="never overwritten"):
        record.save(tmp_path / "run", {"t": pd.DataFrame({"a": [2]})})


def test_an_interrupted_write_leaves_the_old_file_and_no_rest(tmp_path):
    path = record.write_text(tmp_path / "x.txt", "old")

    def fails(temporary):
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record.write_atomic(path, fails)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
