"""The report's second half: a pretrained language model on facts it knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from interp.bridges import SMOLLM2_PREFIX, smollm2
from interp.model.transformer import Transformer
from interp.plots import effect_heatmaps, head_heatmap
from interp.report import measure
from interp.report.page import Section
from interp.report.parts import Part, fingerprint, part
from interp.report.show import agreement_table, lens_figure, memory_tables, parameter_words, peak_words
from interp.tasks.facts import DATA, FactSet, Prompts, real_facts, replacement_pairs
from interp.tasks.task import Pairs
from interp.tokens import labels

RELATION, TEMPLATE = (
    "capital",
    1,
)  # patched: "The capital city of {subject} is called", which has words after the subject
PER_RELATION = 40  # known facts of each relation that are read; more change little and cost minutes


@dataclass(frozen=True)
class Known:
    """Prompts of facts the model answers right, and the pairs that are patched."""

    prompts: Prompts
    pairs: Pairs
    recall: pd.DataFrame
    right: int


def section(folder: Path, n_pairs: int, progress: bool) -> Section:
    """Fetch or reuse the weights, measure or reuse, and describe."""
    model, tokenizer = smollm2(progress=progress)
    known = choose(tokenizer, n_pairs)
    settings = {"model": fingerprint(model), "prefix": SMOLLM2_PREFIX, "prompts": known.prompts.table["prompt"].tolist(),
                "pairs": known.pairs.table[["prompt", "corrupted_prompt"]].to_dict("list")}  # fmt: skip
    start = measure.identical_before(known.pairs)

    def sweep() -> dict[str, pd.DataFrame]:
        places = range(start, known.pairs.clean.length)
        return {
            "by_position": measure.by_position(model, known.pairs, places, progress),
            "by_head": measure.by_head(model, known.pairs, progress),
            "pairs": known.pairs.table,
            **measure.facts_of_model(model, known.prompts, known.pairs),
        }

    def read() -> dict[str, pd.DataFrame]:
        agreed = measure.agreement(model, known.prompts)
        layer = int(agreed.loc[agreed["agreement"].idxmax(), "layer"])  # type: ignore[arg-type]
        relations = known.prompts.table["relation"].tolist()
        return {
            "agreement": agreed,
            "lens": measure.lens(model, known.prompts, tokenizer),
            **measure.memory(model, known.prompts, layer, tokenizer, example=relations.index(RELATION)),
        }

    swept = part(folder, "real_patching", settings, sweep)
    probed = part(folder, "real_reading", settings, read)
    page = Section("A real language model: SmolLM2-135M-Instruct")
    _describe_model(page, model, known, swept)
    _describe_patching(page, folder, known, swept, tokenizer, start)
    _describe_reading(page, folder, known, probed)
    return page


def choose(tokenizer: Any, n_pairs: int) -> Known:
    """Facts the model puts first under their relation's best template, and `n_pairs` pairs of one equal-length group."""
    measured = pd.read_csv(DATA / "real_recall.csv", keep_default_na=False)
    best = measured[measured["template"] == 0]
    recall = best.groupby("relation", sort=False)["rank"].agg(facts="size", top_1=_top(1), top_5=_top(5)).reset_index()
    known = _right(measured, 0, real_facts(templates=1), tokenizer)
    some = known.table.groupby("relation", sort=False).head(PER_RELATION).index.tolist()
    prompts = known.select(some)
    asked = real_facts([RELATION], templates=None)
    patched = FactSet(asked.facts, asked.templates.iloc[[TEMPLATE]].reset_index(drop=True))
    group = measure.largest_group(_right(measured, TEMPLATE, patched, tokenizer))
    pairs = measure.some_pairs(replacement_pairs(group, seed=0), n_pairs)
    return Known(prompts, pairs, recall, len(known))


def _right(measured: pd.DataFrame, template: int, facts: FactSet, tokenizer: Any) -> Prompts:
    """The prompts of the facts whose answer was measured to be the top token under that template."""
    first = measured[(measured["template"] == template) & (measured["rank"] == 0)][["relation", "subject"]]
    kept = facts.facts.merge(first, on=["relation", "subject"])
    return FactSet(kept, facts.templates).prompts(tokenizer, prefix=SMOLLM2_PREFIX)


