"""What must hold of every model: who sees whom, padding, caches, weight views, gradients, seeds, compilation."""

import pytest
import torch
from strategies import N_CTX, VOCAB, Case, random_model, small
from torch.func import functional_call, stack_module_state, vmap

from interp.model import Inputs, InputsError, KVCache, ModelConfig, Transformer, as_inputs
from interp.model.block import Blocks

EXACT = {"rtol": 0.0, "atol": 1e-12}


def everything(site, value):
    """A tap that wants every site and changes none: attention takes its explicit route."""
    return value


ROUTES = pytest.mark.parametrize("tap", [None, everything], ids=["fused", "explicit"])
DECODERS = {
    "learned": small(),
    "post-norm": small(norm_position="post"),
    "sinusoidal": small(positions="sinusoidal"),
    "rotary": small(positions="rotary", norm="rmsnorm", ffn="swiglu", bias=False),
    "no positions": small(positions="none"),
    "window": small(window=2),
    "rotary window": small(window=3, positions="rotary", n_heads=4, d_head=4, n_kv_heads=2),
    "grouped": small(n_heads=4, n_kv_heads=2, qk_norm=True),
    "attention-only": small(ffn="none"),
}
KINDS = {
    **DECODERS,
    "encoder": small(kind="encoder"),
    "encoder window": small(kind="encoder", window=2),
    "prefix": small(kind="prefix-decoder"),
    "prefix rotary": small(kind="prefix-decoder", positions="rotary"),
}


# Which positions see which


def seen_by(model, inputs, tap=None):
    """[query, key]: whether the output at `query` depends on the embedding at `key`, by the Jacobian (batch of 1)."""

    def outputs(embeddings):
        return model(Inputs(inputs.tokens, inputs.mask, prefix_length=inputs.prefix_length, embeddings=embeddings), tap)

    jacobian = torch.autograd.functional.jacobian(outputs, model.embedding(inputs.tokens).detach())
    return jacobian[0, :, :, 0].abs().amax((1, 3)) > 1e-9


def rows(text):
    """A picture of edges as a bool matrix, 'x' = sees."""
    return torch.tensor([[c == "x" for c in line] for line in text.split()])


EDGES = {
    "decoder": ({}, None, None, "x.... xx... xxx.. xxxx. xxxxx"),
    "encoder": ({"kind": "encoder"}, None, None, "xxxxx xxxxx xxxxx xxxxx xxxxx"),
    "prefix of 3": ({"kind": "prefix-decoder"}, None, 3, "xxx.. xxx.. xxx.. xxxx. xxxxx"),
    "prefix of 0": ({"kind": "prefix-decoder"}, None, 0, "x.... xx... xxx.. xxxx. xxxxx"),
    "prefix not given": ({"kind": "prefix-decoder"}, None, None, "x.... xx... xxx.. xxxx. xxxxx"),
    "prefix of all": ({"kind": "prefix-decoder"}, None, 5, "xxxxx xxxxx xxxxx xxxxx xxxxx"),
    "window of 1": ({"window": 1}, None, None, "x.... .x... ..x.. ...x. ....x"),
    "window of 2": ({"window": 2}, None, None, "x.... xx... .xx.. ..xx. ...xx"),
    "window of 9": ({"window": 9}, None, None, "x.... xx... xxx.. xxxx. xxxxx"),
    "encoder, window of 2": ({"kind": "encoder", "window": 2}, None, None, "xx... xxx.. .xxx. ..xxx ...xx"),
    # Padding: its own row is its own embedding through the residual alone, plus what it may read.
    "decoder, left padding": ({}, (2, 0), None, "x.... .x... ..x.. ..xx. ..xxx"),
    "encoder, left padding": ({"kind": "encoder"}, (2, 0), None, "x.xxx .xxxx ..xxx ..xxx ..xxx"),
    "encoder, right padding": ({"kind": "encoder"}, (0, 2), None, "xxx.. xxx.. xxx.. xxxx. xxx.x"),
    "prefix of 2, left padding": ({"kind": "prefix-decoder"}, (1, 0), 2, "xxx.. .xx.. .xx.. .xxx. .xxxx"),
}


def check_edges(name, tap=None):
    """A one-layer model's Jacobian and pattern are non-zero exactly on the admitted edges."""
    choices, padding, prefix, picture = EDGES[name]
    prefixes = None if prefix is None else (prefix,)
    case = Case(small(n_layers=1, positions="none", **choices), (padding or (0, 0),), prefixes)
    model, inputs = case.build()
    expected = rows(picture)
    assert torch.equal(seen_by(model, inputs, tap), expected), name
    pattern = {}
    model(inputs, lambda site, value: pattern.setdefault(site.name, value))
    real = torch.ones(5, dtype=torch.bool) if inputs.mask is None else inputs.mask[0]
    for head in pattern["pattern"][0]:
        assert torch.equal((head > 0) & real[:, None], expected & real[:, None]), name
        torch.testing.assert_close(head[real].sum(-1), torch.ones(int(real.sum()), dtype=head.dtype))


