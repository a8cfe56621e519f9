"""What must hold of every model: who sees whom, padding, caches, weight views, gradients, seeds, compilation."""

from dataclasses import replace

import hypothesis
import pytest
import strategies
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from strategies import N_CTX, VOCAB, Case, random_model, small, translator
from torch.func import functional_call, stack_module_state, vmap

from interp.model import Inputs, InputsError, KVCache, ModelConfig, Transformer, as_inputs
from interp.model import inputs as inputs_module
from interp.model.block import Blocks
from interp.model.tap import as_tap

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
TRANSLATORS = {
    "encoder-decoder": translator(),
    "encoder-decoder post-norm": translator(norm_position="post", n_layers=1, n_encoder_layers=2),
    "encoder-decoder rotary": translator(positions="rotary", norm="rmsnorm", ffn="swiglu", n_heads=4, n_kv_heads=2),
    "encoder-decoder window": translator(window=2, positions="none"),
    "encoder-decoder attention-only": translator(ffn="none"),
}
CAUSAL = {**DECODERS, **TRANSLATORS}
KINDS = {
    **CAUSAL,
    "encoder": small(kind="encoder"),
    "encoder window": small(kind="encoder", window=2),
    "prefix": small(kind="prefix-decoder"),
    "prefix rotary": small(kind="prefix-decoder", positions="rotary"),
}


# Which positions see which


class Leaves:
    """A tap around another that adds a zero leaf to each stack's embeddings and keeps what comes out of the encoder."""

    def __init__(self, tap=None):
        self.tap, self.leaves, self.encoded = as_tap(tap), {}, None

    def wants(self, site):
        return self.tap.wants(site)

    def __call__(self, site, value):
        value = self.tap(site, value)
        if site.name == "embed":
            self.leaves[site.stack] = torch.zeros_like(value, requires_grad=True)
            value = value + self.leaves[site.stack]
        if (site.stack, site.name) == ("encoder", "final"):
            self.encoded = value
        return value


def depends(model, inputs, tap=None):
    """Which embeddings each output depends on: {(stack read, stack of embeddings): bool [batch query key]}.

    By one vector-Jacobian product per query, with a random vector over the output's entries: it is exactly 0 where the
    Jacobian is, and where the Jacobian is not, not. ("encoder", "encoder") is of encoder.final.
    """
    leaves = Leaves(tap)
    outputs = {"decoder" if model.encoder is not None else None: model(inputs, leaves)}
    if leaves.encoded is not None:
        outputs["encoder"] = leaves.encoded
    generator, found = torch.Generator().manual_seed(7), {}
    for read, out in outputs.items():
        direction = torch.randn(out.shape[-1], generator=generator, dtype=torch.float64).to(out.dtype)
        on = [stack for stack in leaves.leaves if read != "encoder" or stack == "encoder"]
        each = [
            torch.autograd.grad(one, [leaves.leaves[stack] for stack in on], retain_graph=True, materialize_grads=True)
            for one in (out @ direction).sum(0)  # sequences do not mix: `test_sequences_do_not_mix`
        ]
        for stack, gradients in zip(on, zip(*each, strict=True), strict=True):
            found[read, stack] = torch.stack(gradients, 1).abs().amax(-1) != 0
    return found


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
    assert torch.equal(depends(model, inputs, tap)[None, None][0], expected), name
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


# Of an encoder-decoder: choices, padding of target and source; target on target, target on source, source on source.
CAUSAL_5, ALL_4, FROM_ALL_4 = "x.... xx... xxx.. xxxx. xxxxx", "xxxx xxxx xxxx xxxx", "xxxx xxxx xxxx xxxx xxxx"
TWO_STACK_EDGES = {
    "plain": ({}, None, None, CAUSAL_5, FROM_ALL_4, ALL_4),
    "post-norm": ({"norm_position": "post"}, None, None, CAUSAL_5, FROM_ALL_4, ALL_4),
    "source, left padding": ({}, None, (2, 0), CAUSAL_5, "..xx ..xx ..xx ..xx ..xx", "x.xx .xxx ..xx ..xx"),
    "source, right padding": ({}, None, (0, 1), CAUSAL_5, "xxx. xxx. xxx. xxx. xxx.", "xxx. xxx. xxx. xxxx"),
    "target, left padding": ({}, (2, 0), None, "x.... .x... ..x.. ..xx. ..xxx", FROM_ALL_4, ALL_4),
    "target, right padding": ({}, (0, 2), None, "x.... xx... xxx.. xxxx. xxx.x", FROM_ALL_4, ALL_4),
    "window of 2": ({"window": 2}, None, None, "x.... xx... .xx.. ..xx. ...xx", FROM_ALL_4, "xx.. xxx. .xxx ..xx"),
    "window of 1": ({"window": 1}, None, None, "x.... .x... ..x.. ...x. ....x", FROM_ALL_4, "x... .x.. ..x. ...x"),
}


