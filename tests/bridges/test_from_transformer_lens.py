"""TransformerLens's bridges behind our protocol: random models of many families, built offline from their configs."""

from __future__ import annotations

import copy
import functools
import inspect
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from interp import Inputs, logit_lens, patch_sweep, run
from interp.bridges import BridgeError, from_huggingface
from interp.bridges.lens_in.model import from_transformer_lens
from interp.bridges.lens_in.places import Pass, Place
from interp.bridges.lens_in.selftest import adds_up
from interp.hookable import Hookable
from interp.interventions import Add, AddNoise, KnockOut, Replace, Zero
from interp.metrics import logit_difference
from interp.model.inputs import InputsError
from interp.run import NotReachedError
from interp.sites import Site

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformer_lens")

VOCAB = 37
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 12, "sliding_window": 5}
FAMILIES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": 5}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 12}),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**PLAIN, "rotary_pct": 0.5}),
    "neox, sequential": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**PLAIN, "use_parallel_residual": False}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**LLAMA, "head_dim": 12}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**LLAMA, "head_dim": 12, **CAPS}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**LLAMA, "head_dim": 12, "sliding_window": 5}),
    "opt": ("OPTConfig", "OPTForCausalLM", {**PLAIN, "ffn_dim": 44, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**GPT, "hidden_size": 32}),
    "phi": ("PhiConfig", "PhiForCausalLM", PLAIN),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", LLAMA),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", LLAMA),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", LLAMA),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**LLAMA, "residual_multiplier": 0.5, "logits_scaling": 3.0}),
    "cohere": ("CohereConfig", "CohereForCausalLM", LLAMA),
    "falcon": ("FalconConfig", "FalconForCausalLM", PLAIN),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 3}),
    "bert": ("BertConfig", "BertForMaskedLM", PLAIN),
}  # fmt: skip
ROTATION = {"q_rot": "never fires", "k_rot": "never fires"}
DELEGATED = {"scores": "holds other numbers than the lowest", "pattern": "changes nothing when written"}
HEADS = {"head_out": "does not add up to attn_out"}
NO_NEURONS = dict.fromkeys(("ffn_pre", "ffn_act"), "its neurons have no hook")
NO_GAIN = dict.fromkeys((f"{norm}_{part}" for norm in ("norm1", "norm2", "final") for part in ("scale", "hat")),
                        "raises AttributeError when written")  # fmt: skip
DROPPED = {
    "neox": ROTATION, "neox, sequential": ROTATION, "phi3": ROTATION, "falcon": ROTATION, "gptj": ROTATION | DELEGATED,
    "opt": DELEGATED, "bert": dict.fromkeys(DELEGATED, "changes nothing when written"), "gemma2": HEADS, "gemma3": HEADS,
    "olmo2": HEADS, "granite": HEADS, "mixtral": NO_NEURONS, "olmo": NO_GAIN,
}  # fmt: skip
OURS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing here may reach for a hub."""

    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def build(name: str, dtype: torch.dtype = torch.float32):
    """A transformers model with every parameter random; norm gains are not 1, biases not 0."""
    config, architecture, options = FAMILIES[name]
    config = getattr(transformers, config)(**options)
    config._attn_implementation = "eager"
    model = getattr(transformers, architecture)(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
    return model


source = functools.cache(build)


@functools.cache
def wrapped(name: str) -> Any:
    """The family's model through TransformerLens; what is dropped is told in `dropped` too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*dropped sites of the bridge")
        return from_transformer_lens(source(name))


