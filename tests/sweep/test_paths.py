"""Path patching against two full runs per cell by hand, and the sums that it must obey."""

from __future__ import annotations

import itertools

import pytest
import torch
from strategies import Case, random_model, small, translator
from sweep_cases import CASES, Pair, assert_close, grid_cells, pair_of, values_of

from interp import logit_difference, patch_sweep, path_patch
from interp.hookable import UnsupportedModelError
from interp.metrics import evaluate
from interp.sites import UnknownSiteError
from interp.sweep import SweepError

READ = logit_difference(1, 2)
COMPONENTS = ("attn_out", "cross_out", "ffn_out")
PART_OF = {"z": "attn_out", "head_out": "attn_out", "attn_out": "attn_out", "cross_z": "cross_out", "cross_head_out": "cross_out",
           "cross_out": "cross_out", "ffn_act": "ffn_out", "ffn_out": "ffn_out"}  # fmt: skip


def first_step(pair: Pair, held: dict, sender: list, base) -> dict[str, torch.Tensor]:
    """Every site when only what is sent changes: each part of every component but the sender's stays the base run's."""
    noted: dict[str, torch.Tensor] = {}
    names = {site.split(".")[-1] for site, _, _ in sender}

    def tap(site, value):
        text = str(site)
        if site.name in names:  # what the sender's fellows write is the base run's, too
            value = held[text].clone()
            for where, index, new in sender:
                if where == text:
                    value[index] = new[index]
        elif site.name in COMPONENTS and not any(PART_OF[one] == site.name for one in names):
            value = held[text]
        noted[text] = value
        return value

    with torch.no_grad():
        pair.model(base, tap)
    return noted


def second_step(pair: Pair, noted: dict, receivers: list[tuple[str, tuple]], base) -> torch.Tensor:
    """The metric [batch] when the receivers read what they read in the first step, and all else runs."""

    def tap(site, value):
        for where, index in receivers:
            if where == str(site):
                value = value.clone()
                value[(slice(None), *index)] = noted[where][(slice(None), *index)]
        return value

    with torch.no_grad():
        return evaluate(READ, pair.model(base, tap), base)


def check(
    pair: Pair,
    receivers: dict,
    senders: str,
    by=("layer", "head"),
    direction="denoising",
    engines=("fast", "reference"),
):
    """Fast = reference = by hand; the fast result."""
    found = [path_patch(pair.model, pair.clean, pair.corrupted, READ, receivers, senders, by, direction, engine, check=0)
             for engine in engines]  # fmt: skip
    source, base = pair.ends(direction)
    cells = grid_cells(pair.model, senders, by, values_of(pair.model, source), pair.clean)
    held = values_of(pair.model, base)
    places = [[place] if isinstance(place, tuple) else place for place in receivers.values()]
    noted = [first_step(pair, held, sender, base) for sender in cells]
    expected = torch.stack([second_step(pair, one, place, base) for place in places for one in noted])
    name = f"{senders} → receiver"
    for got in found:
        assert got.axes[name] == ("receiver", *by) and got.coordinates[name][0] == list(receivers)
        assert_close(got.values[name].flatten(0, -2), expected, what=f"{got.engine}, {senders} by {by}")
    start = found[0].corrupted if direction == "denoising" else found[0].clean
    assert start is not None and float((expected - start).abs().max()) > 1e-8
    return found[0]


def heads(layer, kind, head):
    return (f"{layer}.{kind}", (slice(None), head))


RECEIVERS = {"q": heads(2, "q", 1), "k and v": [heads(2, "k", 0), heads(1, "v", 0)], "ffn": ("1.ffn_pre", ()),
             "read": ("2.norm1", (4,)), "final": ("final", ()), "logits": ("logits", (-1,)),
             "norm": ("2.norm2", (slice(None), 3))}  # fmt: skip


PATHS = [
    ("z", ("layer", "head"), "denoising"),
    ("ffn_out", ("layer", "role"), "noising"),
    ("ffn_act", ("layer", "neuron"), "denoising"),
    ("z", ("layer", "position", "head"), "noising"),
    ("head_out", ("layer", "head"), "noising"),
    ("attn_out", ("layer", "position"), "denoising"),
]
KINDS = ["post-norm", "everything", "encoder, padded", "modern", "sums only", "attention only", "left padding", "encoder",
         "prefix, padded"]  # fmt: skip
STACKS = ["two stacks, padded", "two stacks", "two stacks, post-norm"]


