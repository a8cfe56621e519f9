"""Attention on known keys, against patterns written in and counts written out."""

import pytest
import torch

from interp import Inputs, ModelConfig, Replace, Transformer, run
from interp.analyses import attention_mass, permuted_keys
from interp.at import SelectionError
from interp.tasks import Dyck, Rewriting

SIZES = {"vocab": 13, "n_layers": 2, "n_heads": 2, "d_model": 8, "n_ctx": 13}


def test_it_is_the_mean_weight_on_the_key():
    model = Transformer(ModelConfig(**SIZES)).double()
    tokens = torch.randint(0, 13, (3, 5), generator=torch.Generator().manual_seed(0))
    keys = torch.tensor([[-1, 0, 1, 2, 3], [-1, -1, 0, 0, 0], [0, 1, 2, -1, -1]])
    table = attention_mass(model, tokens, keys)
    pattern = run(model, tokens, record="pattern").cache
    for row in table.itertuples():
        weights = pattern[f"{row.layer}.pattern"][:, row.head]
        wanted = [float(weights[b, q, keys[b, q]]) for b in range(3) for q in range(5) if keys[b, q] >= 0]
        assert row.mass == pytest.approx(sum(wanted) / len(wanted)) and row.n == len(wanted) == 10
        admitted = [1 / (q + 1) for b in range(3) for q in range(5) if keys[b, q] >= 0]  # causal: q+1 keys
        assert row.chance == pytest.approx(sum(admitted) / len(admitted))
    assert list(table.columns) == ["site", "layer", "head", "mass", "chance", "n"] and len(table) == 4


def test_cross_attention_reads_the_source_and_padding_does_not_count_as_chance():
    task = Rewriting("reverse")
    batch = task.sample(20, torch.Generator().manual_seed(0))
    model = Transformer(task.model_config(n_heads=2))
    truth = task.alignment(batch.inputs)
    table = attention_mass(model, batch.inputs, truth, "cross_pattern")
    assert set(table["site"]) == {"decoder.0.cross_pattern", "decoder.1.cross_pattern"}
    n = batch.inputs.source_mask.sum(1)
    assert table["n"].eq(int(n.sum())).all()
    assert table["chance"].iloc[0] == pytest.approx(float((n * (1 / n.double())).sum() / n.sum()))
    perfect = torch.nn.functional.one_hot(truth.clamp(min=0), 12).float()[:, None].expand(-1, 2, -1, -1)
    written = run(model, batch.inputs, record="1.cross_pattern", change=Replace("decoder.1.cross_pattern", perfect))
    chosen = written.cache["decoder.1.cross_pattern"].gather(
        -1, truth.clamp(min=0)[:, None, :, None].expand(-1, 2, -1, -1)
    )
    assert (chosen == 1).all()


def test_an_encoder_and_its_partners():
    task = Dyck(shortest=8, longest=8)
    words, partner = task.words(torch.full((5,), 8), torch.Generator().manual_seed(0), 8)
    table = attention_mass(Transformer(task.model_config()), Inputs(words), partner)
    assert len(table) == 16 and table["chance"].eq(1 / 8).all() and table["mass"].between(0, 1).all()


def test_permuting_keeps_each_examples_keys():
    keys = torch.tensor([[3, -1, 2, 1, 0], [-1, -1, 4, 5, 6]])
    for seed in range(5):
        shuffled = permuted_keys(keys, seed)
        assert torch.equal(shuffled == -1, keys == -1)
        assert torch.equal(shuffled.sort(1).values, keys.sort(1).values)
    assert not torch.equal(permuted_keys(keys, 0), permuted_keys(keys, 1)) or not torch.equal(
        permuted_keys(keys, 2), keys
    )
    assert keys[0, 0] == 3


@pytest.mark.parametrize(
    "keys", [torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 5), torch.full((3, 5), 5), torch.full((3, 5), -1)]
)
def test_keys_that_do_not_fit_are_refused(keys):
    with pytest.raises(SelectionError, match="keys"):
        attention_mass(Transformer(ModelConfig(**SIZES)), torch.zeros(3, 5, dtype=torch.long), keys)
