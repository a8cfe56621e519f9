"""What a model knows: ranks, whole answers, paraphrases and neighbours, against a model whose answers are planted."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from interp import Inputs, ModelConfig, Site, Transformer
from interp.tasks import FactSet, ToyFacts
from interp.tasks.fact_checks import answer_nats, answer_scores, attribute_sets, known_facts, neighbours, paraphrases
from interp.tasks.facts import FactsError, Prompts
from interp.tokens import Vocabulary

WORDS = Vocabulary("<s> Ann Bob Cid Dee likes eats tea red wine old rye the drink of is".split())  # noqa: SIM905
TRUE = [("drink", "Ann", "tea"), ("drink", "Bob", "red wine"), ("drink", "Cid", "tea"), ("drink", "Dee", "old rye")]
FORMS = [
    ("drink", "{subject} likes", "likes"),
    ("drink", "the drink of {subject} is", "drink"),
    ("food", "{subject} eats", "eats"),
]
FACTS = FactSet(
    pd.DataFrame([*TRUE, ("food", "Ann", "rye")], columns=["relation", "subject", "object"]),
    pd.DataFrame(FORMS, columns=["relation", "template", "cue"]),
)


class Planted:
    """A Hookable whose next token is a table's: logits [vocab] by (last token, the subject before it)."""

    sites = (Site("logits"),)
    config = SimpleNamespace(vocab=len(WORDS), n_layers=1, n_ctx=16, kind="decoder", n_segments=0)

    def __init__(self, knows: dict[tuple[str, ...], str]) -> None:
        self.knows = knows

    def weight(self, kind, layer=None, stack=None):
        return torch.zeros(1)

    def __call__(self, inputs: Inputs, tap=None) -> torch.Tensor:
        logits = torch.zeros(*inputs.tokens.shape, len(WORDS), dtype=torch.float64)
        logits[..., 0] = 1e-9  # what is not known is answered "<s>"
        for i, row in enumerate(inputs.tokens.tolist()):
            for j in range(len(row)):
                seen = tuple(WORDS.text(one) for one in row[: j + 1])
                said = self.knows.get(seen)
                if said is not None:
                    logits[i, j, WORDS.ids(said)[0]] = math.log(3 * (len(WORDS) - 1))  # probability 3/4
        return logits


@pytest.fixture
def model():
    return Planted({("Ann", "likes"): "tea", ("the", "drink", "of", "Ann", "is"): "tea", ("Bob", "likes"): "red",
                    ("Bob", "likes", "red"): "wine", ("Cid", "likes"): "wine", ("Ann", "eats"): "rye"})  # fmt: skip


def test_prompts_hold_whole_answers():
    prompts = FACTS.prompts(WORDS)
    assert [" ".join(map(WORDS.text, ids)) for ids in prompts.answer_ids] == prompts.table["object"].tolist()
    assert [ids[0] for ids in prompts.answer_ids] == prompts.answers.tolist()
    some = prompts.select([3, 0])
    assert some.answer_ids == (prompts.answer_ids[3], prompts.answer_ids[0])
    assert Prompts(prompts.inputs, prompts.answers, prompts.table).select([1]).answer_ids == ()


def test_what_a_model_knows(model):
    known = known_facts(model, FACTS, WORDS)
    assert (known.n, known.n_known, known.excluded) == (5, 3, 2)
    scores = known.scores.set_index(["subject", "relation", "template"])
    assert scores.loc[("Ann", "drink", 0), "rank"] == 0 and scores.loc[
        ("Ann", "drink", 0), "probability"
    ] == pytest.approx(0.75)
    assert scores.loc[("Cid", "drink", 0), "rank"] == 2 and not scores.loc[("Cid", "drink", 0), "right"]
    assert (
        scores.loc[("Bob", "drink", 0), "answer_probability"] == pytest.approx(0.75)
        and scores.loc[("Bob", "drink", 0), "tokens"] == 2
    )
    rest = 0.25 / (len(WORDS) - 1)
    assert scores.loc[("Cid", "drink", 0), "answer_probability"] == pytest.approx(rest)
    assert scores.loc[("Dee", "drink", 0), "answer_probability"] == pytest.approx(1 / len(WORDS))
    assert set(known.facts.facts["subject"]) == {"Ann", "Bob"} and "fact" not in known.facts.facts.columns
    assert known.right_prompts().table["prompt"].tolist() == [
        "Ann likes",
        "the drink of Ann is",
        "Bob likes",
        "Ann eats",
    ]
    assert known.by_relation().to_dict("records")[0] == {
        "relation": "drink",
        "n": 4,
        "known": 2,
        "excluded": 2,
        "right": 0.375,
    }
    assert len(known.facts.prompts(WORDS)) == 5


