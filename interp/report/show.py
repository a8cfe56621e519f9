"""Tables and sentences that both halves of the report use."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from interp.plots import lens_curves
from interp.report.page import Section, show_token
from interp.report.parts import Part


def parameter_words(table: pd.DataFrame) -> str:
    """F1 for this model: the FFN's share of all parameters and of the blocks'."""
    row = table.set_index("group").loc["ffn"]
    total = int(table["parameters"].sum())
    return (
        f"It has {total:,} parameters; {100 * row['share_blocks']:.1f}% of those in the blocks and "
        f"{100 * row['share']:.1f}% of all are the FFNs' (claim F1: arithmetic, and it depends on what is counted)."
    )


def peak_words(peaks: pd.DataFrame, axis: str) -> str:
    """Where each component's effect is largest, estimated on pairs that did not choose the place."""
    parts = [
        f"{row.site} peaks at layer {row.layer}, {str(getattr(row, axis)).replace('_', ' ')}: "
        f"{row.effect:.2f} [{row.low:.2f}, {row.high:.2f}]"
        for row in peaks.itertuples()
    ]
    n = int(peaks["n"].iloc[0])
    return (
        "; ".join(parts)
        + f". (Place chosen on one half of the pairs, effect estimated on the other {n}; 95% bootstrap "
        "interval over pairs of this one model, no correction: descriptive, not a test.)"
    )


def lens_figure(page: Section, path: Path, lens: pd.DataFrame, what: str) -> pd.DataFrame:
    """The lens over depth at both roles, on `what` prompts; returns the rows of the final position."""
    final = lens[lens["role"] == "final"]
    page.figure(
        lens_curves(lens.assign(name=lens["role"].str.replace("_", " "))), path,
        f"Every block's output read by the final norm and head, {final['example'].nunique():,} {what}, at the subject's last "
        "token and at the final position.",
    )  # fmt: skip
    return final


def memory_tables(page: Section, probed: Part, layer: int) -> None:
    """The dominant neurons of one prompt: what they write, read and are set off by."""
    top = probed["subupdates"]
    prompt, answer = top["prompt"].iloc[0], top["answer"].iloc[0]
    page.text(
        f"The FFN's output is a sum of values, each weighted by how strongly its key fired. On “{prompt}” → “{answer}” the "
        f"{len(top)} dominant neurons of layer {layer} at the final position ({100 * top['share'].sum():.0f}% of Σ|m|·‖v‖) are "
        "these. A gated neuron's coefficient is signed, and it has two read vectors (gate and up) instead of one key."
    )
    written = _joined(probed["values"], ["neuron", "sign"])
    rows = []
    for row in top.to_dict("records"):
        sign = 1 if row["coefficient"] >= 0 else -1
        rows.append({
            "neuron": row["neuron"], "coefficient": row["coefficient"], "share of Σ": row["share"],
            "logit of the answer": row["target_logit"], "promotes at this sign": written.get((row["neuron"], sign), ""),
        })  # fmt: skip
    page.table(pd.DataFrame(rows), "What they write (tokens in order of promotion; logits before the final norm's scale).",
               tokens=["promotes at this sign"])  # fmt: skip
    fired = probed["triggers"]
    best = fired[fired["rank"] == 0][["neuron", "sign", "coefficient", "context"]]
    page.table(
        best, "What sets them off: the fact prompt with the largest coefficient of each sign.", tokens=["context"]
    )
    read = _joined(probed["keys"], ["neuron", "reads"])
    keys = pd.DataFrame(
        [{"neuron": n, "reads": r, "input embeddings most along it": text} for (n, r), text in read.items()]
    )
    page.table(keys, "What they read, as far as input embeddings show it.", tokens=["input embeddings most along it"])


def _joined(table: pd.DataFrame, by: list[str]) -> dict[tuple, str]:
    groups = table.sort_values("rank").groupby(by, sort=False)["text"]
    return {key: " | ".join(show_token(text) for text in texts) for key, texts in groups}  # type: ignore[misc]


def agreement_table(page: Section, table: pd.DataFrame, layers: list[int] | None = None) -> None:
    """Agreement per layer against the permuted pairing."""
    shown = table if layers is None else table[table["layer"].isin(layers)]
    page.table(
        shown, "Key-value agreement (Geva 2021): share of neurons whose value promotes most the answer of the fact prompt that "
        "excites them most, against 1,000 permutations of values among a layer's neurons. Unit: neuron; uncorrected.",
    )  # fmt: skip
    best = table.iloc[int(table["agreement"].argmax())]
    page.finding(
        f"Agreement is highest in layer {int(best['layer'])} for sign {int(best['sign']):+d}: {100 * best['agreement']:.1f}% of "
        f"{int(best['n'])} neurons, against {100 * best['null_mean']:.1f}% when values are permuted (97.5th percentile "
        f"{100 * best['null_high']:.1f}%)."
    )
