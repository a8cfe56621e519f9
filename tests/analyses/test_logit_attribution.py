"""Logit attribution: rows against the model's own logits, each against the formula written out."""

from __future__ import annotations

import pytest
import torch
from stream_cases import CASES, case

from interp import run
from interp.analyses.logit_attribution import AttributionError, direct_logit_attribution
from interp.hookable import UnsupportedModelError

CORRECT, WRONG = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 2])


def sums(table) -> torch.Tensor:
    return torch.tensor(table.groupby("example")["attribution"].sum().tolist(), dtype=torch.float64)


def truth(model, inputs, wrong) -> torch.Tensor:
    logits = run(model, inputs).logits[torch.arange(3), inputs.last()].double()
    chosen = logits[torch.arange(3), CORRECT]
    return chosen if wrong is None else chosen - logits[torch.arange(3), wrong]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", CASES)
def test_the_rows_add_up_to_the_models_logits(name, dtype, limit):
    model, inputs = case(name, dtype)
    for wrong in (None, WRONG):
        for by in ("component", "head", "source", "neuron"):
            if by == "neuron" and name == "no ffn":
                continue
            table = direct_logit_attribution(model, inputs, CORRECT, wrong, by=by, top=3)
            assert (sums(table) - truth(model, inputs, wrong)).abs().max() < limit, by


def test_each_row_is_the_formula_written_out():
    """Centre, divide by the cached σ, times gain, times the difference of unembedding columns."""
    model, inputs = case("layernorm, b_U")
    names = ["1.resid_post", "0.head_out", "1.ffn_out", "embed"]
    cache = run(model, inputs, record=names).cache
    at = (torch.arange(3), inputs.last())
    stream = cache["1.resid_post"][at]
    sigma = (stream.var(-1, correction=0) + model.config.norm_eps).sqrt()
    direction = (model.W_U[:, CORRECT] - model.W_U[:, WRONG]).T

    def hand(part):
        return ((part - part.mean(-1, keepdim=True)) / sigma[:, None] * model.final_norm.weight * direction).sum(-1)

    table = direct_logit_attribution(model, inputs, CORRECT, WRONG, by="head")
    rows = {
        name: torch.tensor(part["attribution"].tolist(), dtype=torch.float64)
        for name, part in table.groupby("component")
    }
    expected = {
        "embed": hand(cache["embed"][at]),
        "0.head3": hand(cache["0.head_out"][at][:, 3]),
        "1.b_O": hand(model.blocks[1].attention.b_O.expand(3, -1)),
        "1.ffn": hand(cache["1.ffn_out"][at] - model.blocks[1].ffn.b_out),
        "norm offset": direction @ model.final_norm.bias,
        "b_U": model.b_U[CORRECT] - model.b_U[WRONG],
    }
    for name, value in expected.items():
        assert torch.allclose(rows[name], value.detach(), atol=1e-12), name
    assert table["kind"].unique().tolist() == [
        "embed", "position", "head", "attention bias", "ffn", "ffn bias", "final norm offset", "unembedding bias"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["tied, gelu", "grouped, rotary, rmsnorm, gated"])
def test_neurons_are_a_split_of_their_ffn_and_the_rest_is_kept(name):
    model, inputs = case(name)
    whole = direct_logit_attribution(model, inputs, CORRECT, WRONG).set_index(["component", "example"])["attribution"]
    every = direct_logit_attribution(model, inputs, CORRECT, WRONG, by="neuron", top=None)
    assert (every["kind"] == "neuron").sum() == 3 * 2 * 12 and not (every["kind"] == "other neurons").any()
    some = direct_logit_attribution(model, inputs, CORRECT, WRONG, by="neuron", layers=[1], top=4)
    assert set(some.loc[some["kind"] == "ffn", "layer"]) == {0}
    act = run(model, inputs, record="1.ffn_act").cache["1.ffn_act"][torch.arange(3), inputs.last()]
    for example in range(3):
        rows = every[(every["example"] == example) & (every["layer"] == 1) & (every["kind"] == "neuron")]
        assert rows["attribution"].sum() == pytest.approx(whole["1.ffn", example], abs=1e-12)
        best = rows.loc[rows["attribution"].abs().sort_values(ascending=False).index][:4]
        kept = some[(some["example"] == example) & (some["kind"] == "neuron")]
        assert kept["neuron"].tolist() == best["neuron"].tolist()
        rest = some[(some["example"] == example) & (some["kind"] == "other neurons")]["attribution"].item()
        assert rest == pytest.approx(rows["attribution"].sum() - best["attribution"].sum(), abs=1e-12)
        silent = rows[rows["neuron"].map(lambda i, example=example: float(act[example, i]) == 0)]
        assert not silent["attribution"].any(), "what did not fire wrote nothing"


