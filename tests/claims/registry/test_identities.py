"""The identities' measurement, on few models; that it can fail; and the rule on made-up tables."""

import pandas as pd
import pytest
import torch

from interp.claims.registry import identities


def table(errors, identity="R1", holds=True, missing=0):
    rows = [{"seed": i, "identity": identity, "where": "x", "holds": holds, "kind": "decoder", "norm": "none",
             "norm_position": "pre", "error": error, "missing": missing} for i, error in enumerate(errors)]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return identities.measure({"first": 1000, "last": 1004}, tmp_path_factory.mktemp("identities"))


@pytest.mark.parametrize("claim", identities.CLAIMS, ids=lambda claim: claim.id)
def test_random_models(measured, claim):
    (hypothesis,) = claim.hypotheses
    reading = hypothesis.rule({"identities": measured})
    assert reading.says == "by construction", reading
    assert reading.n == 4
    assert not hypothesis.shown({"identities": measured}).empty


def test_rule_each_outcome():
    good = pd.concat([table([1e-12, 1e-15]), table([0.5], holds=False)])
    assert identities.r1({"identities": good}).says == "by construction"
    assert identities.r1({"identities": good}).estimate == 1e-12
    bad = {
        "too large": pd.concat([table([1e-9]), table([0.5], holds=False)]),
        "never fails": table([0.0]),
        "missing": pd.concat([table([0.0], missing=1), table([0.5], holds=False)]),
        "not a number": pd.concat([table([float("nan")]), table([0.5], holds=False)]),
    }
    for rows in bad.values():
        assert identities.r1({"identities": rows}).says == "refuted"
    assert identities.a2({"identities": table([1e-300], "A2")}).says == "refuted"


def test_admitted_edges_by_hand():
    mask = torch.tensor([[True, True, True], [False, True, True]])
    inputs = identities.Inputs(torch.zeros(2, 3, dtype=torch.long), mask=mask, prefix_length=torch.tensor([2, 0]))
    assert identities.admitted("prefix-decoder", inputs).int().tolist() == [[[1, 1, 0], [1, 1, 0], [1, 1, 1]],
                                                                            [[0, 0, 0], [0, 1, 0], [0, 1, 1]]]  # fmt: skip


def test_an_open_mask_is_seen():
    model, inputs = identities.random_case(1000, ("encoder",))
    size = identities.influence(model, inputs)[inputs.mask]
    assert float(size[~identities.admitted("decoder", inputs)[inputs.mask]].max()) > 0


def test_jacobian_by_hand():
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], requires_grad=True)
    out = torch.stack([x[:, 0] * 2, x[:, 0] - 5 * x[:, 1]], 1)
    assert identities._jacobian(out, [x]).tolist() == [[[2.0, 0.0], [1.0, 5.0]]]


def test_shorter_model_drops_that_block():
    model, _ = identities.random_case(1001, ("decoder",), n_layers=3)
    new = identities.shorter(model, 1)
    assert new.config.n_layers == 2
    assert torch.equal(new.blocks[1].attention.qkv.weight, model.blocks[2].attention.qkv.weight)
