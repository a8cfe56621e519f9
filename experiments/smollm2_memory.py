"""The FFN of a real model as a key-value memory: experiments/results/smollm2_memory/{README.md, cards.html, tables, figures}.

    python experiments/smollm2_memory.py [--tokens 100000]        about a second per 90 tokens on one busy core

SmolLM2-135M reads English sentences from the docstrings of installed packages, each after `<|endoftext|>`. Every key's strongest
triggers over them, agreement with the values against two nulls (Geva 2021), what the dominant sub-updates write (Geva 2022)."""

from __future__ import annotations

import argparse
import ast
import random
import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import interp
from interp.analyses.memory_agreement import confident_values, memory_agreement, memory_pairs, values_promoting
from interp.analyses.neuron_cards import cards_page, neuron_card
from interp.analyses.subupdates import prediction_events, subupdate_shares
from interp.analyses.triggers import Triggers, corpus_triggers
from interp.bridges.smollm2 import SMOLLM2_PREFIX
from interp.plots.memory import agreement_curves, subupdate_curves
from interp.record import provenance as provenance_of
from interp.record import write_atomic, write_json, write_table, write_text
from interp.tokens import pad

RESULTS = Path(__file__).parent / "results" / "smollm2_memory"
SOURCES = ("scipy", "statsmodels", "networkx", "scikit-learn")
MODULES = {"scikit-learn": "sklearn"}
ASKED = (" Paris", " three", " because", " error", " matrix")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def sentences_of(package: str) -> Iterator[str]:
    """English sentences of a package's docstrings, in the order of its files; nothing of it is imported."""
    spec = find_spec(MODULES.get(package, package))
    assert spec is not None and spec.submodule_search_locations is not None, f"{package} is not installed"
    for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
        if "tests" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                    yield from filter(is_english, SENTENCE.split(" ".join(paragraph.split())))


def is_english(said: str) -> bool:
    """A whole sentence of 6 to 40 words that is neither code nor markup."""
    words = said.split()
    plain = sum(c.isalpha() or c in " ,.'-" for c in said) / max(len(said), 1)
    return 6 <= len(words) <= 40 and said[0].isupper() and said[-1] == "." and plain > 0.97 and "--" not in said


def corpus(tokenizer: Any, tokens: int, seed: int) -> tuple[list[list[int]], pd.DataFrame]:
    """Sentences as ids after the prefix, about `tokens` in all, shortest first (less padding); and where they are from."""
    found = {said: package for package in reversed(SOURCES) for said in sentences_of(package)}  # each sentence once
    order = sorted(found)
    random.Random(seed).shuffle(order)
    rows, used, total = [], [], 0
    for said in order:
        ids = [*SMOLLM2_PREFIX, *tokenizer.encode(said, add_special_tokens=False)]
        rows.append(ids)
        used.append(found[said])
        total += len(ids)
        if total >= tokens:
            break
    counts = pd.Series(used).value_counts()
    table = pd.DataFrame(
        {"package": counts.index, "version": [version(name) for name in counts.index], "sentences": counts.values}
    )
    return sorted(rows, key=len), table


