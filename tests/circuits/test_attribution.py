"""Scores of edges against finite differences, the sums that they must have, and exact patches; curves and files."""

from __future__ import annotations

import pytest
import torch
from circuits.test_edges import METRIC, a_model, two_prompts

from interp import Inputs, run
from interp.circuits import (
    CircuitError,
    Graph,
    acdc,
    circuit_document,
    curve_areas,
    edge_attribution,
    edge_patch,
    faithfulness,
    faithfulness_curve,
    load_circuit,
    save_circuit,
)
from interp.circuits.attribution import Method


@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_eap_is_the_gradient_of_an_edge_s_dose(kind):
    model, (clean, corrupted) = a_model(kind), two_prompts()
    scores = edge_attribution(model, clean, corrupted, METRIC, "eap")
    graph, base = scores.graph, edge_patch(model, clean, corrupted, METRIC, [])
    for name in ("input->a1.h2<q>", "a0.h3->a1.h1<v>", "m0->a1.h0<k>", "a1.h1->logits", "input->m0"):
        at = graph.mask([name])
        dosed = edge_patch(model, clean, corrupted, METRIC, at.double() * 1e-5)
        assert torch.allclose(scores.scores[at][0], (dosed - base) / 1e-5, atol=1e-4, rtol=1e-3), name


def test_eap_is_the_published_formula():
    """(corrupted − clean) of a sender · gradient at a receiver's input in the clean run: of an FFN and of the head."""
    model, (clean, corrupted) = a_model(), two_prompts()
    scores = edge_attribution(model, clean, corrupted, METRIC, "eap")
    other, sites = run(model, corrupted, record=["0.ffn_out"]), ["0.ffn_out", "1.resid_mid", "1.resid_post"]
    base = run(model, clean, record=sites, grad=True)
    value = METRIC(METRIC.read(base.logits, Inputs(clean))).sum()
    mid, end = torch.autograd.grad(value, [base.cache["1.resid_mid"], base.cache["1.resid_post"]])
    change = (other.cache["0.ffn_out"] - base.cache["0.ffn_out"]).detach()
    for receiver, gradient in (
        ("m1", mid - end),
        ("logits", end),
    ):  # what passes by the FFN on the stream is not its input's
        wanted = (change * gradient).sum((1, 2))
        assert torch.allclose(scores.scores[scores.graph.mask([f"m0->{receiver}"])][0], wanted, atol=1e-10)


def test_sums_that_the_scores_must_have():
    model, (clean, corrupted) = a_model("grouped"), two_prompts()
    methods: tuple[Method, ...] = ("dose", "eap-ig")
    for method in methods:
        scores = edge_attribution(model, clean, corrupted, METRIC, method, 60)
        assert scores.completeness < 0.02 and not scores.ranking_only
        few = edge_attribution(model, clean, corrupted, METRIC, method, 1)
        assert few.completeness > scores.completeness
    parts = edge_attribution(model, clean, corrupted, METRIC, "eap-ig", 60).scores[:, 0].sum(0)
    ends = [METRIC(METRIC.read(run(model, tokens).logits, Inputs(tokens))) for tokens in (clean, corrupted)]
    assert torch.allclose(parts, ends[1] - ends[0], atol=0.02)


@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_exact_scores_are_single_edge_patches(direction):
    model, (clean, corrupted) = a_model("grouped"), two_prompts()
    scores = edge_attribution(model, clean, corrupted, METRIC, "exact", direction=direction)
    base = edge_patch(model, clean, corrupted, METRIC, [], direction)
    for name in scores.graph.edges[::7]:
        wanted = edge_patch(model, clean, corrupted, METRIC, [name], direction) - base
        assert torch.allclose(scores.scores[scores.graph.mask([name])][0], wanted, atol=1e-12)
    some = edge_attribution(model, clean, corrupted, METRIC, "exact", edges=scores.graph.mask(scores.graph.edges[:2]))
    assert int(some.scores.isfinite().all(-1).sum()) == 2
    table = scores.table()
    assert len(table) == 3 * len(scores.graph.edges) and set(table["ablation"]) == {"corrupted"}


def test_the_model_is_left_as_it_was():
    model, (clean, corrupted) = a_model(), two_prompts()
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    for method in ("eap", "eap-ig", "dose"):
        edge_attribution(model, clean, corrupted, METRIC, method)
    assert all(torch.equal(p, before[n][0]) and p.grad is None and p.requires_grad == before[n][1]
               for n, p in model.named_parameters())  # fmt: skip


def test_acdc_is_the_greedy_walk():
    """The published loop, written with whole forwards."""
    model, (clean, corrupted) = a_model("no ffn"), two_prompts()
    reference = run(model, clean).logits[:, -1].log_softmax(-1)

    def damage(logits):
        last = logits[:, -1].log_softmax(-1)
        return (reference.exp() * (reference - last)).sum(-1)

    found = acdc(model, clean, corrupted, 0.01)
    graph, cut = Graph.of(model), torch.zeros_like(Graph.of(model).admitted)
    now = edge_patch(model, clean, corrupted, damage, cut).mean()
    depth = lambda name: -1 if name == "logits" else -2 - int(name[1])  # noqa: E731
    rows = sorted(range(len(graph.receivers)), key=lambda r: (-depth(graph.receivers[r]), -r))
    for r in rows:
        for s in reversed(range(len(graph.senders))):
            if graph.admitted[r, s]:
                cut[r, s] = True
                then = edge_patch(model, clean, corrupted, damage, cut).mean()
                assert abs(float(then - now) - float(found.costs[r, s])) < 1e-10
                if then - now < 0.01:
                    now = then
                else:
                    cut[r, s] = False
    assert torch.equal(found.kept, graph.admitted & ~cut) and 0 < int(found.kept.sum()) < len(graph.edges)
    assert torch.allclose(found.damage.mean(), now, atol=1e-10)
    assert list(found.table()["kept"]) == [bool(found.kept[graph.mask([e])]) for e in graph.edges]


