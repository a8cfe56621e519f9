"""What a model consists of and costs, against PyTorch's own FLOP counter, real runs and arithmetic by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from interp import Inputs, ModelConfig, Transformer, run
from interp.analyses import parameter_table
from interp.analyses.describe import (
    DescribeError,
    ModelInfo,
    flops_text,
    forward_flops,
    model_info,
    parameter_groups,
    site_table,
)
from interp.hookable import UnsupportedModelError
from interp.metrics import logit_difference
from interp.model.inputs import KVCache
from interp.sweep import plan_sweep

SMALL: dict[str, Any] = {"vocab": 11, "n_layers": 3, "n_heads": 4, "d_model": 16, "n_ctx": 12}
CONFIGS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {"kind": "encoder", "norm_position": "post"},
    "prefix": {"kind": "prefix-decoder", "tied_embeddings": True},
    "encoder-decoder": {"kind": "encoder-decoder", "n_encoder_layers": 2, "n_kv_heads": 2},
    "grouped": {"n_kv_heads": 2, "positions": "rotary", "qk_norm": True, "norm": "rmsnorm"},
    "wide heads": {"d_head": 6, "bias": False},
    "gated": {"ffn": "swiglu", "d_ff": 20, "swish_beta": "learned"},
    "attention-only": {"ffn": "none"},
    "windowed": {"window": 2, "n_segments": 2},
    "headless": {"kind": "encoder", "head": False},
}


def built(name: str) -> Transformer:
    return Transformer(ModelConfig(**{**SMALL, **CONFIGS[name]}))


def given(model: Transformer, batch: int, length: int, source: int | None) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(0, 11, (batch, n), generator=generator)

    two = model.config.kind == "encoder-decoder"
    return Inputs(tokens(length), source=tokens(source) if two and source else None)


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_that_pytorch_counts(name):
    model = built(name)
    source = 5 if name == "encoder-decoder" else None
    table = forward_flops(model, 7, 3, source).set_index("part")
    patterns = [site for site in model.sites if site.name in ("pattern", "cross_pattern")]
    # With its pattern read, attention is two matrix products; the fused kernel of a CPU is not in PyTorch's counter.
    with FlopCounterMode(display=False) as counter:
        run(model, given(model, 3, 7, source), record=patterns)
    found: dict[str, int] = {}
    for operation, count in counter.get_flop_counts()["Global"].items():
        kind = "products of activations" if "bmm" in str(operation) else "weights"
        found[kind] = found.get(kind, 0) + count
    scores = table.filter(like="scores", axis=0)["flops"].sum()
    assert found["products of activations"] == scores
    assert found["weights"] == table["flops"].sum() - scores
    assert abs(table["share"].sum() - 1) < 1e-12


def test_the_parts_by_hand():
    """Two layers, d 4, two heads of 2, one of keys, d_ff 3, vocabulary 5; a batch of one, three tokens."""
    model = Transformer(
        ModelConfig(vocab=5, n_layers=2, n_heads=2, n_kv_heads=1, d_model=4, n_ctx=3, d_ff=3, ffn="relu")
    )
    table = forward_flops(model, 3).set_index("part")["flops"]
    assert table["attention projections"] == 2 * 3 * 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4)
    assert table["attention scores and mix"] == 2 * 2 * (2 * 3 * 3 * 2) * 2
    assert table["FFN"] == 2 * 3 * 2 * 2 * 4 * 3
    assert table["unembedding"] == 3 * 2 * 4 * 5


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_and_bytes_are_those_of_a_run_that_records_everything(name):
    model = built(name)
    source = 5 if name == "encoder-decoder" else None
    cache = run(model, given(model, 3, 7, source), record=list(model.sites)).cache
    table = site_table(model, 7, 3, source)
    assert len(table) == len({(site.stack, site.name) for site in model.sites})
    for row in table.itertuples(index=False):
        mine = [site for site in model.sites if (site.stack, site.name) == (row.stack, row.site)]
        assert [tuple(cache[site].shape) for site in mine] == [row.shape] * len(mine)
        assert row.bytes == sum(cache[site].numel() * 4 for site in mine)
        assert pd.isna(row.layers) if mine[0].layer is None else row.layers == len(mine)
    cost = model_info(model, 7, 3, source).cost.set_index("what")
    assert cost.loc["a run that records every site", "bytes"] == sum(value.numel() * 4 for value in cache.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_in_one_group(name):
    model = built(name)
    table = parameter_groups(model).set_index("group")
    counts, total = table["parameters"], sum(value.numel() for value in model.parameters())
    whole = table[table["part_of"].isna()].drop("all")
    assert counts["all"] == total == whole["parameters"].sum()
    for owner, parts in table[table["part_of"].notna()].groupby("part_of"):
        assert parts["parameters"].sum() == counts[str(owner)]
    for group in (name for name in counts.index if name != "all"):
        assert counts[group] == model.weights.count(group)
    other = parameter_table(model).set_index("group")["parameters"]
    learned = 3 if name == "gated" else 0  # β, which has no name to read it by there
    assert counts["attention"] == other["attention"] and counts.get("ffn", 0) == other["ffn"] + learned
    if name == "decoder":
        assert counts["qk"] == counts["ov"] and table.loc["ffn", "share_blocks"] > 0.6
        assert math.isnan(table.loc["norms", "share_blocks"]) and table.loc["all", "share"] == 1


@pytest.mark.parametrize("name", ["decoder", "encoder", "prefix", "grouped", "gated", "attention-only", "windowed"])
@pytest.mark.parametrize("site", ["resid_pre", "attn_out"])
def test_the_fast_sweep_is_counted_as_the_sweep_itself_estimates_it(name, site):
    """The count is made on a narrow stand-in; the sweep's own plan of the whole model says the same."""
    model = built(name)
    clean = given(model, 2, 7, None)
    plan = plan_sweep(
        model, clean, Inputs((clean.tokens + 1) % 11), logit_difference(0, 1), site, ("layer", "position"), budget=1e12
    )
    row = (
        model_info(model, 7, 2, site=site).cost.set_index("what").loc[f"patch sweep of {site}, layer × position, fast"]
    )
    assert row["flops"] == plan.estimate.flops and row["cells"] == plan.estimate.cells == 21
    assert abs(row["bytes"] / plan.estimate.memory - 1) < 1e-9


