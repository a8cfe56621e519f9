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
# # A first look inside a transformer
#
# A small model that knows 2,048 made-up facts ships with the package. This notebook opens it: reads its stream, patches
# one person's activations into another's, reads the stream early with the logit lens, and looks at single neurons of a
# feed-forward layer. Nothing is downloaded; it runs in seconds.

# %%
import interp
from interp.plots import effect_heatmaps, lens_curves
from interp.tasks import replacement_pairs

model, task = interp.shipped()
model.config

# %% [markdown]
# ## What does it know?
# A person is two name tokens; each has a home, a job, a dish and a sport. Every fact was asked in four templates, one of
# which was kept out of training.

# %%
words = task.vocabulary
held_out = task.splits["held_out"]
held_out.table[["prompt", "object"]].head()

# %%
got = interp.run(model, held_out.inputs)
answers = got.logits[:, -1].argmax(-1)
print(
    f"{100 * (answers == held_out.answers).double().mean():.2f}% of {len(held_out)} held-out prompts are answered right"
)

# %% [markdown]
# ## What happens inside?
# Every intermediate of the block equations has one name. `run` records it; nothing is registered on the model.

# %%
prompt = held_out.table["prompt"][0]
one = interp.run(model, prompt, record=["resid_post", "1.pattern"], tokenizer=words)
print(prompt, "->", words.text(int(one.logits[0, -1].argmax())))
print(one.cache)
print("stream after both layers:", tuple(one.cache.stack("resid_post").shape), "[layer batch position d_model]")

# %% [markdown]
# The sites of one layer, in the order in which a forward pass reaches them:

# %%
[str(site) for site in model.sites if site.layer == 0]

# %% [markdown]
# ## Where does the answer depend on the person?
# Pair each prompt with one about somebody else, write one clean activation into the corrupted run, and see how much of the
# difference between the two answers comes back. 0: nothing, 1: all of it.

# %%
template = held_out.select((held_out.table["template"] == 0).to_numpy())
pairs = replacement_pairs(template)
metric = interp.logit_difference(pairs.correct, pairs.wrong)
sweep = interp.patch_sweep(model, pairs.clean, pairs.corrupted, metric, sites=["resid_pre", "attn_out", "ffn_out"])
print(f"{len(pairs)} pairs; logit difference {sweep.clean.mean():+.1f} clean, {sweep.corrupted.mean():+.1f} corrupted")
sweep.table().head()

# %%
effect_heatmaps(sweep.effect_table(), labels=["[first]", "[last]", "has", "the", "[relation]", "of"])

# %% [markdown]
# ## When does the stream say the answer?

# %%
lens = interp.logit_lens(model, held_out.inputs, "resid_post", "final", held_out.answers, tokenizer=words)
lens.groupby("layer")[["probability", "rank", "kl_to_final"]].mean()

# %%
lens_curves(lens)

# %% [markdown]
# ## What do single neurons do?
# The last FFN as a key-value memory: which neurons write most at this prompt, what they promote, and what sets them off.

# %%
from interp.analyses import ffn_subupdates

top = ffn_subupdates(model, template.inputs.select([0]), layer=1, targets=template.answers[:1], k=5, tokenizer=words)
print(template.table["prompt"][0], "->", template.table["object"][0])
top[["neuron", "coefficient", "share", "target_logit", "top_text"]]

# %%
neurons = top["neuron"].tolist()
interp.ffn_triggers(model, held_out.inputs, 1, neurons[:2], k=3, tokenizer=words)[
    ["neuron", "sign", "coefficient", "context"]
]

# %%
interp.ffn_values(model, 1, neurons[:2], k=5, tokenizer=words)[["neuron", "rank", "text", "score"]]

# %% [markdown]
# ## Change something yourself
# Cut the attention edges from the last position to the person's two names in layer 0, and most answers are lost: in this
# model, heads of layer 0 carry the name to where the answer is formed.

# %%
cut = interp.KnockOut("0.scores", at=(slice(None), 5, [0, 1]))
after = interp.run(model, template.inputs, change=cut)
right = (after.logits[:, -1].argmax(-1) == template.answers).double().mean()
print(f"{100 * right:.1f}% right with those edges cut")

# %% [markdown]
# One trained model is one observation: what the maps show here holds for this seed. `make report` does the same for a
# model trained on the spot and for a pretrained language model.
