"""How long a patching sweep takes, next to TransformerLens, transformers with hooks and nnsight, and to the least it could.

    python experiments/bench/sweep.py [--rows resid16 heads ...] [--repeats N] [--threads N] [--nnsight-python PATH] [--quick]

| row | sweep |
|---|---|
| resid16, resid64 | resid_pre, layer × position; GPT-2 small's shape, random weights, 4 prompts of 16 or 64 tokens |
| heads | z, layer × position × head; the same model, 16 tokens |
| toy | resid_pre; 4 layers of width 128, 4 prompts of 16 tokens |
| smollm2 | resid_pre; SmolLM2-135M on facts it knows (weights: 93 MB from the package index, once) |
| floor | resid16 and resid64 against the matrix products that cannot be avoided, at the rate measured between them |
| curves | our time and work against layers, positions, heads and prompts |
| equality | values against full forward passes, float64 and float32, on every shape above |

Clean and corrupted prompts differ in one token in the middle (SmolLM2: in the subject); the metric is a logit difference at
the last position, nothing keeps a gradient, everything is float32 on the same threads. Contenders warm up, then alternate;
ratios are of medians. Where a library is too slow to run every cell it runs a sample spread over the grid, and its time is
scaled by the number of cells (each of its cells is one whole forward pass). Every peer computes the cells before the
differing token too, which cannot change anything and which we skip: half the grid of the random prompts ("first").
"difference" is the largest between our values and theirs, "effect" the largest of a patch, both over the largest |metric|.

nnsight lives in an environment of its own, so that its packages cannot move ours; without it its rows are left out:

    python3 -m venv nnsight_env
    nnsight_env/bin/pip install torch==2.13.0 transformers==5.24.0 'nnsight==0.8.*'
    python experiments/bench/sweep.py --rows toy --nnsight-python nnsight_env/bin/python
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from sweeps import curves, peers
from sweeps.case import Case, Contender, alternate, gpt2_case, smollm2_case, spread
from sweeps.equality import equality
from sweeps.floor import floor

SPEED = ("resid16", "resid64", "heads", "toy", "smollm2")
ROWS = (*SPEED, "floor", "curves", "equality")
ENGINE = "fast"
SAMPLE = 32  # cells that a slow peer runs per turn
GPT2_SMALL: dict[str, Any] = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "prompts": 4}
TOY: dict[str, Any] = {"layers": 4, "width": 128, "heads": 4, "vocab": 1000, "prompts": 4}
RESULTS = Path(__file__).parent / "results" / "sweep"
QUICK: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "vocab": 101, "prompts": 2}


def case(row: str, quick: bool) -> Case:
    """The model and prompts of a row."""
    if row == "smollm2":
        return smollm2_case(1 if quick else 4)
    sizes, length, site = {
        "resid16": (GPT2_SMALL, 16, "resid_pre"), "resid64": (GPT2_SMALL, 64, "resid_pre"), "heads": (GPT2_SMALL, 16, "z"),
        "toy": (TOY, 16, "resid_pre"),
    }[row]  # fmt: skip
    return gpt2_case(row, **(QUICK if quick else sizes), length=length // 2 if quick else length, site=site)


def compare(row: str, repeats: int, quick: bool, python: Path | None, threads: int) -> pd.DataFrame:
    """One table row per peer."""
    one, sample = case(row, quick), 4 if quick else SAMPLE
    some = spread(sample, len(one.cells))
    us, notes = peers.ours(one, ENGINE), ""
    with ExitStack() as stack:
        if row in ("resid16", "toy"):
            against = [peers.transformer_lens(one), peers.hooks(one)]
        else:
            against = [peers.transformer_lens(one, some)]
        if row == "toy" and python is not None:
            against += stack.enter_context(peers.nnsight(one, python, threads))
        alternate([us, *against], repeats)
        if row == "resid16":  # the scaled time of a sample, checked where the whole sweep runs as well
            scaled = peers.transformer_lens(one, some)
            alternate([scaled], repeats)
            notes = f"from {len(some)} cells alone: {scaled.seconds:.3g} s"
    return pd.DataFrame([_row(one, us, peer, notes if peer is against[0] else "") for peer in against])


def _row(one: Case, us: Contender, peer: Contender, note: str) -> dict[str, Any]:
    a, b = us.laps[0].values, peer.laps[0].values
    assert a is not None and b is not None
    corrupted = one.metric(_logits(one))
    a = a if peer.ran is None else a[list(peer.ran)]
    ratios = [theirs.seconds / ours.seconds for ours, theirs in zip(us.laps, peer.laps, strict=True)]
    cells = len(one.cells)
    ran = "all" if peer.ran is None else f"{len(peer.ran)}, time scaled"
    return {
        "row": one.name, "site": one.site, "against": peer.name, "cells": cells, "cells it ran": ran,
        "tokens": "×".join(map(str, one.clean.shape)), "first": one.first, "interp s": us.seconds,
        "against s": peer.seconds, "ratio": peer.seconds / us.seconds, "lowest ratio": min(ratios), "highest ratio": max(ratios),
        "difference / metric": float((a - b).abs().max() / b.abs().max()),
        "effect / metric": float((b - corrupted).abs().max() / b.abs().max()), "note": note,
    }  # fmt: skip


@torch.no_grad()
def _logits(one: Case) -> torch.Tensor:
    return one.theirs(one.corrupted).logits


def against_floor(repeats: int, quick: bool) -> pd.DataFrame:
    """Our time over the time that the unavoidable operations take at the best matrix-product rate measured in between."""
    rows = []
    for row in ("resid16", "resid64"):
        one = case(row, quick)
        us, products = peers.ours(one, ENGINE), peers.matmul_rates()
        alternate([us, *(contender for _, contender in products)], repeats)
        rates = {contender.name: count / contender.seconds for count, contender in products}
        operations, best = floor(one.shape, one.site), max(rates.values())
        rows.append({
            "row": one.name, "cells": len(one.cells), "GFLOP": operations / 1e9, "floor s": operations / best,
            "interp s": us.seconds, "interp / floor": us.seconds * best / operations,
            **{f"GFLOP/s {name}": rate / 1e9 for name, rate in rates.items()},
        })  # fmt: skip
        gc.collect()
    return pd.DataFrame(rows)


def equal_values(quick: bool) -> pd.DataFrame:
    """Every shape of the table in both types."""
    found = []
    for row in SPEED[: 4 if quick else None]:
        one = case(row, quick)
        cells = len(one.cells) if row == "toy" else SAMPLE
        found += [equality(one, ENGINE, dtype, cells) for dtype in (torch.float64, torch.float32)]
        gc.collect()
    return pd.DataFrame(found)


def markdown(table: pd.DataFrame) -> str:
    """A table as GitHub shows it."""
    cells = table.map(lambda value: f"{value:.3g}" if isinstance(value, float) else str(value)).replace("nan", "")
    lines = [list(map(str, table.columns)), ["---"] * len(table.columns), *cells.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nnsight-python", type=Path, help="the Python of an environment with nnsight (see above)")
    parser.add_argument(
        "--folder", type=Path, help="default: results/sweep beside this file, with --quick runs/sweep_quick"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    asked = parser.parse_args(words)
    torch.set_num_threads(asked.threads)
    folder = asked.folder or (Path("runs/sweep_quick") if asked.quick else RESULTS)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "transformer-lens"))
    print(f"float32, medians of {asked.repeats} alternating turns, {asked.threads} thread(s), {versions}")
    if "toy" in asked.rows and asked.nnsight_python is None:
        print("nnsight was not measured: no --nnsight-python")
    tables: dict[str, pd.DataFrame] = {}
    for row in asked.rows:
        found = measure(row, asked)
        if "curves" in found:
            for name in curves.MEASURES:
                folder.mkdir(parents=True, exist_ok=True)
                curves.figure(found["curves"], name).savefig(folder / f"curves_{name}.png")
        tables |= {name: save(folder / f"{name}.csv", table, asked.threads) for name, table in found.items()}
        gc.collect()
    for name, table in tables.items():
        print(f"\n{name}\n\n{markdown(table)}")


def measure(row: str, asked: argparse.Namespace) -> dict[str, pd.DataFrame]:
    """The tables of one row of the program, by name."""
    if row in SPEED:
        return {"speed": compare(row, asked.repeats, asked.quick, asked.nnsight_python, asked.threads)}
    if row == "floor":
        return {"floor": against_floor(asked.repeats, asked.quick)}
    if row == "equality":
        return {"equality": equal_values(asked.quick)}
    table = curves.measure(ENGINE, asked.repeats, asked.quick)
    return {"curves": table, "slopes": curves.slopes(table)}


def save(path: Path, table: pd.DataFrame, threads: int) -> pd.DataFrame:
    """As CSV; rows of the same name that an earlier run left there are replaced, others kept. Returns the whole table."""
    table = table.assign(threads=threads)
    if path.exists():
        earlier = pd.read_csv(path, keep_default_na=False, na_values=[""])
        key = table.columns[0]
        table = pd.concat([earlier[~earlier[key].isin(table[key])], table], ignore_index=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False, float_format="%.4g")
    return table


if __name__ == "__main__":
    main()
