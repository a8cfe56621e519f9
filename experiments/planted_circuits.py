"""Which method finds a circuit that was planted, under which ablation: results/planted_circuits/{recovery.csv, README.md}.

python experiments/planted_circuits.py            a minute or two
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from interp.circuits.planted import LARGE, recovery
from interp.record import write_atomic, write_text

RESULTS = Path(__file__).parent / "results" / "planted_circuits"


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Per program, model, method and ablation: mean and lowest AUC over seeds, edges found of those of the program, false
    ones."""
    groups = table.groupby(["program", "null", "method", "ablation"], sort=False)
    found = groups.agg(auc=("auc", "mean"), lowest=("auc", "min"), found=("found", "mean"), of=("of_program", "first"),
                       false=("false", "mean"), seeds=("seed", "nunique")).reset_index()  # fmt: skip
    return found.assign(model=found.pop("null").map({True: "null", False: "planted"}))


def markdown(found: pd.DataFrame) -> str:
    """The planted models' rows, one per program, method and ablation; then the null models' in one line."""
    lines = ["| program | method | ablation | AUC, mean (lowest) | found | false |", "|---|---|---|---|---|---|"]
    for row in found[found["model"] == "planted"].to_dict("records"):
        lines.append(f"| {row['program']} | {row['method']} | {row['ablation']} | {row['auc']:.3f} ({row['lowest']:.3f}) | "
                     f"{row['found']:.1f} of {row['of']} | {row['false']:.1f} |")  # fmt: skip
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    table = recovery(seeds=range(asked.seeds))
    found = summary(table)
    write_atomic(asked.folder / "recovery.csv", lambda path: table.to_csv(path, index=False))
    null = found[found["model"] == "null"]
    text = f"""# Planted circuits: which method finds them

Written by `python experiments/planted_circuits.py`: three programs set by hand (interp/circuits/planted.py), {asked.seeds}
seeds each of the noise on all weights. AUC: the chance that an edge of the program ranks above another edge. found, false:
edges of the program, and others, with a score of {LARGE} logits or more (ACDC: kept at every threshold up to that), means over
seeds. A program makes about 10 logits.

{markdown(found)}

Null models (noise alone, nothing to be found; {int(null["seeds"].sum())} cells of model, method, ablation and seed): on average
{null["found"].mean():.3f} edges of the program and {null["false"].mean():.3f} others reach {LARGE} logits.
"""
    write_text(asked.folder / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
