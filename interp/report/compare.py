"""The parity page: how far our numbers are from transformers', TransformerLens' and PyTorch's, site by site."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from interp import record
from interp.bridges.compare import EVERY, compare
from interp.plots import parity_map
from interp.report.build import provenance_section
from interp.report.page import Section, render
from interp.sites import SITES

TITLE = "The same numbers as the models people have"
LEAD = (
    "Random models of every family, made from configs with non-trivial norms and biases, run here and in the library they "
    "come from; every site that both show is compared at every real position of four sequences, with and without padding. "
    "A difference is given as a share of the site's largest value."
)


def build(
    folder: str | Path, families: Sequence[str] = EVERY, seed: int = 0, progress: bool = True
) -> tuple[Path, int]:
    """Compare and write a new `folder`: parity.parquet, figures, index.html; returns its path and how many rows are too far."""
    folder, started = Path(folder), time.time()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds results already; results are never overwritten, choose a new folder")
    table = compare(families, seed, progress)
    record.write_table(folder / "parity.parquet", table)
    too_far = int((table["verdict"] == "too far").sum())
    sections = [
        _summary(table, too_far),
        *(_peer(folder, peer, rows) for peer, rows in table.groupby("peer", sort=False)),
    ]
    sections += [_notes(table), provenance_section(folder, started, config={"families": list(families)}, seed=seed)]
    return render(folder / "index.html", TITLE, LEAD, sections), too_far


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row per peer × family × type: worst relative difference, tolerance, and rows by verdict."""
    groups = table.groupby(["peer", "family", "dtype"], sort=False)
    counts = groups["verdict"].value_counts().unstack(fill_value=0)
    found = groups.agg(
        rows=("site", "size"), sites=("site", "nunique"), worst=("relative", "max"), allowed=("tolerance", "max")
    )
    for verdict in ("too far", "peer not finite", "not offered"):
        found[verdict] = counts.get(verdict, 0)
    return found.reset_index()


def _summary(table: pd.DataFrame, too_far: int) -> Section:
    section = Section("Summary")
    counts = table["verdict"].value_counts()
    section.finding(
        f"{counts.get('equal', 0) + too_far:,} comparisons of a site, {too_far} above their tolerance. In "
        f"{counts.get('peer not finite', 0):,} more the peer's own numbers are not finite where ours are, and "
        f"{counts.get('not offered', 0)} inputs the peer does not take (see the notes)."
    )
    section.table(summary(table), "Rows: peer, family, type; all head groupings (MHA, GQA, MQA) and paddings together.")
    return section


def _peer(folder: Path, peer: object, rows: pd.DataFrame) -> Section:
    section = Section(str(peer))
    order = rows["site"].map(lambda site: (site.startswith("decoder."), list(SITES).index(site.split(".")[-1])))
    shown = rows.assign(case=rows["family"] + ", " + rows["dtype"], order=order).sort_values("order", kind="stable")
    name = "".join(c if c.isalnum() else "_" for c in str(peer)).lower()
    section.figure(parity_map(shown, f"against {peer}"), folder / f"{name}.png",
                   "Largest relative difference of each shared site over layers, head groupings and paddings.")  # fmt: skip
    worst = rows.sort_values("relative", ascending=False).head(5)
    columns = [
        "family",
        "heads",
        "dtype",
        "padding",
        "site",
        "difference",
        "largest",
        "relative",
        "tolerance",
        "verdict",
    ]
    section.table(worst[columns], "The five largest relative differences.")
    return section


def _notes(table: pd.DataFrame) -> Section:
    section = Section("What is above 1e-9 in float64 or could not be compared, and why")
    noted = table[table["note"] != ""]
    if noted.empty:
        section.text("Nothing.")
        return section
    for note, rows in noted.groupby("note", sort=False):
        families = ", ".join(dict.fromkeys(rows["family"]))
        top = rows["relative"].max()
        size = "no finite number to compare" if pd.isna(top) else f"largest relative difference {top:.1e}"
        section.text(f"{families} ({len(rows):,} rows, {size}): {note}.")
    return section
