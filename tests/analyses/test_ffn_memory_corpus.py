"""Triggers over a streamed corpus: the same as in memory, by brute force and however the corpus is cut."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from interp import Inputs, ModelConfig, Transformer, ffn_triggers, open_activations, record_corpus, run
from interp.analyses import triggers
from interp.analyses.ffn_memory import NeuronError
from interp.analyses.subupdates import FFNError
from interp.analyses.triggers import FIELDS, TriggerSearch, corpus_triggers

NAMES = [*FIELDS]


@pytest.fixture(scope="module")
def sentences() -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(0, 13, draw.integers(2, 12)).tolist() for _ in range(40)]


@pytest.fixture(scope="module")
def padded(sentences) -> Inputs:
    """All sentences in one batch, padded on the left: positions then differ from places in the sentence."""
    length = max(map(len, sentences))
    tokens = torch.tensor([[0] * (length - len(row)) + row for row in sentences])
    mask = torch.tensor([[False] * (length - len(row)) + [True] * len(row) for row in sentences])
    return Inputs(tokens, mask=mask)


@pytest.fixture(scope="module")
def plain() -> Transformer:
    return Transformer(ModelConfig(vocab=13, n_layers=2, n_heads=2, d_model=8, n_ctx=16, ffn="relu"), seed=3).double()


def brute(model, sentences, layer: int, neurons: list[int], skip: int, followed: bool):
    """Every sentence alone: the coefficients of the positions that count, {(example, position): [neuron]}."""
    found = {}
    for example, row in enumerate(sentences):
        act = (
            run(model, torch.tensor([row]), record=f"{layer}.ffn_act").cache[f"{layer}.ffn_act"][0, :, neurons].numpy()
        )
        found |= {(example, i): act[i] for i in range(skip, len(row)) if i + 1 < len(row) or not followed}
    return found


@pytest.mark.parametrize(("skip", "followed"), [(0, False), (1, True)])
@pytest.mark.parametrize("name", ["model", "plain"])
def test_every_neuron_of_every_layer_as_by_brute_force(request, sentences, name, skip, followed):
    """Sentences that begin alike have equal coefficients but for rounding: so values are compared, and where they stand."""
    model, some, neurons = request.getfixturevalue(name), sentences[:25], [0, 3, 17]
    got = corpus_triggers(model, iter(some), k=5, skip=skip, followed=followed, batch_tokens=40)
    assert got.layers == (0, 1) and got.signs == ((1,) if name == "plain" else (1, -1))
    assert got.coefficient.shape == (2, len(got.signs), model.weight("W_out", 0).shape[0], 5)
    for layer in (0, 1):
        every = brute(model, some, layer, neurons, skip, followed)
        for s, sign in enumerate(got.signs):
            for column, neuron in enumerate(neurons):
                of = {}
                for (example, _), act in every.items():
                    of[example] = max(of.get(example, 0.0), sign * act[column])
                expected = [m for m in sorted(of.values(), reverse=True)[:5] if m > 0]
                rows = zip(*(getattr(got, field)[layer, s, neuron].tolist() for field in NAMES), strict=True)
                rows = [row for row in rows if row[1] >= 0]
                assert np.allclose([sign * row[0] for row in rows], expected, atol=1e-12, rtol=0)
                assert len({row[1] for row in rows}) == len(rows), "a sentence counts once"
                for m, example, i, token, after in rows:
                    assert abs(every[example, i][column] - m) < 1e-12 and token == some[example][i]
                    assert after == (some[example][i + 1] if i + 1 < len(some[example]) else -1)


def test_the_table_is_that_of_the_search_in_memory(model, padded):
    parts = [padded.select(slice(i, i + 7)) for i in range(0, 40, 7)]
    streamed = corpus_triggers(model, parts, 1, k=6)
    pd.testing.assert_frame_equal(streamed.table(1), ffn_triggers(model, padded, 1, k=6, batch_size=7))
    words = [chr(97 + i) for i in range(13)]
    some = ffn_triggers(model, padded, 1, [5, 2], 4, words, batch_size=7)
    shown = streamed.table(1, [5, 2], words, k=4).sort_values(["neuron", "sign", "rank"], ascending=[True, False, True])
    pd.testing.assert_frame_equal(shown.reset_index(drop=True), some)


@pytest.mark.parametrize("size", [1, 4, 9])
def test_equal_coefficients_are_listed_in_the_order_of_the_corpus_however_it_is_cut(model, size):
    search = TriggerSearch(model, [0], 4, 0, False, None)
    act = torch.tensor([0.5, -1.0, 0.5, -1.0]).double()[None, :, None].expand(9, 4, 43)
    for part in act.split(size):
        search.add(Inputs(torch.ones(len(part), 4, dtype=torch.long)), [part])
    got = search.result()
    assert (got.example == torch.arange(4)).all()
    assert (got.position[0, 0] == 0).all() and (got.position[0, 1] == 1).all(), "the earlier position"
    assert (got.coefficient[0, 0] == 0.5).all() and (got.coefficient[0, 1] == -1.0).all()


@pytest.mark.parametrize("size", [1, 30, 10_000])
def test_a_recording_gives_what_the_model_gives(model, padded, sentences, tmp_path, size):
    record_corpus(model, [padded.select(slice(i, i + 9)) for i in range(0, 40, 9)], "ffn_act", tmp_path, shard_tokens=50,
                  progress=False)  # fmt: skip
    recorded = corpus_triggers(model, open_activations(tmp_path), k=5, skip=1, followed=True, batch_tokens=size)
    live = corpus_triggers(model, [padded.select(slice(i, i + 9)) for i in range(0, 40, 9)], k=5, skip=1, followed=True)
    for name in NAMES:
        assert torch.equal(getattr(recorded, name), getattr(live, name)), name
    assert recorded.sentences == live.sentences and torch.equal(recorded.next_counts, live.next_counts)
    assert (
        (recorded.examples, recorded.positions)
        == (live.examples, live.positions)
        == (40, sum(len(s) - 2 for s in sentences if len(s) > 2))
    )


def test_going_on_from_an_earlier_result_is_the_same_as_one_search(model, sentences):
    whole = corpus_triggers(model, sentences, k=5, batch_tokens=1)
    half = corpus_triggers(model, sentences[:13], k=5, batch_tokens=1)
    both = corpus_triggers(model, sentences[13:], k=5, batch_tokens=1, previous=half)
    for name in NAMES:
        assert torch.equal(getattr(both, name), getattr(whole, name)), name
    assert (
        both.sentences == whole.sentences and both.examples == 40 and torch.equal(both.next_counts, whole.next_counts)
    )
    with pytest.raises(FFNError, match="previous has layers"):
        corpus_triggers(model, sentences, k=4, previous=half)


def test_only_what_is_listed_is_kept_and_what_follows_is_counted(model, sentences, monkeypatch):
    got = corpus_triggers(model, sentences, k=1)
    assert set(got.sentences) == set(got.example[got.example >= 0].tolist())
    counts = np.bincount([token for row in sentences for token in row[1:]], minlength=13)
    assert got.next_counts.tolist() == counts.tolist() and got.positions == sum(map(len, sentences))
    assert "40 sentences" in repr(got)
    most = []
    monkeypatch.setattr(triggers, "KEPT", 2)
    end = TriggerSearch._end
    monkeypatch.setattr(
        TriggerSearch, "_end", lambda self, inputs: (end(self, inputs), most.append(len(self.sentences)))[0]
    )
    corpus_triggers(model, sentences * 5, 0, k=1, batch_tokens=1)
    assert max(most) < 150 and len(most) == 200, "sentences that no neuron lists are forgotten on the way"


def test_a_pass_ends_at_the_last_layer_asked_for_and_none_holds_two_layers(model, sentences, monkeypatch):
    reached = []
    merge = TriggerSearch._merge
    monkeypatch.setattr(TriggerSearch, "_merge", lambda self, i, act: (reached.append(i), merge(self, i, act))[1])
    monkeypatch.setattr(type(model), "unembed", lambda *a, **k: pytest.fail("the head ran"))
    got = corpus_triggers(model, sentences, [0], k=2, batch_tokens=10_000)
    assert reached == [0] and got.layers == (0,)
    with pytest.raises(NeuronError, match=r"layer=1 .* allowed: 0"):
        got.table(1)


def test_silent_neurons_and_short_corpora_have_no_row(plain):
    got = corpus_triggers(plain, [[1, 2], [3]], k=4)
    assert (
        (got.example[..., 2:] == -1).all()
        and (got.coefficient[..., 2:] == 0).all()
        and (got.token[..., 2:] == -1).all()
    )
    assert ((got.example >= 0) == (got.coefficient > 0)).all()


@pytest.mark.parametrize(
    ("corpus", "choices", "message"),
    [
        ([], {}, "no sentence"),
        (7, {}, "corpus is a int"),
        ([[1, 2]], {"k": 0}, "k=0"),
        ([[1, 2]], {"skip": -1}, "skip=-1"),
        ([[1, 2]], {"layers": [0, 5]}, r"layers=\[0, 5\]"),
        ([[1, 2]], {"batch_tokens": 0}, "batch_tokens=0"),
        ([[1.5, 2.5]], {}, "must be ints"),
        ([[]], {}, "at least one"),
        ([[1, 99]], {}, "99 is outside the vocabulary"),
    ],
)
def test_bad_input_is_refused_by_name(model, corpus, choices, message):
    with pytest.raises(ValueError, match=message):
        corpus_triggers(model, corpus, **choices)


def test_triggers_come_back_from_a_file(tmp_path):
    import interp
    from interp.analyses.triggers import Triggers

    model, task = interp.shipped()
    found = interp.corpus_triggers(model, task.splits["held_out"].inputs.select(torch.arange(40)), k=3)
    path = found.save(tmp_path / "triggers.safetensors")
    again = Triggers.load(path)
    assert again.sentences == dict(found.sentences) and (again.layers, again.signs) == (found.layers, found.signs)
    pd.testing.assert_frame_equal(again.table(1, [3, 7], task.vocabulary), found.table(1, [3, 7], task.vocabulary))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(NeuronError, match=r"is truncated, or no file that Triggers\.save wrote"):
        Triggers.load(path)
