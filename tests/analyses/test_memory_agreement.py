"""Agreement of keys and values, its nulls and the search from a token back to values, against numpy and planted truth."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from interp import ModelConfig, Transformer
from interp.analyses.ffn_memory import ffn_values
from interp.analyses.memory_agreement import confident_values, memory_agreement, memory_pairs, values_promoting
from interp.analyses.subupdates import FFNError
from interp.analyses.triggers import corpus_triggers


def planted(n: int = 12, ffn: str = "relu") -> tuple[Transformer, torch.Tensor]:
    """Neuron i fires on token i alone and writes the token that follows it."""
    model = Transformer(ModelConfig(vocab=n, n_layers=1, n_heads=1, d_model=n, n_ctx=4, d_ff=n, ffn=ffn, norm="none",
                                    positions="none", bias=False)).double()  # fmt: skip
    after = (torch.arange(n) * 5 + 1) % n
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight.copy_(torch.eye(n))
        model.unembedding.weight.copy_(torch.eye(n))
        model.blocks[0].ffn.down.weight.copy_(torch.eye(n)[after].T * 3)
        if ffn == "relu":
            model.blocks[0].ffn.up.weight.copy_(torch.eye(n))
        else:  # bilinear: coefficient = gate · up; odd neurons are negative
            sign = torch.diag((-1.0) ** torch.arange(n))
            model.blocks[0].ffn.gate_up.weight.copy_(torch.cat([torch.eye(n), sign]))
            model.blocks[0].ffn.down.weight.mul_(torch.diagonal(sign))
    return model, after


@pytest.fixture(scope="module")
def corpus() -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 13, draw.integers(4, 12)).tolist() for _ in range(60)]


def test_planted_memories_agree_and_shifted_ones_never_do():
    model, after = planted()
    agreement = memory_agreement(
        memory_pairs(model, corpus_triggers(model, torch.stack([torch.arange(12), after], 1), followed=True))
    )
    row = agreement.iloc[0]
    assert (row["sign"], row["n"], row["agreement"], row["p"]) == (1, 12, 1.0, 1 / 1001)
    assert row["frequency_null"] == pytest.approx(1 / 12) and row["uniform"] == 1 / 12 and np.isnan(row["null_999"])
    assert row["null_mean"] == pytest.approx(1 / 12, abs=0.01)
    wrong = torch.stack([torch.arange(12), (after + 1) % 12], 1)
    row = memory_agreement(memory_pairs(model, corpus_triggers(model, wrong, followed=True))).iloc[0]
    assert row["agreement"] == 0 and row["p"] == 1


def test_a_negative_coefficient_turns_the_value_round():
    model, after = planted(ffn="bilinear")
    pairs = memory_pairs(model, corpus_triggers(model, torch.stack([torch.arange(12), after], 1), followed=True))
    assert pairs.groupby("sign")["neuron"].apply(list).to_dict() == {1: [0, 2, 4, 6, 8, 10], -1: [1, 3, 5, 7, 9, 11]}
    assert pairs["agrees"].all() and pairs["top"].tolist() == after[pairs["neuron"].tolist()].tolist()
    assert (np.sign(pairs["coefficient"]) == pairs["sign"]).all()


@pytest.mark.parametrize("norm", ["none", "final"])
def test_pairs_by_numpy(model, corpus, norm):
    gain = torch.linspace(0.5, 2, 16, dtype=torch.float64)
    import copy

    model = copy.deepcopy(model)
    with torch.no_grad():
        model.final_norm.weight.copy_(gain)
    triggers = corpus_triggers(model, corpus, k=7, followed=True)
    pairs = memory_pairs(model, triggers, norm, [chr(97 + i) for i in range(13)])
    assert set(pairs["through"]) == {"none" if norm == "none" else "gain"}
    follows = np.bincount([token for row in corpus for token in row[1:]], minlength=13)
    head = model.unembedding.weight.detach().numpy().T
    for row in pairs.sample(40, random_state=0).itertuples():
        v = row.sign * model.blocks[row.layer].ffn.down.weight.detach().numpy()[:, row.neuron]
        if norm == "final":
            v = v / np.sqrt((v**2).mean()) * gain.numpy()
        scores = v @ head
        listed = triggers.table(row.layer, [row.neuron]).query(f"sign == {row.sign}")
        nexts = [corpus[t.example][t.position + 1] for t in listed.itertuples()]
        assert row.top == scores.argmax() and row.continuation == nexts[0] and row.n_triggers == len(nexts)
        assert row.agrees == (row.top == nexts[0]) and row.agrees_any == (row.top in nexts)
        assert row.rank == (scores > scores[nexts[0]]).sum() and row.top_text == chr(97 + row.top)
        assert row.confidence == pytest.approx(np.exp(scores.max()) / np.exp(scores).sum(), abs=1e-12)
        others = np.delete(scores, scores.argmax())
        assert row.log_odds == pytest.approx(scores.max() - np.log(np.exp(others).sum()), abs=1e-12)
        assert row.marginal == pytest.approx(follows[row.top] / follows.sum()) and row.uniform == 1 / 13


def test_keys_whose_trigger_nothing_follows_are_not_counted(model):
    triggers = corpus_triggers(model, [[3, 4]], k=1)
    pairs = memory_pairs(model, triggers)
    first = (triggers.position == 0) & (triggers.example == 0)
    assert len(pairs) == int(first.sum()) > 0 and (pairs["continuation"] == 4).all()


def made(top, continuation, **columns) -> pd.DataFrame:
    return pd.DataFrame({"layer": 0, "sign": 1, "top": top, "continuation": continuation, "marginal": 0.25, "uniform": 0.1,
                         "through": "none", **columns})  # fmt: skip


def test_the_nulls_by_hand():
    """Permuting: E[share] = Σ_i #{j: continuation_j = top_i}/n², here (2·2 + 1·1)/16; p against every pairing."""
    from itertools import permutations

    pairs = made([1, 1, 2, 3], [1, 1, 2, 4], marginal=[0.5, 0.5, 0.3, 0.1])
    shares = [
        np.mean([a == b for a, b in zip(order, [1, 1, 2, 4], strict=True)]) for order in permutations([1, 1, 2, 3])
    ]
    row = memory_agreement(pairs, 20_000, seed=1).iloc[0]
    assert row["agreement"] == 0.75 and row["frequency_null"] == pytest.approx(0.35)
    assert row["null_mean"] == pytest.approx(5 / 16, abs=0.005) and np.mean(shares) == pytest.approx(5 / 16)
    assert row["p"] == pytest.approx(np.mean(np.array(shares) >= 0.75), abs=0.01)
    assert row["null_999"] == 0.75 and row["permutations"] == 20_000
    assert memory_agreement(pairs, 1000, seed=1).equals(memory_agreement(pairs, 1000, seed=1))
    assert np.isnan(memory_agreement(pairs, 9_999).iloc[0]["null_999"])


