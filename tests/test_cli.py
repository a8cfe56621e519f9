"""The command line parses, calls, prints, and says what is wrong in one line."""

from __future__ import annotations

import pytest

from interp.cli import main


def test_train_leaves_a_checkpoint_curves_and_a_figure(tmp_path, capsys):
    words = ["train", "facts", "--folder", str(tmp_path / "run"), "--n-subjects", "8", "--steps", "4", "--d-model", "16",
             "--batch-size", "16"]  # fmt: skip
    main(words)
    assert {"model", "curves.parquet", "curves.png", "config.json", "provenance.json"} == {
        path.name for path in (tmp_path / "run").iterdir()
    }
    assert "held_out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--resume"):
        main(words)
    main([*words, "--resume"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "nonsense", "--folder", "x"],
            "task 'nonsense' is not allowed; allowed: 'facts', 'induction', 'copy'",
        ),
        (["train", "facts", "--folder", "x", "--n-subjects", "1"], "n_subjects=1"),
    ],
)
def test_errors_are_one_line(words, message):
    with pytest.raises(SystemExit, match=message):
        main(words)


def test_sweep_prints_its_cost_leaves_a_page_and_says_how_to_go_on(tmp_path, capsys, monkeypatch, shipped):
    monkeypatch.setattr("interp.report.sweep_inputs.shipped", lambda: shipped)  # prompts are tokenized once
    words = ["sweep", "shipped", "--pairs", "4", "--sites", "attn_out+ffn_out", "--folder", str(tmp_path / "sweep")]
    main([*words, "--dry-run"])
    said = capsys.readouterr().out
    assert "4 prompt pairs, layer × role of attn_out+ffn_out" in said and "denoising: 8 cells" in said
    assert not (tmp_path / "sweep").exists()
    with monkeypatch.context() as patch:
        patch.setattr("interp.sweep.execute.Job._run", _interrupt)
        with pytest.raises(SystemExit, match="what had finished is kept; the same command goes on"):
            main(words)
    main(words)
    assert f"wrote {tmp_path / 'sweep' / 'index.html'}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="holds results already"):
        main(words)


def _interrupt(*_):
    raise KeyboardInterrupt


def test_info_names_versions_and_sites(capsys):
    main(["info"])
    out = capsys.readouterr().out
    assert "torch" in out and "0.attn_out" in out