@ROUTES
@pytest.mark.parametrize("name", EDGES)
def test_exactly_the_admitted_edges(name, tap):
    check_edges(name, tap)


@torch.no_grad()
def check_causality(choices, tap=None):
    """Changing later tokens leaves earlier logits alone (A1)."""
    model, inputs = Case(choices, length=N_CTX).build()
    for cut in (1, 3, N_CTX - 1):
        changed = inputs.tokens.clone()
        changed[:, cut:] = (changed[:, cut:] + 1) % VOCAB
        before, after = model(inputs, tap), model(changed, tap)
        torch.testing.assert_close(before[:, :cut], after[:, :cut], **EXACT)
        assert not torch.allclose(before[:, cut:], after[:, cut:])


@ROUTES
@pytest.mark.parametrize("name", DECODERS)
def test_causality(name, tap):
    check_causality(DECODERS[name], tap)


# Padding


@torch.no_grad()
def check_padding(choices, tap=None, dtype=torch.float64, atol=1e-10):
    """A batch padded left, right or on both sides gives each example what it gives alone."""
    padding = ((0, 0), (3, 0), (0, 2), (1, 3))
    prefixes = (4, 1, 3, 2) if choices.get("kind") == "prefix-decoder" else None
    model, inputs = Case(choices, padding, prefixes, length=7, dtype=dtype).build()
    together = model(inputs, tap)
    assert together.isfinite().all()
    for row, (left, right) in enumerate(padding):
        real = slice(left, 7 - right)
        prefix = None if prefixes is None else torch.tensor([prefixes[row]])
        alone = model(Inputs(inputs.tokens[row : row + 1, real], prefix_length=prefix), tap)
        torch.testing.assert_close(together[row, real], alone[0], rtol=0, atol=atol)


@ROUTES
@pytest.mark.parametrize("name", KINDS)
def test_padding(name, tap):
    check_padding(KINDS[name], tap)
    check_padding(KINDS[name], tap, torch.float32, 1e-5)


@ROUTES
def test_tokens_under_padding_do_not_matter(tap):
    model, inputs = Case(small(), ((2, 0), (0, 2))).build()
    other = torch.where(inputs.mask, inputs.tokens, (inputs.tokens + 1) % VOCAB)
    real = inputs.mask
    torch.testing.assert_close(model(inputs, tap)[real], model(Inputs(other, real), tap)[real], **EXACT)


@ROUTES
def test_rows_without_edges_give_zero_and_finite_gradients(tap):
    model, inputs = Case(small(norm_eps=0), ((3, 0), (0, 0))).build()
    seen = {}
    model(inputs, lambda site, value: seen.setdefault(str(site), value))
    assert (seen["0.z"][0, :3] == 0).all()
    assert (seen["0.scores"][0, :, :3] == -torch.inf).all()
    model(inputs, tap).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


# Keys and values of an earlier pass


@torch.no_grad()
def check_cache(choices, padding, pieces, tap=None):
    """Feeding the sequence in pieces through one cache equals one full pass (A4)."""
    length = sum(pieces)
    prefixes = (2,) * len(padding) if choices.get("kind") == "prefix-decoder" else None
    model, inputs = Case(choices, padding, prefixes, length=length).build()
    full = model(inputs, tap)
    cache, outputs, start = KVCache(), [], 0
    for size in pieces:
        span = slice(start, start + size)
        mask = None if inputs.mask is None or bool(inputs.mask[:, span].all()) else inputs.mask[:, span]
        piece = Inputs(inputs.tokens[:, span], mask, prefix_length=inputs.prefix_length)
        outputs.append(model(piece, tap, kv_cache=cache))
        start += size
        assert cache.length == start
        assert all(keys.shape[1] == start for keys in (*cache.keys.values(), *cache.values.values()))
    assert set(cache.keys) == set(range(model.config.n_layers))
    real = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    torch.testing.assert_close(torch.cat(outputs, 1)[real], full[real], **EXACT)


PIECES = {"one by one": (1,) * 7, "prompt, then one by one": (4, 1, 1, 1), "several at once": (3, 2, 2)}
PADDINGS = {"none": ((0, 0), (0, 0)), "left": ((0, 0), (2, 0), (5, 0))}


@ROUTES
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", DECODERS)
def test_cached_pieces_equal_one_pass(name, pieces, padding, tap):
    check_cache(DECODERS[name], PADDINGS[padding], PIECES[pieces], tap)


