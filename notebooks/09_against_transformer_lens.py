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
# # The same numbers as TransformerLens
#
# Needs: the extra `lens` (TransformerLens 4.3), no download; about half a minute on a CPU.
#
# A random GPT-2 is made from a config, so nothing is fetched. It is opened three ways: by our own transformer with
# copied weights, by TransformerLens behind our protocol, and our model behind theirs.

# %%
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import interp
from interp.plots import effect_heatmaps

torch.manual_seed(0)
torch.set_num_threads(1)
theirs = GPT2LMHeadModel(
    GPT2Config(n_layer=3, n_head=4, n_embd=64, vocab_size=200, n_positions=32, bos_token_id=0, eos_token_id=0)
).eval()
mine = interp.from_huggingface(theirs)
wrapped = interp.from_transformer_lens(theirs)
tokens = torch.randint(200, (4, 12))

# %% [markdown]
# ## Every site

# %%
names = [
    str(site) for site in wrapped.sites if str(site) in {str(one) for one in mine.sites} and site.name != "head_out"
]
a, b = (interp.run(model, tokens, record=names) for model in (mine, wrapped))
gaps = {
    name: float((a.cache[name] - b.cache[name]).abs().max() / a.cache[name].abs().max())
    for name in names
    if torch.isfinite(b.cache[name]).all()
}
print(len(gaps), "sites; largest relative difference", f"{max(gaps.values()):.1e}", "at", max(gaps, key=gaps.get))

# %% [markdown]
# ## A patching sweep
# The same call on both. Ours computes only what a patch reaches; a wrapped model runs whole batches.

# %%
clean, corrupted = tokens[:2], tokens[2:]
metric = interp.logit_difference(torch.tensor([5, 6]), torch.tensor([7, 8]))
sweeps, seconds = {}, {}
for name, model in (("ours", mine), ("wrapped", wrapped)):
    began = time.perf_counter()
    sweeps[name] = interp.patch_sweep(model, clean, corrupted, metric, ["resid_pre", "ffn_out"], progress=False)
    seconds[name] = time.perf_counter() - began
print({name: f"{value:.2f} s" for name, value in seconds.items()})
effect_heatmaps(sweeps["ours"].effect_table())

# %%
gap = max(
    float((torch.as_tensor(sweeps["ours"].values[site]) - torch.as_tensor(sweeps["wrapped"].values[site])).abs().max())
    for site in ("resid_pre", "ffn_out")
)
print("largest difference of the metric in any cell:", f"{gap:.1e}")

# %% [markdown]
# ## Our model behind their interface
# Hook names, `run_with_cache` and the weights under their 3.x names; their own tools run on it.

# %%
bridge = interp.to_transformer_lens(mine)
logits, cache = bridge.run_with_cache(tokens)
print(cache["blocks.0.attn.hook_pattern"].shape, tuple(bridge.W_E.shape))
there = float((logits - a.logits).detach().abs().max())

# %%
assert max(gaps.values()) < 1e-4
assert gap < 1e-4
assert there < 1e-4
