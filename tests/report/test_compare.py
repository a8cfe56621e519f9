"""The parity table: equal where it must be, too far when a number is wrong, and the page and exit code that follow."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from interp.bridges import compare as module
from interp.bridges.compare import Case, cases, compare
from interp.cli import main
from interp.model import attention
from interp.report.compare import build, summary

pytest.importorskip("transformers")
pytest.importorskip("transformer_lens")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A whole page of one family, its path, and its table."""
    folder = tmp_path_factory.mktemp("compare") / "page"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HEADS", {"MHA": 4, "GQA": 2})
        page, too_far = build(folder, ["Qwen3", "torch"], progress=False)
    return page, too_far, pd.read_parquet(folder / "parity.parquet")


def test_cases_are_every_family_type_and_grouping():
    every = cases()
    assert len(every) == 2 * (2 + 4 * 3) and Case("Llama", "MQA", "float64") in every
    assert {case.heads for case in every if case.layernorm} == {"MHA"}
    tolerances = {(case.layernorm, case.dtype): case.tolerance for case in every}
    assert tolerances == {
        (True, "float32"): 1e-4,
        (False, "float32"): 1e-4,
        (True, "float64"): 1e-9,
        (False, "float64"): 1e-6,
    }
    with pytest.raises(ValueError, match="family 'T5' is not allowed; allowed: GPT-2"):
        cases(["T5"])


def test_every_shared_site_is_equal(small):
    _page, too_far, table = small
    assert too_far == 0 and set(table["verdict"]) <= {"equal", "peer not finite", "not offered"}
    equal = table[table["verdict"] == "equal"]
    assert (equal["relative"] <= equal["tolerance"]).all() and equal["largest"].gt(0).all()
    assert equal["layers"].ge(1).all()
    assert set(table["peer"]) == {"transformers", "TransformerLens", "torch.nn.Transformer"}
    lens = set(table.loc[table["peer"] == "TransformerLens", "site"])
    assert {
        "scores",
        "pattern",
        "q_rot",
        "head_out",
        "norm1_hat",
        "ffn_up",
        "resid_mid",
        "final_scale",
        "logits",
    } <= lens
    assert set(table["padding"]) == {"none", "left", "right"}
    loud = equal[(equal["dtype"] == "float64") & (equal["relative"] > 1e-9)]
    assert len(loud) and loud["note"].str.contains("float32").all()
    torches = equal[(equal["peer"] == "torch.nn.Transformer") & (equal["dtype"] == "float64")]
    assert torches["relative"].max() < 1e-12 and {"decoder.resid_cross", "decoder.resid_cross_sum"} <= set(
        torches["site"]
    )
    rows = summary(table)
    assert rows["rows"].sum() == len(table) and rows["too far"].sum() == 0


def test_the_page_says_so(small):
    page, _, _table = small
    text = page.read_text()
    assert "The same numbers as the models people have" in text and "Qwen3, float64" not in text
    assert text.count("<img") == 3 and "0 above their tolerance" in text
    assert "whatever the model" in text  # the note on float32 casts
    assert {path.name for path in page.parent.glob("*.png")} == {
        "transformers.png", "transformerlens.png", "torch_nn_transformer.png",
    }  # fmt: skip
    with pytest.raises(FileExistsError, match="never overwritten"):
        build(page.parent, ["Qwen3", "torch"], progress=False)


def test_a_wrong_number_is_too_far_and_the_exit_code_says_so(tmp_path, monkeypatch):
    original = attention.softmax_or_zero
    monkeypatch.setattr(attention, "softmax_or_zero", lambda scores: original(scores) * 1.001)
    monkeypatch.setattr(module, "HEADS", {"MHA": 4})
    monkeypatch.setattr(module, "DTYPES", {"float32": torch.float32})
    with pytest.raises(SystemExit, match="comparisons are above their tolerance"):
        main(["compare", "--folder", str(tmp_path / "page"), "--families", "Llama"])
    table = pd.read_parquet(tmp_path / "page" / "parity.parquet")
    for peer in ("transformers", "TransformerLens"):
        rows = table[table["peer"] == peer]
        assert {"pattern", "z", "logits"} <= set(rows.loc[rows["verdict"] == "too far", "site"])
        assert "norm1" in set(rows.loc[rows["verdict"] == "equal", "site"]) or rows["layers"].max() > 1


def test_the_same_seed_gives_the_same_table():
    a, b = (pd.DataFrame(module._torch(3)) for _ in range(2))
    assert a.equals(b) and not a.equals(pd.DataFrame(module._torch(4)))
    assert callable(compare)
