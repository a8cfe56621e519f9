"""The command line parses, calls, prints, and says what is wrong in one line."""

from __future__ import annotations

import pytest

from interp.cli import main
from interp.training import open_run


def test_train_leaves_a_checkpoint_curves_and_a_figure(tmp_path, capsys):
    words = ["train", "facts", "--folder", str(tmp_path / "run"), "--task.n-subjects", "8", "--steps", "4", "--model.d-model",
             "16", "--model.bias", "True", "--betas", "0.9", "0.95", "--batch-size", "16", "--keep", "2"]  # fmt: skip
    main(words)
    assert {"model", "curves.parquet", "curves.png", "config.json", "provenance.json", "samples.csv", "steps", "index.html",
            "runs.csv", "all_curves.parquet"} == {path.name for path in (tmp_path / "run").iterdir()}  # fmt: skip
    assert "held_out" in capsys.readouterr().out
    opened = open_run(tmp_path / "run")
    assert opened.kept == (0, 1, 4) and opened.config.betas == (0.9, 0.95) and opened.task.n_subjects == 8
    assert opened.model.config.d_model == 16 and "qkv" in opened.model.config.bias
    with pytest.raises(SystemExit, match="--resume"):
        main(words)
    main([*words, "--resume"])


def test_several_seeds_are_trained_together_and_compared(tmp_path, capsys):
    words = ["train", "induction", "--steps", "2", "--batch-size", "4", "--model.d-model", "16", "--model.n-heads", "2"]
    main([*words, "--folder", str(tmp_path / "three"), "--seeds", "3", "--seed", "5"])
    said = capsys.readouterr().out
    assert "seed_0006: second_copy" in said and "0 of 3 runs learned" in said and "stacked" in said
    main([*words, "--folder", str(tmp_path / "one"), "--learning-rate", "0.1"])
    main(["runs", str(tmp_path / "three"), str(tmp_path / "one"), "--page", str(tmp_path / "page")])
    page = (tmp_path / "page" / "index.html").read_text()
    assert "three/seed_0007" in page and "train.learning rate" in page.replace("_", " ")
    with pytest.raises(SystemExit, match=r"no finished training run in .*empty"):
        main(["runs", str(tmp_path / "empty")])


def test_train_lists_its_tasks(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train"])
    said = capsys.readouterr().out
    assert "facts-4096" in said and "made-up people" in said and "n_subjects=4096" in said
    with pytest.raises(SystemExit, match="0"):
        main(["train", "dyck", "--help"])
    said = capsys.readouterr().out
    assert "--task.depth" in said and "--model.norm-position" in said and "--weight-decay" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "nonsense", "--folder", "x"],
            "task 'nonsense' is not allowed; allowed: 'facts', 'induction', 'copy'",
        ),
        (["train", "facts", "--folder", "x", "--seeds", "0"], "seeds=0 is not allowed"),
        (
            ["train", "facts", "--folder", "x", "--device", "abacus"],
            "device 'abacus' cannot be used; allowed: 'auto', 'cpu'",
        ),
        (["train", "facts", "--folder", "x", "--model.n-heads", "3"], "n_heads=3 is not allowed"),
        (["train", "facts", "--folder", "x", "--learning-rate", "-1"], "learning_rate=-1"),
        (["train", "facts", "--folder", "x", "--task.n-subjects", "1"], "n_subjects=1"),
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