def test_p_is_calibrated_where_nothing_agrees_but_by_chance():
    draw = np.random.default_rng(5)
    p = [memory_agreement(made(*draw.integers(0, 4, (2, 200))), 1000, seed).iloc[0]["p"] for seed in range(80)]
    assert np.mean(np.array(p) < 0.05) <= 0.125 and 0.35 < np.mean(p) < 0.68


def test_the_most_confident_values_by_hand():
    pairs = pd.DataFrame({
        "layer": [0, 0, 1, 1, 2], "sign": 1, "confidence": [0.1, 1.0, 1.0, 1.0, 0.2], "log_odds": [-2, 40, 39, 38, -1.5],
        "agrees": [True, False, True, False, True], "agrees_any": [True, True, True, False, True],
    })  # fmt: skip
    got = confident_values(pairs, 3)
    assert got["n_confident"].tolist() == [1, 2, 0] and got["agree_any"].tolist() == [1, 1, 0]
    assert got["agree_first"].tolist() == [0, 1, 0] and got["share"].tolist() == pytest.approx([1 / 3, 2 / 3, 0])
    assert (got["least_log_odds"] == 38).all() and (got["least_confidence"] == 1).all()


@pytest.mark.parametrize("norm", ["none", "final"])
def test_values_promoting_by_numpy(model, corpus, norm):
    triggers = corpus_triggers(model, corpus, k=2)
    got = values_promoting(model, 4, k=9, norm=norm, triggers=triggers)
    head = model.unembedding.weight.detach().numpy().T
    every = []
    for layer in (0, 1):
        scores = model.blocks[layer].ffn.down.weight.detach().numpy().T @ head  # the model's gains are 1
        for neuron, row in enumerate(scores):
            for sign in (1, -1):
                z = sign * (row[4] - row.mean()) / row.std()
                every.append((z, layer, neuron, sign, sign * row[4], int((sign * row > sign * row[4]).sum())))
    every = sorted(every, reverse=True)[:9]
    assert list(zip(got["layer"], got["neuron"], got["sign"], strict=True)) == [row[1:4] for row in every]
    assert np.allclose(got["z"], [row[0] for row in every]) and np.allclose(got["score"], [row[4] for row in every])
    assert got["rank_of_token"].tolist() == [row[5] for row in every] and got["rank"].tolist() == list(range(9))
    for row in got.itertuples():
        listed = triggers.table(row.layer, [row.neuron], k=1).query(f"sign == {row.sign}").iloc[0]
        assert (row.coefficient, row.fired_by, row.context) == (
            listed["coefficient"],
            listed["token"],
            listed["context"],
        )


