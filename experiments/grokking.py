"""Modular addition learnt by heart, then by Fourier: results/grokking/{progress.csv, progress.png, power.png, README.md}.

python experiments/grokking.py            trains some 4 minutes on one core (resumed or re-used where runs/grokking has it)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from interp.analyses.over_training import over_training
from interp.analyses.progress import key_frequencies, progress_measures
from interp.plots.progress import fourier_power, progress_curves
from interp.record import write_atomic, write_text
from interp.tasks import ModularAddition
from interp.training import Trained, train

HERE = Path(__file__).parent
RESULTS, RUN = HERE / "results" / "grokking", HERE.parent / "runs" / "grokking"
LEARNT = 0.99  # accuracy


def first_step(rows: pd.Series, reached: pd.Series) -> int | None:
    """The first step (the series' index) at which `reached` holds."""
    steps = rows.index[reached]
    return int(steps.min()) if len(steps) else None


def accuracy_step(trained: Trained, split: str) -> int | None:
    """The first evaluation at which a split's accuracy is above 99%; evaluations are every 10 steps by default."""
    rows = trained.curves[trained.curves["split"] == split].set_index("step")["accuracy"]
    return first_step(rows, rows > LEARNT)


def losses_of(table: pd.DataFrame, measure: str, split: str) -> pd.Series:
    """One loss by kept step."""
    rows = table[(table["measure"] == measure) & (table["split"] == split) & table["frequency"].isna()]
    return rows.set_index("step")["value"].sort_index()


def halved(nats: pd.Series) -> int | None:
    """The first kept step at which a loss is below half its value before training."""
    return first_step(nats, nats < nats.loc[0] / 2)


def halved_after_peak(nats: pd.Series) -> int | None:
    """The first kept step from its highest value on at which a loss is below half of that."""
    return first_step(nats, (nats < nats.max() / 2) & (nats.index > nats.idxmax()))


def order(restricted: int | None, test: int | None) -> str:
    """Which of two losses falls first, in words."""
    if restricted is None or test is None:
        return "one of them never does"
    return "restricted first" if restricted < test else "the same kept step" if restricted == test else "test first"


def some_steps(table: pd.DataFrame, n: int = 18) -> str:
    """The losses at about `n` of the kept steps and the last, as Markdown."""
    columns = {
        "train loss": ("loss", "train"), "test loss": ("loss", "held_out"), "restricted (all)": ("restricted_loss", "all"),
        "restricted (test)": ("restricted_loss", "held_out"), "excluded (train)": ("excluded_loss", "train"),
        "test accuracy": ("accuracy", "held_out"), "squared weights": ("squared_weights", None),
    }  # fmt: skip
    weights = table[table["measure"] == "squared_weights"].set_index("step")["value"]
    shown = pd.DataFrame({name: weights if split is None else losses_of(table, measure, split)
                          for name, (measure, split) in columns.items()})  # fmt: skip
    every = math.ceil(len(shown) / n)
    shown = shown.iloc[sorted({*range(0, len(shown), every), len(shown) - 1})]
    lines = [f"| step | {' | '.join(shown.columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in shown.reset_index().to_dict("records"):
        step, accuracy, weights = row.pop("step"), row.pop("test accuracy"), row.pop("squared weights")
        lines.append(f"| {step} | {' | '.join(f'{x:.3g}' for x in row.values())} | {accuracy:.1%} | {weights:.0f} |")
    return "\n".join(lines)


def rules(table: pd.DataFrame) -> str:
    """When each loss falls, by two rules, as Markdown."""
    chosen = {"restricted, all inputs": ("restricted_loss", "all"), "restricted, test": ("restricted_loss", "held_out"),
              "test": ("loss", "held_out")}  # fmt: skip
    curves = {name: losses_of(table, *which) for name, which in chosen.items()}
    lines = [f"| below half of | {' | '.join(curves)} | all inputs' restricted against test |", "|---" * 5 + "|"]
    for name, rule in (("its value before training", halved), ("its highest value, after it", halved_after_peak)):
        steps = [rule(nats) for nats in curves.values()]
        lines.append(f"| {name} | {' | '.join(map(str, steps))} | {order(steps[0], steps[-1])} |")
    return "\n".join(lines)


def settled(trained: Trained, key: list[int]) -> tuple[int | None, int | None]:
    """The first kept steps from which on every model's own key frequencies include all of `key`, and are exactly these."""
    table = over_training(trained, partial(key_frequencies, task=trained.task))
    found = table[table["key"]].groupby("step")["frequency"].agg(set).to_dict()
    own = [found.get(step, set()) for step in trained.kept]
    includes = pd.Series([one >= set(key) for one in own], index=trained.kept)
    equals = pd.Series([one == set(key) for one in own], index=trained.kept)
    first, second = (first_step(held, held[::-1].cummin()[::-1]) for held in (includes, equals))
    return first, second


def control(trained: Trained, spectrum: pd.DataFrame) -> tuple[list[int], float]:
    """As many frequencies that are not key, those of most power, and the last model's restricted loss with them, in nats."""
    rest = spectrum[~spectrum["key"]].sort_values("logit_power", ascending=False)
    others = sorted(rest["frequency"].head(int(spectrum["key"].sum())).tolist())
    table = progress_measures(trained.model, trained.task, others).assign(step=0)
    return others, float(losses_of(table, "restricted_loss", "all").loc[0])


def text_of(trained: Trained, table: pd.DataFrame, spectrum: pd.DataFrame) -> str:
    """README.md."""
    config, task, key = trained.config, trained.task, spectrum[spectrum["key"]]
    assert config is not None
    pairs, n = f"{task.n_train} of {task.modulus**2} pairs", len(spectrum)
    by_embedding = key_frequencies(trained.model, task, by="embedding")
    in_embedding = by_embedding.loc[by_embedding["key"], "frequency"].tolist()
    others, without = control(trained, spectrum)
    includes, equals = settled(trained, key["frequency"].tolist())
    last = {name: losses_of(table, name, "all").iloc[-1] for name in ("loss", "restricted_loss")}
    return f"""# Grokking: modular addition by heart, then by Fourier

Written by `python experiments/grokking.py`: `modular-addition` with p = {task.modulus}, trained on {pairs},
with the task's own model and training ({config.steps} steps, learning rate {config.learning_rate}, weight decay
{config.weight_decay}), seed {config.seed}. One run, so no interval. Measures: `progress_measures` (Nanda et al. 2023) at
{len(trained.kept)} kept steps, log-spaced from 0 and so far apart late; the key frequencies are the last model's throughout.

* Accuracy above 99%, first: train at step {accuracy_step(trained, "train")}, test (held out) at step
  {accuracy_step(trained, "held_out")}; evaluated every {config.evaluate_every} steps.
* Key frequencies: {len(key)} of {n}, {key["frequency"].tolist()}. Rule: more than 2/{n} of the norms of the
  logits' cos w(a+b) and sin w(a+b) components. They hold {key["logit_share"].sum():.1%} of the power of these and
  {key["embedding_share"].sum():.1%} of the embedding's. The same rule on the embedding finds {in_embedding}.
* At the last step the loss on all inputs is {last["loss"]:.2g} nats, with the key frequencies alone
  {last["restricted_loss"]:.2g}. Control: with {others}, the strongest that are not key, it is {without:.2g}
  (ln {task.modulus} = {math.log(task.modulus):.2f}).
* When the losses fall, by two rules (first kept step; the test loss first rises, so the first rule alone would flatter
  the restricted one):

{rules(table)}

The frequencies above are the last model's, chosen in hindsight. By the same rule on each kept step's own logits the key
frequencies include all of these from step {includes} on, and are exactly these from step {equals} on.

{some_steps(table)}

Losses are in nats per input, over all {task.modulus + 1} tokens. progress.csv has every measure, frequency, split and
kept step.

![losses](progress.png)
![power](power.png)
"""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=RUN, help="the training's folder; one that is there is resumed")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--modulus", type=int, default=59)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--keep", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1000)
    asked = parser.parse_args(words)
    task = ModularAddition(asked.modulus)
    config = task.train_config(seed=asked.seed, steps=asked.steps, keep=asked.keep, evaluate_every=10)
    trained = train(None, task, config, asked.run, resume=True)
    spectrum = key_frequencies(trained.model, task)
    frequencies = spectrum.loc[spectrum["key"], "frequency"].tolist()
    measures = partial(progress_measures, task=task, frequencies=frequencies)
    table = over_training(trained, measures, progress=True)
    write_atomic(asked.folder / "progress.csv", lambda path: table.to_csv(path, index=False))
    figures = {"progress": progress_curves(table), "power": fourier_power(spectrum)}
    for name, figure in figures.items():
        write_atomic(asked.folder / f"{name}.png", partial(figure.savefig, format="png", dpi=150))
    text = text_of(trained, table, spectrum)
    write_text(asked.folder / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
