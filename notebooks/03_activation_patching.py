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
# # Activation patching
#
# Needs: the toy model in the package, no download; a few seconds on a CPU.
#
# Two prompts that differ in one thing (who is asked about) are run; one activation of the clean run is written into the
# corrupted one; how much of the difference between the two answers comes back? 0: nothing, 1: all of it. An effect is
# *mediation*, not storage: it says which values the answer passes through.

# %%
import torch

import interp
from interp.plots import effect_heatmaps
from interp.tasks import replacement_pairs

torch.set_num_threads(1)
model, task = interp.shipped()
held_out = task.splits["held_out"]
template = held_out.select((held_out.table["template"] == 0).to_numpy())
pairs = replacement_pairs(template.select(range(128)))
metric = interp.logit_difference(pairs.correct, pairs.wrong)

# %% [markdown]
# ## Every place at once
# A sweep never recomputes what a patch cannot reach; what it will cost is known before.

# %%
plan = interp.plan_sweep(model, pairs.clean, pairs.corrupted, metric, ["resid_pre", "attn_out", "ffn_out"])
print(plan.estimate)
sweep = plan.run(progress=False)
effect_heatmaps(sweep.effect_table(), labels=["[first]", "[last]", "has", "the", "[relation]", "of"])

# %% [markdown]
# ## Which heads?

# %%
heads = interp.patch_sweep(model, pairs.clean, pairs.corrupted, metric, "z", by=("layer", "head"))
heads.effect_table()[["layer", "head", "effect"]].round(3)

# %% [markdown]
# ## Sufficiency and necessity
# *Denoising* (clean into corrupted) asks what suffices, *noising* (corrupted into clean) what is needed. A part with a
# backup is not needed; a part that works only together with another does not suffice.

# %%
both = {
    direction: interp.patch_sweep(
        model, pairs.clean, pairs.corrupted, metric, ["attn_out", "ffn_out"], by=("layer",), direction=direction
    )
    for direction in ("denoising", "noising")
}
for direction, found in both.items():
    print(direction)
    print(found.effect_table()[["site", "layer", "effect"]].round(2).to_string(index=False))

# %% [markdown]
# ## Effects do not add up
# Shapley values divide the whole fairly between players, and say how much belongs to pairs.

# %%
from interp.analyses import site_shares

shares = site_shares(
    model, pairs.clean, pairs.corrupted, metric, {"attention": ["attn_out"], "ffn": ["ffn_out"]}, check=0
)
shares.table().round(3)

# %% [markdown]
# ## The same numbers without shortcuts
# The reference engine runs the whole model for every cell.

# %%
slow = interp.patch_sweep(
    model, pairs.clean, pairs.corrupted, metric, "ffn_out", by=("layer", "position"), engine="reference"
)
fast = interp.patch_sweep(model, pairs.clean, pairs.corrupted, metric, "ffn_out", by=("layer", "position"))
gap = float((torch.as_tensor(slow.effect()["ffn_out"]) - torch.as_tensor(fast.effect()["ffn_out"])).abs().max())
print("largest difference of an effect:", gap)

# %%
assert gap < 1e-4
table = sweep.effect_table()
start = table[(table["site"] == "resid_pre") & (table["layer"] == 0)].set_index("position")["effect"]
assert start[[0, 1]].max() > 0.3 and start[[2, 3, 4, 5]].abs().max() < 1e-6  # the prompts differ in the name alone
alone = shares.table().query("other == ''").set_index("player")
assert abs(alone["share"].sum() - 1) < 1e-6
