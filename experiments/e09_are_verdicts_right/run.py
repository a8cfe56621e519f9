"""How often are the verdicts wrong? The registered rules on planted truth, where the answer is known. See README.md.

    python experiments/e09_are_verdicts_right/run.py [--draws 400] [--models 59]       some ten minutes on one core

Readings are drawn where training is too dear ("simulated"); "models" are real ones, untrained, read by the whole pipeline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from interp.claims.confusion import SEEDS, TRUTHS, confusion
from interp.record import provenance, write_atomic, write_json, write_text

HERE = Path(__file__).parent


def measure(draws: int, models: int) -> pd.DataFrame:
    """The confusion table: `draws` verdicts per simulated truth, `models` per truth of real ones."""
    tables = [
        confusion([truth], models if truth.how == "models" else draws, lambda line: print(line, flush=True))
        for truth in TRUTHS
    ]
    return pd.concat(tables, ignore_index=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--models", type=int, default=59)
    parser.add_argument("--folder", type=Path, default=HERE)
    asked = parser.parse_args(words)
    table = measure(asked.draws, asked.models)
    write_atomic(asked.folder / "confusion.csv", lambda path: table.to_csv(path, index=False, float_format="%.5g"))
    write_json(
        asked.folder / "provenance.json", provenance(config={"draws": asked.draws, "models": asked.models}, seed=0)
    )
    write_text(asked.folder / "README.md", text(table))
    print(text(table))


def text(table: pd.DataFrame) -> str:
    """What came out, row by row."""
    lines = ["| hypothesis | planted | how | verdicts | supported | refuted | undecided | wrong (95% bound) | power |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in table.to_dict("records"):
        power = "" if pd.isna(row["power"]) else f"{row['power']:.0%}"
        lines.append(f"| {row['hypothesis']} | {row['planted']} | {row['how']} | {row['draws']} | {row['supported']} | "
                     f"{row['refuted']} | "
                     f"{row['undecided']} | {row['wrong']} (below {row['wrong_high']:.1%}) | {power} |")  # fmt: skip
    nulls = table[table["planted"].isin(NULLS)]
    worst = nulls["wrong_high"].max() if len(nulls) else float("nan")
    return f"""# How often are the verdicts wrong?

Written by `python experiments/e09_are_verdicts_right/run.py`. Each row plants a truth, lets the registered rule read it with
{SEEDS} seeds and Holm's correction at its strictest, and counts verdicts. Nulls must not be called supported, effects must not
be called refuted; at a boundary both are errors. Bound: one-sided 95% Clopper-Pearson. Simulated readings use normal errors
about as large as those measured; they test the rule, not the measurement. "models" are real untrained models, read by the
whole pipeline.

{chr(10).join(lines)}

Of the nulls, the largest bound on being declared supported is {worst:.1%}.
"""


NULLS = ("storage in proportion to size", "no gap", "no pair composes more", "untrained models", "no trend with depth",
         "no agreement", "1/3 in FFNs", "FFNs hold less: -.4 logits")  # fmt: skip


if __name__ == "__main__":
    main()
