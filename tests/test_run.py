"""run: what is recorded, what is refused, and that nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from interp import Add, Inputs, KnockOut, ModelConfig, Replace, Scale, Site, Transformer, Zero, run
from interp.model.inputs import InputsError
from interp.run import NaNWeightsError, NotReachedError
from interp.sites import UnknownSiteError


def test_records_what_was_asked_in_the_models_order(model, tokens):
    got = run(model, tokens, record=["1.attn_out", "embed", "resid_post"])
    assert [str(site) for site in got.cache] == ["embed", "0.resid_post", "1.attn_out", "1.resid_post"]
    assert got.cache["1.attn_out"].shape == (3, 7, 16)
    assert torch.equal(got.cache.stack("resid_post")[1], got.cache[Site("resid_post", 1)])
    assert "0.resid_post" in got.cache and "0.z" not in got.cache and "nonsense" not in got.cache


def test_a_plain_run_equals_the_model(model, tokens):
    assert torch.equal(run(model, tokens).logits, model(tokens).detach())


def test_unbatched_lists_and_tuples_are_accepted(model):
    assert torch.equal(run(model, [1, 2, 3]).logits, run(model, torch.tensor([[1, 2, 3]])).logits)
    assert run(model, (1, 2), record=("embed",)).logits.shape == (1, 2, 13)
    assert run(model, [1, 2], record={"embed"}).cache["embed"].shape == (1, 2, 16)


def test_gradients_flow_only_when_asked(model, tokens):
    assert not run(model, tokens, record="embed").logits.requires_grad
    got = run(model, tokens, record="0.resid_mid", grad=True)
    gradient = torch.autograd.grad(got.logits.sum(), got.cache["0.resid_mid"])[0]
    assert gradient.abs().sum() > 0


def test_a_site_is_recorded_after_its_changes_in_list_order(model, tokens):
    changes = [Replace("0.resid_mid", 1.0), Add("0.resid_mid", 2.0)]
    assert torch.equal(
        run(model, tokens, "0.resid_mid", changes).cache["0.resid_mid"], torch.full((3, 7, 16), 3.0).double()
    )
    reverse = run(model, tokens, "0.resid_mid", changes[::-1]).cache["0.resid_mid"]
    assert torch.equal(reverse, torch.ones(3, 7, 16).double())


def test_cached_tensors_never_change(model, tokens):
    """Stream leaving one block and entering the next are one tensor in the model, two in the cache."""
    every = run(model, tokens, record=model.sites)
    copies = {site: value.clone() for site, value in every.cache.items()}
    for site in model.sites:
        every.cache[site].add_(1.0)
        for other in model.sites:
            if other != site:
                assert torch.equal(every.cache[other], copies[other]), f"writing {site} changed {other}"
        every.cache[site].copy_(copies[site])


def test_editing_a_cached_tensor_does_not_touch_the_model(tokens):
    model = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8))
    before = run(model, tokens).logits
    for value in run(model, tokens, record=model.sites).cache.values():
        value.zero_()
    assert torch.equal(run(model, tokens).logits, before)


def test_nothing_is_left_behind_after_an_exception(model, tokens):
    before = run(model, tokens, record="0.z")
    with pytest.raises(ValueError):
        run(model, tokens, change=Replace("0.z", torch.zeros(5)))
    after = run(model, tokens, record="0.z")
    assert torch.equal(before.logits, after.logits) and torch.equal(before.cache["0.z"], after.cache["0.z"])
    assert not any(module._forward_hooks for module in model.modules())


def test_a_site_never_reached_raises(model, tokens):
    class Short:
        """Advertises a site that it does not reach."""

        config, sites, additive_stream, can_resume = model.config, (*model.sites, Site("resid_cross", 0)), True, False

        def __call__(self, inputs, tap=None):
            return model(inputs, tap)

    with pytest.raises(NotReachedError, match=r"0\.resid_cross"):
        run(Short(), tokens, record="0.resid_cross")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ("0.atn_out", "did you mean 'attn_out'"),
        ("9.attn_out", "it has 0.attn_out … 1.attn_out"),
        ("pos_embed", "this model has no site 'pos_embed'"),
        ("attn_out.3", "is not a layer"),
        ("cross_q", "this model has no site 'cross_q'"),
        ("0.embed", "has no layer"),
    ],
)
def test_unknown_and_absent_sites_are_refused_by_name(model, tokens, site, words):
    with pytest.raises(UnknownSiteError, match=words):
        run(model, tokens, record=["embed", site])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.tensor([[1, 13]]), "token id 13 is outside the vocabulary; allowed: 0 … 12"),
        (torch.tensor([[-1, 3]]), "token id -1 is outside"),
        (torch.zeros(1, 17, dtype=torch.long), "17 tokens is too long; allowed: at most n_ctx=16"),
        (torch.zeros(1, 3), "must be integers"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"\[batch pos\]"),
        (torch.zeros(0, 3, dtype=torch.long), "none empty"),
        ("text", "tokenizer="),
        (None, "NoneType"),
        (Inputs(torch.ones(1, 3).long(), mask=torch.ones(1, 2).bool()), r"mask must have shape \(1, 3\)"),
        (Inputs(torch.ones(1, 3).long(), mask=torch.ones(1, 3)), "mask must be torch.bool"),
        (Inputs(torch.ones(1, 3).long(), mask=torch.zeros(1, 3).bool()), "needs a real token"),
        (Inputs(torch.ones(2, 3).long(), roles={"subject": torch.tensor([1])}), "role 'subject'"),
        (Inputs(torch.ones(1, 3).long(), embeddings=torch.zeros(1, 3, 5)), "embeddings must have shape"),
    ],
)
def test_bad_inputs_are_refused_naming_value_and_range(model, inputs, words):
    with pytest.raises(InputsError, match=words):
        run(model, inputs)


def test_a_prefix_is_never_implicit_and_needs_text(model):
    words = [chr(97 + i) for i in range(13)]
    assert run(model, "b c", tokenizer=words).inputs.tokens.tolist() == [[1, 2]]
    assert run(model, "b c", tokenizer=words, prefix=[0]).inputs.tokens.tolist() == [[0, 1, 2]]
    with pytest.raises(InputsError, match="prefix="):
        run(model, torch.tensor([[1]]), prefix=[0])


def test_nan_weights_are_named(tokens):
    model = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8))
    with torch.no_grad():
        model.blocks[0].ffn.down.weight[0, 0] = float("nan")
    with pytest.raises(NaNWeightsError, match=r"blocks\.0\.ffn\.down\.weight' has 1 NaN"):
        run(model, tokens)


def test_wrong_change_is_refused(model, tokens):
    with pytest.raises(TypeError, match="interventions"):
        run(model, tokens, change=["0.z"])  # type: ignore[list-item]


def test_embeddings_replace_the_token_embedding(model, tokens):
    embedded = model.W_E[tokens].detach()
    assert torch.equal(run(model, Inputs(tokens, embeddings=embedded)).logits, run(model, tokens).logits)
    assert not torch.equal(run(model, Inputs(tokens, embeddings=embedded * 2)).logits, run(model, tokens).logits)


def test_head_ablation_is_true_head_ablation(model, tokens):
    """Zeroing z of one head equals zeroing its rows of W_O; TRAPS: surgery after the projection is not the same."""
    import copy

    cut = copy.deepcopy(model)
    with torch.no_grad():
        cut.blocks[0].attention.W_O[2].zero_()
    ablated = run(model, tokens, change=Zero("0.z", at=(slice(None), 2))).logits
    assert torch.allclose(ablated, run(cut, tokens).logits, atol=1e-12)


def test_knocking_out_every_earlier_edge_leaves_positions_alone(model, tokens):
    """R2: with all edges between positions cut, each position sees only itself."""
    n = tokens.shape[1]
    cuts = [
        KnockOut(f"{layer}.scores", at=(slice(None), query, key))
        for layer in range(2)
        for query in range(n)
        for key in range(query)
    ]
    got = run(model, tokens, change=cuts, record="pattern")
    assert torch.equal(got.cache["0.pattern"], torch.eye(n).double().expand(3, 4, n, n))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 13
    other = run(model, changed, change=cuts)
    assert torch.equal(got.logits[:, 1:], other.logits[:, 1:])


def test_every_recorded_tensor_lies_on_the_path_to_the_logits(model, tokens):
    """With grad=True a copy would have no gradient; b_K-like directions aside, every site has one."""
    wanted = [site for site in model.sites if site.name != "logits"]
    got = run(model, tokens, record=model.sites, grad=True)
    gradients = torch.autograd.grad(got.logits.square().sum(), [got.cache[site] for site in wanted])
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_integer_types_are_accepted_and_headless_output_is_not_shared(model, tokens):
    assert torch.equal(run(model, tokens.to(torch.uint8)).logits, run(model, tokens).logits)
    bare = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8, head=False))
    got = run(bare, tokens, record="final")
    before = got.cache["final"].clone()
    got.logits.zero_()
    assert torch.equal(got.cache["final"], before)


def test_no_change_of_scores_opens_a_masked_edge(model, tokens):
    for change in (Zero("0.scores"), Replace("0.scores", 3.0), Scale("0.scores", -1.0)):
        got = run(model, tokens, record="0.pattern", change=change)
        above = torch.ones(7, 7).triu(1).bool()
        assert (got.cache["0.pattern"][..., above] == 0).all() and torch.isfinite(got.logits).all()