def test_more_templates_fewer_facts(model):
    assert known_facts(model, FACTS, WORDS, min_right=2).n_known == 1
    one = known_facts(model, FACTS.prompts(WORDS), templates=[0], rank=1)
    assert set(one.scores["template"]) == {0} and one.facts.templates["template"].tolist() == [
        "{subject} likes",
        "{subject} eats",
    ]
    assert one.n_known == 4  # all but Cid's tea, which has rank 2


def test_a_prefix_shifts_nothing_but_positions():
    task = ToyFacts(6, seed=1)
    config = ModelConfig(vocab=len(task.vocabulary), n_layers=1, n_heads=2, d_model=8, n_ctx=12)
    model = Transformer(config, seed=0).double().eval()
    prompts = task.facts.prompts(task.vocabulary, prefix=[5])
    with torch.no_grad():
        logits = model(prompts.inputs)[:, -1]
    scores = answer_scores(model, prompts, batch=7)
    chance = logits.softmax(-1)[torch.arange(len(prompts)), prompts.answers]
    assert np.allclose(scores["probability"], chance) and np.allclose(scores["answer_probability"], chance)
    assert (scores["rank"] == (logits > logits.gather(1, prompts.answers[:, None])).sum(1).numpy()).all()


def test_answers_of_several_tokens_in_padded_batches():
    config = ModelConfig(vocab=11, n_layers=2, n_heads=2, d_model=8, n_ctx=12, positions="rotary")
    model = Transformer(config, seed=0).double().eval()
    rows = [[1, 2, 3], [4, 5, 6, 7, 8]]
    answers = [(9, 10, 1), (2,)]
    padded = Inputs(
        torch.tensor([[*rows[0], 0, 0], rows[1]]), mask=torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    )
    found = answer_nats(model, padded, answers)
    for row, answer, nats in zip(rows, answers, found, strict=True):
        for i, token in enumerate(answer):
            with torch.no_grad():
                logits = model(Inputs(torch.tensor([[*row, *answer[:i]]])))[0, -1]
            assert float(nats[i]) == pytest.approx(float(torch.logsumexp(logits, 0) - logits[token]), abs=1e-12)
    with pytest.raises(FactsError, match="at least one token id for each of 2"):
        answer_nats(model, padded, [(1,)])


def test_paraphrases_and_neighbours():
    prompts = FACTS.prompts(WORDS)
    row = prompts.table.index[prompts.table["prompt"] == "Ann likes"][0]
    assert paraphrases(prompts, row).table["prompt"].tolist() == ["the drink of Ann is"]
    assert neighbours(prompts, row).table["prompt"].tolist() == ["Cid likes"]
    assert neighbours(prompts, row, "other").table["prompt"].tolist() == ["Bob likes", "Dee likes"]
    assert len(neighbours(prompts, row, "other", n=1, seed=3)) == 1
    eats = prompts.table.index[prompts.table["prompt"] == "Ann eats"][0]
    with pytest.raises(FactsError, match="has no other template"):
        paraphrases(prompts, eats)
    with pytest.raises(FactsError, match="no other subject has the relation 'food'"):
        neighbours(prompts, eats)


def test_attribute_sets():
    ids = WORDS.ids
    assert attribute_sets(FACTS, WORDS)["Ann"] == tuple(ids("tea rye"))
    assert attribute_sets(FACTS, WORDS)["Bob"] == tuple(ids("red")) and attribute_sets(FACTS, WORDS, whole=True)[
        "Bob"
    ] == tuple(ids("red wine"))


def test_refusals(model):
    with pytest.raises(FactsError, match="tokenizer=None"):
        known_facts(model, FACTS)
    with pytest.raises(FactsError, match="min_right=0"):
        known_facts(model, FACTS, WORDS, min_right=0)
    with pytest.raises(FactsError, match="templates=\\[7\\] is not allowed; allowed: \\[0, 1\\]"):
        known_facts(model, FACTS, WORDS, templates=[7])
    prompts = FACTS.prompts(WORDS)
    with pytest.raises(FactsError, match="row=99 is not allowed"):
        paraphrases(prompts, 99)
    with pytest.raises(FactsError, match="objects='near'"):
        neighbours(prompts, 0, "near")  # type: ignore[arg-type]
