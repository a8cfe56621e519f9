"""Edge patching against cases worked by hand, whole-component patches and path patching, which share no code with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interp import Inputs, ModelConfig, Replace, Site, Transformer, logit_difference, path_patch, run
from interp.circuits import CircuitError, Graph, edge_patch
from interp.circuits.flow import Stage, flow, stages_of
from interp.circuits.patching import Ablation, Direction, study
from interp.hookable import UnsupportedModelError

KINDS = {
    "plain": {},
    "grouped": {"n_kv_heads": 2, "norm": "rmsnorm", "ffn": "swiglu", "positions": "rotary", "qk_norm": True},
    "no ffn": {"ffn": "none", "norm": "none"},
    "encoder": {"kind": "encoder", "ffn": "geglu", "tied_embeddings": True},
}
METRIC = logit_difference(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))


def a_model(kind="plain", layers=2, **more):
    config = {"vocab": 11, "n_layers": layers, "n_heads": 4, "d_model": 16, "n_ctx": 8, **KINDS[kind], **more}
    model, drawn = Transformer(ModelConfig(**config), seed=3).double(), torch.Generator().manual_seed(4)
    for name, value in model.named_parameters():
        if "bias" in name:  # zero at the start: a bias that is left out would change nothing
            value.data.normal_(0, 0.3, generator=drawn)
    return model


def two_prompts(seed=0):
    clean, corrupted = torch.randint(0, 11, (2, 3, 6), generator=torch.Generator().manual_seed(seed))
    return clean, corrupted


def case():
    """The case of two blocks, block(x) = x + Σ over h of w[h]·x, position by position."""
    path = Path(__file__).parent.parent / "data" / "hand_cases.json"
    cases = json.loads(path.read_text())
    return next(value for name, value in cases.items() if name.startswith("edge patching"))


def hand_stages():
    w = torch.tensor(case()["w"], dtype=torch.float64)
    block = lambda given: w[:, None, None] * given  # noqa: E731
    return [Stage(slice(0, 2), block), Stage(slice(2, 4), block), Stage(slice(4, 5), lambda x: x)]


# senders: Start, B0.0, B0.1, B1.0, B1.1; receivers: B0.0, B0.1, B1.0, B1.1, End
EDGES = {"B0.1->End": (4, 2), "B0.0->B1.1": (3, 1), "Start->B0.0": (0, 0), "Start->End": (4, 0)}


def hand(edges, position):
    found, stages = case(), hand_stages()
    clean = torch.tensor(found["clean_input"], dtype=torch.float64)[None]
    source = flow(clean, stages).written
    mask = torch.zeros(5, 5)
    for edge in edges:
        mask[EDGES[edge]] = 1
    with torch.no_grad():
        output = flow(-clean, stages, mask, source).output
    assert output is not None
    return output[0, position].tolist()


def test_two_blocks_by_hand():
    last = case()["last_position"]
    assert hand([], -1) == last["corrupted"]
    assert hand(["B0.1->End"], -1) == last["+B0.1->End"]
    assert hand(["B0.1->End", "B0.0->B1.1"], -1) == last["+B0.0->B1.1"]
    assert hand(["B0.1->End", "B0.0->B1.1", "Start->B0.0"], -1) == last["+Start->B0.0"]
    assert hand(["Start->End"], 0) == case()["position_0"]["Start->End"]
    clean = flow(torch.tensor(case()["clean_input"], dtype=torch.float64)[None], hand_stages()).output
    assert clean is not None and clean[0, -1].tolist() == last["clean"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_edge_is_the_base_run_and_every_edge_the_other(kind):
    model, (clean, corrupted) = a_model(kind), two_prompts()
    graph = Graph.of(model)
    directions: tuple[tuple[Direction, Tensor, Tensor], ...]
    directions = ("noising", clean, corrupted), ("denoising", corrupted, clean)
    for direction, base, other in directions:
        none, every = (edge_patch(model, clean, corrupted, METRIC, mask, direction)
                       for mask in (torch.zeros_like(graph.admitted), graph.admitted))  # fmt: skip
        for value, tokens in ((none, base), (every, other)):
            wanted = METRIC(METRIC.read(run(model, tokens).logits, Inputs(tokens)))
            assert torch.allclose(value, wanted, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_all_edges_out_of_a_component_are_a_patch_of_that_component(kind):
    model, (clean, corrupted) = a_model(kind), two_prompts()
    graph = Graph.of(model)
    sites = ["1.z", "embed", *(["0.ffn_out"] if graph.feeds else [])]
    source = run(model, corrupted, record=sites)
    changes = {"a1.h2": Replace("1.z", source, at=(slice(None), 2)), "m0": Replace("0.ffn_out", source)}
    for sender, change in changes.items():
        if sender in graph.senders:
            mask = graph.admitted & (torch.arange(len(graph.senders)) == graph.senders.index(sender))
            wanted = METRIC(METRIC.read(run(model, clean, change=change).logits, Inputs(clean)))
            assert torch.allclose(edge_patch(model, clean, corrupted, METRIC, mask), wanted, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "grouped", "no ffn"])
def test_one_edge_is_a_patched_path(kind):
    """With a single edge nothing else has changed before its receiver, so live and frozen senders are the same."""
    model, (clean, corrupted) = a_model(kind, layers=3), two_prompts()
    receivers = {"q": ("2.q", (slice(None), 3)), "k": ("2.k", (slice(None), 1)), "v": ("2.v", (slice(None), 0))}
    paths = path_patch(model, clean, corrupted, METRIC, receivers, direction="noising")
    values = paths.values["z → receiver"]
    for i, name in enumerate(("a2.h3<q>", "a2.h1<k>", "a2.h0<v>")):
        for layer, head in ((0, 1), (1, 2)):
            ours = edge_patch(model, clean, corrupted, METRIC, [f"a{layer}.h{head}->{name}"])
            assert torch.allclose(ours, values[i, layer, head], atol=1e-11), (name, layer, head)


def test_a_mask_with_positions_patches_one_of_them():
    model, (clean, corrupted) = a_model("grouped"), two_prompts()
    graph = Graph.of(model)
    source = run(model, corrupted, record=["0.ffn_out"])
    wanted = run(model, clean, change=Replace("0.ffn_out", source, at=(4,))).logits
    mask = torch.zeros(*graph.admitted.shape, 1, 6)
    mask[..., 0, 4] = (graph.admitted & (torch.arange(len(graph.senders)) == graph.senders.index("m0"))).float()
    value = edge_patch(model, clean, corrupted, METRIC, mask)
    assert torch.allclose(value, METRIC(METRIC.read(wanted, Inputs(clean))), atol=1e-12)


def test_resuming_at_a_receiver_changes_nothing():
    model, (clean, corrupted) = a_model("grouped", layers=3), two_prompts()
    found = study(model, clean, corrupted, METRIC)
    mask = found.graph.mask(["m0->m1", "a1.h0->m1", "input->logits"]).double()
    at = next(i for i, s in enumerate(found.stages) if s.receivers.start == found.graph.receivers.index("m1"))
    assert torch.equal(found.value(mask), found.value(mask, resume=(at, found.base)))


def test_padding_on_the_left_changes_nothing():
    model, (clean, corrupted) = a_model("grouped"), two_prompts()
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[:, :2] = False
    pad = lambda tokens: Inputs(torch.nn.functional.pad(tokens, (2, 0)), mask=mask)  # noqa: E731
    edges = ["a0.h1->a1.h0<k>", "input->m1"]
    plain, padded = (edge_patch(model, f(clean), f(corrupted), METRIC, edges) for f in (lambda x: x, pad))
    assert torch.allclose(plain, padded, atol=1e-12)


def test_the_four_ablations_differ_and_do_what_they_say():
    model, (clean, corrupted) = a_model(), two_prompts()
    graph = Graph.of(model)
    mask = graph.admitted & (torch.arange(len(graph.senders)) == graph.senders.index("a1.h2"))
    site = Site("z", 1)
    clean_run, other = run(model, clean, record=[site]), run(model, corrupted, record=[site])
    mean = other.cache[site].mean(0, keepdim=True)[:, :, 2]
    ablations: dict[Ablation, Any] = {"zero": 0.0, "mean": mean, "corrupted": other.cache[site][:, :, 2]}
    for ablation, value in ablations.items():
        change = Replace(site, value, at=(slice(None), 2))
        wanted = METRIC(METRIC.read(run(model, clean, change=change).logits, Inputs(clean)))
        assert torch.allclose(edge_patch(model, clean, corrupted, METRIC, mask, ablation=ablation), wanted, atol=1e-12)
    resampled = study(model, clean, None, METRIC, ablation="resample", seed=5)
    own, taken = resampled.base.written, resampled.source
    order = [next(j for j in range(3) if torch.equal(taken[:, i], own[:, j])) for i in range(3)]
    assert sorted(order) == [0, 1, 2] and all(i != j for i, j in enumerate(order))
    assert clean_run.cache[site].shape[0] == 3


def test_what_is_refused():
    clean, corrupted = two_prompts()
    model = a_model()
    with pytest.raises(UnsupportedModelError, match=r"normed between its blocks .*allowed: pre-norm models"):
        Graph.of(a_model(norm_position="post"))
    with pytest.raises(UnsupportedModelError, match="circuits read one stack; allowed: decoder, encoder"):
        Graph.of(Transformer(ModelConfig(kind="encoder-decoder", vocab=11, n_layers=1, n_heads=2, d_model=8, n_ctx=8)))
    with pytest.raises(
        CircuitError, match=r"edge 'a1\.h0->a0\.h0<q>' is not one of this graph's \d+; allowed: sender->rec"
    ):
        edge_patch(model, clean, corrupted, METRIC, ["a1.h0->a0.h0<q>"])
    with pytest.raises(CircuitError, match=r"the mask has a0\.h0->a0\.h0<q>, which is no edge: the sender runs later"):
        edge_patch(model, clean, corrupted, METRIC, torch.ones_like(Graph.of(model).admitted))
    with pytest.raises(CircuitError, match=r"a mask of shape \(2, 2\) is not allowed; allowed: \[receiver sender\] = "):
        edge_patch(model, clean, corrupted, METRIC, torch.ones(2, 2))
    with pytest.raises(CircuitError, match=r"have shapes \(3, 6\) and \(3, 5\); allowed: one shape"):
        edge_patch(model, clean, corrupted[:, :5], METRIC, ["input->logits"])
    with pytest.raises(CircuitError, match="ablation='gauss' is not allowed; allowed: 'corrupted', 'zero'"):
        edge_patch(model, clean, corrupted, METRIC, ["input->logits"], ablation="gauss")  # type: ignore[arg-type]
    with pytest.raises(
        CircuitError, match="ablation='mean' needs corrupted prompts; allowed without them: 'zero', 'resample'"
    ):
        edge_patch(model, clean, None, METRIC, ["input->logits"], ablation="mean")
    with pytest.raises(CircuitError, match="with 1 example is not allowed"):
        edge_patch(model, clean[:1], None, logit_difference(1, 2), ["input->logits"], ablation="resample")


def test_stages_cover_every_receiver_and_sender():
    for kind in KINDS:
        model = a_model(kind)
        graph, stages = Graph.of(model), stages_of(model, Inputs(two_prompts()[0]))
        assert [i for s in stages for i in range(s.receivers.start, s.receivers.stop)] == list(
            range(len(graph.receivers))
        )
        assert len(graph.edges) == int(graph.admitted.sum()) == len(set(graph.edges))
