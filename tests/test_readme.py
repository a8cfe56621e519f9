"""The README: short, its program runs, its generated parts are current, its files exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short():
    assert TEXT.count("\n") < 180


def test_the_program_of_twelve_lines_runs(capsys):
    programs = [
        code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if code.startswith("import interp")
    ]
    assert len(programs) == 1
    lines = [line for line in programs[0].splitlines() if line.strip()]
    assert len(lines) <= 12
    exec(compile(programs[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "resid_pre" in printed and "subject_last" in printed
    assert float(re.findall(r"tensor\((.*?)\)", printed)[-1]) < 0.7, "cutting the edges to the name loses facts"


def test_generated_parts_are_current():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "experiments" / "readme.py")
    assert spec is not None and spec.loader is not None
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    for file in readme.PARTS:
        assert readme.filled(file) == (ROOT / file).read_text(encoding="utf-8"), "run python experiments/readme.py"


def test_links_and_images_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_encoder_decoder_page_runs(capsys):
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "encoder_decoder.md").read_text(), re.DOTALL)
    assert "steps=150" in program
    exec(compile(program.replace("steps=150", "steps=3, batch_size=8"), "encoder_decoder.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "decoder.cross_out" in printed and "chance" in printed


def test_the_page_on_sweeps_runs(capsys):
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sweeps.md").read_text(), re.DOTALL)
    exec(compile(program, "sweeps.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "32 cells" in printed and "z → receiver" in printed


def test_the_page_on_circuits_runs(capsys):
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "circuits.md").read_text(), re.DOTALL)
    exec(compile(program.replace("range(48)", "range(24)").replace("steps=10", "steps=2"), "circuits.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "of 110 edges" in printed and "CPR" in printed


def test_the_page_on_facts_runs(capsys):
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "facts.md").read_text(), re.DOTALL)
    program = program.replace("range(60)", "range(16)").replace("range(0, 240, 10)", "range(0, 240, 60)")
    exec(compile(program, "facts.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "rank-one ffn" in printed and "attn_out@final" in printed and "same_relation" in printed


def test_the_page_on_training_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, many = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    exec(compile(one.replace("steps=150", "steps=20, batch_size=32, evaluate_every=10"), "training.md", "exec"), {})
    printed = capsys.readouterr().out
    assert (
        "(0, 1, 3, 7, 20)" in printed and "True" in printed and (tmp_path / "runs" / "facts64" / "samples.csv").exists()
    )
    exec(compile(many.replace("steps=30", "steps=3"), "training.md", "exec"), {})
    assert "'seed_1003': (False, 'stacked')" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "runs" / "four").iterdir()} == {
        f"seed_{seed}" for seed in range(1000, 1004)
    }


def test_the_page_on_claims_runs(capsys):
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "claims.md").read_text(), re.DOTALL)
    exec(compile(program, "claims.md", "exec"), {})
    assert "supported" in capsys.readouterr().out
