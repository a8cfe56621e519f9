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
# # Reading the stream early: logit lens and tuned lens
#
# Needs: the toy model in the package, no download; about half a minute on a CPU.
#
# What would the model say if it stopped here? The logit lens sends the stream of every layer through the last norm and
# the unembedding. The tuned lens learns one affine map per layer first, because a layer may hold the answer in other
# directions than the last one reads.

# %%
import torch

import interp
from interp.plots import lens_comparison, lens_curves

torch.set_num_threads(1)
model, task = interp.shipped()
held_out, train = task.splits["held_out"], task.splits["train"]
lens = interp.logit_lens(model, held_out.inputs, "resid_post", "final", held_out.answers, tokenizer=task.vocabulary)
lens.groupby("layer")[["probability", "rank", "kl_to_final"]].mean().round(3)

# %%
lens_curves(lens)

# %% [markdown]
# ## The stream at one prompt

# %%
one = held_out.select([0])
at = interp.logit_lens(model, one.inputs, ["resid_mid", "resid_post"], "final", one.answers, tokenizer=task.vocabulary)
print(one.table["prompt"].iloc[0], "->", one.table["object"].iloc[0])
at[["site", "probability", "rank", "top_token", "top_probability"]].round(3)

# %% [markdown]
# ## A tuned lens
# Trained on prompts of the training split, compared on held-out ones.

# %%
tuned = interp.TunedLens.train(model, train.inputs.select(torch.arange(0, len(train), 4)), steps=150, progress=False)
compared = tuned.compare(inputs=held_out.inputs)
compared.groupby(["lens", "site"])[["kl_to_final", "cross_entropy", "bias"]].mean().round(3)

# %%
lens_comparison(compared)

# %%
last = lens[lens["layer"] == 1]
assert (last["kl_to_final"].abs() < 1e-4).all()  # after the last block the lens is the model
assert last["probability"].mean() > 0.9