class Costs:
    """Seconds of each step, and the process's peak memory when it ended (a peak only grows)."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def of(self, step: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        found = work()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.rows.append({"step": step, "seconds": time.perf_counter() - begun, "peak_gib": peak})
        print(f"{step}: {self.rows[-1]['seconds']:.0f} s, peak {peak:.2f} GiB", flush=True)
        return found


def event_positions(rows: list[list[int]], n: int, seed: int) -> tuple[interp.Inputs, torch.Tensor]:
    """`n` sentences and in each a random position after the prefix that a token follows (as Geva 2022 draws them)."""
    draw = random.Random(seed)
    chosen = sorted(draw.sample([row for row in rows if len(row) > 4], n), key=len)
    return pad(chosen), torch.tensor([draw.randrange(2, len(row) - 1) for row in chosen])


def chosen_neurons(pairs: pd.DataFrame, n: int, seed: int) -> list[tuple[int, int]]:
    """Half of the cards show agreeing keys of different layers, half are drawn at random from all neurons."""
    agree = pairs[pairs["agrees"]].sort_values("log_odds", ascending=False).drop_duplicates("layer").head(n // 2)
    rest = pairs.drop_duplicates(["layer", "neuron"]).sample(n - len(agree), random_state=seed)
    chosen = pd.concat([agree, rest]).sort_values(["layer", "neuron"])
    return list(zip(chosen["layer"].astype(int), chosen["neuron"].astype(int), strict=True))


def measure(asked: argparse.Namespace) -> tuple[dict[str, pd.DataFrame], str]:
    """Every table, and the page of cards."""
    costs, (model, tokenizer) = Costs(), interp.smollm2()
    rows, sources = costs.of("text", lambda: corpus(tokenizer, asked.tokens, asked.seed))
    triggers: Triggers = costs.of(
        "triggers of every neuron", lambda: corpus_triggers(model, rows, k=50, skip=1, followed=True)
    )
    tables = {"sources": sources.assign(tokens_read=triggers.positions, prefix=str(list(SMOLLM2_PREFIX)))}
    pairs = costs.of("keys beside values", lambda: memory_pairs(model, triggers, asked.norm, tokenizer))
    tables["agreement"] = costs.of(
        "agreement and nulls", lambda: memory_agreement(pairs, asked.permutations, asked.seed)
    )
    tables["confident"] = confident_values(pairs)
    tables["agreeing"] = pairs[pairs["agrees"]].reset_index(drop=True)
    inputs, places = event_positions(rows, asked.events, asked.seed)
    tables["shares"] = costs.of(
        "shares of sub-updates", lambda: subupdate_shares(model, inputs, position=places, norm=asked.norm)
    )
    tables["events"] = costs.of(
        "saturation and elimination",
        lambda: prediction_events(model, inputs, places, norm=asked.norm, tokenizer=tokenizer),
    )
    tables["promoting"] = costs.of("values promoting a token", lambda: pd.concat([
        values_promoting(model, token, None, 5, asked.norm, tokenizer, triggers) for token in ASKED
    ], ignore_index=True))  # fmt: skip
    cards = costs.of("cards", lambda: [
        neuron_card(model, layer, neuron, triggers, tokenizer, norm=asked.norm)
        for layer, neuron in chosen_neurons(pairs, asked.cards, asked.seed)
    ])  # fmt: skip
    tables["costs"] = pd.DataFrame(costs.rows)
    about = (f"SmolLM2-135M on {triggers.examples:,} sentences of package docstrings, each after <|endoftext|>. Half of "
             f"them agree (the value's top token follows the strongest trigger), the rest is drawn at random; the "
             f"colour of a token is its coefficient: blue positive, red negative.")  # fmt: skip
    return tables, cards_page(cards, f"{len(cards)} neurons of SmolLM2-135M", about)


def text(tables: dict[str, pd.DataFrame], asked: argparse.Namespace) -> str:
    """What came out, number by number."""
    agreement, shares, events, confident = (tables[name] for name in ("agreement", "shares", "events", "confident"))
    used = ", ".join(f"{row.package} {row.version} ({row.sentences:,})" for row in tables["sources"].itertuples())
    lines = [
        "| layer | sign | keys | agreement % | permuted % | p | frequency null % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in agreement.to_dict("records"):
        lines.append(f"| {row['layer']} | {'+' if row['sign'] > 0 else '−'} | {row['n']:,} | {100 * row['agreement']:.2f} | "
                     f"{100 * row['null_mean']:.2f} | {row['p']:.4f} | {100 * row['frequency_null']:.2f} |")  # fmt: skip
    rows = [
        "| event | updates | by the FFN | events | mean of means | mean of maxima | mean of minima |",
        "|---|---|---|---|---|---|---|",
    ]
    for (event, by_ffn, kind), part in events.groupby(["event", "by_ffn", "updates"]):
        rows.append(f"| {event} | {kind} | {'yes' if by_ffn else 'no'} | {len(part)} | {part['mean'].mean():+.3f} | "
                    f"{part['max'].mean():+.3f} | {part['min'].mean():+.3f} |")  # fmt: skip
    cost = ["| step | seconds | peak GiB |", "|---|---|---|"]
    cost += [f"| {row.step} | {row.seconds:.0f} | {row.peak_gib:.2f} |" for row in tables["costs"].itertuples()]
    where = confident[confident["n_confident"] > 0].groupby("layer")["n_confident"].sum()
    bar = 0.05 / len(agreement)
    return f"""# SmolLM2-135M's FFNs as key-value memories

