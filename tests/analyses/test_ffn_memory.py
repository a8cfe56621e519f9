"""Keys, values, triggers and sub-updates against their definitions, plain and gated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from interp import Inputs, ModelConfig, Transformer, ffn_keys, ffn_triggers, ffn_values, run
from interp.analyses import ffn_subupdates, key_value_agreement
from interp.analyses.ffn_memory import NeuronError


@pytest.fixture(scope="module")
def plain() -> Transformer:
    return Transformer(ModelConfig(vocab=13, n_layers=2, n_heads=2, d_model=8, n_ctx=16, ffn="relu"), seed=3).double()


def numpy(tensor):
    return tensor.detach().numpy()


def test_values_are_rows_of_the_last_matrix_read_by_the_unembedding(model):
    table = ffn_values(model, 1, neurons=[5, 9], k=4)
    for neuron in (5, 9):
        scores = numpy(model.blocks[1].ffn.down.weight)[:, neuron] @ numpy(model.unembedding.weight).T
        order = np.argsort(-scores)[:4]
        rows = table[table["neuron"] == neuron]
        assert rows["token"].tolist() == order.tolist() and np.allclose(rows["score"], scores[order])
    down = ffn_values(model, 1, neurons=[5], k=13, sign=-1)
    assert down["token"].tolist() == ffn_values(model, 1, neurons=[5], k=13)["token"].tolist()[::-1]


def test_a_plain_neuron_has_one_key_a_gated_one_two_read_vectors(model, plain):
    table = ffn_keys(plain, 0, neurons=[3], k=5)
    scores = numpy(plain.embedding.weight) @ numpy(plain.blocks[0].ffn.up.weight)[3]
    assert table["reads"].unique().tolist() == ["key"] and table["token"].tolist() == np.argsort(-scores)[:5].tolist()
    gated = ffn_keys(model, 0, neurons=[3], k=5)
    assert gated["reads"].unique().tolist() == ["gate", "up"]
    fused = numpy(model.blocks[0].ffn.gate_up.weight)
    for reads, row in (("gate", 3), ("up", model.config.d_ff + 3)):
        scores = numpy(model.embedding.weight) @ fused[row]
        assert gated[gated["reads"] == reads]["token"].tolist() == np.argsort(-scores)[:5].tolist()


def test_triggers_are_the_largest_coefficients_of_each_sign(model, plain):
    tokens = torch.randint(0, 13, (9, 5), generator=torch.Generator().manual_seed(5))
    act = run(model, tokens, record="1.ffn_act").cache["1.ffn_act"]
    table = ffn_triggers(model, tokens, 1, neurons=[7], k=3, batch_size=4)
    for sign in (1, -1):
        rows = table[table["sign"] == sign]
        best = (sign * act[..., 7]).amax(1).sort(descending=True)
        assert rows["example"].tolist() == best.indices[:3].tolist()
        assert np.allclose(rows["coefficient"] * sign, numpy(best.values[:3]))
        for row in rows.itertuples():
            assert abs(float(act[row.example, row.position, 7]) - row.coefficient) < 1e-12
            assert row.token == int(tokens[row.example, row.position])
    assert set(ffn_triggers(plain, tokens, 0, k=2)["sign"]) == {1}, "ReLU has no negative coefficients"


def test_triggers_never_stand_on_padding(model):
    tokens = torch.randint(0, 13, (6, 7), generator=torch.Generator().manual_seed(6))
    mask = torch.ones(6, 7).bool()
    mask[:, 2:] = False
    table = ffn_triggers(model, Inputs(tokens, mask=mask), 0, k=6)
    assert table["position"].max() < 2


def test_subupdates_sum_to_the_ffn_output_and_are_ranked_by_size(model, tokens):
    targets = torch.tensor([1, 2, 3])
    size = model.config.d_ff
    table = ffn_subupdates(model, tokens, 0, targets, position=4, k=size)
    got = run(model, tokens, record="0.ffn_out").cache["0.ffn_out"][:, 4]
    logits = (got @ model.W_U)[torch.arange(3), targets]
    assert np.allclose(table.groupby("example")["target_logit"].sum(), numpy(logits), atol=1e-10)
    assert np.allclose(table.groupby("example")["share"].sum(), 1)
    assert (table.groupby("example")["size"].diff().dropna() <= 0).all()


def test_agreement_is_one_where_values_are_built_to_agree_and_chance_where_permuted():
    """Planted truth: neuron i is excited most by prompt i and writes exactly the answer of prompt i."""
    config = ModelConfig(vocab=12, n_layers=1, n_heads=1, d_model=12, n_ctx=4, d_ff=12, ffn="relu", norm="none",
                         positions="none", bias=False)  # fmt: skip
    model = Transformer(config).double()
    answers = (torch.arange(12) * 5 + 1) % 12
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight.copy_(torch.eye(12))
        model.unembedding.weight.copy_(torch.eye(12))
        model.blocks[0].ffn.up.weight.copy_(torch.eye(12))
        model.blocks[0].ffn.down.weight.copy_(torch.eye(12)[answers].T * 3)
    table = key_value_agreement(model, torch.arange(12)[:, None], answers, permutations=200)
    assert table["agreement"].tolist() == [1.0] and table["n"].tolist() == [12] and table["p"][0] == 1 / 201
    assert 0.02 < table["null_mean"][0] < 0.15, "a random pairing agrees once in 12"
    wrong = key_value_agreement(model, torch.arange(12)[:, None], (answers + 1) % 12, permutations=200)
    assert wrong["agreement"].tolist() == [0.0] and wrong["p"][0] == 1.0


def test_agreement_of_neurons_that_never_fire_is_missing_and_needs_an_ffn(plain):
    import copy

    silent = copy.deepcopy(plain)
    with torch.no_grad():
        silent.blocks[1].ffn.up.bias.fill_(-1e3)
    row = key_value_agreement(silent, torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 2]), permutations=10).iloc[1]
    assert row["n"] == 0 and np.isnan(row["agreement"]) and np.isnan(row["p"])
    bare = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8, ffn="none"))
    with pytest.raises(ValueError, match="this model has none"):
        key_value_agreement(bare, torch.tensor([[1, 2]]), torch.tensor([1]))


@pytest.mark.parametrize("neurons", [[], [-1], [43]])
def test_neurons_outside_are_refused(model, neurons):
    with pytest.raises(NeuronError, match="0 … 42"):
        ffn_values(model, 0, neurons=neurons)


def test_a_model_without_ffn_is_refused_by_name():
    bare = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8, ffn="none"))
    with pytest.raises(ValueError, match="'W_out' in layer 0"):
        ffn_values(bare, 0)
