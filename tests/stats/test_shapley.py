"""Shapley values against the definition over all orders, games whose answer is known, and the axioms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from interp.stats import ShapleyError, coalitions, shapley


def drawn(players, shape=(), seed=0):
    rng = np.random.default_rng(seed)
    return {one: rng.normal(size=shape) for one in coalitions(players)}


def over_orders(players, game, player):
    """The definition: what the player adds on joining, averaged over all orders."""
    gains = []
    for order in itertools.permutations(players):
        before = frozenset(order[: order.index(player)])
        gains.append(game[before | {player}] - game[before])
    return np.mean(gains, axis=0)


def test_values_are_means_over_all_orders():
    players = ["a", "b", "c", "d", "e"]
    game = drawn(players, (3,))
    found = shapley(players, game)
    for i, player in enumerate(players):
        np.testing.assert_allclose(found.values[i], over_orders(players, game, player), atol=1e-12)
    whole = game[frozenset(players)] - game[frozenset()]
    np.testing.assert_allclose(found.values.sum(0), whole, atol=1e-12)
    np.testing.assert_allclose(found.total, whole)


def test_interaction_is_the_mean_second_difference():
    """I(i, j) = mean over orders of the others, the pair as one, of v(S+ij) − v(S+i) − v(S+j) + v(S)."""
    players = ["a", "b", "c", "d"]
    game = drawn(players, seed=3)
    found = shapley(players, game)
    for i, j in itertools.combinations(range(4), 2):
        others = [p for p in players if p not in (players[i], players[j])]
        second = []
        for order in itertools.permutations([*others, "pair"]):
            s = frozenset(order[: order.index("pair")])
            second.append(
                game[s | {players[i], players[j]}] - game[s | {players[i]}] - game[s | {players[j]}] + game[s]
            )
        assert found.interactions[i, j] == pytest.approx(np.mean(second), abs=1e-12)
        assert found.interactions[j, i] == found.interactions[i, j] and found.interactions[i, i] == 0


def test_games_whose_answer_is_known():
    """The gloves game (one left, two right: 2/3, 1/6, 1/6), an additive game, and a lock that needs both keys."""
    gloves = {s: float("left" in s and len(s) > 1) for s in coalitions(["left", "right1", "right2"])}
    np.testing.assert_allclose(shapley(["left", "right1", "right2"], gloves).values, [2 / 3, 1 / 6, 1 / 6])
    worth = {"a": 1.0, "b": -2.0, "c": 5.0}
    added = shapley(list(worth), {s: 7 + sum(worth[p] for p in s) for s in coalitions(list(worth))})
    np.testing.assert_allclose(added.values, list(worth.values()))
    np.testing.assert_allclose(added.alone, list(worth.values()))
    np.testing.assert_allclose(added.interactions, 0, atol=1e-12)
    np.testing.assert_allclose(added.share(), [1 / 4, -2 / 4, 5 / 4])
    lock = shapley(["ffn", "attention"], {(): 0, ("ffn",): 0, ("attention",): 0, ("ffn", "attention"): 1})
    np.testing.assert_allclose(lock.values, 0.5)
    assert lock.interactions[0, 1] == 1 and not lock.alone.any()
    table = lock.table()
    assert list(table["player"]) == ["ffn", "attention", "ffn"] and table.iloc[2]["value"] == 1


def test_ten_players_are_exact():
    players = [f"p{i}" for i in range(10)]
    weights = np.random.default_rng(0).normal(size=10)
    game = {s: sum(weights[int(p[1:])] for p in s) ** 2 for s in coalitions(players)}
    found = shapley(players, game)  # v = (Σw)²: value_i = w_i · Σw, interaction = 2 w_i w_j
    np.testing.assert_allclose(found.values, weights * weights.sum(), atol=1e-9)
    off = ~np.eye(10, dtype=bool)
    np.testing.assert_allclose(found.interactions[off], (2 * np.outer(weights, weights))[off], atol=1e-9)


def test_what_is_refused():
    with pytest.raises(ShapleyError, match="1 to 10 different names"):
        coalitions([f"p{i}" for i in range(11)])
    with pytest.raises(ShapleyError, match="1 to 10 different names"):
        shapley(["a", "a"], {})
    with pytest.raises(ShapleyError, match=r"1 of 4 coalitions are missing and 0 unknown, such as \['a', 'b'\]"):
        shapley(["a", "b"], {(): 0, "a": 1, "b": 2})
    with pytest.raises(ShapleyError, match="allowed: one shape"):
        shapley(["a"], {(): 0, ("a",): [1, 2]})
    with pytest.raises(ShapleyError, match="shares of nothing"):
        shapley(["a"], {(): 1, ("a",): 1}).share()