def _top(k: int):
    def share(rank: pd.Series) -> float:
        return float((rank < k).mean())

    return share


def _describe_model(page: Section, model: Transformer, known: Known, swept: Part) -> None:
    config = model.config
    page.text(
        f"The same block at scale: {config.n_layers} layers, d = {config.d_model}, {config.n_heads} heads with "
        f"{config.n_kv_heads} key/value heads, SwiGLU with d_ff = {config.d_ff}, RMSNorm, rotary positions, tied embeddings "
        f"(4-bit weights, dequantised). {parameter_words(swept['parameters'])}"
    )
    page.text(
        "Prompts ask for true facts that ship with interp, with the prefix token <|endoftext|> (id 0) before each; without "
        "it this model recalls fewer of them. Only facts it answers right are opened up below "
        f"(at most {PER_RELATION} of a relation)."
    )
    n = int(known.recall["facts"].sum())
    page.table(known.recall.rename(columns={"top_1": "top-1 share", "top_5": "top-5 share"}),
               "Recall of the answer's first token under each relation's best template; "
               f"{known.right} of {n} facts are top-1.")  # fmt: skip
    error = float(swept["identity"]["largest_relative_error"].iloc[0])
    page.finding(
        "Components only add to the stream (R1), measured: the last stream differs from the sum of everything written to "
        f"it by at most {error:.1e} of its largest entry."
    )


def _describe_patching(page: Section, folder: Path, known: Known, swept: Part, tokenizer: Any, start: int) -> None:
    page.heading("Activation patching")
    pairs, base = known.pairs, swept["baselines"]
    example = pairs.table.iloc[0]
    page.text(
        f"{len(pairs)} pairs of equal length, such as “{example['prompt']}” ({example['object']}) against "
        f"“{example['corrupted_prompt']}” ({example['corrupted_object']}). Unpatched, the mean logit difference is "
        f"{base['clean'].mean():+.1f} (clean) and {base['corrupted'].mean():+.1f} (corrupted) logits. Positions before the "
        "first differing token are left out: clean and corrupted runs are identical there, so a patch cannot do anything."
    )
    shown = [text.strip() for text in labels(tokenizer, pairs.clean.tokens[0])][start:]
    page.figure(
        effect_heatmaps(measure.effects(swept["by_position"], ["site", "layer", "position"]), labels=shown),
        folder / "figures" / "real_patching_position.png",
        f"Denoising by layer and position, {len(pairs)} pairs; token labels are those of the first pair's clean prompt.",
    )  # fmt: skip
    components = swept["by_position"][swept["by_position"]["site"] != "resid_pre"]
    found = measure.peaks(components, ["layer", "position"])
    found["position"] = [f"“{shown[int(position) - start]}”" for position in found["position"]]
    page.finding(peak_words(found, "position"))
    page.figure(
        head_heatmap(measure.effects(swept["by_head"], ["layer", "head"])), folder / "figures" / "real_patching_heads.png",
        f"Denoising one head's z at every position at once, {len(pairs)} pairs.", wide=False,
    )  # fmt: skip


def _describe_reading(page: Section, folder: Path, known: Known, probed: Part) -> None:
    page.heading("Logit lens")
    final = lens_figure(page, folder / "figures" / "real_lens.png", probed["lens"], "known facts")
    share = final.groupby("layer")["rank"].apply(lambda rank: (rank == 0).mean())
    half = int(share[share >= 0.5].index.min())
    page.finding(
        f"At the final position the answer is the lens's top token for at least half of the facts from layer {half} of "
        f"{len(share)} on; before layer {len(share) // 2} it is for at most {100 * share.iloc[: len(share) // 2].max():.0f}%."
    )
    layer = int(probed["subupdates"]["layer"].iloc[0])
    page.heading(f"The FFN of layer {layer} as a key-value memory")
    memory_tables(page, probed, layer)
    best = probed["agreement"].groupby("layer")["agreement"].max().nlargest(5).index.tolist()
    agreement_table(page, probed["agreement"], layers=sorted(best))
