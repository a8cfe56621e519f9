"""Does a localiser read where facts lie? Planted mixtures, every localiser's reading against the planted share. See README.md.

    python experiments/e07_calibration/run.py [--seeds 5] [--only plant read]       about half an hour on two cores; resumes

Seeds 1000 and up (0-9 are kept for the registered claims). What is finished in --runs is not done again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from interp.claims.calibration import calibrate
from interp.claims.localisers import LOCALISERS, relearning
from interp.claims.planted import CONFIG, Mixture, SomeFacts, bases, deal, plant
from interp.model.checkpoint import load, save
from interp.model.transformer import Transformer
from interp.plots import calibration_curves
from interp.record import new_folder, provenance, write_atomic, write_json, write_table, write_text

HERE, SHARES = Path(__file__).parent, (0.0, 0.25, 0.5, 0.75, 1.0)


def mixtures(
    models: Mapping[int, Transformer], shares: Sequence[float], folder: Path, task: SomeFacts, config=None
) -> list[Mixture]:
    """Every mixture, planted share by share or opened again."""
    found: list[Mixture] = []
    for share in shares:
        place = folder / f"share_{share:.2f}"
        if not place.exists():
            made = plant(models, [share], task, config)

            def fill(path: Path, made=made) -> None:
                for one in made:
                    save(one.model, path / str(one.seed), extra={"share": one.share, "recall": dict(one.recall)})
                    write_json(path / f"{one.seed}.json", dict(one.recall))

            new_folder(place, fill)
        for seed, base in models.items():
            prompts = deal(task, seed, share)
            recall = json.loads((place / f"{seed}.json").read_text())
            found.append(
                Mixture(seed, share, base, load(place / str(seed)), prompts["train"], prompts["held_out"], recall)
            )
    return found


def measure(models: Sequence[Mixture], folder: Path, prompts: int = 300, steps: int = 60) -> pd.DataFrame:
    """Columns localiser, kind, seed, share, reading (the FFNs' share as read), value_ffn, value_attention; one file per
    mixture."""
    for one in models:
        path = folder / f"{one.share:.2f}_{one.seed}.parquet"
        if not path.exists():
            rows = [{"localiser": name, "kind": kind, "seed": one.seed, "share": one.share, **localiser(one, prompts)}
                    for name, (kind, localiser) in LOCALISERS.items()]  # fmt: skip
            write_table(path, pd.DataFrame(rows))
            print(f"{path.stem}: " + ", ".join(f"{row['localiser']} {row['reading']:.2f}" for row in rows), flush=True)
    path = folder / "relearning.parquet"
    if not path.exists():
        write_table(path, relearning(models, steps).assign(localiser="relearning", kind="storage"))
    return pd.concat([pd.read_parquet(one) for one in sorted(folder.glob("*.parquet"))], ignore_index=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--only", nargs="*", default=("plant", "read"), choices=("plant", "read"))
    parser.add_argument("--runs", type=Path, default=Path("runs/e07_calibration"))
    parser.add_argument("--folder", type=Path, default=HERE)
    asked = parser.parse_args(words)
    task = SomeFacts()
    models = bases(range(1000, 1000 + asked.seeds), task, asked.runs / "bases")
    found = mixtures(models, asked.shares, asked.runs / "planted", task)
    if "read" not in asked.only:
        return
    readings = measure(found, asked.runs / "readings")
    fits = calibrate(readings)
    recall = pd.DataFrame([{"seed": one.seed, "share": one.share, **one.recall} for one in found])
    for name, table in (("readings", readings), ("calibration", fits), ("recall", recall)):
        write_atomic(asked.folder / f"{name}.csv", lambda path, table=table: table.round(6).to_csv(path, index=False))
    figure = calibration_curves(readings, fits)
    write_atomic(asked.folder / "calibration.png", lambda path: figure.savefig(path, dpi=150))
    config = {
        "seeds": list(models),
        "shares": list(asked.shares),
        "planting": {"steps": CONFIG.steps, "rate": CONFIG.learning_rate},
    }
    write_json(asked.folder / "provenance.json", provenance(config=config, seed=1000))
    write_text(asked.folder / "README.md", text(fits, recall))
    print(text(fits, recall))


def interval(row: dict, name: str) -> str:
    """An estimate with its interval."""
    return f"{row[name]:.2f} [{row[name + '_low']:.2f}, {row[name + '_high']:.2f}]"


def text(fits: pd.DataFrame, recall: pd.DataFrame) -> str:
    """What came out, number by number."""
    lines = [
        "| localiser | kind | slope [95%] | intercept [95%] | slope within .25 to .75 | monotone | calibrated |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in fits.to_dict("records"):
        slope, intercept = (interval(row, name) for name in ("slope", "intercept"))
        inner = f"{row['inner_slope']:.2f} [{row['inner_low']:.2f}, {row['inner_high']:.2f}]"
        verdict = "yes" if row["calibrated"] else "no: " + row["why"]
        monotone = "yes" if row["monotone"] else "no"
        lines.append(
            f"| {row['localiser']} | {row['kind']} | {slope} | {intercept} | {inner} | {monotone} | {verdict} |"
        )
    columns = [column for column in recall.columns if column not in ("seed", "share")]
    means = recall.groupby("share")[columns].mean()
    table = ["| planted in FFNs | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for share, row in means.iterrows():
        table.append(f"| {share} | " + " | ".join("" if pd.isna(v) else f"{v:.1%}" for v in row) + " |")
    n = recall["seed"].nunique()
    return f"""# Which localisers read where facts lie?

Written by `python experiments/e07_calibration/run.py`. Question: a model in which it is known what share of some facts was
trained into its FFNs, and the rest into attention's OV — does a localiser's reading follow that share? Rule: calibrated if
the mean reading rises with every share and the 95% t interval of the per-seed slope lies above .25. Unit: the seed, n = {n}.
A localiser that is not calibrated does not vote on where facts lie. Storage measures ask weights; mediation measures ask what
carries the answer through the forward pass, and attention carries the subject to the last token even when only FFNs store.

{chr(10).join(lines)}

Read the slope within .25 to .75 beside the other: at 0 and 1 only one group of weights differs from the ancestor, so weight
interchange is forced to read 0 and 1 there. Between them FFN and OV were trained together and lean on each other.

![Readings against the planted share](calibration.png)

Recall of the models (accuracy; `base`: the held-out prompts of the base's own facts, which planting overwrites):

{chr(10).join(table)}
"""


if __name__ == "__main__":
    main()
