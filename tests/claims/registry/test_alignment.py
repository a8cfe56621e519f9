"""A3: the rule, the choice of a layer on the other half, and one tiny measurement; F4's rule."""

import numpy as np
import pandas as pd
import pytest

from interp.claims import confusion
from interp.claims.registry import alignment, gating


@pytest.mark.parametrize("mass, says", [(0.95, "supported"), (0.5, "refuted")])
def test_aligned(mass, says):
    reading = alignment.aligned(confusion.alignment_tables(mass, 0))
    assert reading.says == says
    assert reading.estimate == pytest.approx(mass, abs=0.03)


def test_the_layer_is_chosen_on_one_half_and_read_on_the_other():
    rows = [{"task": "copy", "seed": 0, "layer": layer, "head": 0, "half": half, "permuted": 0.1, "chance": 0.1, "mass": mass}
            for (layer, half), mass in {(0, "choose"): 0.9, (1, "choose"): 0.1,
                                        (0, "read"): 0.2, (1, "read"): 0.8}.items()]  # fmt: skip
    found = alignment.by_layer(pd.DataFrame(rows)).set_index("layer")
    assert found["best"].tolist() == [True, False]
    assert found.loc[0, "mass"] == 0.2  # not the larger one that the reading half shows


def test_a_tiny_measurement(tmp_path):
    table = alignment.alignment({"task": "copy", "seeds": [1000, 1001], "training": {"steps": 2}}, tmp_path)
    assert set(table["half"]) == {"choose", "read"}
    assert np.allclose(table["mass"], table["chance"], atol=0.05)


def test_gating_takes_each_kinds_best_rate_from_other_seeds():
    rows = [{"ffn": kind, "learning_rate": rate, "seed": seed, "nats": base + (0.0 if rate == best else 0.5) + 0.001 * (seed % 7)}
            for kind, base, best in (("swiglu", 3.0, 1e-3), ("relu", 3.04, 2e-3)) for rate in (1e-3, 2e-3)
            for seed in (1000, 1001, *range(10))]  # fmt: skip
    table = pd.DataFrame(rows)
    reading = gating.gated_wins({"F4": table})
    assert (reading.says, reading.n) == ("supported", 10)
    assert reading.estimate == pytest.approx(-0.04)
    turned = table.assign(ffn=table["ffn"].map({"swiglu": "relu", "relu": "swiglu"}))
    assert gating.gated_wins({"F4": turned}).says == "refuted"
