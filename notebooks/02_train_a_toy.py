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
# # Train a toy model and watch it learn
#
# Needs: `interp` alone, no download; about a minute on one CPU core.
#
# A small decoder learns made-up people's homes, jobs, dishes and sports by heart. One template per fact is kept from
# training: recall there shows a fact that can be used, not only a string that was seen.

# %%
import tempfile

import torch

import interp
from interp.plots import training_curves
from interp.tasks import ToyFacts

torch.set_num_threads(1)
task = ToyFacts(64)
task.splits["train"].table[["prompt", "object"]].head(4)

# %%
folder = tempfile.mkdtemp() + "/facts64"
config = task.train_config(steps=250, batch_size=128, evaluate_every=25, keep=6, seed=1000)
run = interp.train(None, task, config, folder, progress=False)
run.last[["accuracy", "nats"]]

# %%
training_curves(run.curves)

# %% [markdown]
# Models on the way were kept at log-spaced steps. When does the stream begin to hold the answer? The logit lens along
# training:

# %%
import pandas as pd

from interp.training import open_run

again = open_run(folder)
held_out, rows = task.splits["held_out"], []
for step in again.kept:
    lens = interp.logit_lens(
        again.at(step),
        held_out.inputs,
        "resid_post",
        "final",
        held_out.answers,
    )
    rows.append(lens.groupby("layer")["probability"].mean().rename(step))
along = pd.DataFrame(rows).rename_axis("step")
along.round(3)

# %% [markdown]
# The same seed, config and thread count give the same weights bit for bit; a run that is killed goes on with
# `resume=True` and ends the same.

# %%
twin = interp.train(None, task, config, progress=False)
same = all(torch.equal(a, b) for a, b in zip(run.model.parameters(), twin.model.parameters(), strict=True))
print("the same weights again:", same)

# %%
assert same
assert float(run.last.loc["train", "accuracy"]) > 0.95
assert along.iloc[-1].max() > along.iloc[0].max() + 0.5
