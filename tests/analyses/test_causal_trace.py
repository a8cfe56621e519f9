"""Causal tracing against loops over `run` and by-hand forwards: pairing of noise, windows, severed paths, roles, aggregation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from interp import Add, Inputs, ModelConfig, Replace, Transformer, run
from interp.analyses.causal_trace import causal_trace
from interp.analyses.joint_metric import TraceError, layer_windows
from interp.analyses.subject_noise import noise_scale, subject_noise
from interp.analyses.trace_effects import held_out_peaks, trace_agreement, trace_effects
from interp.analyses.trace_result import position_roles
from interp.hookable import UnsupportedModelError
from interp.tasks.facts import Prompts
from interp.tasks.task import Pairs

L, T, V = 4, 7, 13


@pytest.fixture(scope="module")
def deep() -> Transformer:
    config = ModelConfig(
        vocab=V, n_layers=L, n_heads=2, d_model=12, n_ctx=16, norm="rmsnorm", ffn="swiglu", positions="rotary"
    )
    return Transformer(config, seed=3).double().eval()


def pairs_of(batch: int = 3, padded: bool = False) -> Pairs:
    """Prompts whose subject is tokens 2 … 4 (3 … 3 in the last one), and others with another subject."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, V, (batch, T), generator=generator)
    first, last = torch.full((batch,), 2), torch.full((batch,), 4)
    first[-1], last[-1] = 3, 3
    mask = torch.ones(batch, T, dtype=torch.bool)
    if padded:
        mask[1, -1] = False
    final = mask.sum(1) - 1
    at = torch.arange(T)[None]
    other = torch.where((at >= first[:, None]) & (at <= last[:, None]), (tokens + 1 + at) % V, tokens)
    roles = {"subject": first, "subject_last": last, "relation": torch.ones(batch).long(), "final": final}
    clean = Inputs(tokens, mask=mask if padded else None, roles=roles)
    correct = torch.arange(batch) % V
    table = pd.DataFrame({"fact": 100 + np.arange(batch), "subject": [f"s{i}" for i in range(batch)]})
    return Pairs(clean, replace(clean, tokens=other), correct, (correct + 4) % V, table)


def numbers(model, inputs, change, pairs: Pairs) -> dict[str, torch.Tensor]:
    """Probability and logit difference at the last real token [example]."""
    logits = run(model, inputs, change=change).logits
    rows = torch.arange(inputs.batch)
    last = logits[rows, inputs.last()]
    return {"probability": torch.exp(last[rows, pairs.correct] - torch.logsumexp(last, -1)),
            "logit_difference": last[rows, pairs.correct] - last[rows, pairs.wrong]}  # fmt: skip


def at(table: pd.DataFrame, **where) -> pd.DataFrame:
    for name, value in where.items():
        table = table[table[name] == value]
    return table.sort_values(["noise_seed", "example"])


def close(found, wanted, tolerance: float = 1e-12) -> None:
    assert np.allclose(np.asarray(found, dtype=float), np.asarray(wanted, dtype=float), atol=tolerance, rtol=0)


def test_replacement_equals_a_loop_over_runs(deep):
    pairs = pairs_of()
    table = causal_trace(deep, pairs, window=3).table()
    clean = run(deep, pairs.clean, record=["resid_post", "ffn_out", "attn_out"])
    assert len(table) == 3 * L * T * 3 * 2
    for site in ("resid_post", "ffn_out", "attn_out"):
        for layer in range(L):
            span = [layer] if site == "resid_post" else [one for one in (layer - 1, layer, layer + 1) if 0 <= one < L]
            for position in range(T):
                change = [Replace(f"{one}.{site}", clean, at=position) for one in span]
                wanted = numbers(deep, pairs.corrupted, change, pairs)
                for metric, values in wanted.items():
                    here = at(table, site=site, layer=layer, position=position, metric=metric)
                    close(here["value"], values)
                    assert here["clipped"].eq(len(span) < (1 if site == "resid_post" else 3)).all()
                    assert here["first_layer"].eq(span[0]).all() and here["last_layer"].eq(span[-1]).all()
    for metric in ("probability", "logit_difference"):
        here = at(table, site="ffn_out", layer=0, position=0, metric=metric)
        close(here["clean"], numbers(deep, pairs.clean, (), pairs)[metric])
        close(here["corrupted"], numbers(deep, pairs.corrupted, (), pairs)[metric])


