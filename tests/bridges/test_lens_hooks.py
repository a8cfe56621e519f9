"""TransformerLens's hooks over our taps: names, order, edits, gradients, what is computed, and what is refused."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import pytest
import torch
from strategies import random_model

from interp import Inputs, KVCache, Site, generate, run
from interp.bridges.lens_out.hooks import HookConflictError
from interp.bridges.lens_out.model import to_transformer_lens
from interp.bridges.lens_out.names import Fork, UnknownHookError, hook_names
from interp.hookable import UnsupportedModelError
from interp.model.inputs import InputsError
from interp.model.tap import NO_TAP
from interp.run import NotReachedError
from interp.tokens import TokenizerError

SIZES = {"vocab": 9, "n_layers": 2, "n_heads": 4, "d_model": 16, "n_ctx": 10, "d_ff": 12}
WORDS = list("abcdefghi")
TOKENS = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
MODEL: Any = random_model({**SIZES, "ffn": "gelu"})
KINDS = {
    "gpt": {"ffn": "gelu", "bias": frozenset({"qkv", "attn_out", "ffn", "unembed"})},
    "llama": {
        "n_kv_heads": 2,
        "norm": "rmsnorm",
        "positions": "rotary",
        "ffn": "swiglu",
        "bias": False,
        "qk_norm": True,
    },
    "post-norm": {"norm_position": "post"},
    "post-norm, no FFN": {"norm_position": "post", "ffn": "none", "final_norm": True},
    "encoder": {"kind": "encoder", "positions": "sinusoidal", "embedding_norm": True},
    "prefix-decoder": {"kind": "prefix-decoder", "norm": "none", "ffn": "none"},
}


def cached(model, inputs=TOKENS, **options):
    return model.run_with_cache(inputs, return_cache_object=False, **options)[1]


@pytest.fixture
def model():
    return to_transformer_lens(MODEL, WORDS)


@pytest.fixture(params=list(KINDS))
def any_model(request):
    return to_transformer_lens(random_model({**SIZES, **KINDS[request.param]}))


@torch.no_grad()
def test_every_name_fires_once_in_order_under_the_name_asked_for(any_model):
    fired = []
    names = list(any_model.hook_dict)
    if any("hook_attn_in" in name for name in names):  # the other way to read the same stream
        names = [name for name in names if "hook_attn_in" not in name]
    logits = any_model.run_with_hooks(
        TOKENS, fwd_hooks=[(name, lambda _, hook: fired.append(hook.name)) for name in names]
    )
    assert sorted(fired) == sorted(names)
    firsts = [name for i, name in enumerate(names) if any_model.registry.places[name] not in
              {any_model.registry.places[other] for other in names[:i]}]  # fmt: skip
    assert [name for name in fired if name in firsts] == firsts
    torch.testing.assert_close(logits, any_model.model(TOKENS))


@torch.no_grad()
def test_noise_written_to_any_name_changes_the_output(any_model):
    plain = any_model.model(TOKENS)
    for name in any_model.hook_dict:

        def noise(value, hook):
            moved = value + torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape).sin()
            return moved.abs() + 0.1 if "scale" in hook.name else moved

        changed = any_model.run_with_hooks(TOKENS, fwd_hooks=[(name, noise)])
        assert (changed - plain).abs().max() > 1e-6, name


@torch.no_grad()
def test_what_is_cached_is_what_run_records(any_model):
    found = cached(any_model, names_filter=lambda name: True)
    sites = {name: place for name, place in any_model.registry.places.items() if isinstance(place, Site)}
    recorded = run(any_model.model, TOKENS, record=list(dict.fromkeys(sites.values())))
    for name, site in sites.items():
        torch.testing.assert_close(found[name], recorded.cache[site], rtol=0, atol=1e-12)
    for name, fork in any_model.registry.places.items():
        if isinstance(fork, Fork):
            stream = recorded.cache[Site("resid_mid" if fork.part == "mlp" else "resid_pre", fork.layer)]
            expected = stream if fork.part == "mlp" else stream[:, :, None].expand(found[name].shape)
            assert torch.equal(found[name], expected)


def test_names_go_both_ways(any_model):
    assert hook_names(any_model.model) == any_model.registry.places
    sites = [place for place in any_model.registry.places.values() if isinstance(place, Site)]
    assert set(sites) == set(any_model.model.sites)


def test_a_name_that_does_not_exist_raises_everywhere(model):
    def nothing(value, hook):
        raise AssertionError

    wrong = "blocks.0.attn.hook_patern"
    for call in (
        lambda: model.run_with_hooks(TOKENS, fwd_hooks=[(wrong, nothing)]),
        lambda: model.run_with_hooks(TOKENS, fwd_hooks=[(lambda name: "patern" in name, nothing)]),
        lambda: model.run_with_cache(TOKENS, names_filter=wrong),
        lambda: model.run_with_cache(TOKENS, names_filter=["blocks.0.hook_resid_pre", wrong]),
        lambda: model.run_with_cache(TOKENS, names_filter=lambda name: False),
        lambda: model.add_hook(wrong, nothing),
        lambda: model.hooks([("blocks.0.hook_resid_pre", nothing), (wrong, nothing)]).__enter__(),
    ):
        with pytest.raises(UnknownHookError, match=r"hook_pattern|matched no"):
            call()
        assert not model.registry.hooks and model.context_level == 0
    with pytest.raises(KeyError):  # what TransformerLens raises
        model.add_hook("blocks.2.hook_resid_pre", nothing)
    assert "rot_q" not in " ".join(model.hook_dict)  # no rotary: no such name, instead of one that never fires
    assert not hasattr(model, "hook_nothing") and not hasattr(model.blocks[0], "hook_nothing")


@pytest.mark.parametrize("kind", [str, list, tuple, set, frozenset])
def test_filters_of_any_kind(model, kind):
    name = "blocks.1.attn.hook_z"
    assert list(cached(model, names_filter=name if kind is str else kind([name]))) == [name]
    both = cached(model, names_filter=["blocks.0.hook_out", "blocks.0.hook_resid_post"])
    assert torch.equal(both["blocks.0.hook_out"], both["blocks.0.hook_resid_post"])


def test_without_a_filter_the_flags_decide(model):
    plain = set(cached(model))
    assert len(plain) == 2 + 2 * 17 + 2
    model.set_use_attn_result(True)
    model.set_use_split_qkv_input(True)
    model.set_use_hook_mlp_in(True)
    more = {f"blocks.{layer}.{name}" for layer in range(2) for name in
            ("attn.hook_result", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in")}  # fmt: skip
    assert set(cached(model)) - plain == more
    with pytest.raises(ValueError, match="exclude"):
        model.set_use_attn_in(True)


def test_an_edit_in_place_and_a_returned_value_are_the_same(model):
    def in_place(value, hook):
        value[:, 2] = 0

    def returned(value, hook):
        value = value.clone()
        value[:, 2] = 0
        return value

    for name in model.hook_dict:
        if "scale" not in name:
            one, two = (model.run_with_hooks(TOKENS, fwd_hooks=[(name, hook)]) for hook in (in_place, returned))
            assert torch.equal(one, two), name
    with pytest.raises(HookConflictError, match="shape"):
        model.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", lambda value, hook: value[:1])])


@torch.no_grad()
def test_no_edit_reaches_what_was_cached_or_given_before(model):
    kept, given = {}, MODEL.blocks(MODEL.embed(Inputs(TOKENS)), 0, 1, None, Inputs(TOKENS))
    before = given.clone()

    def keep(value, hook):
        kept[hook.name] = value  # not a copy

    def spoil(value, hook):
        value.copy_(torch.arange(16.0).expand(value.shape))

    plain = cached(model)
    with model.hooks([("blocks.0.hook_resid_post", keep), ("blocks.1.hook_resid_pre", spoil)]):
        found = cached(model)
    assert torch.equal(kept["blocks.0.hook_resid_post"], plain["blocks.0.hook_resid_post"])
    assert torch.equal(found["blocks.0.hook_resid_post"], plain["blocks.0.hook_resid_post"])
    assert (found["blocks.1.hook_resid_pre"][..., 7] == 7).all()
    model.run_with_hooks(given, start_at_layer=1, fwd_hooks=[("blocks.1.hook_resid_pre", spoil)])
    assert torch.equal(given, before)
    found["blocks.1.hook_resid_pre"].fill_(0)
    assert (found["blocks.1.ln1.hook_normalized"] != 0).any() and (found["hook_embed"] != 0).any()


def test_no_two_cached_tensors_share_memory(model):
    logits, found = model.run_with_cache(TOKENS, names_filter=lambda name: True, return_cache_object=False)
    held = [value.untyped_storage().data_ptr() for value in (logits, *found.values())]
    assert len(set(held)) == len(held)


def test_order_prepending_and_chaining(model):
    seen = []

    def note(mark):
        return lambda value, hook: seen.append((mark, hook.name))

    model.add_hook("hook_embed", note(1))
    model.add_hook("embed.hook_out", note(2))
    model.add_hook("hook_embed", note(0), prepend=True)
    model.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", note(3))])
    assert seen == [(0, "hook_embed"), (1, "hook_embed"), (2, "embed.hook_out"), (3, "hook_embed")]
    assert len(model.hook_embed.fwd_hooks) == 2 and model.hook_embed.has_hooks("fwd")
    model.reset_hooks()
    name = "blocks.0.hook_mlp_out"
    chained = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda v, hook: v * 0), (name, lambda v, hook: v + 1)])
    one = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda v, hook: torch.ones_like(v))])
    assert torch.equal(chained, one)


def test_contexts_nest_and_leave_the_callers_hooks(model):
    calls = []
    model.add_hook("hook_embed", lambda value, hook: calls.append("mine"))
    model.add_perma_hook("hook_embed", lambda value, hook: calls.append("permanent"))
    with model.hooks([("hook_embed", lambda value, hook: calls.append("outer"))]):
        with pytest.raises(RuntimeError), model.hooks([("hook_embed", lambda value, hook: 1 / 0)]):
            with pytest.raises(ZeroDivisionError):
                model(TOKENS)
            raise RuntimeError
        calls.clear()
        model(TOKENS)
        assert calls == ["mine", "permanent", "outer"]
    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", lambda value, hook: 1 / 0)])
    calls.clear()
    cached(model)
    assert calls == ["mine", "permanent"] and model.context_level == 0
    model.reset_hooks()
    calls.clear()
    model(TOKENS)
    assert calls == ["permanent"]
    model.reset_hooks(including_permanent=True)
    assert not model.registry.hooks
    model.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", lambda value, hook: None)], reset_hooks_end=False)
    assert len(model.registry.hooks) == 1


def test_nothing_is_ever_registered_on_the_model(model):
    state = copy.deepcopy(MODEL.state_dict())
    with model.hooks([("hook_embed", lambda value, hook: None)], [("hook_embed", lambda value, hook: None)]):
        model(TOKENS, return_type="loss")
        for module in MODEL.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
    cached(model)
    assert all(torch.equal(state[name], value) for name, value in MODEL.state_dict().items())
    assert all(parameter.grad is None for parameter in MODEL.parameters())


def test_a_function_of_names_gets_each_place_once(model):
    names = []

    def note(value, hook):
        names.append(hook.name)

    model.run_with_hooks(TOKENS, fwd_hooks=[(lambda name: name.startswith("blocks.0.hook_"), note)])
    assert "blocks.0.hook_resid_pre" in names and "blocks.0.hook_in" not in names
    assert not any(name.endswith(("_input", "attn_in", "mlp_in")) for name in names)  # their flags are off
    names.clear()
    model.run_with_hooks(TOKENS, fwd_hooks=[(lambda name: name.endswith("q_input"), note)])
    assert names == ["blocks.0.hook_q_input", "blocks.1.hook_q_input"]
    point = model.blocks[1].attn.hook_pattern
    assert point is model.hook_dict["blocks.1.attn.hook_pattern"] and point.layer() == 1
    handle = point.add_hook(lambda value, hook: hook.ctx.update(shape=value.shape))
    model(TOKENS)
    assert point.ctx == {"shape": (2, 4, 5, 5)}
    handle.remove()
    model.clear_contexts()
    assert point.ctx == {} and not point.has_hooks()


def test_unwanted_sites_are_not_computed(model, monkeypatch):
    attention = MODEL.blocks[0].attention
    monkeypatch.setattr(attention, "_explicit", lambda *_: 1 / 0)  # scores and pattern of layer 0
    cached(model, names_filter=lambda name: "resid" in name or name.startswith("blocks.1"))
    model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_z", lambda value, hook: value * 0)])
    with pytest.raises(ZeroDivisionError):
        cached(model, names_filter="blocks.0.attn.hook_pattern")


@torch.no_grad()
def test_starting_and_stopping_between_blocks_runs_no_other_block(model, monkeypatch):
    ran = []
    for layer, block in enumerate(MODEL.blocks):
        monkeypatch.setattr(block, "forward", lambda *a, layer=layer, f=block.forward: (ran.append(layer), f(*a))[1])
    full = cached(model)
    stream = full["blocks.1.hook_resid_pre"]
    ran.clear()
    torch.testing.assert_close(model(TOKENS, stop_at_layer=1), stream, rtol=0, atol=1e-12)
    assert ran == [0]
    assert torch.equal(model(TOKENS, stop_at_layer=-2), full["blocks.0.hook_resid_pre"]) and ran == [0]
    torch.testing.assert_close(model(stream, start_at_layer=1), MODEL(TOKENS), rtol=0, atol=1e-12)
    assert torch.equal(model(stream, start_at_layer=1, stop_at_layer=1), stream)
    torch.testing.assert_close(
        model(stream, start_at_layer=1, tokens=TOKENS, return_type="loss"), model(TOKENS, return_type="loss")
    )
    ran.clear()
    part = cached(model, stream, start_at_layer=1)
    assert ran == [1] and all(name.startswith(("blocks.1", "ln_final")) for name in part)
    assert all(torch.allclose(part[name], full[name], rtol=0, atol=1e-12) for name in part)
    assert set(cached(model, stop_at_layer=1)) == {name for name in full if name.startswith(("hook", "blocks.0"))}
    for call in (
        lambda: cached(model, names_filter="blocks.1.hook_resid_pre", stop_at_layer=1),
        lambda: cached(model, stream, names_filter=["hook_embed"], start_at_layer=1),
        lambda: model.run_with_hooks(TOKENS, fwd_hooks=[("ln_final.hook_scale", print)], stop_at_layer=1),
    ):
        with pytest.raises(NotReachedError, match="does not reach"):
            call()
    for call, match in (
        (lambda: model(TOKENS, start_at_layer=1), "takes a stream"),
        (lambda: model(TOKENS, stop_at_layer=3), "allowed: -2 … 2"),
        (lambda: model(stream, start_at_layer=1, return_type="loss"), "needs tokens"),
        (lambda: model(stream, start_at_layer=1, tokens=TOKENS[:1]), "must have shape"),
        (lambda: model(TOKENS, stop_at_layer=1, past_kv_cache=KVCache()), "would not grow"),
    ):
        with pytest.raises(InputsError, match=match):
            call()


def test_gradients_are_autograds(any_model):
    if any_model.model.config.kind == "encoder":
        with pytest.raises(UnsupportedModelError, match="next token"):
            any_model(TOKENS, return_type="loss")
        return
    names = list({place: name for name, place in any_model.registry.places.items() if isinstance(place, Site)}.values())
    cache = cached(any_model, return_type="loss", incl_bwd=True, names_filter=names)
    seen = {}
    logits = any_model.run_with_hooks(
        TOKENS, bwd_hooks=[(name, lambda g, hook: seen.update({hook.name: g})) for name in names]
    )
    any_model.loss_fn(logits, TOKENS).backward()
    any_model.zero_grad()
    direction = torch.Generator().manual_seed(0)
    for name in names:
        assert torch.allclose(seen[name], cache[f"{name}_grad"], rtol=0, atol=1e-10), name
        if name.endswith("attn_scores"):
            continue  # −∞ where the mask closes: no finite step
        step = torch.randn(cache[name].shape, generator=direction, dtype=torch.float64) * 1e-6
        losses = [
            any_model.run_with_hooks(
                TOKENS, return_type="loss", fwd_hooks=[(name, lambda v, hook, move=s * step: v + move)]
            )
            for s in (1, -1)
        ]
        slope = float((losses[0] - losses[1]).detach()) / 2
        assert slope == pytest.approx(float((cache[f"{name}_grad"] * step).sum()), rel=1e-4, abs=1e-11), name


def test_gradients_of_the_readers_copies_sum_to_the_streams(model):
    forks = ["hook_q_input", "hook_k_input", "hook_v_input"]
    names = [f"blocks.1.{name}" for name in forks]
    whole = cached(
        model, return_type="loss", incl_bwd=True, names_filter=["blocks.1.hook_resid_pre", "blocks.1.hook_resid_mid"]
    )
    split = cached(model, return_type="loss", incl_bwd=True, names_filter=names)
    attn = cached(model, return_type="loss", incl_bwd=True, names_filter="blocks.1.hook_attn_in")
    total = sum(split[f"{name}_grad"].sum(2) for name in names)
    expected = (
        whole["blocks.1.hook_resid_pre_grad"] - whole["blocks.1.hook_resid_mid_grad"]
    )  # less the way past attention
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(attn["blocks.1.hook_attn_in_grad"].sum(2), expected, rtol=0, atol=1e-12)


def test_a_backward_hook_can_change_the_gradient(model):
    with model.hooks(bwd_hooks=[("blocks.1.hook_resid_pre", lambda gradient, hook: (gradient * 0,))]):
        model(TOKENS, return_type="loss").backward()
    assert MODEL.W_E.grad.abs().max() == 0 and MODEL.final_norm.weight.grad.abs().max() > 0
    model.zero_grad()
    with torch.no_grad(), pytest.raises(ValueError, match="gradients are off"):
        model.run_with_hooks(TOKENS, bwd_hooks=[("hook_embed", lambda gradient, hook: None)])
    with torch.no_grad(), pytest.raises(ValueError, match="gradients"):
        model.run_with_cache(TOKENS, incl_bwd=True, return_type="loss")
    with pytest.raises(ValueError, match="scalar"):
        model.run_with_cache(TOKENS, incl_bwd=True)


@torch.no_grad()
def test_a_readers_own_copy_changes_that_reader_alone(model):
    full = cached(model)

    def shift(value, hook):
        value[:, :, 2, 0] += 3.0

    found = {}
    for part in "qkv":
        with model.hooks([(f"blocks.1.hook_{part}_input", shift)]):
            found[part] = cached(model)
    for part in "qkv":
        moved = found[part][f"blocks.1.attn.hook_{part}"] - full[f"blocks.1.attn.hook_{part}"]
        assert moved[:, :, 2].abs().max() > 1e-3
        assert moved[:, :, [0, 1, 3]].abs().max() < 1e-12
        for other in set("qkv") - {part}:
            assert torch.equal(found[part][f"blocks.1.attn.hook_{other}"], full[f"blocks.1.attn.hook_{other}"])
    with model.hooks([("blocks.1.hook_mlp_in", lambda value, hook: value.square())]):
        ffn = cached(model)
    assert torch.equal(ffn["blocks.1.hook_resid_mid"], full["blocks.1.hook_resid_mid"])
    assert (ffn["blocks.1.hook_mlp_out"] - full["blocks.1.hook_mlp_out"]).abs().max() > 1e-3
    for first, second in (
        ("blocks.1.ln1.hook_scale", "blocks.1.hook_q_input"),
        ("blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_in"),
        ("blocks.1.hook_attn_in", "blocks.1.hook_v_input"),
    ):
        with pytest.raises(HookConflictError):
            double = [(name, lambda value, hook: value * 2) for name in (first, second)]
            model.run_with_hooks(TOKENS, fwd_hooks=double)


def test_position_slices_and_batches_of_one(model):
    full, one = cached(model), cached(model, TOKENS[:1], remove_batch_dim=True)
    for chosen, index in ((-1, [4]), ((1, 3), [1, 2]), ([0, 2], [0, 2]), (slice(3, None), [3, 4])):
        part = cached(model, pos_slice=chosen)
        for name, value in full.items():
            axis = 2 if name.endswith(("scores", "pattern")) else 1
            assert torch.equal(part[name], value.index_select(axis, torch.tensor(index))), name
    assert all(torch.allclose(one[name], value[0], rtol=0, atol=1e-12) for name, value in full.items())
    with pytest.raises(InputsError, match="batch of 2"):
        cached(model, remove_batch_dim=True)
    shapes = []
    model.run_with_hooks(
        TOKENS[:1], remove_batch_dim=True, fwd_hooks=[("hook_embed", lambda v, hook: shapes.append(v.shape))]
    )
    assert shapes == [(5, 16)]


def test_caching_hooks(model):
    cache, forward, backward = model.get_caching_hooks(["blocks.0.hook_resid_post"], incl_bwd=True)
    with model.hooks(forward, backward):
        model(TOKENS, return_type="loss").backward()
    model.zero_grad()
    whole = cached(model, return_type="loss", incl_bwd=True, names_filter="blocks.0.hook_resid_post")
    assert set(cache) == set(whole) and all(torch.equal(cache[name], whole[name]) for name in whole)
    kept = model.add_caching_hooks("hook_embed")
    model(TOKENS)
    assert torch.equal(kept["hook_embed"], cached(model)["hook_embed"])


@torch.no_grad()
def test_inputs_of_every_form_and_padding(model):
    texts = ["b c d", "e f g h i"]
    logits = model(texts)
    alone = model("b c d")
    torch.testing.assert_close(logits[:1, :3], alone, rtol=0, atol=1e-12)
    left = model(texts, padding_side="left")
    torch.testing.assert_close(left[:1, 2:], alone, rtol=0, atol=1e-12)
    tokens = model.to_tokens(texts, padding_side="left")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert torch.equal(model(tokens, attention_mask=mask), left)
    assert torch.equal(model(Inputs(tokens, mask=mask.bool())), left)
    for form in ([1, 2, 3], [[1, 2, 3]], torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]).numpy()):
        assert torch.equal(model(form), alone)
    per_token = model(tokens, attention_mask=mask, return_type="loss", loss_per_token=True)
    hand = -left.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(per_token[1], hand[1])
    torch.testing.assert_close(per_token[0], hand[0] * torch.tensor([0, 0, 1, 1]))
    loss = model(texts, padding_side="left", return_type="loss")
    torch.testing.assert_close(loss, per_token.sum() / 6)
    assert model(tokens, return_type=None) is None
    both = model(TOKENS, return_type="both")
    torch.testing.assert_close(both[1], model.loss_fn(both[0], TOKENS))
    with pytest.raises(ValueError, match="return_type"):
        model(TOKENS, return_type="logit")
    with pytest.raises(InputsError, match="outside the vocabulary"):
        model([[9]])
    with pytest.raises(InputsError, match="mask must have shape"):
        model(torch.arange(6), attention_mask=torch.ones(2, 3))
    assert torch.equal(model([1, 2, 3], attention_mask=[1, 1, 1]), model(TOKENS[:1, :3]))


def test_a_model_without_a_head_has_hooks_and_no_logits():
    ours = random_model({**SIZES, "head": False})
    model = to_transformer_lens(ours)
    assert torch.equal(model(TOKENS), ours(TOKENS)) and model.unembed is None
    assert "ln_final.hook_out" in cached(model, names_filter="ln_final.hook_out")
    for call in (lambda: model.W_U, lambda: model(TOKENS, return_type="loss")):
        with pytest.raises(UnsupportedModelError, match="head"):
            call()


def test_text(model):
    assert model.to_tokens("b c").tolist() == [[1, 2]]  # no BOS unless asked
    with pytest.raises(TokenizerError, match="bos_token_id"):
        model.to_tokens("b c", prepend_bos=True)
    assert model.to_tokens(["b", "c d"]).tolist() == [[1, 0], [2, 3]]
    assert model.to_string(torch.tensor([[1, 2], [3, 4]])) == ["b c", "d e"] and model.to_string([1, 2]) == "b c"
    assert model.to_str_tokens("b c") == model.to_str_tokens(torch.tensor([[1, 2]])) == ["b", "c"]
    assert model.to_str_tokens(["b", "c d"]) == [["b"], ["c", "d"]]
    assert model.to_single_token("d") == 3 and model.to_single_str_token(3) == "d"
    assert model.get_token_position("c", "b c d c") == 1 and model.get_token_position(2, "b c d c", mode="last") == 3
    for call in (
        lambda: model.to_single_token("c d"),
        lambda: model.get_token_position("a", "b c"),
        lambda: to_transformer_lens(MODEL)("b c"),
        lambda: to_transformer_lens(MODEL).to_tokens("b c"),
    ):
        with pytest.raises(TokenizerError):
            call()


def test_bos_comes_from_the_tokenizer_when_asked():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = to_transformer_lens(MODEL, transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="i"))
    assert model.to_tokens("b c").tolist() == [[1, 2]] and model.to_tokens("b c", prepend_bos=True).tolist() == [
        [8, 1, 2]
    ]
    assert torch.equal(model("b c", prepend_bos=True), MODEL(torch.tensor([[8, 1, 2]])))
    model.cfg.default_prepend_bos = True
    assert model.to_str_tokens("b c") == ["i", "b", "c"] and model.get_token_position("c", "b c") == 2
    assert model.to_single_token("c") == 2


def test_generation(model):
    new: Any = generate(MODEL, TOKENS, max_new=3)
    expected = torch.cat([TOKENS, getattr(new, "tokens", new)], 1)
    assert torch.equal(model.generate(TOKENS, 3, do_sample=False), expected)
    assert torch.equal(model.generate(TOKENS, 3, do_sample=False, use_past_kv_cache=False), expected)
    text = model.generate("b c", 3, do_sample=False)
    assert text.split()[:2] == ["b", "c"] and len(text.split()) == 5
    assert len(model.generate(["b c", "d"], 2, return_type="tokens")) == 2
    assert torch.equal(model.generate(TOKENS, 3, seed=1), model.generate(TOKENS, 3, seed=1))

    def favour(value, hook):
        value[..., 7] = 100.0

    with model.hooks([("unembed.hook_out", favour)]):
        assert (model.generate(TOKENS, 3, do_sample=False)[:, 5:] == 7).all()
    assert torch.equal(model.generate(TOKENS, 3, do_sample=False), expected)
    cache = KVCache()
    first = model(TOKENS[:, :3], past_kv_cache=cache)
    rest = model(TOKENS[:, 3:], past_kv_cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), MODEL(TOKENS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_weights_are_the_models_own(kind):
    ours: Any = random_model({**SIZES, **KINDS[kind]})
    model: Any = to_transformer_lens(ours)
    c = ours.config
    shapes = {"W_Q": (4, 16, 4), "W_K": (c.kv_heads, 16, 4), "W_V": (c.kv_heads, 16, 4), "W_O": (4, 4, 16), "b_Q": (4, 4),
              "b_K": (c.kv_heads, 4), "b_V": (c.kv_heads, 4), "b_O": (16,)}  # fmt: skip
    for name, shape in (shapes | {"W_in": (16, 12), "W_out": (12, 16), "b_in": (12,), "b_out": (16,)}).items():
        stacked = getattr(model, name)
        assert stacked.shape == (2, *shape), name
        for layer in range(2):
            own = ours.weight(name, layer)
            part = model.blocks[layer].attn if name in shapes else model.blocks[layer].mlp
            assert torch.equal(getattr(part, name), stacked[layer])
            assert torch.equal(stacked[layer], torch.zeros(shape).double() if own is None else own)
    assert (model.W_gate is None) is (kind == "gpt")
    assert model.W_E is ours.W_E and torch.equal(model.unembed.W_U, ours.W_U) and model.b_U.shape == (9,)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(model.unembed(model.ln_final(x)), ours.unembed(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(model.blocks[1].mlp(x), ours.blocks[1].ffn(x, NO_TAP))
    assert model.blocks[1].ln2.w is ours.blocks[1].norm2.weight and model.ln_final.b is ours.final_norm.bias
    directions = model.tokens_to_residual_directions(torch.tensor([1, 2]))
    torch.testing.assert_close(directions, (ours.final_norm.weight[:, None] * ours.W_U)[:, [1, 2]].T)
    assert (
        model.tokens_to_residual_directions(3).shape
        == model.tokens_to_residual_directions(torch.tensor([3])).shape
        == (16,)
    )
    named = model.tl_parameters()
    assert named["blocks.1.attn.W_V"].shape == (4, 16, 4) and named["unembed.W_U"].shape == (16, 9)
    if kind == "llama":
        assert torch.equal(named["blocks.1.attn.W_V"][3], ours.blocks[1].attention.W_V[1])
        with pytest.raises(UnsupportedModelError, match="rotary"):
            _ = model.W_pos
    else:
        biases = [ours.blocks[layer].attention.b_O for layer in (0, 1)] + [ours.blocks[0].ffn.b_out]
        torch.testing.assert_close(model.accumulated_bias(1, mlp_input=True), sum(biases))
        assert model.W_E_pos.shape == (19, 16)


def test_config_and_modes():
    ours: Any = random_model({**SIZES, **KINDS["llama"]})
    model = to_transformer_lens(ours, WORDS)
    c = model.cfg
    assert (c.n_layers, c.n_heads, c.n_key_value_heads, c.d_head, c.d_mlp, c.n_ctx) == (2, 4, 2, 4, 12, 10)
    assert (c.act_fn, c.gated_mlp, c.normalization_type, c.positional_embedding_type) == ("silu", True, "RMS", "rotary")
    assert c.dtype == torch.float64 and model.to(torch.float32).cfg.dtype == torch.float32
    assert c.to_dict()["device"] == torch.device("cpu") and model.original_model is ours
    assert model.train().training and not model.eval().training and not ours.training
    twin = copy.deepcopy(model)
    twin.set_use_attn_result(True)
    with torch.no_grad():
        twin.W_E.zero_()
    assert ours.W_E.abs().max() > 0 and not model.cfg.use_attn_result
    assert twin.blocks[0].attn.W_Q.data_ptr() != model.blocks[0].attn.W_Q.data_ptr()
    learned = to_transformer_lens(random_model({**SIZES, "positions": "sinusoidal"}))
    assert torch.equal(learned.W_pos[:5], cached(learned)["hook_pos_embed"][0])
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    before = model(TOKENS, return_type="loss")
    before.backward()
    optimiser.step()
    assert model(TOKENS, return_type="loss") < before


def test_importing_it_does_not_import_transformer_lens():
    for module in ("model", "names", "hooks", "hooked", "parts", "text", "torch_module", "weights"):
        source = inspect.getsource(importlib.import_module(f"interp.bridges.lens_out.{module}"))
        assert "import transformer_lens" not in source and "from transformer_lens" not in source
