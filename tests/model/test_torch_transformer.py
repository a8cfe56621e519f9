"""Outside oracle: `torch.nn.Transformer` and `torch.nn.TransformerEncoder` with the same weights give the same numbers.

torch's modules have no embeddings and no head, so ours run with head=False and positions="none", and the vectors that
torch is given are written to `encoder.embed` and `decoder.embed`. torch always has final norms; so do ours here.
"""

import pytest
import summary
import torch
from strategies import real_positions, small, translator
from torch import nn

from interp.model import Inputs, KVCache, ModelConfig, Transformer

D, HEADS, D_FF, BATCH, TARGET, SOURCE = 8, 2, 7, 3, 5, 4
TOLERANCE = 1e-10
LARGEST = {"apart": 0.0, "values": 0}
# torch says that it has no fast path for norm_first; the tests train(), where it has none anyway.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
PADDINGS = {
    "whole": (None, None),
    "source right": (None, ((0, 1), (0, 0), (0, 2))),
    "source left": (None, ((1, 0), (0, 0), (3, 0))),
    "target": (((0, 2), (0, 0), (0, 4)), None),  # on the right: a row of torch's without any edge may be NaN
    "both": (((0, 0), (0, 1), (0, 3)), ((2, 0), (0, 3), (1, 1))),
}
CHOICES = [(norm_first, activation) for norm_first in (False, True) for activation in ("relu", "gelu")]
VARIANTS = pytest.mark.parametrize(("norm_first", "activation"), CHOICES)


def random_weights(module: nn.Module, seed: int = 3) -> nn.Module:
    """The module in float64, every parameter random; train() with dropout=0 keeps torch off its fused fast path."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().train()
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 1.0 if parameter.ndim < 2 else 1.5 / parameter.shape[1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread)
    return module


def ours(norm_first: bool, activation: str, choices: dict) -> Transformer:
    """Our model of the same architecture."""
    position = "pre" if norm_first else "post"
    same = {"norm_position": position, "ffn": activation, "positions": "none", "head": False, "final_norm": True}
    return Transformer(ModelConfig(**{**choices, **same}), seed=0).double()


@torch.no_grad()
def copy_attention(theirs: nn.MultiheadAttention, mine) -> None:
    """torch stacks the rows of W_Q, W_K, W_V [d d], heads one after the other; written through our views."""
    for kind, W, b in zip("QKV", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
        for head in range(HEADS):
            rows = slice(head * D // HEADS, (head + 1) * D // HEADS)
            getattr(mine, f"W_{kind}")[head] = W[rows].T
            getattr(mine, f"b_{kind}")[head] = b[rows]
    for head in range(HEADS):
        mine.W_O[head] = theirs.out_proj.weight[:, head * D // HEADS : (head + 1) * D // HEADS].T
    mine.b_O.copy_(theirs.out_proj.bias)


@torch.no_grad()
def copy_norm(theirs: nn.LayerNorm, mine) -> None:
    mine.weight.copy_(theirs.weight)
    mine.bias.copy_(theirs.bias)


@torch.no_grad()
def copy_stack(theirs, blocks, final_norm) -> None:
    """One stack's weights; a decoder layer's second norm is cross-attention's."""
    for layer, block in zip(theirs.layers, blocks, strict=True):
        copy_attention(layer.self_attn, block.attention)
        copy_norm(layer.norm1, block.norm1)
        if block.cross_attention is None:
            copy_norm(layer.norm2, block.norm2)
        else:
            copy_attention(layer.multihead_attn, block.cross_attention)
            copy_norm(layer.norm2, block.cross_norm)
            copy_norm(layer.norm3, block.norm2)
        for view, linear in ((block.ffn.W_in, layer.linear1), (block.ffn.W_out, layer.linear2)):
            view.copy_(linear.weight.T)
        block.ffn.b_in.copy_(layer.linear1.bias)
        block.ffn.b_out.copy_(layer.linear2.bias)
    copy_norm(theirs.norm, final_norm)