@ROUTES
@pytest.mark.parametrize("window", [None, 2])
def test_cached_pieces_of_a_prefix_decoder(window, tap):
    check_cache(small(kind="prefix-decoder", window=window), PADDINGS["none"], (3, 2, 1), tap)
    check_cache(small(kind="prefix-decoder", window=window), ((0, 0), (1, 0)), (3, 2, 1), tap)


# Resuming


@pytest.mark.parametrize("name", KINDS)
def test_blocks_resume_in_the_middle(name):
    prefixes = (2, 3) if "prefix" in name else None
    model, inputs = Case(KINDS[name], ((0, 0), (2, 0)), prefixes).build()
    seen = {}
    logits = model(inputs, lambda site, value: seen.setdefault(str(site), value))
    resumed = model.unembed(model.blocks(seen["0.resid_post"], 1, 2, None, inputs))
    torch.testing.assert_close(resumed, logits, **EXACT)
    torch.testing.assert_close(model.embed(inputs), seen["0.resid_pre"], **EXACT)
    assert isinstance(model.blocks, Blocks)


# Weights


def view_model(ffn="swiglu"):
    # q/k norm, because without it a constant added to every key cancels in the softmax and b_K changes nothing.
    biases = {"qkv", "attn_out", "ffn", "unembed"}
    return random_model(small(n_heads=4, n_kv_heads=2, d_head=3, ffn=ffn, bias=biases, qk_norm=True))


