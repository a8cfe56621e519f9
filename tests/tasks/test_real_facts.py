"""Every shipped fact in every shipped template: each role stands on the tokens it names. No weights needed.

What the table itself must hold is tested in tests/test_real_facts.py.
"""

from __future__ import annotations

import re

import pytest

from interp.tasks.facts import FactSet, real_facts


class Words:
    """A tokenizer of words and punctuation marks, each with the space before it, as byte-pair tokenizers have it."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.index: dict[str, int] = {}

    def ids(self, text: str) -> list[int]:
        found = re.findall(r" ?\w+| ?[^\w\s]", text)
        assert "".join(found) == text  # nothing is lost, so a position stands for the same text
        for word in found:
            if word not in self.index:
                self.index[word] = len(self.words)
                self.words.append(word)
        return [self.index[word] for word in found]

    def text(self, token: int) -> str:
        return self.words[token]


@pytest.fixture(scope="module")
def facts() -> FactSet:
    return real_facts(templates=None)


def test_every_fact_is_located_in_every_template(facts):
    tokenizer = Words()
    prompts = facts.prompts(tokenizer)
    per_relation = facts.templates.groupby("relation").size()
    assert len(prompts) == facts.facts["relation"].map(per_relation).sum()
    cues = facts.templates.assign(number=facts.templates.groupby("relation").cumcount())
    cues = cues.set_index(["relation", "number"])["cue"]
    roles, last = prompts.inputs.roles, prompts.inputs.last()
    for i, row in enumerate(prompts.table.itertuples()):
        words = [tokenizer.text(token) for token in prompts.inputs.tokens[i].tolist()]
        first, end = int(roles["subject"][i]), int(roles["subject_last"][i])
        assert "".join(words[first : end + 1]).strip() == row.subject
        assert words[int(roles["relation"][i])].strip() == cues[row.relation, row.template]
        assert roles["final"][i] == last[i] and "".join(words[: int(last[i]) + 1]) == row.prompt
        assert tokenizer.text(int(prompts.answers[i])) == tokenizer.text(tokenizer.ids(" " + str(row.object))[0])


def test_a_cue_stands_once_in_its_template(facts):
    for row in facts.templates.itertuples():
        assert str(row.template).count(str(row.cue)) == 1


def test_a_prefix_shifts_every_role():
    tokenizer = Words()
    some = real_facts(["capital"], templates=None)
    assert set(some.facts["relation"]) == {"capital"}
    plain, shifted = some.prompts(tokenizer), some.prompts(tokenizer, prefix=[0])
    for role, place in plain.inputs.roles.items():
        assert (shifted.inputs.roles[role] == place + 1).all()
    assert (shifted.inputs.tokens[:, 0] == 0).all() and (shifted.answers == plain.answers).all()


def test_a_capital_template_leaves_tokens_between_subject_and_answer():
    prompts = real_facts(["capital"], templates=None).prompts(Words())
    after = prompts.inputs.roles["final"] - prompts.inputs.roles["subject_last"]
    assert int(after.max()) >= 4