def check_two_stack_edges(name, tap=None):
    """Jacobians and patterns of one-layer stacks: every target position reads every real source position, and no other."""
    choices, padding, source_padding, target, cross, source = TWO_STACK_EDGES[name]
    choices = translator(n_layers=1, positions="none", **choices)
    case = Case(choices, (padding or (0, 0),), source_padding=(source_padding or (0, 0),))
    model, inputs = case.build()
    found = depends(model, inputs, tap)
    assert torch.equal(found["decoder", "decoder"][0], rows(target)), name
    assert torch.equal(found["decoder", "encoder"][0], rows(cross)), name
    assert torch.equal(found["encoder", "encoder"][0], rows(source)), name
    seen = {}
    model(inputs, lambda site, value: seen.setdefault(str(site), value))
    for head in seen["decoder.0.cross_pattern"][0]:
        assert torch.equal(head > 0, rows(cross)), name
        torch.testing.assert_close(head.sum(-1), torch.ones(5, dtype=head.dtype))
    for site, picture, mask in (
        ("decoder.0.pattern", target, inputs.mask),
        ("encoder.0.pattern", source, inputs.source_mask),
    ):
        real = slice(None) if mask is None else mask[0]
        for head in seen[site][0]:
            assert torch.equal((head > 0)[real], rows(picture)[real]), name


@ROUTES
@pytest.mark.parametrize("name", TWO_STACK_EDGES)
def test_exactly_the_admitted_edges_of_two_stacks(name, tap):
    check_two_stack_edges(name, tap)


def admitted(kind, real, window, prefix):
    """[query, key] of one stack, as the book says it: tokens count from 0, padding is not there; each has its residual."""
    edges = torch.eye(len(real), dtype=torch.bool)
    tokens = [position for position, is_token in enumerate(real) if is_token]
    for a, query in enumerate(tokens):
        first = 0 if window is None else max(0, a - window + 1)
        last = a if kind != "encoder" else len(tokens) - 1 if window is None else a + window - 1
        read = set(range(first, last + 1))
        if kind == "prefix-decoder":
            read |= set(range(prefix))
        for b, key in enumerate(tokens):
            edges[query, key] |= b in read
    return edges


def check_dependence(case, tap):
    """A one-layer model's outputs depend on exactly the embeddings that kind, window, prefix and padding admit (A1, A2)."""
    one = {"n_layers": 1, **({"n_encoder_layers": 1} if case.choices["kind"] == "encoder-decoder" else {})}
    case = replace(case, choices={**case.choices, **one})
    model, inputs = case.build()
    kind, window = model.config.kind, model.config.window
    found = depends(model, inputs, tap)
    for row in range(inputs.batch):
        real = [True] * inputs.length if inputs.mask is None else inputs.mask[row].tolist()
        prefix = 0 if inputs.prefix_length is None else int(inputs.prefix_length[row])
        own = admitted(kind, real, window, prefix)
        if kind != "encoder-decoder":
            check_rows(found[None, None][row], own, real, case)
            continue
        length = inputs.source.shape[1]
        source_real = [True] * length if inputs.source_mask is None else inputs.source_mask[row].tolist()
        check_rows(found["decoder", "decoder"][row], own, real, case)
        source = admitted("encoder", source_real, window, 0)
        check_rows(found["encoder", "encoder"][row], source, source_real, case)
        every_real = torch.tensor(source_real).expand(inputs.length, length)
        assert torch.equal(found["decoder", "encoder"][row], every_real), case
    return kind


def check_rows(found, expected, real, case):
    """Of tokens, exactly the expected; padding, whose outputs nobody reads, never depends on other padding."""
    real = torch.tensor(real)
    assert torch.equal(found[real], expected[real]), case
    other_padding = ~real & ~torch.eye(len(real), dtype=torch.bool)
    assert not (found & other_padding).any(), case


