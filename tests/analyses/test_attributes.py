"""Attribute rate and extraction against the stream's own numbers, and where they are known by construction."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from interp import Inputs, ModelConfig, Transformer, Zero, run
from interp.analyses.attributes import attribute_rate, extraction, rates
from interp.analyses.joint_metric import TraceError
from interp.tasks.facts import Prompts

L, V = 3, 17


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(
        vocab=V, n_layers=L, n_heads=2, d_model=12, n_ctx=8, norm="rmsnorm", ffn="swiglu", positions="rotary"
    )
    return Transformer(config, seed=2).double().eval()


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    tokens = torch.randint(0, V, (5, 6), generator=torch.Generator().manual_seed(3))
    roles = {
        "subject": torch.tensor([1, 1, 2, 2, 1]),
        "subject_last": torch.tensor([2, 1, 3, 4, 2]),
        "final": torch.full((5,), 5),
    }
    table = pd.DataFrame({"fact": range(10, 15), "subject": list("abcde")})
    return Prompts(Inputs(tokens, roles=roles), torch.arange(5), table)


SETS = {"a": [0, 1, 2], "b": [3], "c": [4, 5, 6, 7], "d": [8, 9], "e": [1, 10, 11]}


def top(model: Transformer, stream: torch.Tensor, k: int) -> list[set[int]]:
    """The k largest logits of each vector, by the model's weights: RMSNorm without ε's help, gain, unembedding."""
    norm = model.final_norm
    hat = stream / (stream.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt() * norm.weight
    logits = (hat @ model.weight("W_U")).detach().numpy()
    return [set(np.argsort(-row)[:k].tolist()) for row in logits]


@pytest.mark.parametrize("cut", [None, "ffn_out", "attn_out"])
def test_rates_are_those_of_the_stream(model, prompts, cut):
    table = attribute_rate(model, prompts, SETS, k=4, knock_out=cut, window=3, layers=[0, 2], batch=2)
    rows, where = torch.arange(5), prompts.inputs.roles["subject_last"]
    for centre in range(L) if cut else [None]:
        span = [] if centre is None else [one for one in (centre - 1, centre, centre + 1) if 0 <= one < L]
        got = run(
            model, prompts.inputs, record="resid_post", change=[Zero(f"{one}.{cut}", at="subject_last") for one in span]
        )
        for layer in (0, 2):
            here = table[table["layer"] == layer]
            here = here[here["knocked_layer"] == centre] if cut else here
            best = top(model, got.cache[f"{layer}.resid_post"][rows, where], 4)
            wanted = [len(set(SETS[name]) & found) / 4 for name, found in zip("abcde", best, strict=True)]
            assert here.sort_values("example")["rate"].tolist() == wanted
            assert here["clipped"].eq(bool(cut) and len(span) < 3).all()
    assert len(table) == 5 * 2 * (L if cut else 1)
    assert table[table["example"] == 2]["chance"].eq(4 / V).all() and table["knocked"].eq(cut or "none").all()


def test_a_planted_attribute_has_rate_one_and_a_token_that_does_not_count_none(model, prompts):
    got = run(model, prompts.inputs, record="0.resid_post")
    best = top(model, got.cache["0.resid_post"][torch.arange(5), prompts.inputs.roles["subject_last"]], 2)
    table = attribute_rate(model, prompts, [sorted(one) for one in best], k=2, layers=[0])
    assert (table["rate"] == 1).all()
    dropped = next(iter(best[0]))
    counted = torch.ones(V, dtype=torch.bool)
    counted[dropped] = False
    table = attribute_rate(model, prompts, [sorted(one) for one in best], k=2, layers=[0], counted=counted)
    assert table["rate"][0] == 0.5 and table["chance"][0] == 2 / (V - 1)


def test_the_other_subject_is_never_the_same(model, prompts):
    alike = {name: [0, 1, 2] for name in "abcde"}
    assert (attribute_rate(model, prompts, alike, k=17)["other_rate"] == 0).all()  # nothing is left of an equal set
    table = attribute_rate(model, prompts, SETS, k=17, seed=4)
    assert (table["rate"] == [len(SETS["abcde"[i]]) / 17 for i in table["example"]]).all() and (
        table["other_rate"] > 0
    ).any()
    again = attribute_rate(model, prompts, SETS, k=17, seed=4)
    pd.testing.assert_frame_equal(table, again)


def test_extraction_reads_each_sublayer(model, prompts):
    table = extraction(model, prompts, batch=2)
    assert len(table) == 5 * 2 * L
    got = run(model, prompts.inputs, record=["attn_out", "ffn_out"])
    predicted = got.logits[:, -1].argmax(-1).tolist()
    for site in ("attn_out", "ffn_out"):
        for layer in range(L):
            best = [next(iter(one)) for one in top(model, got.cache[f"{layer}.{site}"][:, -1], 1)]
            here = table[(table["site"] == site) & (table["layer"] == layer)].sort_values("example")
            assert here["top"].tolist() == best and here["predicted"].tolist() == predicted
            assert here["extracts"].tolist() == [a == b for a, b in zip(best, predicted, strict=True)]
    for _, rows in table.groupby(["example", "site"]):
        assert rows["first"].sum() == rows["extracts"].any()
        assert (
            not rows["extracts"].any()
            or rows.loc[rows["first"], "layer"].item() == rows.loc[rows["extracts"], "layer"].min()
        )


def test_a_model_of_one_ffn_extracts_there():
    """Zero attention and a zero embedding stream: the last FFN's output is the stream, so it has the prediction on top."""
    config = ModelConfig(
        vocab=V, n_layers=2, n_heads=2, d_model=12, n_ctx=8, norm="rmsnorm", ffn="swiglu", positions="rotary"
    )
    model = Transformer(config, seed=5).double().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.zero_()
            block.ffn.down.weight.mul_(1e6)
        model.blocks[0].ffn.down.weight.mul_(1e-12)
    tokens = torch.tensor([[1, 2, 3, 4]])
    inputs = Inputs(tokens, roles={"subject": torch.tensor([1]), "subject_last": torch.tensor([2])})
    held = Prompts(inputs, torch.tensor([0]), pd.DataFrame({"fact": [0]}))
    table = extraction(model, held)
    assert table[(table["site"] == "ffn_out") & (table["layer"] == 1)]["extracts"].item()