@pytest.mark.parametrize("name", ["decoder", "encoder", "gated", "attention-only"])
def test_the_slow_sweep_is_a_forward_pass_per_cell(name):
    model = built(name)
    clean = given(model, 2, 7, None)
    plan = plan_sweep(model, clean, Inputs((clean.tokens + 1) % 11), logit_difference(0, 1), "resid_pre",
                      engine="reference", budget=1e12)  # fmt: skip
    info = model_info(model, 7, 2)
    row = info.cost.set_index("what").loc["patch sweep of resid_pre, layer × position, full forwards"]
    assert row["flops"] == 21 * info.flops["flops"].sum() == plan.estimate.flops


@pytest.mark.parametrize("name", ["decoder", "grouped", "encoder-decoder"])
def test_a_cache_holds_as_many_bytes_as_is_said(name):
    model = built(name)
    source, cache = (5 if name == "encoder-decoder" else None), KVCache()
    model(given(model, 3, 7, source), kv_cache=cache)
    held = [*cache.keys.values(), *cache.values.values(), *(value for pair in cache.cross.values() for value in pair)]
    held += [] if cache.memory is None else [cache.memory.states]
    said = model_info(model, 7, 3, source).cost.set_index("what").loc["KV cache", "bytes"]
    assert said == sum(value.numel() * value.element_size() for value in held)
    assert "KV cache" not in set(model_info(built("encoder")).cost["what"])


def test_smollm2_by_hand():
    """d 576, 30 layers, 9 heads of 64, 3 of keys and values, d_ff 1536, gated, tied vocabulary of 49,152; 1,024 tokens."""
    config = ModelConfig(
        vocab=49152, n_layers=30, n_heads=9, n_kv_heads=3, d_model=576, d_ff=1536, n_ctx=8192, ffn="swiglu",
        norm="rmsnorm", positions="rotary", bias=False, tied_embeddings=True,
    )  # fmt: skip
    model = Transformer(config, seed=None)  # memory that nobody fills is not taken
    counts = parameter_groups(model).set_index("group")["parameters"]
    assert counts["embeddings"] == 49152 * 576 == 28_311_552 and "unembedding" not in counts
    assert counts["qk"] == counts["ov"] == 30 * 576 * (576 + 192) == 13_271_040
    assert counts["ffn"] == 30 * 3 * 576 * 1536 == 79_626_240
    assert counts["norms"] == 61 * 576 and counts["all"] == 134_515_008
    flops = forward_flops(model, 1024).set_index("part")["flops"]
    assert flops["attention projections"] == 2 * 1024 * (13_271_040 * 2)
    assert flops["attention scores and mix"] == 30 * 9 * (2 * 2 * 1024 * 1024 * 64)
    assert flops["FFN"] == 2 * 1024 * 79_626_240
    assert flops["unembedding"] == 2 * 1024 * 28_311_552


def test_what_is_not_known_is_said():
    headless = model_info(built("headless"))
    assert any("no unembedding" in one for one in headless.missing) and not any(
        headless.cost["what"].str.contains("sweep")
    )
    two = model_info(built("encoder-decoder"), 7, source_length=5)
    assert two.source_length == 5 and any("encoder-decoder" in one for one in two.missing)
    assert two.cost.set_index("what").filter(like="fast", axis=0)["flops"].isna().all()
    assert any("no site 'ffn_out'" in one for one in model_info(built("attention-only"), site="ffn_out").missing)


