"""The lens against its definition; its last row is the model's own output."""

from __future__ import annotations

import pytest
import torch

from interp import Inputs, logit_lens, run
from interp.analyses.logit_lens import LensError


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
