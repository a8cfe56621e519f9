"""Every site of every option combination equals the equations written in NumPy (`oracle.py`); the hand cases hold."""

import json
import math
from pathlib import Path

import numpy as np
import oracle
import pytest
import strategies
import summary
import torch
from hypothesis import HealthCheck, given, settings
from strategies import Case, small, translator

from interp.model.attention import softmax_or_zero
from interp.model.config import ModelConfig
from interp.model.norms import LayerNorm, RMSNorm
from interp.model.tap import NO_TAP
from interp.model.transformer import Transformer
from interp.sites import Site

HAND = json.loads((Path(__file__).parents[1] / "data" / "hand_cases.json").read_text())
TOLERANCE = 1e-10
KINDS: dict[str, int] = {}
COUNT = {"configurations": 0, "values": 0, "sites": 0, "largest": 0.0}


def array(tensor):
    """A tensor as float64 NumPy, None as None."""
    return None if tensor is None else tensor.detach().double().numpy()


def norm_weights(norm):
    """Gain and offset of a norm module."""
    return None if norm is None else {"weight": array(norm.weight), "bias": array(norm.bias)}


def attention_weights(attention):
    """The eight views of one attention."""
    return {name: array(getattr(attention, name)) for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")}


def stack_weights(stack):
    """One stack's layers and outer norms as the oracle reads them: of a model, or of its encoder."""
    layers = []
    for block in stack.blocks:
        a, f = block.attention, block.ffn
        w = attention_weights(a)
        w |= {"q_norm": a.q_norm and array(a.q_norm.weight), "k_norm": a.k_norm and array(a.k_norm.weight)}
        w |= {name: norm_weights(getattr(block, name)) for name in ("norm1", "cross_norm", "norm2")}
        w["cross"] = block.cross_attention and attention_weights(block.cross_attention)
        if f is not None:
            w |= {name: array(getattr(f, name)) for name in ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out")}
            w["beta"] = float(f.beta)
        layers.append(w)
    norms = {name: norm_weights(getattr(stack, name)) for name in ("embedding_norm", "final_norm")}
    return {**norms, "layers": layers}


def numpy_weights(model):
    """A model's weights as the oracle reads them, through the model's public views."""
    outer = {name: array(getattr(model, name)) for name in ("W_E", "W_pos", "W_U", "b_U")}
    segment = model.segment_embedding and array(model.segment_embedding.weight)
    encoder = model.encoder and stack_weights(model.encoder)
    return {**outer, "W_segment": segment, **stack_weights(model), "encoder": encoder}


def expected_sites(case, model, inputs):
    """The oracle's sites; defaults that the book fixes are left to the oracle."""
    config = model.config.to_dict()
    config |= {name: case.choices.get(name) for name in ("attention_scale", "final_norm")}
    names = ("tokens", "mask", "prefix_length", "segments", "source", "source_mask")
    given = {name: array(getattr(inputs, name)) for name in names}
    given = {name: None if value is None else value.astype(int) for name, value in given.items()}
    with np.errstate(invalid="ignore"):
        return oracle.forward(config, numpy_weights(model), **given)


def difference(wanted, got):
    """Largest |difference| over max(1, largest |value|); infinite where shapes, infinities or NaNs differ."""
    if wanted.shape != got.shape:
        return math.inf
    finite = np.isfinite(wanted)
    if not finite.all():
        if not np.array_equal(wanted[~finite], got[~finite]):
            return math.inf
        wanted, got = wanted[finite], got[finite]
    if not wanted.size:
        return 0.0
    apart = float(np.abs(wanted - got).max() / max(1.0, np.abs(wanted).max()))
    return apart if math.isfinite(apart) else math.inf


@torch.no_grad()
def wanted_of(case: Case) -> dict[str, np.ndarray]:
    """The oracle's sites for a case."""
    return expected_sites(case, *case.build())


@torch.no_grad()
def check_case(case: Case, wanted: dict[str, np.ndarray] | None = None) -> None:
    """Every site, tapped, and the logits, untapped, equal the oracle's (`wanted`, where computed before)."""
    model, inputs = case.build()
    reached: dict[str, np.ndarray] = {}

    def tap(site, value):
        assert str(site) not in reached, f"{site} reached twice"
        reached[str(site)] = array(value)
        return value

    tapped = model(inputs, tap)
    plain = model(inputs)
    wanted = expected_sites(case, model, inputs) if wanted is None else wanted
    assert list(wanted) == list(reached), case.choices
    # Without norms scores can reach 1e12: a softmax turns their rounding into that much of a pattern.
    largest = max(
        (float(np.abs(v[np.isfinite(v)]).max(initial=0)) for s, v in wanted.items() if s.endswith("scores")),
        default=0.0,
    )
    allowed = max(TOLERANCE, 8 * np.finfo(np.float64).eps * largest) if case.dtype == torch.float64 else TOLERANCE
    for site, value in wanted.items():
        apart = difference(value, reached[site])
        assert apart < allowed, f"{site} differs by {apart:.1e} for {case}"
        COUNT["values"] += value.size
        COUNT["largest"] = max(COUNT["largest"], apart)
    last = wanted[next(reversed(wanted))]
    assert difference(last, array(tapped)) < allowed
    apart = difference(last, array(plain))
    assert apart < allowed, f"untapped output differs by {apart:.1e} for {case}"
    COUNT["largest"] = max(COUNT["largest"], apart)
    COUNT["configurations"] += 1
    COUNT["sites"] += len(wanted)
    KINDS[model.config.kind] = KINDS.get(model.config.kind, 0) + 1


@settings(max_examples=200, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(strategies.cases())
def run_sampled(case):
    check_case(case)


def test_sampled_configurations():
    """200 option combinations of the four kinds, every site."""
    KINDS.clear()
    COUNT.update(configurations=0, values=0, sites=0, largest=0.0)
    run_sampled()
    assert COUNT["configurations"] >= 200
    assert all(KINDS[kind] >= 10 for kind in ("decoder", "encoder", "prefix-decoder", "encoder-decoder")), KINDS
    summary.LINES.append(
        f"oracle: {COUNT['configurations']} configurations ({', '.join(f'{n} {kind}' for kind, n in KINDS.items())}), "
        f"{COUNT['values']:,} values at {COUNT['sites']:,} sites compared, "
        f" largest difference {COUNT['largest']:.0e}"
    )


# One case per option, so that no option rests on the sampler's luck.
BOTH = ((2, 0), (0, 1))
NAMED = {
    "textbook": Case(small(norm_eps=0)),
    "textbook, post-norm": Case(small(norm_eps=0, norm_position="post")),
    "post-norm with final norm": Case(small(norm_position="post", final_norm=True)),
    "pre-norm without final norm": Case(small(final_norm=False)),
    "rmsnorm": Case(small(norm="rmsnorm", norm_eps=0)),
    "no norm": Case(small(norm="none")),
    "large epsilon": Case(small(norm_eps=0.5)),
    **{f"ffn {ffn}": Case(small(ffn=ffn)) for ffn in strategies.FFNS},
    "attention only, post-norm": Case(small(ffn="none", norm_position="post")),
    "swish beta": Case(small(ffn="swish", swish_beta=1.7)),
    "learned beta": Case(small(ffn="swiglu", swish_beta="learned")),
    "sinusoidal": Case(small(positions="sinusoidal"), BOTH),
    "no positions": Case(small(positions="none"), BOTH),
    "rotary": Case(small(positions="rotary"), BOTH),
    "rotary, half": Case(small(positions="rotary", d_head=8, rotary_fraction=0.5, rotary_base=50.0), BOTH),
    "rotary, linear": Case(small(positions="rotary", rotary_scaling={"type": "linear", "factor": 3.0})),
    "rotary, llama3": Case(small(positions="rotary", d_head=12, rotary_base=100.0, rotary_scaling=strategies.LLAMA3)),
    "grouped": Case(small(n_heads=4, n_kv_heads=2, positions="rotary")),
    "one key-value head": Case(small(n_heads=4, n_kv_heads=1)),
    "no bias": Case(small(bias=False)),
    "every bias": Case(small(bias={"qkv", "attn_out", "ffn", "unembed"})),
    "q/k norm": Case(small(qk_norm=True, positions="rotary", norm_eps=0)),
    "q/k norm without rotary": Case(small(qk_norm=True)),
    "window": Case(small(window=2), BOTH),
    "encoder, window": Case(small(kind="encoder", window=2), BOTH),
    "encoder": Case(small(kind="encoder"), BOTH),
    "prefix": Case(small(kind="prefix-decoder"), BOTH, prefixes=(2, 3)),
    "prefix, window": Case(small(kind="prefix-decoder", window=2), prefixes=(2, 4)),
    "embedding norm": Case(small(embedding_norm=True)),
    "segments": Case(small(n_segments=3), segments=True),
    "tied": Case(small(tied_embeddings=True)),
    "attention scale": Case(small(attention_scale=0.9)),
    "left and right padding": Case(small(), BOTH),
    "no head": Case(small(head=False)),
}


SOURCE = ((0, 1), (2, 0))
EVERY = {"norm": "rmsnorm", "ffn": "swiglu", "swish_beta": "learned", "n_heads": 4, "n_kv_heads": 2, "d_head": 6,
         "positions": "rotary", "rotary_fraction": 2 / 3, "qk_norm": True, "window": 2, "embedding_norm": True,
         "bias": {"qkv", "attn_out", "ffn", "unembed"}, "attention_scale": 0.6}  # fmt: skip
NAMED |= {
    f"encoder-decoder, {name}": case
    for name, case in {
        "textbook": Case(translator(norm_eps=0)),
        "textbook, post-norm": Case(translator(norm_eps=0, norm_position="post")),
        "source padding": Case(translator(), source_padding=SOURCE),
        "source padding, post-norm": Case(translator(norm_position="post"), source_padding=SOURCE),
        "target padding": Case(translator(), BOTH),
        "both padded, equal lengths": Case(translator(), BOTH, source_padding=((0, 3), (0, 0)), source_length=5),
        "both padded, sinusoidal": Case(translator(positions="sinusoidal"), BOTH, source_padding=SOURCE),
        "more encoder": Case(translator(n_layers=1, n_encoder_layers=3)),
        "pre-norm without final norm": Case(translator(final_norm=False)),
        "post-norm with final norm": Case(translator(norm_position="post", final_norm=True)),
        "no norm": Case(translator(norm="none"), source_padding=SOURCE),
        "attention only": Case(translator(ffn="none")),
        "attention only, post-norm": Case(translator(ffn="none", norm_position="post")),
        "gated": Case(translator(ffn="geglu", norm="rmsnorm")),
        "rotary": Case(translator(positions="rotary"), BOTH, source_padding=SOURCE),
        "no positions": Case(translator(positions="none")),
        "grouped": Case(translator(n_heads=4, n_kv_heads=2)),
        "window": Case(translator(window=1), BOTH, source_padding=SOURCE),
        "q/k norm": Case(translator(qk_norm=True)),
        "embedding norm": Case(translator(embedding_norm=True)),
        "attention scale": Case(translator(attention_scale=0.9)),
        "no bias": Case(translator(bias=False)),
        "tied": Case(translator(tied_embeddings=True)),
        "no head": Case(translator(head=False)),
        "a source of padding alone": Case(translator(), source_padding=((4, 0), (0, 0))),
        "everything": Case(translator(**EVERY), BOTH, source_padding=SOURCE),
        "everything, post-norm": Case(translator(**EVERY, norm_position="post"), BOTH, source_padding=SOURCE),
    }.items()
}


@pytest.mark.parametrize("name", NAMED)
def test_named_configuration(name):
    check_case(NAMED[name])


def test_layernorm_by_hand():
    case = HAND["layernorm (7.23-7.25), eps 0"]
    x = torch.tensor(case["x"], dtype=torch.float64)
    norm = LayerNorm(4, 0.0, Site("norm1_scale", 0), Site("norm1_hat", 0)).double()
    seen = {}
    tapped = norm(x, _Recorder(seen))
    assert seen["norm1_scale"].item() == pytest.approx(case["std"], abs=1e-15)
    for got in (seen["norm1_hat"], tapped, norm(x, NO_TAP)):
        assert got.tolist() == pytest.approx(case["x_hat"], abs=1e-14)


def test_rmsnorm_by_hand():
    case = HAND["rmsnorm, eps 0"]
    x = torch.tensor(case["x"], dtype=torch.float64)
    norm = RMSNorm(4, 0.0, Site("norm1_scale", 0), Site("norm1_hat", 0)).double()
    seen = {}
    tapped = norm(x, _Recorder(seen))
    assert seen["norm1_scale"].item() == pytest.approx(case["rms"], abs=1e-15)
    for got in (tapped, norm(x, NO_TAP)):
        assert got.tolist() == pytest.approx(case["out"], abs=1e-14)


def test_swiglu_by_hand():
    case = HAND["swiglu (7.21-7.22), d=1, d_ff=1"]
    config = ModelConfig(vocab=2, n_layers=1, n_heads=1, d_model=1, n_ctx=2, d_ff=1, ffn="swiglu", norm="none",
                         swish_beta=case["beta"])  # fmt: skip
    ffn = Transformer(config, seed=0).double().blocks[0].ffn
    with torch.no_grad():
        for view, name in (("W_gate", "W1"), ("b_gate", "b1"), ("W_in", "W2"), ("b_in", "b2"), ("W_out", "W3"),
                           ("b_out", "b3")):  # fmt: skip
            getattr(ffn, view).fill_(case[name])
        out = ffn(torch.tensor([[[case["x"]]]], dtype=torch.float64), NO_TAP)
    assert out.item() == pytest.approx(case["out"], abs=1e-14)


@pytest.mark.parametrize("tapped", [False, True])
def test_causal_attention_by_hand(tapped):
    case = HAND["causal attention, one head, d=1, W_Q=W_K=W_V=1, scale 1"]
    config = ModelConfig(vocab=2, n_layers=1, n_heads=1, d_model=1, n_ctx=3, norm="none", bias=False, ffn="none",
                         positions="none", attention_scale=1.0)  # fmt: skip
    model = Transformer(config, seed=0).double()
    with torch.no_grad():
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            getattr(model.blocks[0].attention, name).fill_(1.0)
    x = torch.tensor(case["x"], dtype=torch.float64)[None, :, None]
    seen = {}
    out = model.blocks(x, 0, 1, _Recorder(seen) if tapped else None) - x
    for i, row in enumerate(case["rows"]):
        assert out[0, i].item() == pytest.approx(row["z"], abs=1e-14)
        if tapped:
            assert seen["pattern"][0, 0, i, : i + 1].tolist() == pytest.approx(row["pattern"], abs=1e-14)
            assert seen["pattern"][0, 0, i, i + 1 :].abs().sum() == 0


def test_softmax_row_without_edges_is_zero():
    assert softmax_or_zero(torch.full((1, 3), -math.inf)).tolist() == [[0.0, 0.0, 0.0]]


class _Recorder:
    def __init__(self, seen):
        self.seen = seen

    def wants(self, site):
        return True

    def __call__(self, site, value):
        self.seen[site.name] = value.detach()
        return value