def hooked(theirs, prefix: str, seen: dict) -> None:
    """Keep what every module of torch's stack gives, under our site's name."""

    def keep(module: nn.Module, site: str) -> None:
        def hook(module, arguments, output):
            seen[prefix + site] = (output[0] if isinstance(output, tuple) else output).detach()

        module.register_forward_hook(hook)

    for number, layer in enumerate(theirs.layers):
        crosses = hasattr(layer, "multihead_attn")
        norms = ("norm1", "cross_norm", "norm2") if crosses else ("norm1", "norm2")
        if not layer.norm_first:  # the stream itself is normed
            norms = ("resid_mid", "resid_cross", "resid_post") if crosses else ("resid_mid", "resid_post")
        keep(layer, f"{number}.resid_post")
        keep(layer.self_attn, f"{number}.attn_out")
        keep(layer.linear1, f"{number}.ffn_pre")
        keep(layer.linear2, f"{number}.ffn_out")
        if crosses:
            keep(layer.multihead_attn, f"{number}.cross_out")
        for index, name in enumerate(norms):
            keep(getattr(layer, f"norm{index + 1}"), f"{number}.{name}")
    keep(theirs.norm, "final")


class Given:
    """A tap that writes the embeddings that torch is given, and keeps every site where `every`."""

    def __init__(self, embeddings: dict, every: bool) -> None:
        self.embeddings, self.every, self.seen = embeddings, every, {}

    def wants(self, site) -> bool:
        return self.every

    def __call__(self, site, value):
        value = self.embeddings.get(str(site), value)
        self.seen[str(site)] = value.detach()
        return value


def compare(mine: torch.Tensor, theirs: torch.Tensor, real: torch.Tensor | None, what: str) -> None:
    """Equal at real positions, absolutely."""
    assert mine.shape == theirs.shape, what
    mine, theirs = (mine, theirs) if real is None else (mine[real], theirs[real])
    apart = float((mine - theirs).detach().abs().max())
    assert apart <= TOLERANCE, f"{what} differs by {apart:.1e}"
    LARGEST["apart"] = max(LARGEST["apart"], apart)
    LARGEST["values"] += mine.numel()


