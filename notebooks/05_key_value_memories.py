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
# # FFN key-value memories
#
# Needs: the toy model in the package, no download; a few seconds on a CPU.
#
# FFN(x) = Σ mᵢ(x) vᵢ: the first layer's rows are *keys* that say how much each *value*, a row of the second layer, is
# written (Geva 2021). In a gated FFN the coefficient has a sign, so each neuron has two kinds of triggers.

# %%
import torch

import interp
from interp.analyses import ffn_subupdates, key_value_agreement

torch.set_num_threads(1)
model, task = interp.shipped()
words, train, held_out = task.vocabulary, task.splits["train"], task.splits["held_out"]

# %% [markdown]
# ## What sets a neuron off, and what does it promote?

# %%
triggers = interp.corpus_triggers(model, train.inputs, k=5)
one = held_out.select([0])
top = ffn_subupdates(model, one.inputs, layer=1, targets=one.answers, k=5, tokenizer=words)
print(one.table["prompt"].iloc[0], "->", one.table["object"].iloc[0])
top[["neuron", "coefficient", "share", "target_logit", "top_text"]].round(3)

# %%
neuron = int(top["neuron"].iloc[0])
interp.neuron_card(model, 1, neuron, triggers, tokenizer=words)

# %% [markdown]
# ## The other way round: who promotes a word?

# %%
word = one.table["object"].iloc[0]
interp.values_promoting(model, words.ids(word)[0], k=5, tokenizer=words).round(3)

# %% [markdown]
# ## Do keys and values agree?
# The share of neurons whose value promotes most what follows the prompt that excites them most, beside the same with
# the values permuted among the layer's neurons (which keeps how often each word is promoted).

# %%
agreement = key_value_agreement(model, train.inputs, train.answers, "final", permutations=300)
agreement.round(4)

# %% [markdown]
# One trained model is one observation; the claim F3 asks ten seeds ([docs/claims.md](../docs/claims.md)).

# %%
assert (agreement["agreement"] > agreement["null_high"]).all()
assert abs(top["share"]).sum() > 0.05
