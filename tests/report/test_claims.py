"""The claims page and the command: verdicts printed, what was not run said, everything escaped and reachable."""

import pandas as pd
import pytest

from interp.claims import CLAIMS, confusion, decide
from interp.cli import main
from interp.report import claims as page


@pytest.fixture
def found():
    return decide({**confusion.most_tables(2 / 3, 0), **confusion.special_tables(0.4, 0), **confusion.alignment_tables(0.95, 0),
                   **confusion.depth_tables(True, 0)})  # fmt: skip


def test_lines_and_markdown_have_a_row_per_hypothesis(found):
    names = [one.id for claim in CLAIMS for one in claim.hypotheses]
    lines = page.lines(found)
    assert [line.split()[0] for line in lines] == names
    special = next(line for line in lines if line.startswith("F2.special"))
    assert "supported" in special and "n = 10" in special and "(Holm 0.02" in special
    rows = page.markdown(found).splitlines()
    assert len(rows) == 2 + len(names)
    assert any("**F2.special** | supported" in row for row in rows)
    assert any("F4.language** | not run |  |  |  |" in row for row in rows)


def test_the_command_measures_decides_and_writes_a_page(tmp_path, capsys):
    main(["claims", "--only", "F1", "--folder", str(tmp_path), "--engine", "serial"])
    out = capsys.readouterr().out
    assert "F1.blocks" in out and f"wrote {tmp_path / 'quick.html'}" in out
    html = (tmp_path / "quick.html").read_text()
    for text in ("FFN parameters encode most of the factual knowledge", "What was not run",
                 "Would have refuted it", "interp claims --profile standard --only F1.blocks"):  # fmt: skip
        assert text in html
    table = pd.read_csv(tmp_path / "quick.csv")
    assert (table["outcome"] == "not run").sum() == len(table) - 2
    main(["claims", "--show", "--folder", str(tmp_path)])  # decides again from what is there
    assert "F1.blocks" in capsys.readouterr().out


def test_figures_and_tables_stand_beside_their_verdicts(found, tmp_path):
    for claim in CLAIMS:
        for one in claim.hypotheses:
            if found.verdicts[one.id].outcome == "not run":
                continue
            tables = {name: found.tables[name] for name in one.studies}
            if one.figure is not None and one.id in ("F2.special", "A3.mass", "R5.language"):
                one.figure(tables).savefig(tmp_path / f"{one.id}.png")
            if one.shown is not None and one.id == "A3.mass":
                assert len(one.shown(tables)) == 6


def test_an_unknown_name_is_one_clear_line(capsys):
    with pytest.raises(SystemExit, match=r"interp: only='F7' is not allowed; allowed: "):
        main(["claims", "--only", "F7"])
