"""TransformerLens's own analyses, unmodified, on our models: their numbers against ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from strategies import random_model

from interp import Add, Replace, Site, logit_difference, patch_sweep, run
from interp import logit_lens as our_logit_lens
from interp.bridges.huggingface import BridgeError, from_huggingface
from interp.bridges.lens_out.model import to_transformer_lens
from interp.hookable import UnsupportedModelError
from interp.model.tap import NO_TAP

SVDInterpreter: Any = pytest.importorskip("transformer_lens").SVDInterpreter
patching: Any = pytest.importorskip("transformer_lens.patching")
head_detector: Any = pytest.importorskip("transformer_lens.head_detector")
model_protocol: Any = pytest.importorskip("transformer_lens.model_protocol")
analysis: Any = pytest.importorskip("transformer_lens.tools.analysis")
get_act_name: Any = pytest.importorskip("transformer_lens.utilities").get_act_name

WORDS = list("abcdefghi")
SIZES = {"vocab": 9, "n_layers": 2, "n_heads": 4, "d_model": 16, "n_ctx": 10, "d_ff": 12}
EVERY_BIAS = frozenset({"qkv", "attn_out", "ffn", "unembed"})
MODELS = {
    "gpt": random_model({**SIZES, "ffn": "gelu", "bias": EVERY_BIAS}),
    "llama": random_model(
        {**SIZES, "n_kv_heads": 2, "norm": "rmsnorm", "positions": "rotary", "ffn": "swiglu", "bias": False}
    ),
}
CLEAN = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [0, 8, 2, 2, 7]])
CORRUPTED = torch.tensor([[1, 6, 3, 4, 5], [5, 4, 7, 2, 1], [3, 8, 2, 2, 7]])
EXACT = {"rtol": 0, "atol": 1e-10}


@pytest.fixture(scope="module", params=list(MODELS))
def ours(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def theirs(ours):
    return to_transformer_lens(ours, WORDS)


@pytest.fixture(scope="module")
def caches(theirs):
    with torch.no_grad():
        return theirs.run_with_cache(CLEAN)[1], theirs.run_with_cache(CORRUPTED)[1]


def metric(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, -1, 1] - logits[:, -1, 2]).mean()


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol, check_dtype=False)


def test_it_is_every_kind_of_model_that_transformer_lens_asks_for(theirs):
    for protocol in ("TransformerLensModel", "TransformerLensModelWithWeights", "TrainableTransformerLensModel"):
        assert isinstance(theirs, getattr(model_protocol, protocol))


SWEEPS = {
    "resid_pre": ("resid_pre", ("layer", "position")),
    "resid_mid": ("resid_mid", ("layer", "position")),
    "attn_out": ("attn_out", ("layer", "position")),
    "mlp_out": ("ffn_out", ("layer", "position")),
    "attn_head_out_by_pos": ("z", ("layer", "position", "head")),
    "attn_head_k_by_pos": ("k", ("layer", "position", "head")),
    "attn_head_v_all_pos": ("v", ("layer", "head")),
    "attn_head_pattern_all_pos": ("pattern", ("layer", "head")),
}


@pytest.mark.parametrize("name", SWEEPS)
@torch.no_grad()
def test_their_patching_is_our_sweep(ours, theirs, caches, name):
    site, axes = SWEEPS[name]
    found = getattr(patching, f"get_act_patch_{name}")(theirs, CORRUPTED, caches[0], metric)
    swept = patch_sweep(ours, CLEAN, CORRUPTED, logit_difference(1, 2), sites=site, by=axes)
    close(found, swept.values[site].mean(-1), 1e-6)  # they fill a float32 table
    assert not torch.allclose(found, metric(ours(CORRUPTED)).float())


@torch.no_grad()
def test_their_patching_of_every_head_at_once(ours, theirs, caches):
    found = patching.get_act_patch_attn_head_all_pos_every(theirs, CORRUPTED, caches[0], metric)
    for kind, site in enumerate(("z", "q", "k", "v", "pattern")):
        swept = patch_sweep(ours, CLEAN, CORRUPTED, logit_difference(1, 2), sites=site, by=("layer", "head"))
        values = swept.values[site].mean(-1)
        close(found[kind, :, : values.shape[1]], values, 1e-6)
        assert torch.all(found[kind, :, values.shape[1] :] == 0)  # grouped: their padding


@pytest.mark.parametrize("component", ["q", "k", "v"])
@torch.no_grad()
def test_their_direct_path_patching_is_one_heads_input_changed(ours, theirs, caches, component):
    if component != "q" and ours.config.kv_heads != ours.config.n_heads:
        with pytest.raises(ValueError, match="GQA"):
            patching.get_act_patch_direct_path(theirs, CORRUPTED, *caches, metric, 0, 1, component, verbose=False)
        return
    found = patching.get_act_patch_direct_path(theirs, CORRUPTED, *caches, metric, 0, 1, component, verbose=False)
    base = run(ours, CORRUPTED, record=["0.z", "1.resid_pre"])
    written = run(ours, CLEAN, record="0.z").cache["0.z"][:, :, 1] - base.cache["0.z"][:, :, 1]
    block = ours.blocks[1]
    read = block.norm1(base.cache["1.resid_pre"] + written @ ours.blocks[0].attention.W_O[1], NO_TAP)
    for head in range(4):
        value = read @ getattr(block.attention, f"W_{component.upper()}")[head]
        bias = getattr(block.attention, f"b_{component.upper()}")
        value = value if bias is None else value + bias[head]
        change = Replace(Site(component, 1), value, at=(slice(None), head))
        close(found[1, head], metric(run(ours, CORRUPTED, change=change).logits), 1e-6)
    assert torch.all(found[0] == 0)
    assert not theirs.cfg.use_split_qkv_input


@pytest.mark.parametrize("pattern", head_detector.HEAD_NAMES)
@torch.no_grad()
def test_their_head_detector_reads_our_patterns(ours, theirs, pattern):
    found = head_detector.detect_head(theirs, "a b c a b c", pattern)
    alpha = run(ours, [[0, 1, 2, 0, 1, 2]], record="pattern").cache.stack("pattern")[:, 0]
    edges = {
        "previous_token_head": [(i, i - 1) for i in range(1, 6)],
        "duplicate_token_head": [(i, i - 3) for i in range(3, 6)],
        "induction_head": [(i, i - 2) for i in range(3, 6)],
    }[pattern]
    hand = sum(alpha[:, :, i, j] for i, j in edges) / alpha.sum((-1, -2))
    close(found, hand, 2e-3)  # they round the score to three digits


def test_short_names_and_shorthand_keys(caches):
    cache = caches[0]
    assert torch.equal(cache["resid_post", -1], cache["blocks.1.hook_resid_post"])
    assert torch.equal(cache["pattern", 0], cache[get_act_name("pattern", 0)])
    assert torch.equal(cache["scale", None, None], cache["ln_final.hook_scale"])


@torch.no_grad()
def test_their_cache_decomposes_our_stream(ours, theirs, caches):
    cache, last = caches[0], run(ours, CLEAN, record="1.resid_post").cache["1.resid_post"]
    close(cache.accumulated_resid(incl_mid=True)[-1], last)
    close(cache.decompose_resid().sum(0), last)
    close(cache.stack_head_results(-1, incl_remainder=True).sum(0), last)
    close(cache.stack_neuron_results(-1, incl_remainder=True).sum(0), last)
    for expand in (True, False):
        parts, labels = cache.get_full_resid_decomposition(expand_neurons=expand, return_labels=True)
        close(parts.sum(0), last)
        assert len(parts) == len(labels)
    middle = run(ours, CLEAN, record="1.resid_mid").cache["1.resid_mid"]
    close(cache.get_full_resid_decomposition(1, mlp_input=True).sum(0), middle)
    heads = run(ours, CLEAN, record="head_out").cache.stack("head_out")
    close(cache.stack_head_results(-1), heads.permute(0, 3, 1, 2, 4).flatten(0, 1))
    normed = run(ours, CLEAN, record="final_hat").cache["final_hat"]
    close(cache.apply_ln_to_stack(cache.decompose_resid()).sum(0), normed)


@torch.no_grad()
def test_their_logit_attribution_sums_to_our_logits(ours, theirs, caches):
    logits = ours(CLEAN)[:, -1]
    right, wrong = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    rows = torch.arange(3)
    constant = theirs.b_U if ours.final_norm.bias is None else theirs.b_U + ours.final_norm.bias @ theirs.W_U
    for stack in (caches[0].decompose_resid(), caches[0].stack_head_results(-1, incl_remainder=True)):
        total = caches[0].logit_attrs(stack, right, wrong).sum(0)[:, -1]
        close(total, (logits - constant)[rows, right] - (logits - constant)[rows, wrong])
    for unit in ("component", "head", "layer"):
        found = analysis.direct_logit_attribution(theirs, CLEAN, 1, 2, unit=unit).attribution
        total = found[-1] if unit == "layer" else found.sum(0)
        close(total, (logits - constant)[:, 1] - (logits - constant)[:, 2])


@torch.no_grad()
def test_their_logit_lens_is_ours(ours, theirs, caches):
    table = our_logit_lens(ours, CLEAN, sites=["resid_pre", "1.resid_post"], targets=torch.tensor([3, 3, 3]))
    for found in (
        analysis.logit_lens(theirs, CLEAN, positions=-1, return_type="probs", targets=3),
        caches[0].logit_lens(positions=-1, return_type="probs", targets=3),
    ):
        close(found.values.flatten(), torch.tensor(table["probability"].to_numpy()), 1e-6)
    stack = caches[0].accumulated_resid(apply_ln=True)  # the final norm, gain included, recomputed on each
    close(stack[-1] @ theirs.W_U + theirs.b_U, ours(CLEAN))


@torch.no_grad()
def test_a_cache_without_its_batch_axis(theirs, caches):
    _, cache = theirs.run_with_cache(CLEAN[:1], remove_batch_dim=True)
    close(cache["pattern", 1], caches[0]["pattern", 1][0])
    close(cache.decompose_resid().sum(0), caches[0]["resid_post", 1][0])


def nodes(model):
    """Node effects by hand: (clean − corrupted) · gradient of the metric at the corrupted run, means over pairs."""
    names = ["embed", "0.z", "1.z", "0.ffn_out", "1.ffn_out"]
    clean = run(model, CLEAN, record=names)
    corrupted = run(model, CORRUPTED, record=names, grad=True)
    values = [corrupted.cache[name] for name in names]
    gradients = torch.autograd.grad(metric(corrupted.logits), values)  # a mean over pairs, as theirs
    effects = {}
    for name, value, gradient in zip(names, values, gradients, strict=True):
        site, effect = Site.parse(name), ((clean.cache[name] - value) * gradient).sum((0, -1)).detach()
        for position in range(5):
            if site.name == "z":
                effects |= {("attn_head_out", site.layer, h, position): float(effect[position, h]) for h in range(4)}
            else:
                kind = "embed" if site.layer is None else "mlp_out"
                effects[kind, site.layer, None, position] = float(effect[position])
    return effects


def same_scores(scores, expected) -> None:
    found = {(node.kind, node.layer, node.head, node.position): score for node, score in scores.items()}
    assert found == pytest.approx(expected, rel=0, abs=1e-10)
    assert max(map(abs, found.values())) > 1e-3


def test_their_attribution_patching_is_our_gradient(ours, theirs):
    for model in (theirs, to_transformer_lens(copy.deepcopy(ours).requires_grad_(False))):
        same_scores(analysis.attribution_patch(model, CLEAN, CORRUPTED, metric).node_scores, nodes(ours))


def test_their_edges_sum_to_our_nodes_and_a_whole_circuit_is_faithful():
    model = to_transformer_lens(MODELS["gpt"])
    config = analysis.EdgeAttributionConfig(granularity="edge")
    result = analysis.attribution_patch(model, CLEAN, CORRUPTED, metric, config)
    same_scores(result.node_scores, nodes(MODELS["gpt"]))  # every path from a writer passes one of its readers
    edges = list(result.edge_scores)
    whole = analysis.faithfulness(model, CLEAN[:1], CORRUPTED[:1], metric, edges)
    assert whole.recovered == pytest.approx(1, abs=1e-10)
    nothing = analysis.faithfulness(model, CLEAN[:1], CORRUPTED[:1], metric, [])
    assert nothing.recovered == pytest.approx(0, abs=1e-10)
    some = analysis.faithfulness(model, CLEAN[:1], CORRUPTED[:1], metric, result.top_edges(k=200))
    assert abs(some.recovered) > 1e-3
    flags = ("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in")
    assert not any(getattr(model.cfg, flag) for flag in flags)


def test_grouped_heads_have_no_edges_of_their_own():
    with pytest.raises(ValueError, match="GQA"):
        config = analysis.EdgeAttributionConfig(granularity="edge")
        analysis.attribution_patch(to_transformer_lens(MODELS["llama"]), CLEAN, CORRUPTED, metric, config)


def test_their_interchange_of_a_whole_space_is_our_replacement(ours, theirs):
    base, source = torch.tensor([1, 2, 3]), torch.tensor([2, 1, 0])

    def logits(tokens):
        return theirs(tokens)[:, -1]

    name = "blocks.0.hook_resid_post"
    held = analysis.collect_activations(theirs, name, CORRUPTED, logits, positions=source)
    recorded = run(ours, CORRUPTED, record="0.resid_post").cache["0.resid_post"][torch.arange(3), source]
    close(held, recorded)
    swap = analysis.SubspaceInterchange(torch.eye(16, dtype=torch.float64))
    found = analysis.intervened_logits(theirs, name, swap, CLEAN, held, logits, positions=base)
    close(found, run(ours, CLEAN, change=Replace(Site("resid_post", 0), recorded, at=(base,))).logits[:, -1])
    fit = analysis.fit_das(
        theirs, name, CLEAN, CORRUPTED, base, logits, rank=1, base_positions=base, source_positions=source, epochs=2
    )
    assert fit.losses[1] < fit.losses[0]
    assert all(parameter.requires_grad for parameter in ours.parameters())


def test_their_jacobian_lens_takes_only_their_own_class(theirs):
    with pytest.raises(TypeError, match="TransformerBridge"):
        analysis.JacobianLens.fit(theirs, ["a b c"], corpus="none")


@torch.no_grad()
def test_circuits_from_weights(ours, theirs):
    group = 4 // ours.config.kv_heads
    for layer in range(2):
        attention = ours.blocks[layer].attention
        for head in range(4):
            w_k, w_v = attention.W_K[head // group], attention.W_V[head // group]
            close(theirs.QK[layer, head].AB, attention.W_Q[head] @ w_k.T)
            close(theirs.OV[layer, head].AB, w_v @ attention.W_O[head])
    ov = SVDInterpreter(theirs).get_singular_vectors("OV", 1, 3, head_index=3)
    right = torch.linalg.svd(theirs.OV[1, 3].AB).Vh[:3]
    close(ov[:, 0].abs(), (theirs.W_U.T @ right.T).abs())
    q = theirs.all_composition_scores("Q")
    one = theirs.OV[0, 2].AB @ theirs.QK[1, 3].AB
    close(q[0, 2, 1, 3], one.norm() / theirs.OV[0, 2].AB.norm() / theirs.QK[1, 3].AB.norm())
    assert torch.all(q[1] == 0) and torch.all(q[0, :, 0] == 0)
    for role in "QKV":
        scores = analysis.attention_head_subspace_affinity(theirs, target_role=role).scores
        assert scores.shape == (2, 4, 2, 4 if role == "Q" else ours.config.kv_heads)


HF = {
    "gpt2": ("GPT2", {"vocab_size": 9, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "llama": ("Llama", {
        "vocab_size": 9, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 16,
    }),
}  # fmt: skip


@pytest.mark.parametrize("family", HF)
@pytest.mark.filterwarnings("ignore")  # theirs
@torch.no_grad()
def test_every_hook_that_a_bridge_of_the_same_weights_also_has_holds_the_same_value(family):
    transformers = pytest.importorskip("transformers")
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    name, sizes = HF[family]
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation="eager")
    architecture = "GPT2LMHeadModel" if name == "GPT2" else "LlamaForCausalLM"
    source = getattr(transformers, architecture)(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in source.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + (parameter.ndim == 1))
    model = from_huggingface(source)
    ours = to_transformer_lens(model)
    bridge = build_bridge_from_module(source, architecture, hf_config=config, tokenizer=None)
    expected = bridge.run_with_cache(CLEAN, return_cache_object=False)[1]
    found = ours.run_with_cache(CLEAN, names_filter=lambda name: True, return_cache_object=False)[1]
    common = [name for name in found if name in expected]
    assert len(common) > 50
    for one in common:
        if not one.endswith("attn_scores"):
            torch.testing.assert_close(found[one], expected[one], rtol=1e-4, atol=2e-5, msg=f"{one} differs")
        else:  # the bridge marks closed edges with a large number
            open_edges = found[one] > float("-inf")
            torch.testing.assert_close(found[one][open_edges], expected[one][open_edges], rtol=1e-4, atol=2e-5)
    for one in ("W_E", "W_U", "b_U", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"):
        torch.testing.assert_close(getattr(ours, one), getattr(bridge, one), rtol=0, atol=0, msg=f"{one} differs")
    close(ours(CLEAN, return_type="loss"), bridge(CLEAN, return_type="loss"), 1e-5)
    assert ours.all_head_labels == bridge.all_head_labels
    close(ours.accumulated_bias(2), bridge.accumulated_bias(2), 1e-6)
    sweeps = [
        patching.get_act_patch_resid_pre(one, CORRUPTED, one.run_with_cache(CLEAN)[1], metric) for one in (ours, bridge)
    ]
    close(sweeps[0], sweeps[1], 2e-5)


def test_models_that_a_decomposition_would_misread_refuse_it():
    post = random_model({**SIZES, "norm_position": "post", "ffn": "relu"})
    model = to_transformer_lens(post)
    _, cache = model.run_with_cache(CLEAN)
    for name in ("decompose_resid", "get_full_resid_decomposition", "logit_attrs"):
        with pytest.raises(UnsupportedModelError, match="would not sum"):
            getattr(cache, name)()
    with pytest.raises(UnsupportedModelError, match="copies of the stream"):
        patching.get_act_patch_direct_path(model, CORRUPTED, cache, cache, metric, 0, 0, verbose=False)
    close(cache.accumulated_resid()[-1], run(post, CLEAN, record="1.resid_post").cache["1.resid_post"])
    with torch.no_grad():
        found = patching.get_act_patch_resid_mid(model, CORRUPTED, cache, metric)
    swept = patch_sweep(post, CLEAN, CORRUPTED, logit_difference(1, 2), sites="resid_mid")
    close(found, swept.values["resid_mid"].mean(-1), 1e-6)
    segments = to_transformer_lens(random_model({**SIZES, "n_segments": 2}))
    with pytest.raises(UnsupportedModelError, match="segment"):
        segments.run_with_cache(CLEAN)[1].decompose_resid()


def test_what_it_does_not_take():
    with pytest.raises(BridgeError, match="takes an interp"):
        to_transformer_lens(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(BridgeError, match="encoder-decoder"):
        to_transformer_lens(random_model({**SIZES, "kind": "encoder-decoder"}))


def test_float32_sweeps_agree_too():
    model = copy.deepcopy(MODELS["llama"]).float()
    theirs = to_transformer_lens(model)
    with torch.no_grad():
        found = patching.get_act_patch_mlp_out(theirs, CORRUPTED, theirs.run_with_cache(CLEAN)[1], metric)
    swept = patch_sweep(model, CLEAN, CORRUPTED, logit_difference(1, 2), sites="ffn_out")
    close(found, swept.values["ffn_out"].mean(-1), 2e-5)


def test_an_addition_by_hook_is_our_addition(ours, theirs):
    vector = torch.linspace(-1, 1, 16, dtype=torch.float64)
    found = theirs.run_with_hooks(CLEAN, fwd_hooks=[("blocks.0.hook_mlp_out", lambda value, hook: value + vector)])
    close(found.detach(), run(ours, CLEAN, change=Add(Site("ffn_out", 0), vector)).logits)
