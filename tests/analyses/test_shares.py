"""Shapley shares against swaps and patches made by hand, one coalition at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from interp import Inputs, Replace, Transformer, logit_difference, run
from interp.analyses.shares import SharesError, site_shares, weight_shares
from interp.metrics import evaluate
from interp.model.weights import WeightsError

METRIC = logit_difference(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))


def mean_marginal(players, value, player):
    """The definition: what the player adds on joining, averaged over all orders."""
    gains = []
    for order in itertools.permutations(players):
        before = frozenset(order[: order.index(player)])
        gains.append(value(before | {player}) - value(before))
    return np.mean(gains, axis=0)


def test_weight_shares_are_swaps(model, config, tokens):
    other = Transformer(config, seed=2).double()
    players = ("embeddings", "attention", "ffn")
    found = weight_shares(model, other, tokens, METRIC, players)

    def value(groups):
        swapped = model.weights.swapped(other, groups) if groups else model
        return evaluate(METRIC, swapped(tokens), Inputs(tokens)).detach().numpy()

    for i, player in enumerate(players):
        np.testing.assert_allclose(found.values[i], mean_marginal(players, value, player), atol=1e-12)
    named = weight_shares(model, other, tokens, METRIC, {"a": ["qk"], "b": ["ov", "ffn_out"]}, layers=[1])
    swapped = model.weights.swapped(other, ["qk", "ov", "ffn_out"], layers=[1])
    both = evaluate(METRIC, swapped(tokens), Inputs(tokens)) - evaluate(METRIC, model(tokens), Inputs(tokens))
    np.testing.assert_allclose(named.total, both.detach().numpy(), atol=1e-12)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_site_shares_are_patches(model, tokens, direction):
    clean, corrupted = tokens, (tokens + 3) % 13
    role = {"last": torch.tensor([6, 6, 6]), "mid": torch.tensor([2, 3, 4])}
    a, b = Inputs(clean, roles=role), Inputs(corrupted, roles=role)
    found = site_shares(model, a, b, METRIC, ("attn_out", "ffn_out"), ("mid", "last"), direction)
    base, other = (b, a) if direction == "denoising" else (a, b)
    sites = [f"{layer}.{name}" for layer in (0, 1) for name in ("attn_out", "ffn_out")]
    source = run(model, other, record=sites)

    def value(players):
        changes = [Replace(f"{layer}.{name}", source, at=(where,)) for layer in (0, 1)
                   for name, where in (player.split("@") for player in players)]  # fmt: skip
        return evaluate(METRIC, run(model, base, change=changes).logits, base).numpy()

    assert found.players == ("attn_out@mid", "attn_out@last", "ffn_out@mid", "ffn_out@last")
    for i, player in enumerate(found.players):
        np.testing.assert_allclose(found.values[i], mean_marginal(found.players, value, player), atol=1e-11)
    everything = site_shares(model, a, b, METRIC, {"all": ["embed"]}, direction=direction)
    ends = evaluate(METRIC, model(other.tokens), other) - evaluate(METRIC, model(base.tokens), base)
    np.testing.assert_allclose(everything.values[0], ends.detach().numpy(), atol=1e-11)


def test_what_is_refused(model, config, tokens):
    other = Transformer(config, seed=2).double()
    with pytest.raises(SharesError, match=r"players 'qk' and 'attention' both hold blocks\.0\.attention\.qkv\.weight"):
        weight_shares(model, other, tokens, METRIC, ("qk", "attention"))
    with pytest.raises(WeightsError, match="allowed: embeddings"):
        weight_shares(model, other, tokens, METRIC, ("mlp",))
    with pytest.raises(SharesError, match="share a site"):
        site_shares(model, tokens, (tokens + 1) % 13, METRIC, {"a": ["ffn_out"], "b": ["1.ffn_out"]})
    with pytest.raises(SharesError, match="direction='both' is not allowed"):
        site_shares(model, tokens, tokens, METRIC, direction="both")  # type: ignore[arg-type]