def test_values_promoting_finds_the_planted_memory():
    model, after = planted()
    words = [chr(97 + i) for i in range(12)]
    got = values_promoting(model, words[int(after[7])], k=1, tokenizer=words)
    assert got[["neuron", "sign", "rank_of_token"]].iloc[0].tolist() == [7, 1, 0]
    assert got["score"].iloc[0] == 3 and got["text"].iloc[0] == words[int(after[7])]


def test_values_of_a_layernorm_model_are_read_through_gain_and_centring():
    model = Transformer(ModelConfig(vocab=11, n_layers=1, n_heads=2, d_model=8, n_ctx=8, ffn="gelu"), seed=2).double()
    with torch.no_grad():
        model.final_norm.weight.copy_(torch.linspace(0.2, 3, 8))
    value, head = model.weight("W_out", 0)[3].detach().numpy(), model.W_U.detach().numpy()
    expected = ((value - value.mean()) * np.linspace(0.2, 3, 8)) @ head
    table = ffn_values(model, 0, [3], 11, norm="final")
    assert np.allclose(table.sort_values("token")["score"], expected) and set(table["through"]) == {"gain, centred"}
    assert np.allclose(ffn_values(model, 0, [3], 11).sort_values("token")["score"], value @ head)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: memory_agreement(made([1], [1]), 999), "permutations=999"),
        (lambda m: memory_agreement(pd.DataFrame({"layer": [0]})), "pairs lacks continuation"),
        (lambda m: confident_values(made([1], [1]), 0), "n=0"),
        (lambda m: values_promoting(m, 13), "token=13.*0 … 12"),
        (lambda m: values_promoting(m, "a"), "tokenizer="),
        (lambda m: values_promoting(m, "a b", tokenizer=["a", "b"]), "2 tokens"),
        (lambda m: values_promoting(m, 1, k=0), "k=0"),
        (lambda m: ffn_values(m, 0, norm="rms"), "norm='rms'.*'none', 'final'"),
    ],
)
def test_bad_input_is_refused_by_name(model, call, message):
    with pytest.raises(FFNError, match=message):
        call(model)