def few(names: list, number: int) -> list:
    """The first ones by default, the others in the slow tests."""
    return [one if i < number else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
            for i, one in enumerate(names)]  # fmt: skip


@pytest.mark.parametrize(("senders", "by", "direction"), few(PATHS, 1))
def test_paths_by_hand(senders, by, direction):
    pair = pair_of(Case(small(n_layers=3, n_kv_heads=1, positions="rotary")), (1, 3))
    check(pair, RECEIVERS, senders, by, direction)


@pytest.mark.parametrize("name", few(KINDS, 2))
def test_paths_in_models_of_every_kind(name):
    pair = pair_of(CASES[name], (0, 1, 3))
    last = pair.model.config.n_layers - 1
    check(pair, {"q": heads(last, "q", 1), "v": (f"{last}.v", ()), "out": ("logits", ())}, "z")
    if pair.model.config.ffn != "none":
        check(pair, {"ffn": (f"{last}.ffn_pre", ()), "k": (f"{last}.k", ())}, "attn_out", ("layer", "role"), "noising")


@pytest.mark.parametrize("name", few(STACKS, 1))
def test_paths_between_two_stacks(name):
    pair = pair_of(CASES[name], (0, 1))
    sites = {"keys": "cross_k", "own": "q", "query": "cross_q"}
    receivers = {"out": ("decoder.logits", ()), **{name: (f"decoder.1.{site}", ()) for name, site in sites.items()}}
    got = check(pair, receivers, "encoder.z")
    behind = got.values["encoder.z → receiver"][[0, 2, 3]]
    assert torch.equal(behind, got.corrupted.expand(behind.shape)), "the source is read through keys and values only"
    if name != STACKS[0]:
        check(pair, receivers, "cross_z", direction="noising")
        check(pair, receivers, "decoder.ffn_out", ("layer", "role"))


@pytest.mark.parametrize(("senders", "by"), [("z", ("head",)), ("attn_out", ("position",)), ("ffn_act", ("neuron",))])
def test_senders_in_every_layer_at_once(senders, by):
    pair = pair_of(Case(small(n_layers=3, n_heads=4)), (1, 3))
    check(pair, {"q": heads(2, "q", 1), "out": ("logits", ())}, senders, by)


def test_a_path_from_behind_has_no_effect_at_all():
    pair = pair_of(Case(small(n_layers=3)), (1,))
    receivers = {"0.v": ("0.v", ()), "1.q": ("1.q", ()), "1.ffn": ("1.norm2", ())}
    for engine in ("fast", "reference"):
        got = path_patch(pair.model, pair.clean, pair.corrupted, READ, receivers, "z", ("layer", "head"), engine=engine)  # type: ignore[arg-type]
        values = got.values["z → receiver"]
        behind = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
        for receiver, layer in itertools.product(range(3), range(3)):
            same = torch.equal(values[receiver, layer], got.corrupted.expand(2, 2))
            assert same == ((receiver, layer) in behind), (receiver, layer)


def test_the_direct_effect_in_a_linear_model_is_a_product_of_matrices():
    """norm="none": what a head writes straight to the logits is (z − z') W_O W_U."""
    pair = pair_of(CASES["sums only"], (0, 1, 3))
    got = path_patch(pair.model, pair.clean, pair.corrupted, READ, {"out": ("logits", ())})
    clean, corrupted = (values_of(pair.model, inputs) for inputs in (pair.clean, pair.corrupted))
    unembed = (pair.model.W_U[:, 1] - pair.model.W_U[:, 2]).detach()
    for layer, head in itertools.product(range(2), range(2)):
        change = (clean[f"{layer}.z"] - corrupted[f"{layer}.z"])[:, -1, head]
        expected = change @ pair.model.weight("W_O", layer)[head].detach() @ unembed
        effect = got.values["z → receiver"][0, layer, head] - got.corrupted
        assert_close(effect, expected, float(got.corrupted.abs().max()))
        assert float(expected.abs().max()) > 1e-6


def test_direct_effects_add_up_in_a_linear_model():
    """norm="none": the direct effects of all components and of the embedding are the whole difference."""
    pair = pair_of(CASES["sums only"], (1, 4))
    parts = [path_patch(pair.model, pair.clean, pair.corrupted, READ, {"out": ("logits", ())}, senders, ("layer",))
             for senders in ("attn_out", "ffn_out")]  # fmt: skip
    start = parts[0].corrupted
    names = ("attn_out", "ffn_out")
    total = sum((part.values[f"{name} → receiver"][0] - start).sum(0) for name, part in zip(names, parts, strict=True))
    W_E, W_U = pair.model.W_E.detach(), pair.model.W_U.detach()
    direct = W_E[pair.clean.tokens[:, -1]] - W_E[pair.corrupted.tokens[:, -1]]
    total = total + direct @ (W_U[:, 1] - W_U[:, 2])
    assert_close(total, parts[0].clean - start, float(start.abs().max()))


