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
# # Induction heads and circuits
#
# Needs: `interp` alone, no download; about a minute on one CPU core.
#
# Program: "what followed this token the last time it was here?" Two layers of attention can do it: a previous-token
# head writes into each position what stood before it, and an induction head looks for the position whose predecessor is
# the current token. Here the weights are set by hand, so the circuit is known.

# %%
import pandas as pd
import torch

import interp
from interp import circuits
from interp.circuits.planted import planted, recovery
from interp.plots import head_score_heatmaps

torch.set_num_threads(1)
made = planted("induction", seed=0)
model = made.model
print(
    model.config.n_layers,
    "layers,",
    model.config.n_heads,
    "heads;",
    len(made.clean),
    "prompts of",
    made.clean.shape[1],
    "tokens",
)

# %% [markdown]
# ## What do the heads look at?

# %%
scores = interp.head_scores(model, conventions=("mean",), lengths=(3,))
head_score_heatmaps(scores)

# %% [markdown]
# The patterns themselves at one prompt; point at a cell, or use the arrow keys.

# %%
got = interp.run(model, made.clean[:1], record=["pattern"])
words = [f"t{int(token)}" for token in made.clean[0]]
interp.attention_widget(got.cache.stack("pattern")[:, 0], words, title="The planted induction model")

# %% [markdown]
# ## Which edges carry the answer?
# Edge attribution (EAP) scores every edge by a gradient; exact edge patching runs each. On a known circuit both can be
# marked: AUC 1 puts every true edge above every other.

# %%
tables = {}
for method in ("eap", "exact"):
    scores = interp.edge_attribution(model, made.clean, made.corrupted, made.metric, method)
    tables[method] = scores.table().groupby("edge")["score"].mean()
pd.DataFrame(tables).sort_values("exact", key=abs, ascending=False).head(6).round(3)

# %%
auc = recovery(["induction"], methods=("eap", "eap-ig", "exact"), ablations=("corrupted", "zero"), seeds=(0, 1))
auc.groupby(["null", "ablation", "method"], sort=False)["auc"].mean().unstack().round(3)

# %% [markdown]
# ## Is the circuit enough?
# Keep the best edges and cut the rest; 1 means that the circuit behaves like the model.

# %%
curve = circuits.faithfulness(model, made.clean, made.corrupted, made.metric, scores)
circuits.curve_areas(curve)

# %%
found = interp.acdc(model, made.clean, made.corrupted, threshold=0.01)  # damage: KL from the clean run, in nats
print(int(found.kept.sum()), "of", len(found.graph.edges), "edges are left")

# %% [markdown]
# In trained models several heads share each role: the claim R3 asks ten seeds ([docs/claims.md](../docs/claims.md)).

# %%
real = auc[~auc["null"].astype(bool)]
assert real[real["method"] == "exact"]["auc"].min() > 0.9
assert 0 < int(found.kept.sum()) < len(found.graph.edges) / 2