def bridged(name: str) -> Any:
    """A TransformerLens bridge as a user would hold it."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = copy.deepcopy(source(name))
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)


def left_padded() -> Any:
    """Three sequences of 9, 7 and 4 real tokens, padded on the left."""
    tokens = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    return Inputs(tokens, mask=torch.arange(9)[None] >= torch.tensor([[0], [2], [5]]))


def theirs(model, inputs: Inputs, **options):
    """transformers' output, with the position ids that its own generate() gives padded prompts."""
    if inputs.mask is not None:
        options["attention_mask"] = inputs.mask.long()
        if "position_ids" in inspect.signature(model.forward).parameters:
            options["position_ids"] = (inputs.mask.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(input_ids=inputs.tokens, **options)


def close(found: torch.Tensor, wanted: torch.Tensor, relative: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= relative * wanted.abs().max()


def names(model: Hookable, layer: int = 1) -> list[str]:
    return [site.name for site in model.sites if site.layer == layer]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_equal_transformers(name, padded):
    inputs = left_padded() if padded else Inputs(left_padded().tokens)
    real = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    wanted = theirs(source(name), inputs).logits[real]
    assert wanted.std() > (0.05 if name == "cohere" else 0.2)  # a comparison that can fail
    model = wrapped(name)
    with torch.no_grad():
        close(model(inputs)[real], wanted)
        close(model(inputs, lambda site, value: value)[real], wanted)  # every site read
    assert isinstance(model, Hookable)


@pytest.mark.parametrize("name", FAMILIES)
def test_sites_and_what_is_dropped(name):
    model = wrapped(name)
    found = {}
    for site, why in model.dropped.items():
        assert found.setdefault(site.name, why) == why  # in every layer, for the same reason
    wanted = DROPPED.get(name, {})
    assert set(found) == set(wanted)
    assert all(wanted[key] in found[key] for key in wanted)
    assert not {site.name for site in model.sites} & set(found)
    with torch.no_grad():
        reached = []
        model(left_padded(), lambda site, value: (reached.append(site), value)[1])
    assert tuple(reached) == model.sites
    assert model.additive_stream == (name not in ("bert", "bloom"))  # a norm stands after their embeddings


def test_what_is_dropped_is_told_in_one_warning():
    message = (r"^GPTJForCausalLM: dropped sites of the bridge: (q_rot|k_rot|scores|pattern) .*; .*"
               r"pattern changes nothing when written\. All other sites work")  # fmt: skip
    with pytest.warns(UserWarning, match=message) as told:
        from_transformer_lens(source("gptj"))
    assert len(told) == 1 and told[0].filename == __file__


PRE = ["resid_pre", "norm1_scale", "norm1_hat", "norm1", "q", "k", "v"]
NORM2 = ["norm2_scale", "norm2_hat", "norm2"]


def test_the_lists_of_sites():
    attention = ["scores", "pattern", "z", "head_out", "attn_out"]
    gated, plain = ["ffn_pre", "ffn_up", "ffn_act", "ffn_out"], ["ffn_pre", "ffn_act", "ffn_out"]
    rotated, end = ["q_rot", "k_rot"], ["resid_post"]
    assert names(wrapped("gpt2")) == [*PRE, *attention, "resid_mid", *NORM2, *plain, *end]
    assert names(wrapped("llama")) == [*PRE, *rotated, *attention, "resid_mid", *NORM2, *gated, *end]
    assert names(wrapped("neox")) == [*PRE, *attention, *NORM2, *plain, *end]  # parallel: no resid_mid
    assert names(wrapped("neox, sequential")) == [*PRE, *attention, "resid_mid", *NORM2, *plain, *end]
    assert names(wrapped("phi")) == [*PRE, *rotated, *attention, *plain, *end]  # parallel, one norm
    assert names(wrapped("gptj")) == [*PRE, "z", "head_out", "attn_out", *plain, *end]
    assert names(wrapped("gemma2")) == [
        *PRE,
        *rotated,
        "scores",
        "pattern",
        "z",
        "attn_out",
        "resid_mid",
        *NORM2,
        *gated,
        *end,
    ]
    assert names(wrapped("bert")) == ["resid_pre", "q", "k", "v", "z", "head_out", "attn_out", "resid_mid_sum", "norm1_scale",
                                      "norm1_hat", "resid_mid", *plain, "resid_post_sum", "norm2_scale", "norm2_hat",
                                      "resid_post"]  # fmt: skip
    outer = [str(site) for site in wrapped("gpt2").sites if site.layer is None]
    assert outer == ["embed", "pos_embed", "final_scale", "final_hat", "final", "logits"]
    config = wrapped("qwen3").config
    assert (config.kind, config.vocab, config.n_layers, config.n_ctx, config.n_heads) == ("decoder", VOCAB, 2, 64, 4)
    assert (config.n_kv_heads, config.d_model, config.d_head, config.d_ff, config.window) == (2, 32, 12, 44, None)
    assert wrapped("mistral").config.window == 5 and wrapped("gemma2").config.window is None
    assert wrapped("falcon").config.n_kv_heads == 1 and wrapped("bert").config.kind == "encoder"


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_values_are_transformers_own(name):
    inputs, model = left_padded(), wrapped(name)
    output = theirs(source(name), inputs, output_hidden_states=True, output_attentions=True)
    has = {site.name for site in model.sites}
    read = run(model, inputs, record=["resid_pre", "final", *(["pattern"] if "pattern" in has else [])]).cache
    ours = [read["0.resid_pre"], read["1.resid_pre"], *([read["final"]] if name != "bert" else [])]
    for mine, given in zip(ours, output.hidden_states, strict=name != "bert"):
        close(mine[inputs.mask], given[inputs.mask])
    if "pattern" in has:
        for layer in range(2):
            mine, given = (value.transpose(1, 2)[inputs.mask]
                           for value in (read[f"{layer}.pattern"], output.attentions[layer]))  # fmt: skip
            close(mine, given)


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_tensors_are_what_passed_and_stay(name):
    """The model goes on writing into none of them, and identities of the block hold."""
    inputs, model = Inputs(left_padded().tokens), wrapped(name)
    seen = {}

    def tap(site, value):
        seen[site] = value.clone()
        return value

    with torch.no_grad():
        model(inputs, tap)
    read = run(model, inputs, record=list(model.sites)).cache
    assert all(torch.equal(read[site], seen[site]) for site in model.sites)
    for layer in range(2):
        at = {site.name: read[site] for site in model.sites if site.layer == layer}
        if "head_out" in at:
            bias = model.weight("b_O", layer)
            close(at["head_out"].sum(2) + (0 if bias is None else bias), at["attn_out"])
        if "pattern" in at:
            assert torch.equal(at["pattern"] == 0, at["scores"].isneginf())
            close(at["scores"].softmax(-1), at["pattern"])
        if name != "bert":
            written = at["attn_out"] + at["ffn_out"]
            close(at["resid_pre"] + written, at["resid_post"])
            if "resid_mid" in at:
                close(at["resid_pre"] + at["attn_out"], at["resid_mid"])


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_that_were_used(name):
    """In the researcher's layout: what a site reads times its weight is what the next site holds."""
    model = wrapped(name)
    read = run(model, Inputs(left_padded().tokens), record=list(model.sites)).cache
    weight = functools.partial(model.weight, layer=1)

    def linear(value, kind):
        product, bias = torch.tensordot(value, weight(f"W_{kind}"), dims=1), weight(f"b_{kind}")
        return product if bias is None else product + bias

    at = {site.name: read[site] for site in model.sites if site.layer == 1}
    into = at.get("norm1", at["resid_pre"])
    for letter, axis in (("Q", "q"), ("K", "k"), ("V", "v")):
        product, bias = torch.einsum("bpm,hmd->bphd", into, weight(f"W_{letter}")), weight(f"b_{letter}")
        close(product if bias is None else product + bias, at[axis])
    if name == "mixtral":
        assert weight("W_in") is None and weight("W_out") is None
    else:
        reads = at.get("norm2", at["norm1"] if "resid_mid" not in at else at["resid_mid"])
        close(linear(reads, "gate" if "ffn_up" in at else "in"), at["ffn_pre"])
        if "ffn_up" in at:
            close(linear(reads, "in"), at["ffn_up"])
        if name not in ("gemma2", "gemma3", "olmo2", "granite"):  # a norm or a factor follows W_out
            close(linear(at["ffn_act"], "out"), at["ffn_out"])
    head, bias = read["final"] @ model.weight("W_U"), model.weight("b_U")
    logits = model.bridge.adapter.apply_output_logits_transform(head if bias is None else head + bias)
    close(logits, read["logits"])
    if name not in ("gemma", "gemma2", "gemma3", "granite"):  # they scale the embedding
        assert torch.equal(model.weight("W_E")[left_padded().tokens], read["embed"])
    if model.weight("W_pos") is not None:
        assert torch.equal(model.weight("W_pos")[:9].expand(3, 9, 32), read["pos_embed"])
    assert (model.weight("W_pos") is None) == ("pos_embed" not in read)
    with pytest.raises(ValueError, match="unknown weight 'W_X'; allowed: W_Q"):
        model.weight("W_X")
    with pytest.raises(ValueError, match="layer=2 for 'W_Q' is not allowed; allowed: 0 … 1"):
        model.weight("W_Q", 2)
    with pytest.raises(ValueError, match="stack='encoder'"):
        model.weight("W_E", stack="encoder")


@pytest.mark.parametrize("name", FAMILIES)
def test_unembed_gives_the_models_logits(name):
    model = wrapped(name)
    found = run(model, Inputs(left_padded().tokens), record="1.resid_post")
    with torch.no_grad():
        close(model.unembed(found.cache["1.resid_post"]), found.logits)
        close(model.unembed(found.cache["1.resid_post"][0, 3]), found.logits[0, 3])


@pytest.mark.parametrize("name", FAMILIES)
def test_left_padding_equals_no_padding(name):
    inputs, model = left_padded(), wrapped(name)
    padded = run(model, inputs, record="1.resid_mid" if "resid_mid" in names(model) else "1.attn_out")
    (site,) = padded.cache
    for row, start in ((1, 2), (2, 5)):
        alone = run(model, inputs.tokens[row, start:], record=site)
        close(padded.logits[row, start:], alone.logits[0])
        close(padded.cache[site][row, start:], alone.cache[site][0])


@pytest.mark.parametrize("name", OURS)
def test_every_site_equals_that_of_from_huggingface(name):
    inputs, model = left_padded(), wrapped(name)
    ours: Any = from_huggingface(source(name))
    assert list(model.sites) == list(ours.sites)
    mine, other = (run(one, inputs, record=list(ours.sites)) for one in (ours, model))
    for site in ours.sites:
        query = 2 if site.name in ("scores", "pattern") else 1
        found, wanted = (result.cache[site].movedim(query, 1)[inputs.mask] for result in (other, mine))
        assert torch.equal(found.isneginf(), wanted.isneginf())
        close(found.nan_to_num(neginf=0), wanted.nan_to_num(neginf=0))
    assert model.additive_stream and model.can_resume is False
    for kind in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "W_in", "W_gate", "W_out", "b_in", "b_out"):
        found, wanted = model.weight(kind, 1), ours.weight(kind, 1)
        assert (found is None) == (wanted is None), kind
        assert found is None or torch.equal(found, wanted), kind
    for kind in ("W_E", "W_U", "b_U", "W_pos"):
        found, wanted = model.weight(kind), ours.weight(kind)
        assert (found is None) == (wanted is None) and (found is None or torch.equal(found, wanted)), kind


@pytest.mark.parametrize("name", OURS)
def test_a_sweep_gives_the_numbers_of_from_huggingface(name):
    """Every site of every layer patched, so that a write that reaches only a part of the model would show."""
    clean, corrupted = torch.randint(3, VOCAB, (2, 2, 5), generator=torch.Generator().manual_seed(4))
    model, ours = wrapped(name), from_huggingface(source(name))
    metric = logit_difference(torch.tensor([4, 5]), torch.tensor([6, 7]))
    few = ["resid_pre", "resid_mid", "q_rot", "v", "pattern", "z", "ffn_act", "ffn_out"]
    sites = names(ours) if name in ("gpt2", "qwen3") else few  # the others share their code
    found, wanted = (patch_sweep(one, clean, corrupted, metric, sites=sites, by=("layer",)) for one in (model, ours))
    size = (wanted.clean - wanted.corrupted).abs().max()
    for site in sites:
        assert (found.values[site] - wanted.values[site]).abs().max() < 1e-4 * size, site
    effects = [value for site in sites for value in (wanted.values[site] - wanted.corrupted).abs().amax(1).tolist()]
    assert min(effects) > 1e-3 * size
    options: dict[str, Any] = {"sites": "z", "by": ("layer", "position", "head"), "positions": [2]}
    found, wanted = (patch_sweep(one, clean, corrupted, metric, **options) for one in (model, ours))
    assert (found.values["z"] - wanted.values["z"]).abs().max() < 1e-4 * size


@pytest.mark.parametrize("name", ["neox", "gemma2"])
def test_analyses_run(name):
    clean, corrupted = torch.randint(3, VOCAB, (2, 2, 5), generator=torch.Generator().manual_seed(4))
    corrupted[:, :2] = clean[:, :2]
    model, metric = wrapped(name), logit_difference(torch.tensor([4, 5]), torch.tensor([6, 7]))
    table = patch_sweep(model, clean, corrupted, metric).table()
    same = table[table.position < 2]
    assert (same.patched == same.corrupted).all() and len(table) == 3 * 2 * 5 * 2  # nothing patched: exactly nothing
    last = table[(table.site == "resid_pre") & (table.layer == 0)]
    assert (last[last.position >= 2].patched != last[last.position >= 2].corrupted).any()
    lens = logit_lens(model, clean)
    assert (lens[lens.site == "1.resid_post"].kl_to_final.abs() < 1e-5).all()
    assert (lens[lens.site == "0.resid_pre"].kl_to_final > 1e-2).all()


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if "resid_mid" in name or name not in DROPPED or name == "gemma2"]
)
def test_what_is_written_to_the_stream_arrives_once(name):
    """TransformerLens's hook_resid_mid reaches the FFN alone, not the stream that runs past it."""
    model, inputs = wrapped(name), Inputs(left_padded().tokens)
    change = torch.randn(9, 32, generator=torch.Generator().manual_seed(3))
    pairs = [("0.ffn_out", "0.resid_post"), ("0.resid_post", "1.resid_pre")]
    if "resid_mid" in names(model):
        pairs.append(("0.attn_out", "0.resid_mid"))
        moved = run(model, inputs, record="0.resid_post", change=[Add("0.resid_mid", change), Zero("0.ffn_out")])
        close(moved.cache["0.resid_post"], run(model, inputs, record="0.resid_mid").cache["0.resid_mid"] + change)
    for one, other in pairs:
        first, second = (run(model, inputs, change=Add(site, change)).logits for site in (one, other))
        close(first, second, 1e-4)
    if name == "llama":
        bridge = model.bridge
        found = [bridge.run_with_hooks(inputs.tokens, fwd_hooks=[(f"blocks.0.{hook}", lambda value, hook: value + change)])
                 for hook in ("hook_resid_mid", "hook_attn_out")]  # fmt: skip
        assert (found[0] - found[1]).abs().max() > 0.1  # when this fails, Place.side has become needless


