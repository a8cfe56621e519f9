"""R3, R4, R5 and F3: rules on made-up tables, held-out R² by hand, and each measurement once, tiny."""

import numpy as np
import pandas as pd
import pytest
import torch

from interp.claims import confusion
from interp.claims.registry import stream


@pytest.mark.parametrize("present, says", [(True, "supported"), (False, "refuted")])
def test_composition(present, says):
    reading = stream.composition(confusion.composition_tables(present, 0))
    assert reading.says == says
    assert reading.n == 10


def test_composition_counts_seeds():
    tables = confusion.composition_tables(True, 0)
    table = tables["R3"].copy()
    table.loc[table["seed"] < 2, "percentile"] = 99.0
    found = stream.composition({"R3": table})
    assert (found.estimate, found.says) == (0.8, "supported")
    table.loc[table["seed"] < 3, "percentile"] = 99.0
    assert stream.composition({"R3": table}).says == "refuted"
    assert stream.composed(table)["chance"].tolist() == [0.25] * 10  # 4 of 16 pairs join two such heads


def _overlaps(ratio):
    rows = [{"what": "overlap", "state": state, "seed": seed, "layer": 0, "head": head, "expected": 0.25,
             "overlap": 0.25 * (ratio if state == "trained" else 1.0) * (1 + 0.001 * seed)}
            for state in ("trained", "untrained") for seed in range(10) for head in range(2)]  # fmt: skip
    return {"R3": pd.DataFrame(rows), "facts.reading": pd.DataFrame(rows)}


@pytest.mark.parametrize("ratio, says", [(0.5, "supported"), (0.98, "refuted"), (1.2, "refuted")])
def test_overlap(ratio, says):
    reading = stream.apart(_overlaps(ratio))
    assert reading.says == says
    assert reading.estimate == pytest.approx(ratio * 1.0045)


def test_depth():
    assert stream.depth_language(confusion.depth_tables(True, 0)).says == "supported"
    assert stream.depth_language(confusion.depth_tables(False, 0)).says != "supported"
    turned = confusion.depth_tables(True, 0)["R5.language"].rename(columns={"current": "next", "next": "current"})
    assert stream.depth_language({"R5.language": turned}).says == "refuted"


def test_agreement():
    assert stream.key_value(confusion.agreement_tables(5, 0)).says == "supported"
    assert stream.key_value(confusion.agreement_tables(0, 0)).says == "refuted"
    table = pd.DataFrame({"seed": 0, "n": [1, 3], "agreement": [0.4, 0.0], "null_mean": [0.0, 0.1]})
    assert stream.agreement_excess(table).iloc[0][["agreement", "null"]].tolist() == pytest.approx([10, 7.5])


def test_held_out_r2_by_hand():
    x = np.array([[0.0], [2.0], [0.0], [2.0]])
    half = np.array([True, True, False, False])
    assert stream.held_out_r2(x, np.array([0, 1, 0, 1]), half) == 1.0
    assert stream.held_out_r2(x, np.array([0, 1, 1, 0]), half) == pytest.approx(1 - 8 / 2)  # worse than the mean
    assert stream.held_out_r2(x, np.array([0, 0, 0, 0]), half) == 0.0


def test_variance_of_an_embedding_is_its_token():
    generator = torch.Generator().manual_seed(0)
    now, following = (torch.randint(5, (400,), generator=generator) for _ in range(2))
    table = torch.randn(5, 8, generator=generator)
    found = stream.explained({"a": table[now].double().numpy(), "b": table[following].double().numpy()}, now, following)
    assert found.loc[0, "current"] == pytest.approx(1)
    assert found.loc[1, "next"] == pytest.approx(1)
    assert abs(found.loc[0, "next"]) < 0.1
    assert list(found["place"]) == [0, 1]


def test_each_study_is_measured_tiny(tmp_path):
    table = stream.induction(
        {"seeds": [1000, 1001], "layers": [2, 1], "n_heads": 2, "steps": 2, "draws": 50}, tmp_path / "a"
    )
    assert set(table["what"]) == {"pair", "overlap", "loss"}
    assert len(stream.composed(table)) == 2
    facts = stream.facts({"seeds": [1000, 1001], "subjects": 12, "permutations": 10, "training": {"steps": 40, "batch_size": 32}},
                         tmp_path / "b")  # fmt: skip
    assert set(facts["what"]) == {"overlap", "variance", "agreement"}
    both = {"R3": table, "facts.reading": facts}
    for rule in (stream.apart, stream.key_value):
        assert np.isfinite(rule(both).estimate)
    assert set(stream.overlap_table(both)["task"]) == {"induction", "facts"}
