"""What a notebook shows for a run, its cache and a site: the right numbers, and nothing that was not escaped."""

import pickle
import re
from html import unescape

import pytest
import torch

import interp
from interp.display import card, change_text, size, spans
from interp.sites import SITES, Site


def cells(html):
    """The rows of a card's table, as text."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [[unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def lines(html):
    return [unescape(line) for line in re.findall(r"<div>(.*?)</div>", html)]


def test_a_run_lists_what_was_recorded_with_shapes_and_bytes(model, tokens):
    got = interp.run(model, tokens, record=["resid_post", "1.pattern", "final"])
    html = got._repr_html_()
    header, *rows = cells(html)
    assert header == ["site", "layers", "axes", "each", "type", "size"]
    assert sorted(rows) == [
        ["final", "", "[batch position d_model]", "[3 7 16]", "float64", "2.69 kB"],  # 3 · 7 · 16 · 8 bytes = 2,688
        ["pattern", "1", "[batch head query key]", "[3 4 7 7]", "float64", "4.7 kB"],  # 3 · 4 · 7 · 7 · 8 = 4,704
        ["resid_post", "0–1", "[batch position d_model]", "[3 7 16]", "float64", "5.38 kB"],
    ]
    assert lines(html) == [
        "logits [batch pos vocab] = [3 7 13], float64",
        "inputs [3 7] tokens",
        "recorded: 4 sites, 12.8 kB",
    ]
    assert cells(got.cache._repr_html_()) == [header, *rows]


def test_a_run_says_what_was_changed_where_and_with_what(model, tokens):
    other = interp.run(model, tokens, record="0.z")
    inputs = interp.Inputs(
        tokens, mask=torch.arange(7) < torch.tensor([[7], [5], [6]]), roles={"<b>": torch.ones(3).long()}
    )
    changes = [
        interp.KnockOut("0.scores", at=(slice(None), "<b>", [0, 1])),
        interp.Replace("1.z", 0.25, at=(2, slice(1, 3))),
        interp.Add("1.attn_out", torch.ones(16)),
    ]
    got = interp.run(model, inputs, change=changes)
    assert got.changes == (
        "KnockOut(0.scores, at=[:, '<b>', [0, 1]])",
        "Replace(1.z, at=[2, 1:3], value=0.25)",
        "Add(1.attn_out, value=tensor [16])",
    )
    html = got._repr_html_()
    assert "<b>" not in html.replace("<b>Run</b>", "") and "&lt;b&gt;" in html
    assert lines(html)[1:] == [
        "inputs [3 7] tokens, 18 of 21 tokens real; roles: <b>",
        "changed: " + "; ".join(got.changes),
        "nothing recorded",
    ]
    assert interp.run(model, tokens, change=interp.Replace("0.z", other)).changes == ("Replace(0.z, value=Run)",)
    assert pickle.loads(pickle.dumps(got)).changes == got.changes
    assert interp.run(model, tokens).changes == ()


def test_many_changes_are_counted_not_listed(model, tokens):
    got = interp.run(model, tokens, change=[interp.Scale("0.z", 1.0, at=(0, 0, i % 4)) for i in range(15)])
    assert "; … 3 more" in got._repr_html_() and len(got.changes) == 15


def test_a_change_of_the_users_own_never_stops_a_run():
    class Odd(interp.Replace):
        __slots__ = ()

    assert change_text(Odd("embed", object())) == "Odd(embed, value=object)"
    assert change_text(interp.Resample("embed", seed=3)) == "Resample(embed, seed=3, reference=None)"


def test_a_site_shows_symbol_equation_shape_and_its_other_name():
    rows = dict(cells(Site("attn_out", 1)._repr_html_()))
    assert rows == {
        "what it is": "attention's output",
        "book's symbol": "t²",
        "equation": "7.28 of SLP3's draft",
        "shape": "[batch position d_model]",
        "TransformerLens": "blocks.1.hook_attn_out",
    }
    assert "TransformerLens" not in dict(cells(Site("attn_out", 1, "encoder")._repr_html_()))
    assert dict(cells(Site("norm1_scale", 0)._repr_html_()))["shape"] == "[batch position 1]"
    learned = dict(cells(Site("pos_embed")._repr_html_()))
    assert learned["what it is"] == "position embedding (learned or sinusoidal)" and "equation" not in learned
    assert learned["TransformerLens"] == "hook_pos_embed"


@pytest.mark.parametrize("name", SITES)
def test_every_site_shows_itself(name):
    site = Site(name, 3 if SITES[name].per_layer else None)
    html, rows = site._repr_html_(), dict(cells(site._repr_html_()))
    assert f"<b>Site {site}</b>" in html and "what it is" in rows and "blocks.L" not in html
    number = re.search(r"\((7\.\d+)\)", SITES[name].meaning)
    assert rows.get("equation", "").startswith(number[1] if number else "") and ("equation" in rows) == bool(number)


def test_an_encoder_decoders_run_names_the_stacks():
    config = interp.ModelConfig(vocab=9, n_layers=2, n_heads=2, d_model=8, n_ctx=6, kind="encoder-decoder")
    inputs = interp.Inputs(torch.tensor([[1, 2, 3]]), source=torch.tensor([[4, 5, 6, 7]]))
    got = interp.run(interp.Transformer(config, seed=0), inputs, record=["resid_post", "1.cross_pattern"])
    assert sorted(row[:2] + row[3:4] for row in cells(got._repr_html_())[1:]) == [
        ["decoder.cross_pattern", "1", "[1 2 3 4]"],
        ["decoder.resid_post", "0–1", "[1 3 8]"],
        ["encoder.resid_post", "0–1", "[1 4 8]"],
    ]


def test_small_parts():
    assert [size(n) for n in (0, 999, 1000, 999_600, 1_500_000, 2_000_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1 MB",
        "1.5 MB",
        "2 GB",
    ]
    assert spans([5, 0, 1, 2, 7, 8]) == "0–2, 5, 7–8" and spans([]) == ""
    html = card("<i>", ["a & b"], ["<x>"], [["<y>"]])
    assert not re.search(r"<[ixy]>", html) and "a &amp; b" in html and "&lt;y&gt;" in html
    assert "<table" not in card("t", ["s"])
