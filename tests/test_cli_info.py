"""`interp info`: what is printed, and which models it opens."""

from __future__ import annotations

import pytest

from interp import ModelConfig, Transformer, save
from interp.cli import main
from interp.cli.info import aligned

CONFIG = ModelConfig(vocab=11, n_layers=2, n_heads=4, n_kv_heads=2, d_model=16, n_ctx=12, ffn="swiglu", d_ff=24, norm="rmsnorm",
                     positions="rotary", bias=False)  # fmt: skip


def printed(capsys, *words: str) -> str:
    main(["info", *words])
    return capsys.readouterr().out


def line(text: str, start: str) -> list[str]:
    """The words of the first line that starts so."""
    return next(one for one in text.splitlines() if one.strip().startswith(start)).split()


def test_without_a_model_versions_and_the_shipped_one(capsys):
    text = printed(capsys)
    assert "torch" in text and "the toy model" in text and "0.attn_out" in text
    assert line(text, "all")[1] == "133,184"
    assert "torch" not in printed(capsys, "shipped").splitlines()[0]


def test_a_saved_folder_with_sizes_of_ones_own(capsys, tmp_path):
    folder = save(Transformer(CONFIG), tmp_path / "model")
    text = printed(capsys, str(folder), "--length", "5", "--batch", "2")
    assert "batch 2, 5 tokens" in text
    assert "2 × 4 × 5 × 5" in text and line(text, "FFN")[1:3] == ["46.1", "kFLOP"]  # 2·3·16·24 · 2 layers · 10 tokens
    assert line(text, "patch sweep of resid_pre, layer × position, fast")[8] == "10"
    assert "nan" not in text.lower() and "<NA>" not in text


def test_a_folder_of_transformers(capsys, tmp_path):
    pytest.importorskip("transformers")
    from interp import to_huggingface

    to_huggingface(Transformer(CONFIG)).save_pretrained(tmp_path / "theirs")
    capsys.readouterr()  # what saving shows
    text = printed(capsys, str(tmp_path / "theirs"))
    assert line(text, "all")[1] == f"{sum(p.numel() for p in Transformer(CONFIG).parameters()):,}"


def test_what_cannot_be_opened_is_named_without_asking_the_hub(tmp_path, monkeypatch):
    def ask(*_):
        raise AssertionError("asked for a path that is no hub name")

    monkeypatch.setattr("interp.cli.info.from_huggingface", ask)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "missing"), "./missing", "runs", "runs/missing", "/no/such/model"):
        with pytest.raises(SystemExit, match=r"not allowed|cannot be opened"):
            main(["info", name])


def test_a_name_that_the_hub_does_not_know_says_what_is_allowed(monkeypatch):
    def ask(name):
        raise OSError(f"{name} is not a model\nand more lines")

    monkeypatch.setattr("interp.cli.info.from_huggingface", ask)
    with pytest.raises(
        SystemExit, match=r"model 'nobody/nothing' cannot be opened: nobody/nothing is not a model; allowed: .*hub name"
    ):
        main(["info", "nobody/nothing"])


def test_too_long_is_refused_by_name():
    with pytest.raises(SystemExit, match=r"length=9 is not allowed; allowed: 1 … 8 \(n_ctx\)"):
        main(["info", "shipped", "--length", "9"])


def test_numbers_stand_to_the_right_and_marks_take_no_room():
    lines = aligned(["book", "bytes"], [["x̂", "7 B"], ["xW1", "1.5 kB"]])
    assert lines == ["  book   bytes", "  x̂        7 B", "  xW1   1.5 kB"]