def test_sources_are_a_split_of_their_head_with_the_token_read():
    model, inputs = case("encoder-decoder")
    words = [f"w{i}" for i in range(13)]
    heads = direct_logit_attribution(model, inputs, 1, 2, by="head").set_index(["component", "example"])["attribution"]
    table = direct_logit_attribution(model, inputs, 1, 2, by="source", tokenizer=words)
    for kind, name in (("head", "1.head2"), ("cross head", "0.cross_head1")):
        rows = table[(table["kind"] == kind) & table["component"].str.startswith(f"{name}[") & (table["example"] == 1)]
        assert rows["attribution"].sum() == pytest.approx(heads[name, 1], abs=1e-12)
        read = inputs.source if kind == "cross head" else inputs.tokens
        assert rows["source_token"].tolist() == [f"w{int(i)}" for i in read[1]]


def test_an_earlier_stream_keeps_the_last_streams_scale():
    model, inputs = case("layernorm, b_U")
    whole = direct_logit_attribution(model, inputs, 1, 2)
    early = direct_logit_attribution(model, inputs, 1, 2, site="0.resid_post")
    merged = early.merge(whole, on=["example", "component"])
    assert len(merged) == len(early) < len(whole) and not early["component"].str.startswith("1.").any()
    assert (merged["attribution_x"] - merged["attribution_y"]).abs().max() < 1e-12


class Capped:
    """A model that squashes its logits, which no sum of attributions can follow."""

    def __init__(self, model) -> None:
        self.model, self.sites, self.config = model, model.sites, model.config
        self.can_resume, self.additive_stream, self.weight = False, True, model.weight

    def __call__(self, inputs, tap=None):
        return self.model(inputs, tap).tanh()

    def unembed(self, stream):
        return self.model.unembed(stream).tanh()


def test_refusals(model, tokens):
    with pytest.raises(AttributionError, match="the rows miss the model's logits"):
        direct_logit_attribution(Capped(model), tokens, 1, 2)
    with pytest.raises(AttributionError, match="by='layer' is not allowed; allowed: 'component', 'head'"):
        direct_logit_attribution(model, tokens, 1, 2, by="layer")
    with pytest.raises(AttributionError, match=r"layers=\[0\] goes with by='neuron'"):
        direct_logit_attribution(model, tokens, 1, 2, layers=[0])
    with pytest.raises(AttributionError, match=r"layer\(s\) \[2\]; allowed: 0, 1"):
        direct_logit_attribution(model, tokens, 1, 2, by="neuron", layers=[2])
    with pytest.raises(AttributionError, match="allowed: 0 … 12"):
        direct_logit_attribution(model, tokens, 13)
    with pytest.raises(AttributionError, match=r"\[batch\] = \(3,\)"):
        direct_logit_attribution(model, tokens, torch.tensor([1, 2]))
    with pytest.raises(AttributionError, match="top=0"):
        direct_logit_attribution(model, tokens, 1, by="neuron", top=0)
    post, inputs = case("layernorm, b_U", norm_position="post")
    with pytest.raises(UnsupportedModelError, match="a norm sits on the stream"):
        direct_logit_attribution(post, inputs, 1, 2)
    bare, inputs = case("no ffn", head=False)
    with pytest.raises(UnsupportedModelError, match="no unembedding"):
        direct_logit_attribution(bare, inputs, 1, 2)


def test_an_encoders_stream_ends_in_no_head():
    model, inputs = case("encoder-decoder")
    with pytest.raises(AttributionError, match="does not end in the head"):
        direct_logit_attribution(model, inputs, 1, 2, site="encoder.0.resid_post")
