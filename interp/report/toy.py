"""The report's first half: the toy model, trained on the spot."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from interp.plots import effect_heatmaps, head_heatmap, training_curves
from interp.report import measure
from interp.report.page import Section
from interp.report.parts import Part, fingerprint, part
from interp.report.show import agreement_table, lens_figure, memory_tables, parameter_words, peak_words
from interp.tasks.facts import ROLES, replacement_pairs
from interp.tasks.toy_facts import ToyFacts
from interp.training import Trained, train

PAIRS = 400


def section(folder: Path, progress: bool) -> Section:
    """Train or reuse, measure or reuse, and describe."""
    task = ToyFacts()
    config = task.train_config(seed=0)
    trained = train(None, task, config, folder / "toy_model", resume=True, progress=progress)
    model, vocabulary, held_out = trained.model, task.vocabulary, task.splits["held_out"]
    first = held_out.select((held_out.table["template"] == 0).to_numpy())
    pairs_one, pairs_all = (replacement_pairs(prompts, seed=0) for prompts in (first, held_out))
    pairs_one, pairs_all = measure.some_pairs(pairs_one, PAIRS), measure.some_pairs(pairs_all, PAIRS)
    settings = {"model": fingerprint(model), "task": task.n_subjects, "pairs": PAIRS, "seed": 0}

    def sweep() -> dict[str, pd.DataFrame]:
        return {
            "by_position": measure.by_position(model, pairs_one),
            "by_role": measure.by_role(model, pairs_all),
            "by_head": measure.by_head(model, pairs_all),
            **measure.facts_of_model(model, held_out, pairs_all),
        }

    def read() -> dict[str, pd.DataFrame]:
        last = model.config.n_layers - 1
        return {
            "lens": measure.lens(model, held_out, vocabulary),
            "agreement": measure.agreement(model, task.prompts),
            **measure.memory(model, held_out, last, vocabulary),
        }

    swept = part(folder, "toy_patching", settings, sweep)
    probed = part(folder, "toy_reading", settings, read)
    page = Section("A toy model, trained on made-up facts")
    _describe_training(page, folder, task, trained, swept)
    _describe_patching(page, folder, swept, len(pairs_one), len(pairs_all))
    _describe_reading(page, folder, probed, trained)
    return page


def _describe_training(page: Section, folder: Path, task: ToyFacts, trained: Trained, swept: Part) -> None:
    model = trained.model
    last = {row["split"]: row for row in trained.curves.groupby("split").tail(1).to_dict("records")}
    page.text(
        f"{task.n_subjects} made-up people have four facts each (home, job, dish, sport; 32 values a relation, "
        f"{4 * task.n_subjects:,} facts, {20 * task.n_subjects / 1000:.1f} kbit). A person is two name tokens that "
        "others share, so no single token gives a fact away. Every fact is asked in four templates, one of which was "
        "held out of training: recall there is knowledge, not a memorised string. "
        f"Example: “{task.prompts.table['prompt'].iloc[0]}” → “{task.prompts.table['object'].iloc[0]}”."
    )
    page.text(
        f"The model is the textbook's pre-norm block ({model.config.n_layers} layers, d = {model.config.d_model}, "
        f"{model.config.n_heads} heads, SwiGLU with d_ff = {model.config.d_ff}, RMSNorm, rotary positions). "
        + parameter_words(swept["parameters"])
    )
    page.figure(
        training_curves(trained.curves), folder / "figures" / "toy_training.png",
        "Training of the toy model: loss of each evaluated step's batch, and the share of prompts whose top token is the answer.",
    )  # fmt: skip
    page.finding(
        f"After {int(last['train']['step'])} steps ({trained.seconds:.0f} s of training) it recalls "
        f"{100 * last['train']['accuracy']:.2f}% of {last['train']['n']:,} training prompts and "
        f"{100 * last['held_out']['accuracy']:.2f}% of {last['held_out']['n']:,} held-out-template prompts."
    )
    error = float(swept["identity"]["largest_relative_error"].iloc[0])
    page.finding(
        "Components only add to the stream (claim R1) holds by construction in a pre-norm model; measured, the last "
        f"stream differs from the sum of everything written to it by at most {error:.1e} of its largest entry."
    )


def _describe_patching(page: Section, folder: Path, swept: Part, n_one: int, n_all: int) -> None:
    page.heading("Activation patching: where does putting the right value back restore the answer?")
    base = swept["baselines"]
    page.text(
        "Each prompt is paired with one about another person with another answer. One activation of the clean run is "
        "written into the corrupted run, and the logit difference between the two answers is read. 0 = still the wrong "
        "answer, 1 = fully the right one; the number is a ratio of means over pairs. Unpatched, the mean logit "
        f"difference is {base['clean'].mean():+.1f} (clean) and {base['corrupted'].mean():+.1f} (corrupted) logits."
    )
    page.figure(
        effect_heatmaps(measure.effects(swept["by_position"], ["site", "layer", "position"]),
                        labels=["[first]", "[last]", "has", "the", "[relation]", "of"]),
        folder / "figures" / "toy_patching_position.png",
        f"Denoising by layer and position in the template “[first] [last] has the [relation] of”, {n_one} held-out pairs.",
    )  # fmt: skip
    by_role = measure.effects(swept["by_role"], ["direction", "site", "layer", "role"])
    order = [role for role in ROLES if role in set(by_role["role"])]
    by_role["role"] = pd.Categorical(by_role["role"], order, ordered=True)
    for direction, word in (
        ("denoising", "restored by clean values (sufficiency)"),
        ("noising", "broken by corrupted values (necessity)"),
    ):
        rows = by_role[by_role["direction"] == direction].sort_values("role", kind="stable").astype({"role": str})
        page.figure(
            effect_heatmaps(rows, x="role"), folder / "figures" / f"toy_patching_role_{direction}.png",
            f"{direction.capitalize()} by layer and role over all four templates, {n_all} held-out pairs: share {word}.",
        )  # fmt: skip
    denoised = swept["by_role"][swept["by_role"]["direction"] == "denoising"]
    components = denoised[denoised["site"] != "resid_pre"]
    page.finding(peak_words(measure.peaks(components, ["layer", "role"]), "role"))
    page.figure(
        head_heatmap(measure.effects(swept["by_head"], ["layer", "head"])), folder / "figures" / "toy_patching_heads.png",
        f"Denoising one head's z at every position at once, {n_all} held-out pairs over all four templates.", wide=False,
    )  # fmt: skip


def _describe_reading(page: Section, folder: Path, probed: Part, trained: Trained) -> None:
    page.heading("Logit lens: from which layer on does the stream say the answer?")
    final = lens_figure(page, folder / "figures" / "toy_lens.png", probed["lens"], "held-out prompts")
    by_layer = final.groupby("layer")["rank"].apply(lambda rank: (rank == 0).mean())
    page.finding(
        "At the final position the answer is the lens's top token for "
        + ", ".join(f"{100 * share:.1f}% of prompts after layer {layer}" for layer, share in by_layer.items()) + "."
    )  # fmt: skip
    page.heading("The last FFN as a key-value memory")
    memory_tables(page, probed, trained.model.config.n_layers - 1)
    agreement_table(page, probed["agreement"])
