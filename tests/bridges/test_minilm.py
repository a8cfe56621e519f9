"""The real encoder: equal to transformers (slow: a download of 84 MB)."""

from __future__ import annotations

import importlib
import socket

import pytest
import torch

from interp import Inputs, run
from interp.bridges import MINILM_PREFIX, MINILM_SUFFIX, minilm
from interp.tokens import pad

module = importlib.import_module("interp.bridges.minilm")  # the package's own attribute of this name is the function
TEXTS = ["Paris is the capital of France.", "A short one.", "The chemical symbol of gold is Au, and that of silver Ag."]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return module.fetch(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def pretrained(source, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fetch", lambda work: source)
        minilm(folder := tmp_path_factory.mktemp("cache"), progress=False)

    def refuse(*_):
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        return minilm(folder, progress=False)


@pytest.mark.slow
def test_it_equals_transformers(source, pretrained):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = pretrained
    theirs = transformers.AutoModel.from_pretrained(source, attn_implementation="eager").eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    inputs = pad([[*MINILM_PREFIX, *row, *MINILM_SUFFIX] for row in ids])
    assert torch.equal(inputs.tokens, batch.input_ids) and torch.equal(inputs.mask, batch.attention_mask.bool())
    with torch.no_grad():
        wanted = theirs(**batch, output_hidden_states=True, output_attentions=True)
    got = run(model, inputs, record=["resid_pre", "resid_post", "pattern"])
    ours = [got.cache["0.resid_pre"], *got.cache.stack("resid_post")]
    for mine, given in zip([*ours, got.logits], [*wanted.hidden_states, wanted.last_hidden_state], strict=True):
        apart = (mine - given)[inputs.mask].abs().max()
        assert apart < 1e-5 * given.abs().max(), apart
    for mine, given in zip(got.cache.stack("pattern"), wanted.attentions, strict=True):
        assert (mine - given)[:, 0][inputs.mask].abs().max() < 1e-5
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for name, p in theirs.named_parameters() if "pooler" not in name
    )


@pytest.mark.slow
def test_sentences_that_mean_the_same_lie_together(pretrained):
    """The use it was made for: mean of the last states at real tokens, cosine."""
    model, tokenizer = pretrained
    texts = ["A man eats food.", "Someone is having a meal.", "The stock market fell sharply."]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    inputs = pad([[*MINILM_PREFIX, *row, *MINILM_SUFFIX] for row in ids])
    states = run(model, inputs).logits
    assert isinstance(inputs, Inputs) and inputs.mask is not None
    mean = (states * inputs.mask[..., None]).sum(1) / inputs.mask.sum(1, keepdim=True)
    a, b, c = torch.nn.functional.normalize(mean, dim=-1)
    assert a @ b > 0.6 > 0.2 > a @ c