def wrapped(model: Transformer, experts: bool = False) -> Any:
    """A stand-in for another library's wrapper: fewer names, a fused matrix kept beside its parts, maybe no readable FFN."""
    c = model.config
    names = ("kind", "vocab", "n_layers", "n_ctx", "n_heads", "n_kv_heads", "d_model", "d_head", "d_ff")
    config = SimpleNamespace(architecture="Other", **{name: getattr(c, name) for name in names})

    class Wrapped:
        sites, can_resume, additive_stream = model.sites, False, True

        def __init__(self) -> None:
            self.config = config

        def weight(self, kind: str, layer: int | None = None, stack: str | None = None) -> Any:
            hidden = experts and kind in ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out")
            return None if hidden else model.weight(kind, layer)

        def named_parameters(self):
            for name, value in model.named_parameters():
                yield name, value
                if ".qkv." in name:
                    for part, piece in zip("qkv", value.split([16, 8, 8]), strict=True):
                        yield name.replace(".qkv.", f".{part}."), piece.clone()

    return Wrapped()


def test_a_wrapped_model_gets_what_its_weights_tell():
    model = Transformer(ModelConfig(**SMALL, n_kv_heads=2, ffn="swiglu", tied_embeddings=True))
    info, ours = model_info(wrapped(model), 7, 3), model_info(model, 7, 3)
    theirs, mine = (one.parameters.set_index("group")["parameters"] for one in (info, ours))
    for group in ("embeddings", "attention", "qk", "ov", "ffn", "ffn_in", "ffn_out", "all"):
        assert theirs[group] == mine[group], group
    assert theirs["other"] == mine["norms"] and "unembedding" not in theirs
    pd.testing.assert_frame_equal(info.flops, ours.flops)
    assert [*info.sites["shape"]] == [*ours.sites["shape"]]
    assert not any(info.cost["what"].str.contains("fast")) and any(info.cost["what"].str.contains("full forwards"))
    assert any("like the first" in one for one in info.missing) and info.name == "Other"


def test_experts_leave_flops_open():
    model = Transformer(ModelConfig(**SMALL, n_kv_heads=2))
    info = model_info(wrapped(model, experts=True), 7)
    flops = info.flops.set_index("part")["flops"]
    assert math.isnan(flops["FFN"]) and flops["unembedding"] == 7 * 2 * 16 * 11
    assert info.cost["flops"].isna().all() and any("mixture of experts" in one for one in info.missing)
    assert "–" in info._repr_html_()


def test_a_notebook_shows_small_tables():
    info = model_info(built("encoder-decoder"), 7, 3)
    page = info._repr_html_()
    assert page.count("<table") == 4 and "encoder.0.attn_out" in page and "3 × 4 × 7 × 7" in page
    total = f"{info.parameters['parameters'].iloc[-1]:,} parameters"
    assert isinstance(info, ModelInfo) and total in repr(info)
    assert "not known" in page and "nan" not in page.lower() and "<NA>" not in page


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (1500, "1.5 kFLOP"), (999_900, "1 MFLOP"), (2.5e15, "2.5 PFLOP")],
)
def test_floating_point_operations_have_units(count, text):
    assert flops_text(count) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 13}, r"length=13 .* 1 … 12 \(n_ctx\)"),
        ({"length": 0}, "length=0 "),
        ({"length": 2.0}, "length=2.0 "),
        ({"batch": True}, "batch=True .* an integer from 1"),
        ({"source_length": 3}, "source_length=3 .* kind='decoder'"),
        ({"site": "logits"}, "site='logits' .* resid_pre"),
        ({"site": "pattern"}, "site='pattern' "),
    ],
)
def test_bad_input_is_refused_by_name(options, message):
    with pytest.raises(DescribeError, match=message):
        model_info(built("decoder"), **options)


def test_what_is_no_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear"):
        model_info(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_model_whose_config_lacks_sizes_is_refused_by_their_names():
    model = wrapped(built("decoder"))
    del model.config.n_heads, model.config.d_head
    with pytest.raises(UnsupportedModelError, match="n_heads, d_head"):
        model_info(model)


def test_defaults_fit_the_model():
    assert model_info(built("decoder")).length == 12
    two = built("encoder-decoder")
    assert model_info(two, 7).source_length == 7
    pd.testing.assert_frame_equal(forward_flops(two, 7), forward_flops(two, 7, source_length=7))
    pd.testing.assert_frame_equal(site_table(two, 7), site_table(two, 7, source_length=7))