Written by `python experiments/smollm2_memory.py`. Text: English sentences of docstrings, {used} sentences; {
        int(
            tables["sources"]["tokens_read"].iloc[0]
        ):,} positions read, each sentence after `<|endoftext|>` (id 0), which itself is
not read. Values are read through: {
        agreement["through"].iloc[0]
    }. One trained model: the unit is its neuron, nothing is said of others.

## Agreement of keys and values

Permuted: {
        int(
            agreement["permutations"].iloc[0]
        ):,} new pairings in the layer. Frequency null: independent draws of ordinary
continuations. Uniform: {100 * agreement["uniform"].iloc[0]:.4f}%. {int((agreement["p"] < bar).sum())} of {
        len(agreement)
    } rows have p < .05 after Bonferroni ({bar:.5f}).

![agreement](agreement.png)

{chr(10).join(lines)}

Of the 100 most confident values {
        int(confident["agree_any"].sum())
    } promote most what follows one of their 50 triggers ({
        int(confident["agree_first"].sum())
    } the strongest); their layers: {", ".join(f"{layer}: {count}" for layer, count in where.items())}.

## Sub-updates

{shares["example"].nunique()} sentences, one random position each. The 10 dominant of {
        10 / shares["of_memories"].iloc[0]:.0f}
memories make up {100 * shares["size_share"].median():.1f}% of all sizes |m|·‖v‖ (median over examples and layers; {
        100 * shares["of_memories"].iloc[0]:.2f}% of the memories) and {
        100 * shares["output_share"].median():.1f}% of the output
(projected). {
        100 * shares["composed"].mean():.1f}% of the layer outputs promote most a token that no single memory does.

![shares](shares.png)

Scores of the promoted (saturation) or eliminated token by the 10 dominant sub-updates, by 10 others, and by those others at the
dominant ones' sizes. By the FFN: the top token changed between resid_mid and resid_post.

{chr(10).join(rows)}

## Cost

One thread; peaks are the process's until then.

{chr(10).join(cost)}

[{asked.cards} neurons as cards](cards.html), [values that promote a token](promoting.csv).
"""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="how much text, prefixes included")
    parser.add_argument("--events", type=int, default=300, help="sentences for sub-updates and events")
    parser.add_argument("--cards", type=int, default=20)
    parser.add_argument("--permutations", type=int, default=10_000)
    parser.add_argument("--norm", choices=("none", "final"), default="final", help="what values are read through")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    begun = time.time()
    tables, page = measure(asked)
    for name, table in tables.items():
        if len(table) > 2000:
            write_table(asked.folder / f"{name}.parquet", table)
        else:
            write_atomic(asked.folder / f"{name}.csv", lambda path, table=table: table.to_csv(path, index=False))
    write_text(asked.folder / "cards.html", page)
    figures = {"agreement": agreement_curves(tables["agreement"]), "shares": subupdate_curves(tables["shares"])}
    for name, figure in figures.items():
        write_atomic(asked.folder / f"{name}.png", lambda path, figure=figure: figure.savefig(path, dpi=150))
    write_text(asked.folder / "README.md", text(tables, asked))
    config = {name: str(value) for name, value in vars(asked).items()}
    write_json(asked.folder / "provenance.json", provenance_of(config, asked.seed, begun))
    print(text(tables, asked))


if __name__ == "__main__":
    main()