def vectors(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def pair(norm_first: bool, activation: str, n_encoder: int, n_decoder: int) -> tuple[nn.Transformer, Transformer]:
    """torch's encoder-decoder and ours with its weights."""
    theirs = random_weights(
        nn.Transformer(D, HEADS, n_encoder, n_decoder, D_FF, 0.0, activation, batch_first=True, norm_first=norm_first)
    )
    mine = ours(norm_first, activation, translator(n_layers=n_decoder, n_encoder_layers=n_encoder))
    copy_stack(theirs.encoder, mine.encoder.blocks, mine.encoder.final_norm)
    copy_stack(theirs.decoder, mine.blocks, mine.final_norm)
    return theirs, mine


def check_transformer(norm_first, activation, padding="both", layers=(2, 2), every=True):
    """Output, every module's output in between, and the gradients of both embeddings."""
    theirs, mine = pair(norm_first, activation, *layers)
    target_mask, source_mask = (
        None if rows is None else real_positions(rows, length)
        for rows, length in zip(PADDINGS[padding], (TARGET, SOURCE), strict=True)
    )
    target, source = vectors(BATCH, TARGET, D, seed=1), vectors(BATCH, SOURCE, D, seed=2)
    hidden = None if source_mask is None else ~source_mask
    wanted: dict[str, torch.Tensor] = {}
    hooked(theirs.encoder, "encoder.", wanted)
    hooked(theirs.decoder, "decoder.", wanted)
    expected = theirs(
        source,
        target,
        tgt_mask=torch.ones(TARGET, TARGET, dtype=torch.bool).triu(1),
        src_key_padding_mask=hidden,
        tgt_key_padding_mask=None if target_mask is None else ~target_mask,
        memory_key_padding_mask=hidden,
    )
    tap = Given({"encoder.embed": source, "decoder.embed": target}, every)
    ids = torch.zeros(BATCH, TARGET, dtype=torch.long)
    inputs = Inputs(ids, target_mask, source=ids[:, :SOURCE], source_mask=source_mask)
    got = mine(inputs, tap)
    for site, value in wanted.items():
        if every or site in tap.seen:
            compare(tap.seen[site], value, target_mask if site.startswith("decoder") else source_mask, site)
    per_layer = 5 + norm_first  # post-norm: the last norm's output is the layer's; 2 more for cross-attention
    assert len(wanted) == 2 + per_layer * layers[0] + (per_layer + 2) * layers[1]
    compare(got, expected, target_mask, "output")
    direction = vectors(D, seed=4).detach()
    real = torch.ones(BATCH, TARGET) if target_mask is None else target_mask
    slopes = [torch.autograd.grad(((out @ direction) * real).sum(), (target, source)) for out in (got, expected)]
    for name, a, b in zip(("target", "source"), *slopes, strict=True):
        compare(a, b, None, f"gradient of the {name}")


@pytest.mark.parametrize("padding", PADDINGS)
@VARIANTS
def test_encoder_decoder_equals_torch(norm_first, activation, padding):
    check_transformer(norm_first, activation, padding)


@pytest.mark.parametrize("every", [False, True], ids=["fused", "explicit"])
@pytest.mark.parametrize("layers", [(1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
def test_stacks_of_unequal_depth_equal_torch(norm_first, layers, every):
    check_transformer(norm_first, "relu", "both", layers, every)


@pytest.mark.parametrize("padding", ["whole", "source right", "source left"])
@VARIANTS
def test_encoder_equals_torch(norm_first, activation, padding):
    layer = nn.TransformerEncoderLayer(D, HEADS, D_FF, 0.0, activation, batch_first=True, norm_first=norm_first)
    theirs = random_weights(nn.TransformerEncoder(layer, 2, nn.LayerNorm(D)))
    mine = ours(norm_first, activation, small(kind="encoder"))
    copy_stack(theirs, mine.blocks, mine.final_norm)
    rows = PADDINGS[padding][1]
    mask = None if rows is None else real_positions(rows, SOURCE)
    x, wanted = vectors(BATCH, SOURCE, D, seed=2), {}
    hooked(theirs, "", wanted)
    expected = theirs(x, src_key_padding_mask=None if mask is None else ~mask)
    ids = torch.zeros(BATCH, SOURCE, dtype=torch.long)
    for every in (True, False):
        tap = Given({"embed": x}, every)
        compare(mine(Inputs(ids, mask), tap), expected, mask, "output")
        for site, value in wanted.items():
            if every or site in tap.seen:
                compare(tap.seen[site], value, mask, site)


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_cache_gives_torchs_parallel_pass(norm_first):
    """A1 and A4 against torch: our step-by-step pass with cached keys and values equals its one masked pass."""
    theirs, mine = pair(norm_first, "relu", 2, 2)
    target, source = vectors(BATCH, TARGET, D, seed=1), vectors(BATCH, SOURCE, D, seed=2)
    expected = theirs(source, target, tgt_mask=torch.ones(TARGET, TARGET, dtype=torch.bool).triu(1))
    cache, ids = KVCache(), torch.zeros(BATCH, SOURCE, dtype=torch.long)
    for i in range(TARGET):
        tap = Given({"encoder.embed": source, "decoder.embed": target[:, i : i + 1]}, every=False)
        got = mine(Inputs(ids[:, :1], source=ids), tap, kv_cache=cache)
        compare(got[:, 0], expected[:, i], None, f"step {i}")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("the encoder's final norm", lambda mine: mine.encoder.final_norm.weight),
        ("a cross-attention's key", lambda mine: mine.blocks[1].cross_attention.W_K),
        ("a cross-attention's norm", lambda mine: mine.blocks[0].cross_norm.bias),
    ],
)
def test_the_comparison_can_fail(name, spoil, monkeypatch):
    """A hundredth of a percent of one weight is noticed."""

    def spoiled(*arguments):
        theirs, mine = pair(*arguments)
        with torch.no_grad():
            spoil(mine).mul_(1.0001)
        return theirs, mine

    pair = globals()["pair"]
    monkeypatch.setitem(globals(), "pair", spoiled)
    for norm_first in (False, True):
        with pytest.raises(AssertionError, match="differs by"):
            check_transformer(norm_first, "relu")


def test_report():
    """The largest difference at the end of the run (of the comparisons that ran)."""
    assert LARGEST["values"] > 0
    summary.LINES.append(
        f"torch.nn.Transformer: {LARGEST['values']:,} values compared, largest difference {LARGEST['apart']:.0e}"
    )