def test_noise_is_paired_and_equals_a_loop_over_runs(deep):
    pairs, nu, draws = pairs_of(), 0.7, 3
    table = causal_trace(deep, pairs, corruption="noise", nu=nu, noise_seeds=draws, seed=9).table()
    clean = run(deep, pairs.clean, record=["resid_post", "ffn_out"])
    drawn = subject_noise(pairs.clean, range(draws), 12, 9).unflatten(0, (3, draws)) * nu
    assert set(table["noise_seed"]) == {0, 1, 2}
    for draw in range(draws):
        noise = Add("embed", drawn[:, draw])
        wanted = numbers(deep, pairs.clean, noise, pairs)
        for site, layer, position in (("resid_post", 1, 4), ("ffn_out", 0, 2), ("ffn_out", 2, 6)):
            patched = numbers(deep, pairs.clean, [noise, Replace(f"{layer}.{site}", clean, at=position)], pairs)
            for metric in wanted:
                here = at(table, site=site, layer=layer, position=position, metric=metric, noise_seed=draw)
                close(here["value"], patched[metric])
                close(here["corrupted"], wanted[metric])  # under the same noise
    baselines = table.groupby(["example", "noise_seed", "metric"])["corrupted"].nunique()
    assert baselines.eq(1).all()
    assert table.groupby(["example", "metric"])["corrupted"].nunique().eq(draws).all()


def test_noise_lies_on_the_subject_alone_and_belongs_to_the_prompt(deep):
    inputs = pairs_of().clean
    drawn = subject_noise(inputs, range(4), 12, 0).unflatten(0, (3, 4))
    assert (drawn[0][:, [0, 1, 5, 6]] == 0).all() and (drawn[0][:, 2:5] != 0).all() and (drawn[2][:, [2, 4]] == 0).all()
    alone = subject_noise(inputs.select([1]), range(4), 12, 0)
    assert torch.equal(alone, drawn[1])
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(
        subject_noise(inputs.select([1]), range(4), 12, 1), alone
    )
    many = subject_noise(replace(inputs, roles={**inputs.roles, "subject": torch.zeros(3).long()}), range(200), 12, 0)
    assert abs(float(many[many != 0].std()) - 1) < 0.02


def test_the_code_seeds_its_noise_anew_in_every_call(deep):
    inputs = pairs_of().clean
    drawn = subject_noise(inputs, range(10), 12, 0, code=True).unflatten(0, (3, 10))
    wanted = np.random.RandomState(1).randn(10, 3, 12)
    assert np.array_equal(drawn[0][:, 2:5].numpy(), wanted) and torch.equal(drawn[0], drawn[1])
    assert np.array_equal(drawn[2][:, 3].numpy(), np.random.RandomState(1).randn(10, 1, 12)[:, 0])


def test_code_and_paper_window_differ_by_one_layer_and_odd_ones_do_not():
    assert layer_windows(30, 10, "code")[15] == tuple(range(10, 20))
    assert layer_windows(30, 10, "paper")[15] == tuple(range(11, 21))
    assert layer_windows(30, 10, "code")[0] == tuple(range(5)) and layer_windows(30, 10, "paper")[0] == tuple(range(6))
    for window in (1, 3, 5):
        assert layer_windows(9, window, "code") == layer_windows(9, window, "paper") == layer_windows(9, window)


def test_published_options(deep):
    pairs = pairs_of()
    code = causal_trace(deep, pairs, published="code", window=2)
    paper = causal_trace(deep, pairs, published="paper", window=2)
    for result, first, last in ((code, 0, 1), (paper, 1, 2)):
        table = result.table()
        assert set(table["corruption"]) == {"noise"} and set(table["metric"]) == {"probability"}
        here = table[(table["site"] == "ffn_out") & (table["layer"] == 1)]
        assert here["first_layer"].eq(first).all() and here["last_layer"].eq(last).all()
    predicted = run(deep, pairs.clean).logits[:, -1].softmax(-1).amax(-1)
    close(at(code.table(), site="ffn_out", layer=0, position=0, noise_seed=0)["clean"], predicted)
    wide = causal_trace(deep, pairs, published="code").table()
    assert wide[wide["site"] == "ffn_out"]["clipped"].all() and not wide[wide["site"] == "resid_post"]["clipped"].any()