def test_acdc_on_some_edges_cuts_all_others():
    model, (clean, corrupted) = a_model("grouped"), two_prompts()
    top = edge_attribution(model, clean, corrupted, METRIC, "eap").top(30)
    found = acdc(model, clean, corrupted, 0.0005, edges=top)
    assert found.tried == 30 and not bool((found.kept & ~top).any())
    assert int(found.costs.isfinite().sum()) == 30
    everything = acdc(model, clean, corrupted, 1e9)
    assert not bool(everything.kept.any()) and everything.graph == Graph.of(model)
    with pytest.raises(CircuitError, match="threshold=-1 is not allowed; allowed: 0 or more"):
        acdc(model, clean, corrupted, -1)
    with pytest.raises(
        CircuitError, match=r"the metric falls from 1 for the whole model to 0 with every edge cut, so it is no"
    ):
        whole = run(model, clean).logits[:, -1].sum(-1)
        acdc(model, clean, corrupted, 0.1, lambda logits: (logits[:, -1].sum(-1) - whole).abs().lt(1e-9).double())


def test_faithfulness_ends_at_the_clean_run_and_areas_are_trapezoids():
    model, (clean, corrupted) = a_model(), two_prompts()
    scores = edge_attribution(model, clean, corrupted, METRIC)
    table = faithfulness(model, clean, corrupted, METRIC, scores, (0.1, 0.5, 1.0), random=2)
    curve = faithfulness_curve(table).set_index(["method", "fraction"])["faithfulness"]
    assert abs(curve["scores", 1.0] - 1) < 1e-10 and abs(curve["random", 1.0] - 1) < 1e-10
    f = [curve["scores", x] for x in (0.1, 0.5, 1.0)]
    areas = curve_areas(table).set_index("method")
    assert abs(areas.loc["scores", "CPR"] - (0.4 * (f[0] + f[1]) / 2 + 0.5 * (f[1] + f[2]) / 2)) < 1e-12
    one = table[(table["method"] == "scores") & (table["fraction"] == 0.5)]
    kept = scores.top(int(one["edges"].iloc[0]))
    wanted = edge_patch(model, clean, corrupted, METRIC, scores.graph.admitted & ~kept)
    assert torch.allclose(torch.tensor(one["value"].to_numpy()), wanted)
    with pytest.raises(CircuitError, match=r"fractions=\[0\.0\] is not allowed; allowed: shares"):
        faithfulness(model, clean, corrupted, METRIC, scores, (0.0,))


def test_a_circuit_is_written_and_read_in_the_mib_format(tmp_path):
    model, (clean, corrupted) = a_model("grouped"), two_prompts()
    scores = edge_attribution(model, clean, corrupted, METRIC)
    graph, kept = scores.graph, scores.top(12)
    document = circuit_document(graph, kept, scores.mean)
    assert document["cfg"] == {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 16}
    assert set(document["nodes"]) == {"input", "logits", "m0", "m1", *(f"a{i}.h{j}" for i in (0, 1) for j in range(4))}
    assert {"input->a0.h3<k>", "a0.h1->a1.h2<v>", "m1->logits"} <= set(document["edges"])
    assert document["edges"]["a0.h1->a1.h2<k>"] == document["edges"]["a0.h1->a1.h3<k>"]  # one key serves both
    path = save_circuit(tmp_path / "circuit.json", graph, kept, scores.mean)
    again, values = load_circuit(path, graph)
    assert torch.equal(again, kept) and torch.allclose(values, scores.mean)
    with pytest.raises(FileExistsError, match="circuits are never overwritten"):
        save_circuit(path, graph, kept)
    with pytest.raises(CircuitError, match="is a circuit of a model with"):
        load_circuit(path, Graph.of(a_model("no ffn", layers=3)))
    path.write_text("[]")
    with pytest.raises(CircuitError, match="is not a circuit"):
        load_circuit(path, graph)


def test_bad_choices_are_named():
    model, (clean, corrupted) = a_model(), two_prompts()
    with pytest.raises(CircuitError, match="method='lrp' is not allowed; allowed: 'eap', 'eap-ig', 'dose', 'exact'"):
        edge_attribution(model, clean, corrupted, METRIC, "lrp")  # type: ignore[arg-type]
    with pytest.raises(CircuitError, match="steps=0 is not allowed; allowed: 1 or more"):
        edge_attribution(model, clean, corrupted, METRIC, steps=0)
    with pytest.raises(CircuitError, match="ablation='zero' is not allowed with method='eap-ig'"):
        edge_attribution(model, clean, corrupted, METRIC, ablation="zero")
    with pytest.raises(CircuitError, match=r"n=0 edges is not allowed; allowed: 1 … \d+"):
        edge_attribution(model, clean, corrupted, METRIC).top(0)
