"""Fact sets: roles where they should be, pairs that can be patched, splits that do not leak."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from interp.tasks import FactSet, ToyFacts, replacement_pairs
from interp.tasks.facts import FactsError, locate
from interp.tasks.task import TaskError
from interp.tokens import Vocabulary


@pytest.fixture(scope="module")
def task():
    return ToyFacts(40, seed=3)


class Letters:
    """One token per letter, spaces attached to the letter after them."""

    def ids(self, text):
        return [ord(c) for c in text if c != " "]

    def text(self, token):
        return chr(token)


def test_roles_are_found_for_any_tokenizer():
    ids, places = locate("The capital of {subject} is", "Peru", "capital", Letters())
    text = "ThecapitalofPeruis"
    assert "".join(chr(i) for i in ids) == text
    assert places == [text.index("P"), text.index("P") + 3, text.index("capital") + 6, len(text) - 1]
    _, after = locate("{subject} has the capital", "Peru", "capital", Letters())
    assert after == [0, 3, 16, 16]


def test_a_part_that_is_no_token_boundary_is_refused():
    class Merging(Letters):
        def ids(self, text):
            return [1] if text == "ab" else [ord(c) for c in text]

    with pytest.raises(FactsError, match="token boundary"):
        locate("a{subject}", "b", "a", Merging())
    with pytest.raises(FactsError, match="cue 'town'"):
        locate("the capital of {subject}", "x", "town", Letters())


def test_a_cue_is_a_word_and_other_braces_are_text():
    _, places = locate("this {subject} is {x}", "Peru", "is", Letters())
    assert places[2] == len("thisPeruis") - 1
    with pytest.raises(FactsError, match="not a word"):
        locate("{subject} is", "Peru", "subject", Letters())


def test_the_prefix_shifts_every_role():
    facts = FactSet(pd.DataFrame([("r", "a b", "c")], columns=["relation", "subject", "object"]),
                    pd.DataFrame([("r", "{subject} r is", "r")], columns=["relation", "template", "cue"]))  # fmt: skip
    words = Vocabulary(["<s>", "a", "b", "c", "r", "is"])
    plain, shifted = facts.prompts(words), facts.prompts(words, prefix=[0, 0])
    assert shifted.inputs.tokens.tolist() == [[0, 0, 1, 2, 4, 5]]
    for role, place in plain.inputs.roles.items():
        assert torch.equal(shifted.inputs.roles[role], place + 2)


def test_every_toy_prompt_says_what_its_row_says(task):
    words, inputs = task.vocabulary, task.prompts.inputs
    for row in range(0, len(task.prompts), 7):
        about = task.prompts.table.iloc[row]
        tokens = [words.text(i) for i in inputs.tokens[row].tolist()]
        assert " ".join(tokens) == about["prompt"] and words.text(int(task.prompts.answers[row])) == about["object"]
        first, last = about["subject"].split()
        assert tokens[inputs.roles["subject"][row]] == first and tokens[inputs.roles["subject_last"][row]] == last
        assert tokens[inputs.roles["relation"][row]] == about["relation"] and inputs.roles["final"][row] == 5


def test_one_template_per_fact_is_held_out_and_never_trained(task):
    train, held = task.splits["train"], task.splits["held_out"]
    assert len(train) == 3 * 160 and len(held) == 160
    assert not set(train.table["prompt"]) & set(held.table["prompt"])
    assert held.table.groupby("fact").size().eq(1).all() and set(held.table["template"]) == {0, 1, 2, 3}
    seen = {tuple(row) for step in range(40) for row in task.batch(step, 32, 0).inputs.tokens.tolist()}
    assert not seen & {tuple(row) for row in held.inputs.tokens.tolist()}


def test_an_epoch_sees_every_prompt_once_and_batches_depend_on_step_and_seed_alone(task):
    rows = [tuple(row) for step in range(15) for row in task.batch(step, 32, 5).inputs.tokens.tolist()]
    assert len(rows) == 480 and len(set(rows)) == 480
    again = ToyFacts(40, seed=3).batch(17, 32, 5)
    assert torch.equal(task.batch(17, 32, 5).inputs.tokens, again.inputs.tokens)
    assert not torch.equal(again.inputs.tokens, task.batch(17, 32, 6).inputs.tokens)


def test_no_name_token_gives_a_fact_away():
    task = ToyFacts()
    facts = task.facts.facts
    assert len(facts) == 2048 and facts.groupby("relation")["object"].nunique().eq(32).all()
    first = facts["subject"].str.split().str[0]
    assert facts.groupby([first, "relation"])["object"].nunique().median() > 4


def test_pairs_share_everything_but_subject_and_answer(task):
    pairs = replacement_pairs(task.prompts, seed=1)
    assert len(pairs) > 0.95 * len(task.prompts)
    assert (pairs.correct != pairs.wrong).all()
    for role in pairs.clean.roles:
        assert torch.equal(pairs.clean.roles[role], pairs.corrupted.roles[role])
    differ = pairs.clean.tokens != pairs.corrupted.tokens
    names = torch.zeros_like(differ)
    rows = torch.arange(len(pairs))
    for role in ("subject", "subject_last"):
        names[rows, pairs.clean.roles[role]] = True
    assert differ.any(1).all() and not (differ & ~names).any()
    assert torch.equal(pairs.correct, replacement_pairs(task.prompts, seed=1).correct)
    assert not torch.equal(pairs.wrong, replacement_pairs(task.prompts, seed=2).wrong)


def test_refusals(task):
    with pytest.raises(TaskError, match="n_subjects=1 is not allowed; allowed: 2 … 4096"):
        ToyFacts(1)
    with pytest.raises(FactsError, match="no template for relation 'x'"):
        FactSet(pd.DataFrame([("x", "a", "b")], columns=["relation", "subject", "object"]), task.facts.templates)
    with pytest.raises(FactsError, match="lacks column"):
        FactSet(pd.DataFrame({"relation": []}), task.facts.templates)
    with pytest.raises(FactsError, match="has a partner"):
        replacement_pairs(task.prompts.select([0]))