@pytest.mark.parametrize("cut", ["ffn_out", "attn_out"])
@pytest.mark.parametrize("corruption", ["replacement", "noise"])
def test_severed_equals_an_explicit_run(deep, cut, corruption):
    pairs = pairs_of()
    result = causal_trace(deep, pairs, corruption=corruption, nu=1.0, noise_seeds=1, severed=cut, sites="resid_post")
    table = result.table()
    clean = run(deep, pairs.clean, record=["resid_post"])
    noise = [Add("embed", subject_noise(pairs.clean, [0], 12, 0))] if corruption == "noise" else []
    start = pairs.clean if noise else pairs.corrupted
    corrupted = run(deep, start, record=[cut], change=noise)
    rows, differs = pairs.clean.roles["subject_last"], 0.0
    for layer in range(L):
        held = [
            Replace(f"{one}.{cut}", corrupted.cache[f"{one}.{cut}"][torch.arange(3), rows], at=rows)
            for one in range(layer + 1, L)
        ]
        wanted = numbers(deep, start, [*noise, Replace(f"{layer}.resid_post", clean, at=rows), *held], pairs)
        for metric, values in wanted.items():
            here = at(table, severed=cut, layer=layer, metric=metric)
            assert here["position"].tolist() == rows.tolist()
            close(here["value"], values)
            whole = at(
                table[table["position"] == rows.numpy()[table["example"]]], severed="none", layer=layer, metric=metric
            )
            differs = max(differs, float(np.abs(whole["value"].to_numpy() - here["value"].to_numpy()).max()))
    assert differs > 1e-4  # severing does something


def test_restoring_the_last_state_gives_the_clean_run_and_an_early_token_nothing(deep):
    table = causal_trace(deep, pairs_of(), sites="resid_post").table()
    end = table[(table["layer"] == L - 1) & (table["role"] == "last")]
    close(end["value"], end["clean"])
    early = table[table["role"] == "earlier"]
    assert len(early) and (early["value"] == early["corrupted"]).all()
    dead = table[(table["layer"] == L - 1) & (table["role"] != "last")]
    assert (dead["value"] == dead["corrupted"]).all()


def test_a_path_that_is_known():
    """Without attention's help nothing leaves the subject: only states at the last token matter."""
    config = ModelConfig(vocab=V, n_layers=2, n_heads=2, d_model=12, n_ctx=16, ffn="relu", positions="rotary")
    model = Transformer(config, seed=0).double().eval()
    with torch.no_grad():
        for block in list(model.blocks)[1:]:
            block.attention.out.weight.zero_()
    table = causal_trace(model, pairs_of(), sites=("resid_post", "attn_out")).table()
    state = table[(table["site"] == "resid_post") & (table["role"] == "subject_last")]
    assert (state["value"] == state["corrupted"]).all()  # after layer 0 no attention reads it any more
    moved = at(table, site="attn_out", layer=0, role="last", metric="logit_difference")
    close(moved["value"], moved["clean"])  # layer 0's attention carried everything
    assert (moved["clean"] - moved["corrupted"]).abs().min() > 1e-3


def test_engines_agree_and_repeat(deep):
    pairs = pairs_of()
    options = {"corruption": ("replacement", "noise"), "noise_seeds": 2, "window": 3, "severed": ("ffn_out",)}
    fast, again = causal_trace(deep, pairs, **options), causal_trace(deep, pairs, **options)
    slow = causal_trace(deep, pairs, engine="reference", **options)
    assert fast.checked < 1e-12
    pd.testing.assert_frame_equal(fast.table(), again.table())
    pd.testing.assert_frame_equal(fast.table(), slow.table(), rtol=0, atol=1e-12)


def test_prompts_of_other_lengths_are_traced_as_if_alone(deep):
    pairs = pairs_of(padded=True)
    table = causal_trace(deep, pairs, corruption=("replacement", "noise"), nu=1.0, noise_seeds=2, batch=1).table()
    assert table.loc[table["example"] == 1, "position"].max() == T - 2
    assert table.loc[table["example"] == 0, "position"].max() == T - 1
    short = Pairs(
        Inputs(pairs.clean.tokens[1:2, :-1], roles={name: role[1:2] for name, role in pairs.clean.roles.items()}),
        Inputs(pairs.corrupted.tokens[1:2, :-1], roles={name: role[1:2] for name, role in pairs.clean.roles.items()}),
        pairs.correct[1:2], pairs.wrong[1:2], pairs.table.iloc[1:2].reset_index(drop=True),
    )  # fmt: skip
    alone = causal_trace(deep, short, corruption="replacement").table()
    same = table[(table["example"] == 1) & (table["corruption"] == "replacement")]
    keys = ["metric", "site", "layer", "position"]
    close(same.sort_values(keys)["value"], alone.sort_values(keys)["value"])