def test_sampled_models_depend_on_exactly_the_admitted_positions():
    kinds = []

    @settings(max_examples=150, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @hypothesis.given(strategies.cases(), st.sampled_from([None, everything]))
    def sampled(case, tap):
        kinds.append(check_dependence(case, tap))

    sampled()
    assert len(kinds) >= 150
    assert all(kinds.count(kind) >= 10 for kind in ("decoder", "encoder", "prefix-decoder", "encoder-decoder"))


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_sequences_do_not_mix(name):
    """Another sequence beside it changes nothing: what `depends` takes for granted."""
    prefixes = (2, 3) if "prefix" in name else None
    model, inputs = Case(KINDS[name], ((0, 0), (2, 0)), prefixes).build()
    other = replace(inputs, tokens=torch.cat([inputs.tokens[:1], (inputs.tokens[1:] + 1) % VOCAB]))
    if inputs.source is not None:
        other = replace(other, source=torch.cat([inputs.source[:1], (inputs.source[1:] + 1) % VOCAB]))
    before, after = model(inputs), model(other)
    torch.testing.assert_close(before[0], after[0], **EXACT)
    assert not torch.allclose(before[1], after[1])


def cut(*names):
    """A tap that closes every edge of these sites' scores."""

    def tap(site, value):
        return torch.full_like(value, -torch.inf) if site.name in names else value

    return tap


def check_only_attention_mixes(choices):
    """R2: with every edge cut, FFN, norms and everything else act on one position: the Jacobian off the diagonal is 0."""
    prefixes = (2, 3) if choices.get("kind") == "prefix-decoder" else None
    model, inputs = Case(choices, ((0, 0), (2, 0)), prefixes, source_padding=((0, 1), (0, 0))).build()
    stacks = depends(model, inputs, cut("scores", "cross_scores"))
    for (read, on), found in stacks.items():
        diagonal = torch.eye(*found.shape[1:], dtype=torch.bool).expand_as(found)
        assert torch.equal(found, diagonal if read == on else torch.zeros_like(found)), (read, on)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("name", KINDS)
def test_only_attention_mixes_positions(name, norm_position):
    check_only_attention_mixes({**KINDS[name], "norm_position": norm_position})


@pytest.mark.parametrize("ffn", strategies.FFNS)
@pytest.mark.parametrize("kind", ["decoder", "encoder", "prefix-decoder", "encoder-decoder"])
def test_no_ffn_mixes_positions(kind, ffn):
    check_only_attention_mixes(small(kind=kind, ffn=ffn, n_layers=1, norm="rmsnorm"))


def test_self_attention_and_cross_attention_each_bring_their_own_edges():
    """Cutting one kind of edge leaves the other's."""
    model, inputs = Case(translator(), ((0, 0),), source_padding=((1, 0),)).build()
    source = torch.tensor([False, True, True, True]).expand(5, 4)
    without_self = depends(model, inputs, cut("scores"))
    assert torch.equal(without_self["decoder", "decoder"][0], torch.eye(5, dtype=torch.bool))
    assert torch.equal(without_self["decoder", "encoder"][0], source)
    without_cross = depends(model, inputs, cut("cross_scores"))
    assert torch.equal(without_cross["decoder", "decoder"][0], rows(CAUSAL_5))
    assert not without_cross["decoder", "encoder"].any()


@torch.no_grad()
def check_causality(choices, tap=None):
    """Changing later tokens leaves earlier logits alone (A1)."""
    model, inputs = Case(choices, length=N_CTX).build()
    for cut in (1, 3, N_CTX - 1):
        changed = inputs.tokens.clone()
        changed[:, cut:] = (changed[:, cut:] + 1) % VOCAB
        before, after = model(inputs, tap), model(replace(inputs, tokens=changed), tap)
        torch.testing.assert_close(before[:, :cut], after[:, :cut], **EXACT)
        assert not torch.allclose(before[:, cut:], after[:, cut:])


@ROUTES
@pytest.mark.parametrize("name", CAUSAL)
def test_causality(name, tap):
    check_causality(CAUSAL[name], tap)


@torch.no_grad()
def check_teacher_forcing(choices):
    """Teacher forcing: one pass over known targets gives, at i, what BOS and the targets before i give alone."""
    model, inputs = Case(choices, source_padding=((0, 1), (0, 0))).build()
    targets, bos = inputs.tokens, VOCAB - 1
    assert not torch.equal(targets, targets.flip(1))
    fields = {"source": inputs.source, "source_mask": inputs.source_mask}
    assert inputs_module.teacher_forced(targets, bos).mask is None
    for mask in (None, [[True] * 5, [True] * 3 + [False] * 2], [[True] * 5, [False] * 2 + [True] * 3]):
        mask = None if mask is None else torch.tensor(mask)
        forced = inputs_module.teacher_forced(targets, bos, mask=mask, **fields)
        assert forced.tokens.shape == targets.shape
        assert forced.mask is mask
        logits = model(forced)
        for row in range(2):
            real = [True] * 5 if mask is None else mask[row].tolist()
            places = [i for i in range(5) if real[i]]
            for n, place in enumerate(places):
                so_far = torch.tensor([[bos, *(int(targets[row, i]) for i in places[:n])]])
                alone = replace(inputs.select([row]), tokens=so_far)
                torch.testing.assert_close(logits[row, place], model(alone)[0, -1], **EXACT)


@pytest.mark.parametrize("name", ["learned", "rotary", "window", *TRANSLATORS])
def test_teacher_forcing_equals_step_by_step(name):
    check_teacher_forcing(CAUSAL[name])


# Padding


@torch.no_grad()
def check_padding(choices, tap=None, dtype=torch.float64, atol=1e-10):
    """A batch padded left, right or on both sides (its sources in another way) gives each example what it gives alone."""
    padding, sources = ((0, 0), (3, 0), (0, 2), (1, 3)), ((2, 0), (0, 1), (0, 0), (1, 2))
    prefixes = (4, 1, 3, 2) if choices.get("kind") == "prefix-decoder" else None
    case = Case(choices, padding, prefixes, length=7, source_padding=sources, source_length=6, dtype=dtype)
    model, inputs = case.build()
    together = model(inputs, tap)
    assert together.isfinite().all()
    for row, (left, right) in enumerate(padding):
        real = slice(left, 7 - right)
        prefix = None if prefixes is None else torch.tensor([prefixes[row]])
        alone = Inputs(inputs.tokens[row : row + 1, real], prefix_length=prefix)
        if inputs.source is not None:
            left, right = sources[row]
            alone = replace(alone, source=inputs.source[row : row + 1, left : 6 - right])
        torch.testing.assert_close(together[row, real], model(alone, tap)[0], rtol=0, atol=atol)


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
def test_tokens_under_the_padding_of_a_source_do_not_matter(tap):
    model, inputs = Case(translator(), ((2, 0), (0, 2)), source_padding=((0, 2), (1, 0))).build()
    other = torch.where(inputs.source_mask, inputs.source, (inputs.source + 1) % VOCAB)
    changed = replace(inputs, source=other)
    torch.testing.assert_close(model(inputs, tap), model(changed, tap), **EXACT)


@ROUTES
def test_a_source_of_padding_alone_gives_zero_and_finite_gradients(tap):
    """No source position to read: cross-attention writes its bias alone; no NaN, also not in the gradient."""
    model, inputs = Case(translator(norm_eps=0), source_padding=((4, 0), (0, 0))).build()
    seen = {}
    model(inputs, lambda site, value: seen.setdefault(str(site), value))
    for layer, block in enumerate(model.blocks):
        assert (seen[f"decoder.{layer}.cross_z"][0] == 0).all()
        wanted = block.cross_attention.b_O.expand(5, 8)
        torch.testing.assert_close(seen[f"decoder.{layer}.cross_out"][0], wanted, **EXACT)
    model(inputs, tap).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


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
def check_cache(choices, padding, pieces, tap=None, source_once=False):
    """Feeding the sequence in pieces through one cache equals one full pass (A4); a source is encoded once.

    source_once: only the first piece carries the source, as in generation.
    """
    length = sum(pieces)
    prefixes = (2,) * len(padding) if choices.get("kind") == "prefix-decoder" else None
    source_padding = ((0, 1), (2, 0), (1, 1))[: len(padding)]
    model, inputs = Case(choices, padding, prefixes, length=length, source_padding=source_padding).build()
    full = model(inputs, tap)
    cache, outputs, start, encoded = KVCache(), [], 0, []
    inner = as_tap(tap)

    class Counting:
        wants = staticmethod(inner.wants)

        def __call__(self, site, value):
            if site.stack == "encoder":
                encoded.append(site.name)
            return inner(site, value)

    for size in pieces:
        span = slice(start, start + size)
        mask = None if inputs.mask is None or bool(inputs.mask[:, span].all()) else inputs.mask[:, span]
        piece = Inputs(inputs.tokens[:, span], mask, prefix_length=inputs.prefix_length)
        if inputs.source is not None and not (source_once and start):
            piece = replace(piece, source=inputs.source, source_mask=inputs.source_mask)
        outputs.append(model(piece, Counting(), kv_cache=cache))
        start += size
        assert cache.length == start
        assert all(keys.shape[1] == start for keys in (*cache.keys.values(), *cache.values.values()))
    assert set(cache.keys) == set(range(model.config.n_layers))
    real = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    torch.testing.assert_close(torch.cat(outputs, 1)[real], full[real], **EXACT)
    if inputs.source is not None:
        assert encoded.count("embed") == encoded.count("final") == 1
        check_cached_source(model, inputs, cache)


def check_cached_source(model, inputs, cache):
    """The cache holds each layer's own cross keys and values, of every source position."""
    seen = {}
    model(inputs, lambda site, value: seen.setdefault(str(site), value))
    assert set(cache.cross) == set(range(model.config.n_layers))
    for layer, (k, v) in cache.cross.items():
        torch.testing.assert_close(k, seen[f"decoder.{layer}.cross_k"], **EXACT)
        torch.testing.assert_close(v, seen[f"decoder.{layer}.cross_v"], **EXACT)


PIECES = {"one by one": (1,) * 7, "prompt, then one by one": (4, 1, 1, 1), "several at once": (3, 2, 2)}
PADDINGS = {"none": ((0, 0), (0, 0)), "left": ((0, 0), (2, 0), (5, 0))}


@ROUTES
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", DECODERS)
def test_cached_pieces_equal_one_pass(name, pieces, padding, tap):
    check_cache(DECODERS[name], PADDINGS[padding], PIECES[pieces], tap)


@ROUTES
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", TRANSLATORS)
def test_cached_pieces_of_an_encoder_decoder(name, pieces, padding, tap):
    check_cache(TRANSLATORS[name], PADDINGS[padding], PIECES[pieces], tap, source_once=pieces != "several at once")


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
    stack = "" if model.encoder is None else "decoder."
    memory = None if model.encoder is None else model.encode(inputs)
    n_layers = model.config.n_layers
    middle = seen[f"{stack}{n_layers - 1}.resid_pre"]
    resumed = model.unembed(model.blocks(middle, n_layers - 1, n_layers, None, inputs, memory=memory))
    torch.testing.assert_close(resumed, logits, **EXACT)
    torch.testing.assert_close(model.embed(inputs), seen[f"{stack}0.resid_pre"], **EXACT)
    if memory is not None:
        torch.testing.assert_close(memory.states, seen["encoder.final"], **EXACT)
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


def translator_model():
    """Two decoder layers, three encoder layers, every bias."""
    biases = {"qkv", "attn_out", "ffn", "unembed"}
    return random_model(
        translator(
            n_encoder_layers=3, n_heads=4, n_kv_heads=2, d_head=3, ffn="swiglu", bias=biases, qk_norm=True, window=3
        )
    )


TWO_STACK_VIEWS = [
    *[("decoder", 1, f"cross_{kind}") for kind in SHAPES if kind[-1] in "QKVO"],
    *[("encoder", 2, kind) for kind in SHAPES if kind not in ("W_E", "W_U", "b_U", "W_pos")],
    *[("decoder", 1, kind) for kind in SHAPES if kind not in ("W_E", "W_U", "b_U", "W_pos")],
]


@torch.no_grad()
def check_two_stack_view(stack, layer, kind):
    """Documented shape, the stack's own parameter, shared memory; writing through it changes the model."""
    model = translator_model()
    view = model.weight(kind, layer, stack=stack)
    name = kind.removeprefix("cross_")
    assert tuple(view.shape) == SHAPES[name]
    block = (model.encoder.blocks if stack == "encoder" else model.blocks)[layer]
    home = block.cross_attention if kind.startswith("cross_") else block.attention if kind[-1] in "QKVO" else block.ffn
    assert torch.equal(getattr(home, name), view)
    assert view.untyped_storage().data_ptr() in {p.untyped_storage().data_ptr() for p in home.parameters()}
    if stack == "decoder":
        assert torch.equal(model.weight(kind, layer), view)  # the default stack
    inputs = Inputs(torch.arange(5)[None], source=torch.tensor([[3, 1, 4, 1]]))
    before = model(inputs)
    view[tuple(0 for _ in view.shape)] += 1.0
    view *= 1.5
    if kind == "cross_b_K":  # a constant added to every key cancels in the softmax, without q/k norm
        torch.testing.assert_close(model(inputs), before, **EXACT)
    else:
        assert not torch.allclose(model(inputs), before)


@pytest.mark.parametrize(("stack", "layer", "kind"), TWO_STACK_VIEWS)
def test_weight_views_of_two_stacks(stack, layer, kind):
    check_two_stack_view(stack, layer, kind)


def test_both_stacks_share_the_embeddings():
    model = translator_model()
    for kind in ("W_E", "W_U", "b_U", "W_pos"):
        assert model.weight(kind, stack="encoder").data_ptr() == model.weight(kind).data_ptr()
    assert "encoder.embedding.weight" not in model.state_dict()
    seen = {}
    tokens = torch.tensor([[3, 1, 4, 1]])
    model(Inputs(tokens, source=tokens), lambda site, value: seen.setdefault(str(site), value))
    for name in ("embed", "pos_embed"):
        assert torch.equal(seen[f"encoder.{name}"], seen[f"decoder.{name}"])


@pytest.mark.parametrize(
    ("choices", "kind", "layer", "stack", "said"),
    [
        (translator(), "W_Q", 0, "middle", "stack='middle'"),
        (translator(), "W_Q", 0, "", "stack=''"),
        (small(), "W_Q", 0, "encoder", "stack='encoder' is not allowed for kind='decoder'"),
        (small(), "W_E", None, "decoder", "stack='decoder' is not allowed for kind='decoder'"),
        (small(kind="encoder"), "W_Q", 0, "encoder", "stack='encoder' is not allowed for kind='encoder'"),
        (translator(), "cross_W_in", 0, None, "unknown weight 'cross_W_in'"),
        (translator(), "cross_W_E", 0, None, "unknown weight 'cross_W_E'"),
        (translator(), "cross_W_q", 0, None, "unknown weight 'cross_W_q'"),
        (translator(), "cross_W_Q", None, None, "layer=None"),
        (translator(), "cross_W_Q", 2, None, r"layer=2 for 'cross_W_Q' is not allowed; allowed: 0 … 1"),
        (translator(), "W_Q", 1, "encoder", r"layer=1 for 'W_Q' is not allowed; allowed: 0 … 0"),
        (translator(n_encoder_layers=3), "W_Q", 2, "decoder", r"layer=2 for 'W_Q' is not allowed; allowed: 0 … 1"),
    ],
)
def test_a_wrong_weight_of_a_stack_is_refused(choices, kind, layer, stack, said):
    with pytest.raises(ValueError, match="allowed") as caught:
        random_model(choices).weight(kind, layer, stack=stack)
    assert said in str(caught.value)


def test_cross_weights_that_are_not_there_are_none():
    assert random_model(small()).weight("cross_W_Q", 0) is None
    model = random_model(translator(bias=False))
    assert [model.weight(f"cross_{kind}", 0) for kind in ("b_Q", "b_K", "b_V", "b_O")] == [None] * 4
    assert model.weight("cross_W_Q", 0, stack="encoder") is None  # the encoder reads only itself


@torch.no_grad()
def check_cross_views(choices):
    """Cross-attention by hand, from the recorded streams and the views: q, k, v, pattern, z, each head's output."""
    model, inputs = Case(choices, source_padding=((0, 1), (2, 0))).build()
    seen = {}
    model(inputs, lambda site, value: seen.setdefault(str(site), value))
    for layer in range(2):
        W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O = (
            model.weight(f"cross_{kind}", layer) for kind in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
        )
        at = {
            name: seen[f"decoder.{layer}.cross_{name}"] for name in ("q", "k", "v", "pattern", "z", "head_out", "out")
        }
        t, states = seen[f"decoder.{layer}.cross_norm"], seen["encoder.final"]
        group = W_Q.shape[0] // W_K.shape[0]
        total = b_O
        for h in range(W_Q.shape[0]):
            q = t @ W_Q[h] + b_Q[h]
            k, v = (states @ W[h // group] + b[h // group] for W, b in ((W_K, b_K), (W_V, b_V)))
            torch.testing.assert_close(at["q"][:, :, h], q, **EXACT)
            torch.testing.assert_close(at["k"][:, :, h // group], k, **EXACT)
            torch.testing.assert_close(at["v"][:, :, h // group], v, **EXACT)
            scores = torch.einsum("bid,bjd->bij", q, k) / W_Q.shape[2] ** 0.5
            pattern = scores.exp() * inputs.source_mask[:, None]
            pattern = pattern / pattern.sum(-1, keepdim=True)
            torch.testing.assert_close(at["pattern"][:, h], pattern, **EXACT)
            torch.testing.assert_close(at["z"][:, :, h], pattern @ v, **EXACT)
            torch.testing.assert_close(at["head_out"][:, :, h], pattern @ v @ W_O[h], **EXACT)
            total = total + pattern @ v @ W_O[h]
        torch.testing.assert_close(at["out"], total, **EXACT)


def test_cross_attention_is_reproduced_from_the_views():
    check_cross_views(translator(n_heads=4, n_kv_heads=2, d_head=3))


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


def test_an_encoder_decoder_needs_its_source():
    """Without a source, or blocks without the encoder's states, there is one clear error; other kinds have no encoder."""
    model, inputs = Case(translator()).build()
    for given in (inputs.tokens, Inputs(inputs.tokens), [1, 2, 3]):
        with pytest.raises(InputsError, match=r"encoder-decoder.*source="):
            model(given)
    with pytest.raises(InputsError, match=r"source="):
        model(inputs.tokens, kv_cache=KVCache())
    with pytest.raises(InputsError, match=r"memory=None is not allowed.*encode"):
        model.blocks(model.embed(inputs), 0, 2)
    with pytest.raises(InputsError, match=r"memory=None"):
        model.blocks(model.embed(inputs), 0, 2, None, inputs, KVCache())
    with pytest.raises(InputsError, match=r"kind='decoder' has no encoder"):
        random_model(small()).encode(inputs)


@torch.no_grad()
def test_blocks_read_the_source_that_a_cache_holds():
    """memory: what is in keys_values, unless it is given."""
    model, inputs = Case(translator(), source_padding=((0, 1), (2, 0))).build()
    cache = KVCache()
    model.encode(inputs, kv_cache=cache)
    out = model.unembed(model.blocks(model.embed(inputs), 0, 2, None, inputs, cache))
    torch.testing.assert_close(out, model(inputs), **EXACT)


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


def test_an_encoder_decoder_compiles_as_one_graph():
    model, inputs = Case(translator(n_layers=1), ((0, 0), (2, 0)), source_padding=((0, 1), (0, 0))).build()
    torch._dynamo.reset()

    def both(tokens, mask, source, source_mask):
        return model(Inputs(tokens, mask, source=source, source_mask=source_mask))

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    given = (inputs.tokens, inputs.mask, inputs.source, inputs.source_mask)
    torch.testing.assert_close(compiled(*given), model(inputs), **EXACT)


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


def test_given_embeddings_of_an_encoder_decoder_are_the_decoders():
    model, inputs = Case(translator(), ((2, 0), (0, 2))).build()
    embedded = replace(inputs, tokens=torch.zeros_like(inputs.tokens), embeddings=model.embedding(inputs.tokens))
    torch.testing.assert_close(model(embedded), model(inputs), **EXACT)


def test_select_keeps_each_source_with_its_target():
    model, inputs = Case(translator(), ((2, 0), (0, 2)), source_padding=((0, 1), (2, 0))).build()
    chosen = inputs.select([1])
    assert torch.equal(chosen.source, inputs.source[1:])
    assert torch.equal(chosen.source_mask, inputs.source_mask[1:])
    assert torch.equal(chosen.encoder.tokens, inputs.source[1:])
    torch.testing.assert_close(model(chosen), model(inputs)[1:], **EXACT)