def test_in_one_layer_of_attention_a_heads_total_effect_is_its_direct_one():
    pair = pair_of(Case(small(n_layers=1, ffn="none", norm="none", n_heads=4)), (1, 3))
    paths = path_patch(pair.model, pair.clean, pair.corrupted, READ, {"out": ("logits", ())})
    whole = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, "z", ("layer", "head"))
    assert_close(paths.values["z → receiver"][0], whole.values["z"])
    heads_sum = (whole.values["z"] - whole.corrupted).sum((0, 1))
    assert_close(heads_sum, whole.clean - whole.corrupted, what="the last token is the same: only attention differs")


def test_in_two_layers_of_attention_a_heads_total_effect_is_the_sum_over_what_reads_it():
    """norm="none", ffn="none", one value receiver: the paths to the output and, patterns held, through each value."""
    pair = pair_of(Case(small(n_layers=2, ffn="none", norm="none", n_heads=2)), (1, 3))
    receivers = {"out": ("logits", ()), **{f"v{head}": heads(1, "v", head) for head in range(2)}, "v": ("1.v", ())}
    got = path_patch(pair.model, pair.clean, pair.corrupted, READ, receivers).values["z → receiver"]
    start = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, "z", ("layer", "head")).corrupted
    effect = got[:, 0] - start
    assert_close(effect[1] + effect[2], effect[3], float(start.abs().max()))
    assert float(effect[3].abs().max()) > 1e-8


def test_all_receivers_of_a_head_at_once_are_its_total_effect_without_norms():
    """Every reader in the next layer and the output: what remains is the whole patch."""
    pair = pair_of(Case(small(n_layers=2, ffn="none", n_heads=2)), (1, 3))
    read = [("1.q", ()), ("1.k", ()), ("1.v", ())]
    got = path_patch(pair.model, pair.clean, pair.corrupted, READ, {"layer": read}, "attn_out", ("layer", "position"))
    direct = path_patch(
        pair.model, pair.clean, pair.corrupted, READ, {"out": ("logits", ())}, "attn_out", ("layer", "position")
    )
    whole = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, "attn_out", ("layer", "position"))
    through, straight = got.values["attn_out → receiver"][0], direct.values["attn_out → receiver"][0]
    # Not the last token: it is read by the next layer only, so the way there is the only one.
    assert_close(through[0, :-1], whole.values["attn_out"][0, :-1])
    assert torch.equal(straight[0, :-1], whole.corrupted.expand(4, 2))
    assert torch.equal(through[1], whole.corrupted.expand(5, 2))
    assert_close(straight[1], whole.values["attn_out"][1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"receivers": {}}, "receivers="),
        ({"receivers": [("2.q", ())]}, "receivers="),
        ({"receivers": {"a": ("1.z", ())}}, "receiver 'a' is '1.z'; allowed: what a component reads"),
        ({"senders": "resid_pre"}, "senders='resid_pre'"),
        ({"senders": ["z"]}, "senders="),
        ({"by": ("window", "head")}, "a path starts at one place"),
        ({"by": ("layer", "neuron")}, "cannot be swept by 'neuron'"),
        ({"direction": "up"}, "direction='up'"),
    ],
)
def test_what_is_no_path_is_refused(options, words):
    pair = pair_of(Case(small()), (1,))
    with pytest.raises(SweepError, match=words):
        path_patch(pair.model, pair.clean, pair.corrupted, READ, **{"receivers": {"a": ("1.q", ())}, **options})
    with pytest.raises(UnknownSiteError):
        path_patch(pair.model, pair.clean, pair.corrupted, READ, {"a": ("7.q", ())})


def test_translators_final_must_be_named():
    pair = pair_of(Case(translator()), (1,))
    with pytest.raises(UnknownSiteError, match="can mean"):
        path_patch(pair.model, pair.clean, pair.corrupted, READ, {"a": ("final", ())}, "cross_z")


def test_paths_need_logits():
    model = random_model(small(head=False))
    tokens = torch.arange(4)[None]
    with pytest.raises(UnsupportedModelError, match="no unembedding"):
        path_patch(model, tokens, tokens + 1, READ, {"a": ("1.q", ())})