SHAPES = {
    "W_Q": (4, 8, 3), "W_K": (2, 8, 3), "W_V": (2, 8, 3), "W_O": (4, 3, 8),
    "b_Q": (4, 3), "b_K": (2, 3), "b_V": (2, 3), "b_O": (8,),
    "W_in": (8, 7), "W_gate": (8, 7), "W_out": (7, 8), "b_in": (7,), "b_gate": (7,), "b_out": (8,),
    "W_E": (VOCAB, 8), "W_U": (8, VOCAB), "b_U": (VOCAB,), "W_pos": (N_CTX, 8),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("ffn", ["swiglu", "relu"])
@pytest.mark.parametrize("kind", SHAPES)
def test_weight_views(kind, ffn):
    """Documented shape; shares memory with a parameter; writing through it changes the model."""
    model = view_model(ffn)
    layer = None if kind in ("W_E", "W_U", "b_U", "W_pos") else 1
    view = model.weight(kind, layer)
    if ffn == "relu" and kind in ("W_gate", "b_gate"):
        assert view is None
        return
    assert tuple(view.shape) == SHAPES[kind]
    home = model if layer is None else model.blocks[1].attention if kind[-1] in "QKVO" else model.blocks[1].ffn
    assert torch.equal(getattr(home, kind), view)
    assert any(view.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in model.parameters())
    tokens = torch.arange(5)[None]
    before = model(tokens)
    view[tuple(0 for _ in view.shape)] += 1.0
    view *= 1.5
    assert not torch.allclose(model(tokens), before)


def test_absent_weights_are_none():
    model = random_model(small(bias=False, positions="none", head=False))
    assert [model.weight(kind, 0) for kind in ("b_Q", "b_K", "b_V", "b_O", "b_in", "b_out", "W_gate")] == [None] * 7
    assert [model.weight(kind) for kind in ("W_U", "b_U", "W_pos")] == [None] * 3
    assert random_model(small(ffn="none")).weight("W_in", 0) is None


@pytest.mark.parametrize(("kind", "layer"), [("W_q", 0), ("W_Q", None), ("W_Q", 2), ("W_Q", -1)])
def test_a_wrong_weight_is_refused(kind, layer):
    with pytest.raises(ValueError, match="allowed"):
        view_model().weight(kind, layer)


@torch.no_grad()
def check_views(choices):
    """Queries, keys and values are norm1 times the views, head by head; so is the FFN."""
    model, inputs = Case(choices).build()
    seen = {}
    model(inputs, lambda site, value: seen.setdefault(str(site), value))
    a, f, t1, t4 = model.blocks[1].attention, model.blocks[1].ffn, seen["1.norm1"], seen["1.norm2"]
    for name, W, b in (("q", a.W_Q, a.b_Q), ("k", a.W_K, a.b_K), ("v", a.W_V, a.b_V)):
        for head in range(W.shape[0]):
            torch.testing.assert_close(seen[f"1.{name}"][:, :, head], t1 @ W[head] + b[head], **EXACT)
    for i in range(inputs.length):  # query head h reads key-value head h // (heads per group)
        for h in range(4):
            z = sum(seen["1.pattern"][:, h, i, j, None] * seen["1.v"][:, j, h // 2] for j in range(inputs.length))
            torch.testing.assert_close(seen["1.z"][:, i, h], z, **EXACT)
    torch.testing.assert_close(seen["1.ffn_pre"], t4 @ f.W_gate + f.b_gate, **EXACT)
    torch.testing.assert_close(seen["1.ffn_up"], t4 @ f.W_in + f.b_in, **EXACT)
    torch.testing.assert_close(seen["1.ffn_out"], seen["1.ffn_act"] @ f.W_out + f.b_out, **EXACT)


def test_sites_are_reproduced_from_the_views():
    check_views(small(n_heads=4, n_kv_heads=2, d_head=3, ffn="swiglu"))


def test_tied_embeddings_are_one_parameter():
    model = random_model(small(tied_embeddings=True))
    assert model.W_U.data_ptr() == model.W_E.data_ptr()
    torch.testing.assert_close(model.W_U, model.W_E.T)
    untied = random_model(small())
    assert untied.W_U.data_ptr() != untied.W_E.data_ptr()


# Gradients, seeds, number formats, transforms


@pytest.mark.parametrize("name", KINDS)
def test_both_routes_have_the_same_gradients(name):
    model, inputs = Case(KINDS[name], ((0, 0), (2, 0))).build()
    gradients = []
    for tap in (None, everything):
        model.zero_grad()
        model(inputs, tap)[inputs.mask].log_softmax(-1)[:, 0].sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for fused, explicit in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, explicit, rtol=1e-9, atol=1e-10)


def test_learned_beta_gets_a_gradient():
    model, inputs = Case(small(ffn="swiglu", swish_beta="learned")).build()
    model(inputs).square().sum().backward()
    for block in model.blocks:
        assert block.ffn.beta.grad.abs() > 0
    assert not any("beta" in name for name, _ in random_model(small(ffn="swiglu", swish_beta=1.7)).named_parameters())


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    config = ModelConfig(**small())
    first, again, other = (Transformer(config, seed=s).state_dict() for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) != (first[name].ndim >= 2) for name in first)
    assert all(value.isfinite().all() for value in first.values())


def test_one_config_may_not_be_built_as_one_stack():
    with pytest.raises(ValueError, match=r"encoder-decoder.*allowed"):
        Transformer(ModelConfig(**small(kind="encoder-decoder")))


@ROUTES
@pytest.mark.parametrize("name", KINDS)
def test_bfloat16(name, tap):
    case = Case(KINDS[name], ((0, 0), (2, 0)))
    model, inputs = case.build()
    out = model.bfloat16()(inputs, tap)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


# On the CPU, vmap runs scaled_dot_product_attention model by model, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@torch.no_grad()
def test_functional_call_and_vmap():
    """An ensemble of models in one call equals each alone."""
    models = [random_model(small(positions="rotary", n_kv_heads=1), seed) for seed in range(3)]
    tokens = torch.arange(5)[None].expand(2, 5)
    weights, buffers = stack_module_state(models)
    alone = torch.stack([model(tokens) for model in models])
    torch.testing.assert_close(functional_call(models[1], dict(models[0].named_parameters()), (tokens,)), alone[0])
    together = vmap(lambda w, b: functional_call(models[0], (w, b), (tokens,)))(weights, buffers)
    torch.testing.assert_close(together, alone, **EXACT)


@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((0, 0), (2, 0))], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["learned", "rotary", "window", "prefix"])
def test_compiles_as_one_graph(name, padding):
    """No `.item()` and no branch on a tensor's value: dynamo traces the forward pass without a break."""
    model, inputs = Case(KINDS[name], padding).build()
    torch._dynamo.reset()
    compiled = torch.compile(lambda tokens, mask: model(Inputs(tokens, mask)), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(inputs.tokens, inputs.mask), model(inputs), **EXACT)


# Inputs


def test_inputs_are_accepted_in_every_shape():
    model = random_model(small())
    batch = model(torch.tensor([[1, 2, 3]]))
    for given in ([1, 2, 3], (1, 2, 3), [[1, 2, 3]], torch.tensor([1, 2, 3]), Inputs(torch.tensor([[1, 2, 3]]))):
        assert torch.equal(model(given), batch)


@pytest.mark.parametrize("given", ["text", ["a", "b"], None, 3, [], torch.zeros(1, 2, 3)], ids=str)
def test_what_is_not_inputs_is_refused(given):
    with pytest.raises(InputsError):
        as_inputs(given)


def test_last_select_and_given_embeddings():
    model, inputs = Case(small(), ((2, 0), (0, 2))).build()
    assert inputs.last().tolist() == [4, 2]
    assert torch.equal(inputs.select([1]).tokens, inputs.tokens[1:])
    embedded = Inputs(torch.zeros_like(inputs.tokens), inputs.mask, embeddings=model.embedding(inputs.tokens))
    torch.testing.assert_close(model(embedded), model(inputs), **EXACT)