def test_left_padding_shifts_positions_and_nothing_else(deep):
    pairs = pairs_of()
    mask = torch.ones(3, T + 1, dtype=torch.bool)
    mask[:2, 0], mask[2, -1] = False, False

    def shifted(inputs: Inputs) -> Inputs:
        rows = [torch.cat([row, row[:1]] if i == 2 else [row[:1], row]) for i, row in enumerate(inputs.tokens)]
        roles = {name: role + torch.tensor([1, 1, 0]) for name, role in inputs.roles.items()}
        return Inputs(torch.stack(rows), mask=mask, roles=roles)

    other = replace(pairs, clean=shifted(pairs.clean), corrupted=shifted(pairs.corrupted))
    moved = causal_trace(deep, other, sites="ffn_out").table()
    plain = causal_trace(deep, pairs, sites="ffn_out").table()
    plain["position"] += np.where(plain["example"] < 2, 1, 0)
    pd.testing.assert_frame_equal(moved, plain, rtol=0, atol=1e-12)


def test_noise_scale_is_over_all_entries_of_the_subject(deep):
    inputs = pairs_of().clean
    table = deep.weight("W_E").detach().numpy()
    ids = [*inputs.tokens[0, 2:5], *inputs.tokens[1, 2:5], inputs.tokens[2, 3]]
    entries = np.concatenate([table[int(i)] for i in ids])
    assert noise_scale(deep, inputs) == pytest.approx(entries.std(ddof=1), abs=1e-12)
    assert causal_trace(deep, pairs_of(), corruption="noise", noise=2.0, noise_seeds=1).nu == pytest.approx(
        2 * entries.std(ddof=1)
    )


def test_prompts_without_a_wrong_answer_have_probability_alone(deep):
    pairs = pairs_of()
    prompts = Prompts(pairs.clean, pairs.correct, pairs.table)
    table = causal_trace(deep, prompts, corruption="noise", noise_seeds=1).table()
    assert set(table["metric"]) == {"probability"} and set(table["fact"]) == {100, 101, 102}
    both = causal_trace(deep, pairs, corruption="noise", noise_seeds=1).table()
    close(table["value"], both.loc[both["metric"] == "probability", "value"])
    with pytest.raises(TraceError, match="'logit_difference' needs a wrong answer"):
        causal_trace(deep, prompts, "logit_difference", corruption="noise")
    with pytest.raises(TraceError, match="by replacement needs Pairs"):
        causal_trace(deep, prompts)


def test_roles_of_positions():
    inputs = pairs_of().clean
    roles = position_roles(inputs)
    assert roles[roles["example"] == 0]["role"].tolist() == [
        "earlier", "earlier", "subject_first", "subject_middle", "subject_last", "first_subsequent", "last",
    ]  # fmt: skip
    assert roles[roles["example"] == 2]["role"].tolist() == [
        "earlier", "earlier", "earlier", "subject_last", "first_subsequent", "further", "last",
    ]  # fmt: skip
    shared = position_roles(inputs, shared=True)
    one = shared[(shared["example"] == 2) & (shared["position"] == 3)]["role"].tolist()
    assert one == [
        "subject_last",
        "subject_first",
    ]  # a subject of one token is its own first, as the published code counts
    three = shared[shared["example"] == 0]["role"].tolist()
    assert three.count("subject_first") == three.count("subject_middle") == three.count("subject_last") == 1
    padded = position_roles(pairs_of(padded=True).clean)
    assert (
        padded[padded["example"] == 1]["role"].tolist()[-1] == "last" and len(padded[padded["example"] == 1]) == T - 1
    )


