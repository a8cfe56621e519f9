"""A4: with cached keys and values, generation gives the same tokens as recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interp import (
    Add,
    AddNoise,
    Freeze,
    Inputs,
    KnockOut,
    KVCache,
    ModelConfig,
    Replace,
    Resample,
    Scale,
    Transformer,
    Zero,
    generate,
    logit_difference,
    logit_lens,
    patch_sweep,
    run,
)
from interp.at import SelectionError
from interp.generate import CacheError
from interp.hookable import UnsupportedModelError
from interp.interventions import InterventionError
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
        recomputed = generate(model, prompt, 12, use_cache=False, **options)
        assert torch.equal(cached.tokens, recomputed.tokens), options
        assert torch.allclose(cached.logits, recomputed.logits, atol=1e-5), options


def test_prompts_of_different_length_equal_each_alone(model):
    rows = [[1, 2, 3, 4, 5], [6, 7]]
    alone = [generate(model, [row], 6).tokens[0] for row in rows]
    left = Inputs(torch.tensor([rows[0], [0, 0, 0, 6, 7]]), mask=torch.tensor([[True] * 5, [False] * 3 + [True] * 2]))
    right = Inputs(torch.tensor([rows[0], [6, 7, 0, 0, 0]]), mask=torch.tensor([[True] * 5, [True] * 2 + [False] * 3]))
    for padded in (left, right):
        for use_cache in (True, False):
            got = generate(model, padded, 6, use_cache=use_cache).tokens
            assert torch.equal(got, torch.stack(alone)), (padded, use_cache)


def test_logits_with_a_cache_equal_recomputation(model, tokens):
    cache, pieces = KVCache(), []
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        pieces.append(model(tokens[:, start:stop], kv_cache=cache))
    assert cache.length == 7 and cache.keys[0].shape == (3, 7, 2, 4)
    assert torch.allclose(torch.cat(pieces, 1), model(tokens), atol=1e-12)


def test_greedy_is_the_argmax_and_seeds_decide_samples(model):
    first = generate(model, [[1, 2]], 1).tokens
    assert first.item() == model(torch.tensor([[1, 2]]))[0, -1].argmax().item()
    draws = {tuple(generate(model, [[1, 2]], 6, temperature=5.0, seed=seed).tokens[0].tolist()) for seed in range(8)}
    assert len(draws) > 1
    again = [generate(model, [[1, 2]], 6, temperature=5.0, seed=4).tokens for _ in range(2)]
    assert torch.equal(*again)
    greedy = generate(model, [[1, 2]], 6).tokens
    assert torch.equal(greedy, generate(model, [[1, 2]], 6, temperature=5.0, top_k=1).tokens)
    assert torch.equal(greedy, generate(model, [[1, 2]], 6, temperature=5.0, top_p=1e-9).tokens)


def test_stop_token_ends_a_sequence(model):
    free = generate(model, [[1, 2]], 8).tokens[0].tolist()
    stopped = generate(model, [[1, 2]], 8, stop=free[2]).tokens[0].tolist()
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
    assert torch.equal(generate(model, inputs, 5).tokens, generate(model, inputs, 5, use_cache=False).tokens)


def test_a_model_without_head_is_refused(tokens):
    bare = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8, head=False))
    for use in (generate, logit_lens, lambda model, x: patch_sweep(model, x, x, logit_difference(1, 2))):
        with pytest.raises(UnsupportedModelError, match="head=False"):
            use(bare, tokens)


# Changes and records at absolute positions

SOURCE = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(5))
SOURCE_MASK = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
PROMPT = torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(6))
PADDED = torch.tensor([[True] * 4, [False] * 2 + [True] * 2])
KINDS = {
    "decoder": Inputs(PROMPT),
    "prefix-decoder": Inputs(PROMPT, prefix_length=torch.tensor([3, 2])),
    "encoder-decoder": Inputs(PROMPT, source=SOURCE, source_mask=SOURCE_MASK),
    "decoder, left padding": Inputs(PROMPT, mask=PADDED, roles={"first": torch.tensor([0, 2])}),
    "encoder-decoder, left padding": Inputs(PROMPT, mask=PADDED, source=SOURCE, roles={"first": torch.tensor([0, 2])}),
}
RECORD = ["resid_post", "scores", "pattern", "k", "logits"]


def build(kind, **choices):
    sizes = {"vocab": 11, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 16, "n_ctx": 24}
    return Transformer(ModelConfig(kind=kind.split(",")[0], **{**sizes, **choices}), seed=3).double().eval()


def changes_for(kind, model, inputs):
    """One list per kind of change: inside the prompt, among the new tokens, everywhere, from a run, edges, the source."""
    stack = "decoder." if kind.startswith("encoder-decoder") else ""
    other = run(model, replace(inputs, tokens=(inputs.tokens + 1) % 11), record=["attn_out", "pattern", "scores"])
    place = "first" if "padding" in kind else 1
    found = {
        "a prompt position": [Replace(f"{stack}0.resid_post", 3.0, at=(place,))],
        "a new position": [Add(f"{stack}1.resid_pre", torch.ones(16), at=(5,)), Zero(f"{stack}0.z", at=(6, 2))],
        "every position": [Scale(f"{stack}0.ffn_out", 2.0), AddNoise(f"{stack}1.attn_out", 0.5, seed=4)],
        "several": [Add(f"{stack}0.attn_out", 1.0, at=([3, 5, 7],)), Resample(f"{stack}1.z", seed=1, at=([3, 5], 0))],
        "from a run": [Replace(f"{stack}0.attn_out", other, at=(3,)), Freeze(f"{stack}1.attn_out", other, at=(3,))],
        "an edge": [KnockOut(f"{stack}0.scores", at=(1, 6, 3)), KnockOut(f"{stack}1.scores", at=(slice(None), 5, [3, 4]))],
        "the pattern": [Replace(f"{stack}0.pattern", other, at=(2, 3, slice(0, 4)))],
    }  # fmt: skip
    if stack:
        found["the source"] = [Scale("encoder.final", 0.5), KnockOut("decoder.1.cross_scores", at=(0, 5, 4)),
                               Add("decoder.0.cross_v", 1.0, at=(4,))]  # fmt: skip
    return found


@pytest.mark.parametrize("options", [{}, {"positions": "rotary", "norm": "rmsnorm", "ffn": "swiglu"}, {"window": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_changes_and_records_are_the_same_cached_recomputed_and_in_one_pass(kind, options):
    model, inputs = build(kind, **options), KINDS[kind]
    plain = generate(model, inputs, 5)
    for name, change in {"nothing": [], **changes_for(kind, model, inputs)}.items():
        cached = generate(model, inputs, 5, record=RECORD, change=change)
        recomputed = generate(model, inputs, 5, record=RECORD, change=change, use_cache=False)
        assert torch.equal(cached.tokens, recomputed.tokens), name
        assert torch.allclose(cached.logits, recomputed.logits, atol=1e-10), name
        assert (name == "nothing") == torch.allclose(cached.logits, plain.logits[:, : cached.logits.shape[1]]), name
        if name not in ("from a run", "the pattern"):  # their run is shorter than the whole sequence
            once = run(model, cached.inputs, record=RECORD, change=change)
            real = (
                torch.ones_like(cached.inputs.tokens, dtype=torch.bool) if inputs.mask is None else cached.inputs.mask
            )
            for site, value in once.cache.items():
                for got in (cached.cache[site], recomputed.cache[site]):
                    assert got.shape == value.shape, (name, site)
                    axis = 2 if site.name in ("scores", "pattern") else 1
                    on_source = site.stack == "encoder"
                    keep = slice(None) if on_source else real
                    apart = [x if on_source else x.movedim(axis, 1)[keep] for x in (got, value)]
                    assert torch.allclose(*apart, atol=1e-10), (name, site)
        assert cached.inputs.length == 8 and cached.cache["1.k" if "en" not in kind else "decoder.1.k"].shape[1] == 8


def test_positions_from_the_end_and_beyond_a_run_are_refused(model, tokens):
    other = run(model, tokens[:, :3], record="attn_out")
    for change, error, words in (
        (Zero("0.resid_post", at=(-1,)), SelectionError, "counts from an end that moves; allowed: absolute positions 0 … 6"),
        (Zero("0.resid_post", at=(slice(-2, None),)), SelectionError, "absolute positions"),
        (Zero("0.resid_post", at=(7,)), SelectionError, "out of range"),
        (Replace("0.attn_out", other), InterventionError, "covers positions 0 … 2"),
        (Replace("0.attn_out", other, at=(4,)), InterventionError, "covers positions 0 … 2"),
        (Zero("0.cross_z"), ValueError, "this model has no site .cross_z."),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            generate(model, tokens[:, :3], 5, change=change)


def test_generated_shows_its_tokens(model):
    assert "tokens (1, 2)" in repr(generate(model, [[1, 2]], 2, record="0.q"))