def test_only_the_first_layer_that_extracts_is_first(prompts):
    config = ModelConfig(
        vocab=V, n_layers=L, n_heads=2, d_model=12, n_ctx=8, norm="rmsnorm", ffn="swiglu", positions="rotary"
    )
    model = Transformer(config, seed=6).double().eval()
    with torch.no_grad():
        model.unembedding.weight.zero_()  # every vector has token 0 on top
    table = extraction(model, prompts)
    assert table["extracts"].all() and (table["first"] == (table["layer"] == 0)).all()


def test_rates_by_hand():
    table = pd.DataFrame({"fact": [1, 1, 2], "layer": [0, 0, 0], "rate": [0.0, 1.0, 1.0]})
    (row,) = rates(table, "rate", ["layer"]).to_dict("records")
    assert row["mean"] == 0.75 and row["n"] == 2 and row["high"] - 0.75 == pytest.approx(12.706204736 * 0.25)


def test_refusals(model, prompts):
    for options, said in (
        ({"k": 0}, "k=0 is not allowed; allowed: 1 … 17"),
        ({"knock_out": "z"}, "knock_out='z'"),
        ({"knock_out": "ffn_out", "window": 2}, "window=2 is not allowed"),
        ({"layers": [5]}, "layers=\\[5\\]"),
        ({"counted": torch.ones(3)}, "counted must be bool \\[17\\]"),
    ):
        with pytest.raises(TraceError, match=said):
            attribute_rate(model, prompts, SETS, **{"k": 3, **options})
    with pytest.raises(TraceError, match="no attributes for subject 'a'"):
        attribute_rate(model, prompts, {"b": [1]}, k=3)
    with pytest.raises(TraceError, match="one per prompt, 5"):
        attribute_rate(model, prompts, [[1]], k=3)
    with pytest.raises(TraceError, match="token ids 0 … 16"):
        attribute_rate(model, prompts, [[99]] * 5, k=3)
    with pytest.raises(TraceError, match="lacks column"):
        rates(pd.DataFrame({"fact": []}), "rate", ["layer"])
