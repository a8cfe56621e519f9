# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Writing a claim of your own
#
# Needs: `interp` alone, no download; about a minute on one CPU core.
#
# A claim is a sentence with a quantity, a null, a rule and what would refute it, written down *before* the run. Here:
# "models of this size recall a fact better in the templates they were trained on than in one they were not". Unit: the
# trained seed.

# %%
import pandas as pd
import torch

from interp.claims import Hypothesis, Reading, Study, rule_hash
from interp.engines import run_units
from interp.stats import sign_flip, t_interval
from interp.tasks import ToyFacts
from interp.training.many import train_many

torch.set_num_threads(1)


def measure(config, scratch):
    """Recall in both splits after few steps, one row per seed."""
    task = ToyFacts(config["subjects"])
    configs = [task.train_config(steps=config["steps"], batch_size=64, seed=seed) for seed in config["seeds"]]
    found = train_many(None, task, configs, how="stacked", progress=False)
    return pd.DataFrame(
        [
            {
                "seed": run.config.seed,
                "train": 100 * run.last.loc["train", "accuracy"],
                "held_out": 100 * run.last.loc["held_out", "accuracy"],
            }
            for run in found.values()
        ]
    )


def rule(tables):
    """Above one point: supported; below: refuted."""
    gap = (tables["template"]["train"] - tables["template"]["held_out"]).to_numpy()
    found = t_interval(gap)
    says = "supported" if found.low > 1 else "refuted" if found.high < 1 else "undecided"
    return Reading(says, found.estimate, found.low, found.high, found.n, sign_flip(gap, 1.0))


study = Study(
    "template",
    "how much is recall lost in a new template?",
    measure,
    {"quick": {"all": {"subjects": 64, "steps": 120, "seeds": list(range(1000, 1006))}}},
)
mine = Hypothesis(
    id="X.template",
    quantity="recall in trained templates minus recall in the one kept out",
    unit="points",
    prediction="above 1 point",
    null="1 point",
    statistic="95% t interval over seeds, exact sign flips",
    falsified="an interval below 1 point",
    scope="two-layer decoders, 256 facts, 120 steps",
    rule=rule,
    studies=("template",),
    smallest=1.0,
)

# %% [markdown]
# The rule's hash covers its text, its code and what will be measured. Write it down (or commit it) before running.

# %%
mark = rule_hash(mine, {"template": study})
mark

# %%
import tempfile

table = run_units(measure, study.units["quick"], tempfile.mkdtemp() + "/template", engine="serial", progress=False)
table

# %%
reading = mine.rule({"template": table})
print(
    f"{reading.says}: {reading.estimate:.1f} [{reading.low:.1f}, {reading.high:.1f}] {mine.unit}, "
    f"n = {reading.n} seeds, p = {reading.p:.3f}"
)

# %% [markdown]
# ## Is the rule right?
# Give it tables whose truth is known, and count how often it errs.

# %%
import numpy as np

rng, verdicts = np.random.default_rng(0), []
for _ in range(200):
    gap = rng.normal(1.0, 2.0, 6)  # exactly at the boundary: neither side is right
    verdicts.append(rule({"template": pd.DataFrame({"train": 90 + gap, "held_out": 90.0})}).says)
pd.Series(verdicts).value_counts()

# %%
assert mark == rule_hash(mine, {"template": study})
assert (pd.Series(verdicts) != "undecided").mean() < 0.12  # 5% by design, 200 draws
assert reading.says in ("supported", "undecided")
