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
# # The block beside its equations
#
# Needs: `interp` alone, no download; a few seconds on a CPU.
#
# The textbook writes a pre-norm block in six lines (7.27 to 7.32). Here each line is recomputed by hand from recorded
# values, and compared with what the model computed.

# %%
import torch

import interp

torch.manual_seed(0)
config = interp.ModelConfig(
    vocab=50, n_layers=2, n_heads=2, d_model=16, n_ctx=8, norm="layernorm", ffn="swiglu", norm_eps=0.0
)
model = interp.Transformer(config, seed=0).double()
tokens = torch.randint(50, (1, 6))
got = interp.run(
    model, tokens, record=[str(site) for site in model.sites if site.layer == 0 and site.name != "head_out"]
)
c = {site.name: got.cache[site] for site in got.cache}
list(c)

# %% [markdown]
# **7.27** t¹ = LayerNorm(x): subtract the mean over the d entries of one token's vector, divide by the population
# standard deviation (7.23 to 7.26). A freshly drawn model has gain 1 and offset 0.

# %%
x = c["resid_pre"]
t1 = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, correction=0)
print("largest difference", float((t1 - c["norm1"]).abs().max().detach()))

# %% [markdown]
# **7.28** t² = MultiHeadAttention(t¹): each head mixes values with its pattern, a row of which sums to 1 and never
# looks ahead.

# %%
pattern = c["pattern"]
print(
    "rows sum to",
    float(pattern.sum(-1).min().detach()),
    "mass on later tokens",
    float(pattern.triu(1).abs().max().detach()),
)
z = pattern @ c["v"].transpose(1, 2)  # [batch head position d_head]
print("z by hand", float((z.transpose(1, 2) - c["z"]).abs().max().detach()))

# %% [markdown]
# **7.29** t³ = t² + x. **7.30** t⁴ = LayerNorm(t³). **7.31** t⁵ = FFN(t⁴). **7.32** h = t⁵ + t³.

# %%
t3 = c["attn_out"] + x
t4 = (t3 - t3.mean(-1, keepdim=True)) / t3.std(-1, keepdim=True, correction=0)
h = c["ffn_out"] + t3
for name, mine, site in (("7.29", t3, "resid_mid"), ("7.30", t4, "norm2"), ("7.32", h, "resid_post")):
    print(name, float((mine - c[site]).abs().max().detach()))

# %% [markdown]
# **7.22** the gated FFN: (Swish(x W₁ + b₁) ⊗ (x W₂ + b₂)) W₃ + b₃. Its hidden activations are the *keys' coefficients*
# of notebook 05.

# %%
gate, up = c["ffn_pre"], c["ffn_up"]
act = gate * torch.sigmoid(gate) * up
print("activations by hand", float((act - c["ffn_act"]).abs().max().detach()))
print(
    "output by hand",
    float((act @ model.weight("W_out", 0) + model.weight("b_out", 0) - c["ffn_out"]).abs().max().detach()),
)

# %% [markdown]
# Components only add to the stream: the last vector is the embedding plus everything that attention and FFNs wrote. In
# a post-norm model this is false, and `stream_identity` refuses it.

# %%
from interp.analyses import stream_identity

print("|h_L - (x_0 + sum of outputs)| / |h_L| =", stream_identity(model, tokens))

# %% [markdown]
# Changing one value is one line, and nothing stays behind on the model.

# %%
without = interp.run(model, tokens, change=interp.Zero("1.ffn_out"))
again = interp.run(model, tokens)
print("logits moved by", float((without.logits - got.logits).abs().max().detach()))

# %%
assert float((t3 - c["resid_mid"]).abs().max()) == 0 and float((h - c["resid_post"]).abs().max()) == 0
assert float((t1 - c["norm1"]).abs().max()) < 1e-12 and float((act - c["ffn_act"]).abs().max()) < 1e-12
assert stream_identity(model, tokens) < 1e-12
assert torch.allclose(again.logits, got.logits, atol=1e-12)  # a pass that records patterns computes them one by one