def made_up() -> pd.DataFrame:
    """Two facts, two tokens of one role, two draws."""
    rows = []
    for fact, base in ((1, 0.0), (2, 10.0)):
        for draw in (0, 1):
            for effect in (1.0, 3.0):  # two tokens
                rows.append((fact, "noise", "probability", "ffn_out", "none", 0, 0, 0, False, "further", 8.0 + base, 0.0 + draw,
                             draw + effect + base))  # fmt: skip
    columns = ["fact", "corruption", "metric", "site", "severed", "layer", "first_layer", "last_layer", "clipped", "role",
               "clean", "corrupted", "value"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def test_effects_by_hand():
    (row,) = trace_effects(made_up()).to_dict("records")
    assert row["aie"] == pytest.approx((2 + 12) / 2) and row["n"] == 2  # facts, not rows
    assert row["ate"] == pytest.approx((7.5 + 17.5) / 2) and row["share"] == pytest.approx(7 / 12.5)
    half = 12.706204736 * np.std([2, 12], ddof=1) / np.sqrt(2)
    assert row["high"] - row["aie"] == pytest.approx(half) and row["aie"] - row["low"] == pytest.approx(half)


def test_agreement_by_hand():
    maps = []
    for corruption, effects in (("noise", [1, 2, 3, 8]), ("replacement", [2, 1, 3, 4])):
        for layer, effect in enumerate(effects):
            maps.append({"corruption": corruption, "metric": "probability", "site": "ffn_out", "severed": "none", "layer": layer,
                         "role": "last", "aie": effect, "n": 5})  # fmt: skip
    (row,) = trace_agreement(pd.DataFrame(maps)).to_dict("records")
    assert row["spearman"] == pytest.approx(0.8) and row["ratio"] == 2 and row["cells"] == 4
    assert (row["first"], row["second"], row["first_layer"], row["second_layer"]) == ("noise", "replacement", 3, 3)
    with pytest.raises(TraceError, match="at least two to compare"):
        trace_agreement(pd.DataFrame(maps), "metric")


def test_a_peak_is_estimated_on_other_facts(deep):
    table = causal_trace(deep, pairs_of(8), sites="ffn_out").table()
    peaks = held_out_peaks(table, seed=1)
    chosen = set(np.random.default_rng(1).permutation(pd.unique(table["fact"]))[:4])
    row = peaks[peaks["metric"] == "logit_difference"].iloc[0]
    for part, value in (
        (table[table["fact"].isin(chosen)], row["chosen"]),
        (table[~table["fact"].isin(chosen)], row["aie"]),
    ):
        here = part[
            (part["metric"] == "logit_difference") & (part["layer"] == row["layer"]) & (part["role"] == row["role"])
        ]
        gaps = here.assign(ie=here["value"] - here["corrupted"]).groupby("fact")["ie"].mean()
        assert value == pytest.approx(gaps.mean())
    best = trace_effects(table[table["fact"].isin(chosen)])
    assert row["chosen"] == pytest.approx(best[best["metric"] == "logit_difference"]["aie"].max())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 2}, "window=2 is not allowed; allowed: an odd"),
        ({"corruption": "zero"}, "corruption='zero'"),
        ({"metrics": ("loss",)}, "metrics="),
        ({"severed": "z"}, "severed='z'"),
        ({"severed": "ffn_out", "sites": "attn_out"}, "needs a stream"),
        ({"severed": "ffn_out", "severed_at": "verb"}, "severed_at='verb'"),
        ({"noise_seeds": 0}, "noise_seeds=0"),
        ({"nu": -1.0}, "nu=-1.0"),
        ({"published": "blog"}, "published='blog'"),
        ({"answers": "gold"}, "answers='gold'"),
        ({"sites": ()}, "sites="),
    ],
)
def test_bad_choices(deep, options, said):
    with pytest.raises(TraceError, match=said):
        causal_trace(deep, pairs_of(), **options)


def test_bad_prompts_and_sites(deep):
    pairs = pairs_of()
    with pytest.raises(UnsupportedModelError, match="site 'pattern' cannot be restored"):
        causal_trace(deep, pairs, sites="pattern")
    with pytest.raises(TraceError, match="no role 'subject'"):
        causal_trace(deep, replace(pairs, clean=replace(pairs.clean, roles={})))
    with pytest.raises(TraceError, match="must be Prompts or Pairs"):
        causal_trace(deep, pairs.clean)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than max_rows=10"):
        causal_trace(deep, pairs, sites="resid_post").table(max_rows=10)
