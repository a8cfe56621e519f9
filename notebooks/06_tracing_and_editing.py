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
# # Tracing a fact, and changing it
#
# Needs: the toy model in the package, no download; about half a minute on a CPU.
#
# Causal tracing hides the subject (by noise, or by another subject) and restores one state at a time. A rank-one edit
# then writes another answer into one FFN matrix. That an edit works at a layer does not show that the fact was stored
# there (Hase 2023): both are measured here, and kept apart.

# %%
import torch

import interp
from interp import analyses
from interp.plots import trace_heatmap
from interp.tasks import replacement_pairs

torch.set_num_threads(1)
model, task = interp.shipped()
pairs = replacement_pairs(task.splits["held_out"].select(range(60)))

# %% [markdown]
# ## Which states restore the answer?
# Noise and replacement side by side, in logit difference.

# %%
result = interp.causal_trace(model, pairs, corruption=("noise", "replacement"), noise_seeds=3)
effects = analyses.trace_effects(result.table())
mine = effects[effects["metric"] == "logit_difference"]
mine.sort_values("aie", ascending=False).groupby("corruption").head(3)[
    ["corruption", "site", "layer", "role", "aie", "low", "high"]
].round(2)

# %%
trace_heatmap(effects, "replacement", "logit_difference")

# %% [markdown]
# ## Change a fact
# k* is what the FFN's neurons do at the place, v* what they should write; W' = W + Λ (C⁻¹k*)ᵀ. The edit is a new model:
# the old one stays as it is.

# %%
facts = [3, 70, 500, 900]
cases = analyses.edit_cases(task.prompts, facts, "held_out")
covariance, n = analyses.key_covariance(model, task.splits["train"].inputs, layer=0)
edits = interp.rank_one_edit(model, [case.rewrite for case in cases], layer=0, position="final", covariance=covariance)
edits[0]

# %%
scores = analyses.edit_summary(analyses.edit_scores(model, cases, edits, "rank-one, FFN 0"))
unedited = analyses.edit_summary(analyses.edit_scores(model, cases, [None] * len(cases), "unedited"))
import pandas as pd

table = pd.concat([unedited, scores])[["method", "S", "ES", "PS", "NS"]]
table.round(1)

# %% [markdown]
# ES: the new answer beats the old one; PS: in other wordings; NS: other people's facts still hold; S: their harmonic mean.

# %%
assert float(scores["ES"].iloc[0]) >= 75 and float(unedited["ES"].iloc[0]) <= 25
assert float(scores["NS"].iloc[0]) >= 75
assert mine["aie"].max() > 1
