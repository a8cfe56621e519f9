"""The lens against its definition; its last row is the model's own output."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from interp import Inputs, ModelConfig, Transformer, logit_lens, run
from interp.analyses.logit_lens import LensError, lens_bias, lens_scores, plain_lens


def test_the_last_layers_row_is_the_models_output(model, tokens):
    table = logit_lens(model, tokens)
    last = table[table["site"] == "1.resid_post"]
    chance = run(model, tokens).logits[:, -1].softmax(-1)
    assert last["kl_to_final"].abs().max() < 1e-12 and last["agrees"].all() and (last["rank"] == 0).all()
    assert torch.allclose(torch.tensor(last["probability"].tolist()).double(), chance.amax(-1), atol=1e-6)


def test_early_rows_recompute_the_norm(model, tokens):
    """TRAPS: the scale cached for the final stream is not to be used for early layers."""
    stream = run(model, tokens, record="0.resid_post").cache["0.resid_post"][:, 2]
    scale = (stream.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
    logits = (stream / scale * model.final_norm.weight) @ model.W_U
    chance = logits.softmax(-1)[torch.arange(3), [4, 5, 6]]
    table = logit_lens(model, tokens, "0.resid_post", positions=2, targets=torch.tensor([4, 5, 6]))
    assert torch.allclose(torch.tensor(table["probability"].tolist(), dtype=torch.float64), chance, atol=1e-12)
    above = (logits > logits[torch.arange(3), [4, 5, 6]][:, None]).sum(-1)
    assert table["rank"].tolist() == above.tolist()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert torch.allclose(torch.tensor(table["entropy"].tolist(), dtype=torch.float64), entropy, atol=1e-12)


def test_roles_padding_and_all_positions(model, tokens):
    inputs = Inputs(tokens, roles={"subject": torch.tensor([1, 2, 3])})
    table = logit_lens(model, inputs, "resid_post", ["subject", -1], tokenizer=[f"w{i}" for i in range(13)])
    assert len(table) == 2 * 2 * 3 and set(table["role"].dropna()) == {"subject"}
    first = table[table["role"] == "subject"].iloc[:3]
    assert first["position"].tolist() == [1, 2, 3]
    assert first["token"].tolist() == [f"w{int(tokens[i, i + 1])}" for i in range(3)]
    assert len(logit_lens(model, tokens, "1.resid_post", "all")) == 3 * 7


def test_refusals(model, tokens):
    with pytest.raises(LensError, match=r"not 0\.z"):
        logit_lens(model, tokens, ["resid_post", "0.z"])
    with pytest.raises(LensError, match="not final"):
        logit_lens(model, tokens, "final")
    with pytest.raises(LensError, match=r"\(3,\)"):
        logit_lens(model, tokens, targets=torch.tensor([1]))
    with pytest.raises(LensError, match="padding"):
        logit_lens(model, Inputs(tokens, mask=torch.ones(3, 7).bool()), positions="all")


def test_cross_entropy_to_the_token_that_truly_follows(model, tokens):
    """By hand per token; NaN behind the last real token, where nothing follows."""
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 5:] = False
    inputs = Inputs(tokens, mask=mask)
    stream = run(model, inputs, record="0.resid_post").cache["0.resid_post"]
    table = logit_lens(model, inputs, "0.resid_post", [3, 4])
    assert table["next_token"].dtype == "Int64"
    for row in table.to_dict("records"):
        i, t = row["example"], row["position"]
        if (i, t) == (1, 4):
            assert np.isnan(row["cross_entropy"]) and pd.isna(row["next_token"])
            continue
        logits = model.unembed(stream[i, t]).detach().numpy()
        nats = np.log(np.exp(logits).sum()) - logits[int(tokens[i, t + 1])]
        assert row["cross_entropy"] == pytest.approx(nats, rel=1e-10) and row["next_token"] == int(tokens[i, t + 1])
    assert logit_lens(model, inputs)["cross_entropy"].isna().all()


def test_a_given_next_token_is_read_where_none_follows(model, tokens):
    given = torch.tensor([1, 2, 3])
    table = logit_lens(model, tokens, "1.resid_post", next_token=given)
    want = -run(model, tokens).logits[:, -1].log_softmax(-1)[torch.arange(3), given]
    assert np.allclose(table["cross_entropy"], want, atol=1e-12) and table["next_token"].tolist() == [1, 2, 3]
    all_of_them = logit_lens(model, tokens, "1.resid_post", "all", next_token=torch.full((3, 7), 4))
    assert set(all_of_them["next_token"]) == {4} and all_of_them["cross_entropy"].notna().all()
    with pytest.raises(LensError, match="2 positions"):
        logit_lens(model, tokens, positions=[0, 1], next_token=given)
    with pytest.raises(LensError, match=r"0 … 12"):
        logit_lens(model, tokens, next_token=given + 11)


def test_what_a_model_has_seen_is_not_the_next_token(tokens):
    """An encoder reads every token; a prefix decoder those of its prefix."""
    small = {"vocab": 13, "n_layers": 1, "n_heads": 1, "d_model": 8, "n_ctx": 8}
    encoder = Transformer(ModelConfig(kind="encoder", **small), seed=0)
    assert logit_lens(encoder, tokens, positions="all")["cross_entropy"].isna().all()
    prefixed = Transformer(ModelConfig(kind="prefix-decoder", **small), seed=0)
    table = logit_lens(prefixed, Inputs(tokens, prefix_length=torch.tensor([3, 3, 3])), "resid_post", "all")
    known = table.groupby("position")["cross_entropy"].count()
    assert known.tolist() == [0, 0, 3, 3, 3, 3, 0]


def test_the_bias_of_a_planted_lens_is_what_was_planted(model, tokens):
    """A lens that adds 3 to one token's logit leans to it whatever it reads; the plain lens of the last stream does not."""
    push = torch.zeros(13, dtype=torch.float64)
    push[5] = 3.0
    lenses = {"plain": plain_lens(model), "pushed": lambda stream, site: model.unembed(stream) + push}
    table = lens_scores(model, tokens, lenses, "1.resid_post", batch_tokens=7).set_index("lens")
    p = run(model, tokens).logits.flatten(0, 1).softmax(-1)
    q = p * push.exp()
    q = (q / q.sum(-1, keepdim=True)).mean(0)
    want = float((q * (q / p.mean(0)).log()).sum())
    assert table.loc["pushed", "bias"] == pytest.approx(want, rel=1e-10) and abs(table.loc["plain", "bias"]) < 1e-12
    assert table.loc["pushed", "kl_minus_first"] == pytest.approx(table.loc["pushed", "kl_to_final"], rel=1e-9)
    kl = (p * (1 + p[:, 5:6] * (push[5].exp() - 1)).log()).sum(-1) - 3 * p[:, 5]  # ln Z − 3 p_5, per token
    each = kl.view(3, 7).mean(1)
    assert table.loc["pushed", "kl_to_final"] == pytest.approx(float(kl.mean()), rel=1e-9)
    assert table.loc["pushed", "kl_minus_first_se"] == pytest.approx(float(each.std() / 3**0.5), rel=1e-9)
    assert lens_bias(model, tokens, "1.resid_post")["bias"].abs().max() < 1e-12
    with pytest.raises(LensError, match="no sequence"):
        lens_bias(model, iter([]))
