"""Decomposition, logit attribution and head scores of other libraries' models, and their head detector against ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interp import ModelConfig, Transformer, from_transformer_lens
from interp.analyses.circuits import ov_circuit, qk_circuit
from interp.analyses.composition import composition_scores
from interp.analyses.decompose import decompose
from interp.analyses.heads import head_scores, repeated_tokens
from interp.analyses.logit_attribution import direct_logit_attribution
from interp.bridges.lens_out.model import to_transformer_lens
from interp.hookable import UnsupportedModelError

transformers: Any = pytest.importorskip("transformers")
head_detector: Any = pytest.importorskip("transformer_lens.head_detector")

IDS = {"bos_token_id": 0, "eos_token_id": 0}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, **IDS},
    "Llama": {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 32, **IDS},
}  # fmt: skip
CORRECT, WRONG = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 2])
TOKENS = torch.randint(0, 13, (3, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=list(SIZES))
def pair(request):
    """(theirs in float64, with weights off their initial values; ours around it)."""
    family = request.param
    kind = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(0)
    theirs = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**SIZES[family])).double().eval()
    with torch.no_grad():
        for value in theirs.parameters():
            value.add_(0.2 * torch.randn_like(value))
    return theirs, from_transformer_lens(theirs)


@torch.no_grad()
def test_attribution_adds_up_to_their_logits(pair):
    theirs, ours = pair
    logits = theirs(TOKENS).logits[:, -1].double()
    wanted = logits[torch.arange(3), CORRECT] - logits[torch.arange(3), WRONG]
    limit = 1e-10 if "GPT2" in type(theirs).__name__ else 1e-6  # transformers' RMSNorm works in 32 bits
    for by in ("component", "head", "source", "neuron"):
        table = direct_logit_attribution(ours, TOKENS, CORRECT, WRONG, by=by)
        total = torch.tensor(table.groupby("example")["attribution"].sum().tolist(), dtype=torch.float64)
        assert (total - wanted).abs().max() < limit, by
    assert decompose(ours, TOKENS, "1.resid_post", sources=True).error < 1e-12


@torch.no_grad()
def test_circuits_fold_the_gain_of_their_norms(pair):
    theirs, ours = pair
    if "GPT2" not in type(theirs).__name__:
        with pytest.raises(UnsupportedModelError, match="may rotate its queries and keys"):
            qk_circuit(ours, 0, 0)
        assert set(composition_scores(ours, ("v",))["kind"]) == {"v"}
        return
    block = theirs.transformer.h[1]
    qkv = block.attn.c_attn.weight.T.reshape(3, 4, 4, 16)  # [q/k/v head d_head d_model]
    reads = qkv * block.ln_1.weight
    reads = reads - reads.mean(-1, keepdim=True)
    out = block.attn.c_proj.weight.reshape(4, 4, 16)
    assert torch.allclose(ov_circuit(ours, 1, 2).dense(), reads[2, 2].T @ out[2], atol=1e-12)
    assert torch.allclose(qk_circuit(ours, 1, 3).dense(), reads[0, 3].T @ reads[1, 3], atol=1e-12)


@torch.no_grad()
def test_their_head_detector_gives_our_mul_and_abs():
    """detect_head rounds "abs" to three digits and needs text: tokens are words of one letter."""
    config = ModelConfig(vocab=9, n_layers=2, n_heads=4, d_model=16, n_ctx=24)
    model = Transformer(config, seed=1).double()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.W_Q.mul_(6)  # attention that is not flat
    words = list("abcdefghi")
    theirs = to_transformer_lens(model, words)
    tokens = repeated_tokens(9, 6, 3, seed=2)
    texts = [" ".join(words[i] for i in row) for row in tokens.tolist()]
    ours = head_scores(
        model, tokens, conventions=("mul", "abs"), scores=("previous token", "duplicate token", "induction")
    )
    for convention, limit in (("mul", 1e-6), ("abs", 6e-4)):
        for score in ("previous token", "duplicate token", "induction"):
            found = head_detector.detect_head(
                theirs, texts, f"{score.replace(' ', '_')}_head", error_measure=convention
            )
            chosen = ours[(ours["score"] == score) & (ours["convention"] == convention)]
            expected = torch.tensor(chosen["value"].tolist(), dtype=torch.float64).view(2, 4)
            assert (found - expected).abs().max() < limit
            assert expected.std() > 0.01, "the heads differ, so that agreement says something"