def test_scores_are_minus_infinity_where_masked_and_cutting_an_edge_cuts_it():
    inputs, model = left_padded(), wrapped("neox")
    found = run(model, inputs, record=["1.scores", "1.pattern"]).cache
    edges = inputs.mask[:, None, None] & torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.equal(found["1.scores"].isneginf(), ~edges.expand(3, 4, 9, 9))
    cut = run(model, inputs, record=["1.pattern", "1.z"], change=KnockOut("1.scores", at=(2, 7, slice(0, 7)))).cache
    row = cut["1.pattern"][:, 2, 7]
    assert (row[:, :7] == 0).all() and (row.sum(-1) - 1).abs().max() < 1e-6
    other = cut["1.pattern"].clone()
    other[:, 2, 7] = found["1.pattern"][:, 2, 7]
    assert torch.equal(other, found["1.pattern"])
    none = run(model, inputs, record=["1.pattern", "1.z"], change=KnockOut("1.scores", at=(slice(None), 8)))
    assert (none.cache["1.z"][:, 8] == 0).all() and (none.cache["1.pattern"][:, :, 8] == 0).all()
    assert none.logits[inputs.mask].isfinite().all()
    unchanged = run(model, inputs, wanted=[Site("scores", 1)]).logits
    assert torch.equal(unchanged, run(model, inputs).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_gradients_pass_through_every_recorded_site(name):
    inputs = Inputs(left_padded().tokens)
    gradients = []
    for model in (wrapped(name), from_huggingface(source(name))):
        sites = [site for site in model.sites if site.name != "logits"]
        found = run(model, inputs, record=sites, grad=True)
        target = found.logits.log_softmax(-1)[:, -1, 5].sum()
        gradients.append(torch.autograd.grad(target, [found.cache[site] for site in sites]))
    for site, mine, wanted in zip(sites, *gradients, strict=True):
        if site.name == "pattern":  # ours lets no change open an edge that the mask closes; TransformerLens does
            assert (wanted.triu(1) == 0).all()
            mine = mine.tril()
        assert (mine - wanted).abs().max() < 1e-4 * wanted.abs().max() + 1e-8, site


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bloom", "bert"])
def test_the_given_model_is_left_alone(name):
    model = build(name).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    addresses = {key: value.data_ptr() for key, value in model.state_dict().items()}
    config, modules = copy.deepcopy(model.config.to_dict()), [type(module) for module in model.modules()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*dropped sites of the bridge")
        lens = from_transformer_lens(model)
    run(lens, left_padded(), change=AddNoise("0.attn_out", 1.0))
    with torch.no_grad():
        for _, parameter in lens.named_parameters():
            parameter.fill_(7.0)  # it shares no memory
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert {key: value.data_ptr() for key, value in after.items()} == addresses
    assert model.config.to_dict() == config and model.training and all(module.training for module in model.modules())
    assert [type(module) for module in model.modules()] == modules
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def hooks_of(bridge) -> dict[str, int]:
    return {name: len(point.fwd_hooks) + len(point._forward_hooks) for name, point in bridge.hook_dict.items()}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_given_bridge_is_left_as_it_was(name):
    bridge: Any = bridged(name).train()
    seen = []
    bridge.add_hook("blocks.0.hook_attn_out", lambda value, hook: seen.append(hook.name))
    before = {key: value.clone() for key, value in bridge.state_dict().items()}
    flags, hooks = copy.deepcopy(bridge.cfg.to_dict()), hooks_of(bridge)
    model = from_transformer_lens(bridge)
    assert model.bridge is bridge
    seen.clear()
    found = run(model, left_padded(), record=list(model.sites), change=AddNoise("1.head_out", 0.1))
    assert len(seen) == 1  # the user's own hook goes on working
    assert bridge.cfg.to_dict() == flags and hooks_of(bridge) == hooks
    after = bridge.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert bridge.training and all(module.training for module in bridge.original_model.modules())
    assert torch.equal(run(model, left_padded()).logits, run(model, left_padded()).logits)  # no dropout in a run
    assert not torch.equal(found.logits, run(model, left_padded()).logits)


def test_an_exception_leaves_no_hooks():
    model = wrapped("gpt2")
    before, plain = hooks_of(model.bridge), run(model, left_padded()).logits

    def broken(site, value):
        if site == Site("attn_out", 1):
            raise KeyError("mine")
        return value

    with pytest.raises(KeyError, match="mine"):
        model(left_padded(), broken)
    assert hooks_of(model.bridge) == before
    assert torch.equal(run(model, left_padded()).logits, plain)


def test_nested_passes_do_not_touch_each_other():
    """A tap that runs the model itself, with another batch size and its own changes."""
    model, inputs = wrapped("gpt2"), left_padded()
    single = inputs.tokens[:1]
    alone = run(model, single, record="1.resid_post", change=Zero("0.attn_out"))
    plain = run(model, inputs, record="1.resid_post")
    for site in ("embed", "pos_embed", "0.z", "0.ffn_pre", "1.norm2_hat", "1.resid_mid"):
        inner, place = [], Site.parse(site)

        def tap(at, value, place=place, inner=inner):
            if at == place:
                inner.append(run(model, single, record="1.resid_post", change=Zero("0.attn_out")))
            return value

        with torch.no_grad():
            close(model(inputs, tap)[inputs.mask], plain.logits[inputs.mask])
        assert len(inner) == 1
        assert torch.equal(inner[0].logits, alone.logits)


def test_threads_share_a_model():
    model, inputs = wrapped("llama"), left_padded()
    changes = [Add("0.resid_mid", float(size)) for size in range(6)]
    wanted = [run(model, inputs, record="1.z", change=change) for change in changes]
    found, barrier = {}, threading.Barrier(6)

    def work(index):
        barrier.wait()
        for _ in range(3):
            found[index] = run(model, inputs, record="1.z", change=changes[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, one in enumerate(wanted):
        assert torch.equal(found[index].logits, one.logits)
        assert torch.equal(found[index].cache["1.z"], one.cache["1.z"])


def deaf(monkeypatch, bridge, hook: str) -> None:
    """The hook point shows its value and ignores what comes back."""
    point = bridge.hook_dict[hook]
    honest = point.add_hook

    def add_hook(function, **options):
        return honest(lambda value, hook: (function(value, hook=hook), None)[1], **options)

    monkeypatch.setattr(point, "add_hook", add_hook)


def test_the_self_test_drops_what_cannot_be_written(monkeypatch):
    bridge = bridged("llama")
    for hook in ("mlp.hook_out", "attn.q.hook_out", "attn.hook_attn_scores"):
        deaf(monkeypatch, bridge, f"blocks.1.{hook}")
    with pytest.warns(UserWarning, match=r"q \(layer 1\) changes nothing when written") as told:
        model = from_transformer_lens(bridge)
    assert len(told) == 1
    assert {str(site) for site in model.dropped} == {"1.ffn_out", "1.q", "1.scores"}
    with pytest.raises(ValueError, match=r"no site '1.ffn_out'; it has 0.ffn_out"):
        run(model, left_padded(), record="1.ffn_out")
    trusting = from_transformer_lens(bridge, self_test=False)
    assert Site("ffn_out", 1) in trusting.sites and not trusting.dropped


def test_the_self_test_drops_a_write_that_goes_astray(monkeypatch):
    """It changes the output, but not as a write there must."""
    bridge = bridged("llama")
    point = bridge.hook_dict["blocks.0.mlp.hook_out"]
    honest = point.add_hook

    def add_hook(function):
        def doubled(value, hook):
            new = function(value, hook)
            return None if new is None else value + 2 * (new - value)

        return honest(doubled)

    monkeypatch.setattr(point, "add_hook", add_hook)
    with pytest.warns(UserWarning, match=r"ffn_out \(layer 0\) does not act as the same change at 0.resid_post does"):
        assert Site("ffn_out", 0) not in from_transformer_lens(bridge).sites


def test_the_self_test_sees_a_write_beside_the_stream(monkeypatch):
    """What hook_resid_mid alone would do."""
    monkeypatch.setattr(Pass, "_carry", lambda self, layer, value: None)
    with pytest.warns(UserWarning, match=r"resid_mid \(layer 0\) does not act as the same change at 0.attn_out does"):
        model = from_transformer_lens(bridged("gpt2"))
    assert {site.name for site in model.dropped} == {"resid_mid"}


def test_a_small_term_missing_from_a_large_stream_is_seen():
    """Gemma's multipliers, Granite's factors: the stream's largest entries must not set the tolerance."""
    stream = torch.tensor([1e4, 1.0, -1.0])
    written = torch.tensor([0.1, 0.1, 0.1])
    parts = stream.abs() + written.abs()
    assert adds_up(stream + written, written + stream, parts)
    assert not adds_up(stream + 0.99 * written, stream + written, parts)


def test_a_hook_that_fires_twice_is_dropped():
    bridge = bridged("llama")
    bridge.blocks[1].ln1.register_forward_hook(lambda norm, inputs, output: norm.hook_out(output))
    with pytest.warns(UserWarning, match=r"norm1 \(layer 1\) fired 2 times in one forward pass"):
        assert Site("norm1", 1) not in from_transformer_lens(bridge).sites


def test_asking_for_what_is_never_reached_raises():
    from transformer_lens.hook_points import HookPoint

    model = from_transformer_lens(bridged("gpt2"), self_test=False)
    model.places[Site("z", 1)] = Place(Site("z", 1), HookPoint())  # one that no module calls
    with pytest.raises(NotReachedError, match=r"never reached in this forward pass: 1.z"):
        run(model, left_padded(), record=["0.z", "1.z"])


def test_embeddings_and_segments():
    inputs = left_padded()
    for name in ("gpt2", "llama", "bloom"):
        model, given = wrapped(name), torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(5))
        ids = (inputs.mask.long().cumsum(1) - 1).clamp(min=0)
        options = {} if name == "bloom" else {"position_ids": ids}
        with torch.no_grad():
            wanted = source(name)(inputs_embeds=given, attention_mask=inputs.mask.long(), **options).logits
        found = run(model, Inputs(inputs.tokens, mask=inputs.mask, embeddings=given), record="embed")
        close(found.logits[inputs.mask], wanted[inputs.mask])
        assert torch.equal(found.cache["embed"], given)
    bert, segments = wrapped("bert"), (torch.arange(9) > 4).long().expand(3, 9)
    wanted = theirs(source("bert"), Inputs(inputs.tokens), token_type_ids=segments).logits
    close(run(bert, Inputs(inputs.tokens, segments=segments)).logits, wanted)
    with pytest.raises(InputsError, match="would ignore it"):
        run(wrapped("gpt2"), Inputs(inputs.tokens, segments=segments))
    with pytest.raises(InputsError, match="reads neither source nor prefix_length"):
        wrapped("gpt2")(Inputs(inputs.tokens, source=inputs.tokens))
    with pytest.raises(InputsError, match="at most n_ctx=64"):
        run(wrapped("gpt2"), torch.zeros(1, 65, dtype=torch.long))


def test_a_native_bridge_and_one_in_compatibility_mode():
    import transformer_lens as lens

    options: dict[str, Any] = {
        "d_model": 32,
        "d_head": 8,
        "n_heads": 4,
        "n_layers": 2,
        "n_ctx": 16,
        "d_vocab": VOCAB,
        "d_mlp": 44,
    }
    made: Any = lens.TransformerBridge
    bridge = made.boot_native(lens.TransformerBridgeConfig(**options, act_fn="gelu", normalization_type="LN", seed=0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*dropped sites of the bridge")
        native = from_transformer_lens(bridge)
    tokens = left_padded().tokens
    with torch.no_grad():
        assert torch.equal(native(tokens), bridge(tokens))
    assert {"z", "attn_out", "resid_mid", "ffn_act", "pattern"} <= set(names(native))

    folded = bridged("gpt2")
    folded.enable_compatibility_mode(disable_warnings=True)
    model = from_transformer_lens(folded)
    wanted = theirs(source("gpt2"), Inputs(tokens)).logits.log_softmax(-1)
    close(run(model, tokens).logits.log_softmax(-1), wanted)
    assert model.additive_stream and names(model) == names(wrapped("gpt2"))
    assert run(model, left_padded(), record="0.scores").logits.isfinite().all()


def test_bfloat16():
    model = build("llama", torch.bfloat16)
    lens = from_transformer_lens(model)
    tokens = left_padded().tokens
    assert lens.dtype == torch.bfloat16 and lens.device.type == "cpu"
    assert torch.equal(run(lens, tokens).logits, theirs(model, Inputs(tokens)).logits)
    assert list(lens.sites) == list(wrapped("llama").sites)
    patched = run(lens, tokens, change=Replace("1.z", 0.0, at=(3, 2))).logits
    assert patched.dtype == torch.bfloat16 and not torch.equal(patched, run(lens, tokens).logits)


def test_what_a_type_breaks_is_refused_by_name():
    """TransformerLens multiplies OLMo-2's float32 pattern with 16-bit values; a float64 mask overflows transformers' softmax."""
    with pytest.raises(BridgeError, match=r"cannot run Olmo2ForCausalLM in torch.bfloat16: expected scalar type"):
        from_transformer_lens(build("olmo2", torch.bfloat16))
    inputs, source = left_padded(), build("llama", torch.float64)
    model = from_transformer_lens(source)
    assert theirs(source, inputs).logits[inputs.mask].isnan().any()
    with pytest.raises(InputsError, match=r"in torch.float64 gives other logits with padding on the left than without"):
        run(model, inputs)
    right = Inputs(inputs.tokens, mask=inputs.mask.flip(1))
    close(run(model, right).logits[0], theirs(source, right).logits[0])


def test_what_is_refused():
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(BridgeError, match="T5ForConditionalGeneration is an encoder-decoder; allowed: models with one"):
        from_transformer_lens(t5)
    with pytest.raises(
        BridgeError, match=r"no adapter for architecture LlamaModel; it has .*, such as GPT2LMHeadModel"
    ):
        from_transformer_lens(transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)))
    with pytest.raises(BridgeError, match="str is not supported; allowed: a TransformerBridge or a transformers model"):
        from_transformer_lens("gpt2")
    headless = bridged("llama")
    headless.adapter.apply_output_logits_transform = lambda logits: 2 * logits
    with pytest.raises(BridgeError, match="do not give the model's logits"):
        from_transformer_lens(headless)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_lens", None)
    with pytest.raises(ImportError, match=r"transformer_lens, which is not installed: pip install 'interp\[lens\]'"):
        from_transformer_lens(source("gpt2"))


def test_transformer_lens_is_imported_only_when_asked_for():
    for module in ("model", "places", "selftest", "survey"):
        text = Path(sys.modules[f"interp.bridges.lens_in.{module}"].__file__ or "").read_text()
        assert "import transformer_lens" not in text and "from transformer_lens" not in text
