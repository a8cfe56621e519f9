"""The table of true facts that ships: whole, unambiguous, sourced, and in step with what was measured from it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from interp.tasks.facts import DATA, FactsError, real_facts

RECALL = Path(__file__).parents[2] / "experiments" / "facts_table" / "recall.csv"
SPOT = {
    "capital": {"France": "Paris", "Australia": "Canberra", "Canada": "Ottawa", "Turkey": "Ankara", "Nigeria": "Abuja",
                "Brazil": "Brasilia", "Pakistan": "Islamabad", "Switzerland": "Bern", "New Zealand": "Wellington"},
    "language": {"Brazil": "Portuguese", "Austria": "German", "Iran": "Persian", "Moldova": "Romanian"},
    "continent": {"Chile": "South America", "Mexico": "North America", "Mongolia": "Asia", "Chad": "Africa"},
    "country_of_city": {"Toronto": "Canada", "Mumbai": "India", "Casablanca": "Morocco", "Osaka": "Japan"},
    "symbol": {"gold": "Au", "sodium": "Na", "tungsten": "W", "iron": "Fe", "lead": "Pb", "potassium": "K"},
}  # fmt: skip


@pytest.fixture(scope="module")
def facts() -> pd.DataFrame:
    return pd.read_csv(DATA / "real_facts.csv", keep_default_na=False)


@pytest.fixture(scope="module")
def templates() -> pd.DataFrame:
    return pd.read_csv(DATA / "real_templates.csv", keep_default_na=False)


@pytest.fixture(scope="module")
def recall() -> pd.DataFrame:
    return pd.read_csv(DATA / "real_recall.csv", keep_default_na=False)


def test_at_least_200_whole_and_distinct_facts(facts):
    assert list(facts.columns) == ["relation", "subject", "object", "source"]
    assert len(facts) >= 200 and facts["relation"].nunique() >= 5
    assert not (facts == "").any().any() and not facts.map(lambda cell: cell != cell.strip()).any().any()
    assert not facts.duplicated(["relation", "subject"]).any()  # one answer per question
    assert facts.groupby("relation").size().min() >= 40
    assert facts["source"].str.fullmatch(r"\w+ \d+\.\d+\.\d+ \(.+\)").all()  # package, version, licence


def test_order_is_deterministic(facts):
    blocks = facts["relation"].ne(facts["relation"].shift()).sum()
    assert blocks == facts["relation"].nunique()  # one block per relation, subjects in order inside
    for _, rows in facts.groupby("relation"):
        assert rows["subject"].is_monotonic_increasing


@pytest.mark.parametrize("relation", SPOT)
def test_known_answers(facts, relation):
    found = facts[facts["relation"] == relation].set_index("subject")["object"]
    assert {subject: found.get(subject) for subject in SPOT[relation]} == SPOT[relation]


def test_disputed_outdated_and_copyable_answers_are_left_out(facts):
    capitals = facts[facts["relation"] == "capital"]
    left_out = {"Israel", "South Africa", "Bolivia", "Kazakhstan", "Burundi", "Sri Lanka", "Singapore", "Luxembourg"}
    assert not left_out & set(capitals["subject"])
    assert not {"Swaziland", "Taiwan", "Serbia and Montenegro", "Burma", "Macedonia"} & set(facts["subject"])
    assert not {"Russia", "Turkey", "Egypt", "Kazakhstan"} & set(facts[facts["relation"] == "continent"]["subject"])
    copied = [row for row in facts.itertuples() if set(str(row.object).split()) & set(str(row.subject).split())]
    assert copied == []
    pairs = facts.set_index(["relation", "subject"])["object"]
    cities = facts[facts["relation"] == "country_of_city"]
    for capital, country in zip(capitals["object"], capitals["subject"], strict=True):
        if capital in set(cities["subject"]):  # two packages, one world
            assert pairs["country_of_city", capital] == country


def test_templates_and_cues(facts, templates):
    assert list(templates.columns) == ["relation", "template", "cue"]
    assert set(templates["relation"]) == set(facts["relation"])
    for row in templates.itertuples():
        assert str(row.template).count("{subject}") == 1 and str(row.cue) in str(row.template)
        assert not str(row.template).endswith((" ", "."))  # the answer comes next, after a space
    assert not templates.duplicated("template").any()


def test_loading(facts):
    assert len(real_facts().facts) == len(facts)
    some = real_facts(["symbol", "capital"], templates=1)
    assert set(some.facts["relation"]) == {"symbol", "capital"} and len(some.templates) == 2
    with pytest.raises(FactsError, match="unknown relation 'colour'; allowed: capital"):
        real_facts(["colour"])


def test_measured_recall_belongs_to_this_table(facts, templates, recall):
    asked = recall.merge(facts, on=["relation", "subject", "object"])
    assert len(asked) == len(recall)  # no fact that is no longer in the table
    counts = templates.groupby("relation").size()
    first = recall[recall["template"] == 0]
    assert set(zip(first["relation"], first["subject"], strict=True)) == set(
        zip(facts["relation"], facts["subject"], strict=True)
    )
    assert (recall["template"] < recall["relation"].map(counts)).all() and (recall["template"] >= 0).all()
    assert (recall["rank"] >= 0).all() and recall["probability"].between(0, 1).all()
    assert (recall.loc[recall["probability"] > 0.5, "rank"] == 0).all()


def test_the_summary_is_that_of_the_measurements(templates, recall):
    summary = pd.read_csv(RECALL, dtype={"prefix": str}, keep_default_na=False)
    assert set(summary["prefix"]) == {"0", "none"}
    forms = templates.assign(number=templates.groupby("relation").cumcount())
    shares = summary[summary["prefix"] == "0"].merge(
        forms, left_on=["relation", "template_text"], right_on=["relation", "template"], validate="1:1"
    )
    assert len(shares) == len(templates)
    for row in shares.itertuples():
        ranks = recall[(recall["relation"] == row.relation) & (recall["template"] == row.number)]["rank"]
        assert len(ranks) == row.n
        assert (ranks < 1).mean() == pytest.approx(row.top1, abs=6e-4)
        assert (ranks < 5).mean() == pytest.approx(row.top5, abs=6e-4)
    best = shares.sort_values("number").groupby("relation")["top1"].first()
    assert (best == shares.groupby("relation")["top1"].max()).all()  # the first template is the best one
    assert best.mean() > 0.6
