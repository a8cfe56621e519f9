"""Cards say what the tables say, escaped, in HTML that needs nothing else."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from interp import ffn_values, run
from interp.analyses.ffn_memory import NeuronError
from interp.analyses.neuron_cards import cards_page, neuron_card, visible
from interp.analyses.triggers import corpus_triggers

WORDS = ["<s>", "&amp;", '"', "'", " the", "\n", "\t", " <b>x</b>", "$", "é", "日", " ", "a"]


@pytest.fixture(scope="module")
def corpus() -> list[list[int]]:
    draw = np.random.default_rng(2)
    return [draw.integers(0, 13, draw.integers(3, 15)).tolist() for _ in range(30)]


@pytest.fixture(scope="module")
def triggers(model, corpus):
    return corpus_triggers(model, corpus, k=5)


class Reader(HTMLParser):
    """Tags must nest; texts are kept by the class of the innermost element."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.texts = [], {}

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append((tag, dict(attrs).get("class")))
        assert not {name for name, _ in attrs} & {"src", "href", "onclick"}

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1][1] if self.open else None, []).append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open, "an element is left open"
    return reader


def test_a_card_holds_what_the_model_says(model, corpus, triggers):
    card = neuron_card(model, 1, 7, triggers, WORDS, n=3, k=4)
    value, gate, up = (model.weight(name, 1).detach().numpy() for name in ("W_out", "W_gate", "W_in"))
    lengths = {"gate": gate[:, 7], "up": up[:, 7], "value": value[7]}
    assert card.norms == pytest.approx({name: np.sqrt((vector**2).sum()) for name, vector in lengths.items()})
    expected = triggers.table(1, [7], WORDS, k=3)
    assert card.triggers["coefficient"].tolist() == expected["coefficient"].tolist() and len(expected) == 6
    for example, rows in card.tokens.groupby("example"):
        act = run(model, torch.tensor([corpus[example]]), record="1.ffn_act").cache["1.ffn_act"][0, :, 7]
        assert np.allclose(rows["coefficient"], act.numpy(), atol=1e-12) and rows["token"].tolist() == corpus[example]
    for sign in (1, -1):
        assert (
            card.values[card.values["sign"] == sign]["token"].tolist()
            == ffn_values(model, 1, [7], 4, sign)["token"].tolist()
        )


def test_html_is_escaped_nests_and_needs_nothing_else(model, triggers):
    card = neuron_card(model, 0, 3, triggers, WORDS)
    html = card.html()
    assert html == card._repr_html_() and html.startswith("<style>") and "<b>" not in html and "http" not in html
    reader = read(html)
    peaks = reader.texts["t peak"]
    assert peaks == [text for sign in (1, -1) for text in card.triggers[card.triggers["sign"] == sign]["text"]]
    chips = [text for text in reader.texts[None] if text in map(visible, WORDS)]
    assert len(chips) >= 4 * 10
    page = cards_page([card, neuron_card(model, 1, 4, triggers, WORDS)], "<two> neurons", "a & b")
    assert page.count("<style>") == 1 and page.count("<article") == 2 and "width=device-width" in page
    assert "<two>" not in page and "a &amp; b" in page
    read(page.removeprefix("<!doctype html>"))


def test_the_colour_is_the_coefficient(model, triggers):
    card = neuron_card(model, 0, 3, triggers, WORDS, n=1)
    html = card.html(style=False)
    assert html.count("0.60") >= 1, "the strongest token has the strongest colour"
    assert "rgba(27,108,168" in html and "rgba(209,73,91" in html


def test_text_shows_both_signs(model, triggers):
    said = repr(neuron_card(model, 0, 3, triggers, WORDS, n=2))
    assert (
        said.startswith("neuron 0.3")
        and said.count("[") >= 4
        and "promotes (−v)" in said
        and len(said.splitlines()) == 7
    )


def test_toy_words_and_ids_stand_apart(model, triggers):
    card = neuron_card(model, 0, 3, triggers, n=1)
    peak = card.triggers.iloc[0]
    said = card.tokens[card.tokens["example"] == peak["example"]]["text"].tolist()
    said[peak["position"]] = f"[{peak['text']}]"
    assert repr(" ".join(said)) in repr(card) and "</span> <span" in card.html()
    assert "</span> <span" not in neuron_card(model, 0, 3, triggers, WORDS, n=1).html(), "these bring their own spaces"


def test_long_sentences_are_cut_around_the_trigger(model, monkeypatch):
    import interp.analyses.neuron_cards as cards

    monkeypatch.setattr(cards, "BEFORE", 1)
    monkeypatch.setattr(cards, "AFTER", 1)
    triggers = corpus_triggers(model, [[0, 1, 2, 3, 4, 5, 6, 7]], 0, k=1)
    card = neuron_card(model, 0, 3, triggers)
    for row in card.triggers.to_dict("records"):
        shown = card._sentence(row)
        assert shown.count("<span") == 1 + (row["position"] > 0) + (row["position"] < 7)
        assert shown.startswith("…") == (row["position"] > 1) and shown.endswith("…") == (row["position"] < 6)


def test_a_silent_neuron_has_a_card(model, triggers):
    import dataclasses

    silent = dataclasses.replace(
        triggers, example=triggers.example.clone().fill_(-1), coefficient=triggers.coefficient * 0
    )
    card = neuron_card(model, 0, 3, silent, WORDS)
    assert card.signs == [1] and "no sentence sets it off" in card.html() and repr(card).startswith("neuron 0.3")


@pytest.mark.parametrize(("layer", "neuron"), [(5, 0), (0, 43), (0, -1)])
def test_what_is_not_there_is_refused(model, triggers, layer, neuron):
    with pytest.raises(NeuronError, match="allowed: "):
        neuron_card(model, layer, neuron, triggers)


def test_invisible_characters_are_shown():
    assert [visible(text) for text in (" the", "\n", "", "  ", "a ")] == ["␣the", "⏎", "∅", "␣␣", "a␣"]
