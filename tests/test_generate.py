"""A4: with cached keys and values, generation gives the same tokens as recomputation."""

from __future__ import annotations

import pytest
import torch

from interp import Inputs, KVCache, ModelConfig, Transformer, generate, logit_difference, logit_lens, patch_sweep
from interp.generate import CacheError
from interp.hookable import UnsupportedModelError
from interp.model.inputs import InputsError


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_cached_equals_recomputed_token_for_token(positions, norm_position):
    model = Transformer(
        ModelConfig(vocab=11, n_layers=2, n_heads=4, n_kv_heads=2, d_model=16, n_ctx=24, positions=positions,
                    norm_position=norm_position), seed=2,
    ).eval()  # fmt: skip
    prompt = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(1))
    for options in (
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.8},
    ):
        cached = generate(model, prompt, 12, **options)
        assert torch.equal(cached, generate(model, prompt, 12, use_cache=False, **options)), options


def test_prompts_of_different_length_equal_each_alone(model):
    rows = [[1, 2, 3, 4, 5], [6, 7]]
    alone = [generate(model, [row], 6)[0] for row in rows]
    left = Inputs(torch.tensor([rows[0], [0, 0, 0, 6, 7]]), mask=torch.tensor([[True] * 5, [False] * 3 + [True] * 2]))
    right = Inputs(torch.tensor([rows[0], [6, 7, 0, 0, 0]]), mask=torch.tensor([[True] * 5, [True] * 2 + [False] * 3]))
    for padded in (left, right):
        for use_cache in (True, False):
            got = generate(model, padded, 6, use_cache=use_cache)
            assert torch.equal(got, torch.stack(alone)), (padded, use_cache)


def test_logits_with_a_cache_equal_recomputation(model, tokens):
    cache, pieces = KVCache(), []
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        pieces.append(model(tokens[:, start:stop], kv_cache=cache))
    assert cache.length == 7 and cache.keys[0].shape == (3, 7, 2, 4)
    assert torch.allclose(torch.cat(pieces, 1), model(tokens), atol=1e-12)


def test_greedy_is_the_argmax_and_seeds_decide_samples(model):
    first = generate(model, [[1, 2]], 1)
    assert first.item() == model(torch.tensor([[1, 2]]))[0, -1].argmax().item()
    draws = {tuple(generate(model, [[1, 2]], 6, temperature=5.0, seed=seed)[0].tolist()) for seed in range(8)}
    assert len(draws) > 1
    again = [generate(model, [[1, 2]], 6, temperature=5.0, seed=4) for _ in range(2)]
    assert torch.equal(*again)
    greedy = generate(model, [[1, 2]], 6)
    assert torch.equal(greedy, generate(model, [[1, 2]], 6, temperature=5.0, top_k=1))
    assert torch.equal(greedy, generate(model, [[1, 2]], 6, temperature=5.0, top_p=1e-9))


def test_stop_token_ends_a_sequence(model):
    free = generate(model, [[1, 2]], 8)[0].tolist()
    stopped = generate(model, [[1, 2]], 8, stop=free[2])[0].tolist()
    assert stopped == free[: free.index(free[2]) + 1]


def test_a_cache_that_does_not_grow_raises(model, monkeypatch):
    monkeypatch.setattr(KVCache, "extend", lambda self, layer, k, v: (k, v))
    with pytest.raises(CacheError, match="holds 0 positions"):
        generate(model, [[1, 2]], 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new": 0}, "max_new=0"),
        ({"max_new": 16}, r"max_new=16 after 2 tokens is not allowed; allowed: 1 … 15"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
    ],
)
def test_bad_options_are_refused(model, options, words):
    with pytest.raises(InputsError, match=words):
        generate(model, [[1, 2]], **{"max_new": 3, **options})


def test_an_encoder_cannot_generate():
    encoder = Transformer(ModelConfig(kind="encoder", vocab=11, n_layers=1, n_heads=2, d_model=8, n_ctx=8))
    with pytest.raises(InputsError, match="encoder"):
        generate(encoder, [[1, 2]], 1)


def test_a_windowed_prefix_decoder_sees_its_prefix_with_and_without_the_cache():
    model = Transformer(
        ModelConfig(kind="prefix-decoder", window=2, vocab=50, n_layers=2, n_heads=4, d_model=32, n_ctx=16)
    ).double()
    tokens = torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(0))
    inputs = Inputs(tokens, prefix_length=torch.tensor([2, 3, 1]))
    assert torch.equal(generate(model, inputs, 5), generate(model, inputs, 5, use_cache=False))


def test_a_model_without_head_is_refused(tokens):
    bare = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8, head=False))
    for use in (generate, logit_lens, lambda model, x: patch_sweep(model, x, x, logit_difference(1, 2))):
        with pytest.raises(UnsupportedModelError, match="head=False"):
            use(bare, tokens)
