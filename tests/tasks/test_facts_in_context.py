"""Facts in context: prompts read as words by a slow parser; nothing but the asked statement tells the answer."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from interp.tasks import FactsInContext, TaskError, ToyFacts, replacement_pairs
from interp.tasks.facts import ROLES, locate
from interp.tasks.facts_in_context import SHORT
from interp.tasks.toy_facts import TEMPLATES, VALUES

TASK = FactsInContext()


def parse(tokens, n_facts=4):
    """(statement per (subject, relation): its index and value; the question's subject, relation, template), from words."""
    words = [TASK.vocabulary.text(token) for token in tokens]
    statements = {}
    for i in range(n_facts):
        first, last, relation, value = words[4 * i : 4 * i + 4]
        assert value in VALUES[relation]
        assert (f"{first} {last}", relation) not in statements, words
        statements[f"{first} {last}", relation] = (i, value)
    question = " ".join(words[4 * n_facts :])
    found = []
    for number, form in enumerate(TEMPLATES):
        pattern = form.replace("{subject}", r"(?P<subject>\w+ \w+)").replace("RELATION", r"(?P<relation>\w+)")
        match = re.fullmatch(pattern, question)
        if match and match["relation"] in VALUES:
            found.append((match["subject"], match["relation"], number))
    assert len(found) == 1, question
    return statements, found[0]


@pytest.mark.parametrize("step", [0, 699, 700, 1100, 1200])
def test_a_drill_asks_names_for_their_value(step):
    batch = TASK.batch(step, 50, 1)
    vocabulary, used, asked = TASK.vocabulary, set(), Counter()
    for row, tokens in enumerate(batch.inputs.tokens.tolist()):
        words = [vocabulary.text(token) for token in tokens]
        facts = [words[4 * i : 4 * i + 4] for i in range(4)]
        assert len({f[0] for f in facts}) == len({f[1] for f in facts}) == 4 and len({f[2] for f in facts}) == 1
        used |= {(kind, word) for fact in facts for kind, word in enumerate(fact)}
        for position, target in zip(batch.positions[row].tolist(), batch.targets[row].tolist(), strict=True):
            kinds = [(kind, fact[3]) for fact in facts for kind in (0, 1) if fact[kind] == words[position]]
            if position == len(words) - 1:  # the question in a template
                [kinds] = [[(2, f[3])] for f in facts if f"{f[0]} {f[1]}" in " ".join(words[16 + SHORT :])]
            assert vocabulary.text(target) == kinds[0][1]
            asked[kinds[0][0]] += 1
    assert asked[2] == 50 and asked[0] + asked[1] == 50 * SHORT and (asked[0] > 0) == (step >= 700)
    names, relations = (len({word for kind, word in used if kind == k}) for k in (1, 2))
    assert (names <= 16) == (step < 700) and (relations == 1) == (step < 1000)


def test_with_two_people_the_last_name_is_enough():
    batch = TASK.batch(1202, 50, 1)
    for tokens in batch.inputs.tokens.tolist():
        statements, _ = parse(tokens, 4)
        people, relations = {s for s, _ in statements}, {r for _, r in statements}
        assert len(people) == len(relations) == 2 and len({name.split()[1] for name in people}) == 2


@pytest.mark.parametrize("n_facts", [2, 4, 8])
def test_the_answer_and_the_roles_are_those_that_a_reader_finds(n_facts):
    task = FactsInContext(n_facts)
    batch = task.batch(1201, 200, 1)
    kinds = Counter()
    for row, tokens in enumerate(batch.inputs.tokens.tolist()):
        statements, (subject, relation, template) = parse(tokens, n_facts)
        index, value = statements[subject, relation]
        assert task.vocabulary.text(int(batch.targets[row, 0])) == value
        assert len({value for _, value in statements.values()}) == n_facts
        names, relations = {s for s, _ in statements}, {r for _, r in statements}
        assert len({name.split()[0] for name in names}) <= 2 and len({name.split()[1] for name in names}) <= 2
        assert len(relations) <= 2
        form = TEMPLATES[template].replace("RELATION", relation)
        places = [4 * n_facts + place for place in locate(form, subject, relation, task.vocabulary)[1]]
        stated = [4 * index + i for i in range(4)]
        names = (*ROLES, "stated_subject", "stated_subject_last", "stated_relation", "stated_value")
        assert [int(batch.inputs.roles[name][row]) for name in names] == [*places, *stated]
        assert batch.positions[row].tolist() == [len(tokens) - 1] == [places[-1]]
        kinds[template, index] += 1
    assert len(kinds) == 4 * n_facts  # every template, every place


def test_words_and_questions_are_those_of_the_facts_task():
    assert TASK.vocabulary.words == ToyFacts(7, seed=3).vocabulary.words
    whole = ToyFacts(4096).facts.templates
    forms = {row.template: row.relation for row in whole.itertuples()}
    for row in TASK.splits["held_out"].select(range(50)).table.itertuples():
        question = " ".join(row.prompt.split()[16:])
        assert forms[question.replace(row.subject, "{subject}")] == row.relation
        statements, asked = parse(TASK.vocabulary.ids(row.prompt))
        assert asked == (row.subject, row.relation, row.template) and statements[asked[:2]][1] == row.object


def test_nothing_can_be_known_without_context_or_without_question():
    drawn = TASK.draw(20_000, torch.Generator().manual_seed(0))
    value, first = drawn.of_asked(drawn.value), drawn.of_asked(drawn.first)
    counts = torch.bincount(32 * (first % 2) + value, minlength=64).double()
    expected = 20_000 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * (2 * 63) ** 0.5  # four sd of chi-squared
    rows = torch.arange(20_000)
    for part in (drawn.first, drawn.last, drawn.relation):  # an asked fact is no more like the others than these are
        alike = (part[:, :, None] == part[:, None, :]).double().sum(2)
        excess = alike[rows, drawn.asked] - alike.mean(1)
        assert excess.mean().abs() < 4 * excess.std() / 20_000**0.5
    alone = [(part == drawn.of_asked(part)[:, None]).sum(1) for part in (drawn.first, drawn.last, drawn.relation)]
    assert all((count > 1).double().mean() > 0.85 for count in alone)  # no one of the three is enough


def test_pairs_about_another_person_share_the_context():
    for seed, task in enumerate((FactsInContext(), FactsInContext(2), FactsInContext(8))):
        pairs = task.pairs(50, seed=seed, differ="subject")
        assert len(pairs) == 50 and torch.equal(pairs.clean.tokens[:, :-6], pairs.corrupted.tokens[:, :-6])
        for row in range(50):
            sides = [parse(inputs.tokens[row].tolist(), task.n_facts) for inputs in (pairs.clean, pairs.corrupted)]
            (statements, clean), (_, corrupted) = sides
            assert clean[0] != corrupted[0] and clean[1:] == corrupted[1:]
            answers = [statements[asked[:2]][1] for asked in (clean, corrupted)]
            assert (
                answers
                == task.vocabulary.text(int(pairs.correct[row])).split()
                + task.vocabulary.text(int(pairs.wrong[row])).split()
            )
            assert answers == [pairs.table["object"][row], pairs.table["corrupted_object"][row]]


def test_pairs_with_another_value_state_it():
    pairs = TASK.pairs(50, seed=5)
    for inputs, answers in ((pairs.clean, pairs.correct), (pairs.corrupted, pairs.wrong)):
        for tokens, answer in zip(inputs.tokens.tolist(), answers.tolist(), strict=True):
            statements, asked = parse(tokens)
            assert statements[asked[:2]][1] == TASK.vocabulary.text(answer)
            assert len({value for _, value in statements.values()}) == 4


def test_what_reads_fact_prompts_reads_these():
    prompts = TASK.splits["held_out"]
    assert len(prompts) == 2048 and len(replacement_pairs(prompts.select(range(300)))) > 250
    assert torch.equal(TASK.evaluation["held_out"].targets[:, 0], prompts.answers)


def test_options_out_of_range_are_refused():
    for n_facts in (1, 9):
        with pytest.raises(TaskError, match=f"n_facts={n_facts} is not allowed; allowed: 2 … 8"):
            FactsInContext(n_facts)
    with pytest.raises(TaskError, match="differ='name' is not allowed; allowed: 'value', 'subject'"):
        TASK.pairs(3, differ="name")  # type: ignore[arg-type]
