"""Everything that differs on a GPU, checked and timed in one run of under 8 minutes; exit 1 if a check fails.

    python experiments/bench/gpu.py [--device cuda|cpu] [--quick] [--folder FOLDER]

Correctness is against the same program on the CPU. Timings are medians of a few turns, with the device synchronised.
--device cpu --quick runs every line without a GPU, so that the program itself can be tested.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from interp import Inputs, ModelConfig, Transformer, generate, logit_difference, patch_sweep, run
from interp.tasks import TASKS, ToyFacts, as_task
from interp.tasks.task import drawn_on
from interp.training import train
from interp.training.ensemble import Ensemble
from interp.training.optimizer import make_optimizer
from interp.training.train import Loss, Watch, train_step

RESULTS = Path(__file__).parent / "results" / "gpu"
Row = dict[str, Any]


def row(what: str, measured: float, unit: str, wanted: str = "", ok: bool | None = None) -> Row:
    return {"what": what, "measured": measured, "unit": unit, "wanted": wanted, "ok": ok}


def seconds(function: Callable[[], Any], device: torch.device, turns: int = 5) -> float:
    """Median seconds of a call, the device waited for; one turn before that does not count."""
    times = []
    for turn in range(turns + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn:
            times.append(time.perf_counter() - start)
    return float(pd.Series(times).median())


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))


def forwards(device: torch.device, quick: bool) -> Iterator[Row]:
    """Every kind of model: logits and every site, on the device and on the CPU."""
    for name in ("facts", "induction", "copy", "dyck", "lookahead"):
        task = as_task(name)
        here = Transformer(task.model_config(), seed=0)
        there = copy.deepcopy(here).to(device)
        inputs = task.batch(0, 16, 0).inputs
        a, b = (run(model, inputs.to(model.device), record=list(model.sites)) for model in (here, there))
        worst = max(apart(a.cache[site].nan_to_num(0, 0, 0), b.cache[site].nan_to_num(0, 0, 0)) for site in here.sites)
        yield row(f"{name}: every site against the CPU, float32", worst, "relative", "≤ 1e-4", worst <= 1e-4)
        half = copy.deepcopy(here).to(device, torch.bfloat16)
        agree = float((run(half, inputs.to(device)).logits.cpu().argmax(-1) == a.logits.argmax(-1)).float().mean())
        yield row(f"{name}: bfloat16 weights, same most likely token", agree, "share", "≥ 0.9", agree >= 0.9)


def sweeps(device: torch.device, quick: bool) -> Iterator[Row]:
    """A patching sweep against the CPU and against one run per cell."""
    layers, width, length, prompts = (2, 64, 8, 2) if quick else (12, 768, 16, 4)
    config = ModelConfig(
        vocab=101 if quick else 50257, n_layers=layers, n_heads=4 if quick else 12, d_model=width, n_ctx=length
    )
    here = Transformer(config, seed=0)
    there = copy.deepcopy(here).to(device)
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(config.vocab, (prompts, length), generator=generator)
    corrupted = clean.clone()
    corrupted[:, length // 2] = (corrupted[:, length // 2] + 5) % config.vocab
    right, wrong = torch.arange(prompts), torch.arange(prompts) + 7
    for site, by in (("resid_pre", ("layer", "position")), ("z", ("layer", "position", "head"))):

        def sweep(model: Transformer, engine: Any = "fast", site: str = site, by: tuple[str, ...] = by) -> torch.Tensor:
            metric = logit_difference(right.to(model.device), wrong.to(model.device))
            prompts = clean.to(model.device), corrupted.to(model.device)
            return patch_sweep(model, *prompts, metric, site, by, engine=engine).values[site]

        a, b = sweep(here), sweep(there)
        gap = apart(a, b)
        yield row(f"sweep of {site}: values against the CPU", gap, "relative", "≤ 1e-3", gap <= 1e-3)
        fast, slow = (seconds(lambda e=engine, s=sweep: s(there, e), device, 1 if engine == "reference" else 3)
                      for engine in ("fast", "reference"))  # fmt: skip
        yield row(f"sweep of {site}: {b[..., 0].numel()} cells", fast, "s")
        yield row(f"sweep of {site}: one run per cell ÷ fast", slow / fast, "times")


def generation(device: torch.device, quick: bool) -> Iterator[Row]:
    """Greedy tokens, cached, on both."""
    task = ToyFacts(16)
    here = Transformer(task.model_config(positions="rotary", n_ctx=64), seed=0)
    tokens = task.batch(0, 8, 0).inputs.tokens
    a, b = (
        generate(model, Inputs(tokens.to(model.device)), 16).tokens for model in (here, copy.deepcopy(here).to(device))
    )
    same = float((a == b.cpu()).float().mean())
    yield row("generate: same tokens as on the CPU", same, "share", "≥ 0.95", same >= 0.95)


def data(device: torch.device, quick: bool) -> Iterator[Row]:
    """Every task draws its batch where the model is, and the same batch twice."""
    for name in TASKS:
        if name.startswith("language") or name.endswith(("-4096", "-113")):
            continue
        task = as_task(name)
        first, again = (drawn_on(device, task, 3, 64, 0) for _ in range(2))
        where = all(x.device.type == device.type for x in (first.inputs.tokens, first.positions, first.targets))
        same = torch.equal(first.inputs.tokens, again.inputs.tokens) and torch.equal(first.targets, again.targets)
        took = seconds(lambda task=task: drawn_on(device, task, 3, 256, 0), device, 10)
        yield row(f"{name}: a batch of 256 drawn on the device", 1000 * took, "ms", "there, repeatable", where and same)


def training(device: torch.device, quick: bool) -> Iterator[Row]:
    """It learns there; tokens per second in float32, under bfloat16 autocast and compiled."""
    task = ToyFacts(16)
    small = task.model_config(d_model=32, n_heads=2)
    config = task.train_config(steps=20 if quick else 300, batch_size=32, learning_rate=5e-3, weight_decay=0.01)
    learned = train(small, task, config, device=device, progress=False).curves.iloc[-2:]["accuracy"].max()
    yield row("facts of 16 people by heart", float(learned), "share", "1", quick or learned == 1.0)
    model = ModelConfig(vocab=2048, n_layers=2 if quick else 6, n_heads=4, d_model=64 if quick else 512, n_ctx=128)
    batch, n = (2 if quick else 64), 128
    for name, more in (("float32", {}), ("bfloat16 autocast", {"precision": "bfloat16"}),
                       ("bfloat16 autocast, compiled", {"precision": "bfloat16", "compile": True})):  # fmt: skip
        if "compile" in more and device.type == "cpu":
            continue
        chosen = replace(config, **more)  # type: ignore[arg-type]
        one = Transformer(model, seed=0).to(device).train()
        optimizer, loss = make_optimizer(one, chosen), Loss(one)
        loss = torch.compile(loss) if chosen.compile else loss
        watch, tokens = Watch(one, chosen), torch.randint(2048, (batch, n + 1), device=device)
        asked = drawn_on(device, ToyFacts(16), 0, 4, 0)
        every = torch.arange(n, device=device).expand(batch, -1)
        asked = replace(asked, inputs=Inputs(tokens[:, :-1]), positions=every, targets=tokens[:, 1:])

        def steps() -> None:
            for step in range(5):
                watch(step, *train_step(loss, optimizer, asked, chosen, step))  # type: ignore[arg-type]  # noqa: B023

        took = seconds(steps, device)
        yield row(f"training, {model.n_layers} × {model.d_model}: {name}", 5 * batch * n / took, "tokens/s")
    fused = make_optimizer(one, config).param_groups[0]["fused"]
    yield row("AdamW is fused", float(bool(fused)), "", "1", bool(fused))


def ensembles(device: torch.device, quick: bool) -> Iterator[Row]:
    """32 members against one, and float64 members against models trained alone."""
    task = ToyFacts(32 if quick else 512)
    base = task.train_config(batch_size=64)
    for k in (2, 4) if quick else (8, 32):
        configs = [replace(base, seed=i) for i in range(k)]
        ensemble = Ensemble([Transformer(task.model_config(), seed=i).to(device) for i in range(k)], configs)
        one = Transformer(task.model_config(), seed=0).to(device)
        optimizer, loss = make_optimizer(one, base), Loss(one)

        def together() -> None:
            for step in range(10):
                ensemble.step([drawn_on(device, task, step, 64, c.seed) for c in configs], step)  # noqa: B023

        def alone() -> None:
            for step in range(10):
                train_step(loss, optimizer, drawn_on(device, task, step, 64, 0), base, step)  # noqa: B023

        faster = k * seconds(alone, device) / seconds(together, device)
        wanted = "≥ 15" if k == 32 else ""
        yield row(
            f"ensemble of {k}: times faster than one after the other",
            faster,
            "times",
            wanted,
            faster >= 15 if wanted else None,
        )
    configs = [replace(base, seed=i) for i in range(3)]
    models = [[Transformer(task.model_config(), seed=i).double().to(device) for i in range(3)] for _ in range(2)]
    ensemble = Ensemble(models[0], configs)
    optimizers = [make_optimizer(model, base) for model in models[1]]
    for step in range(50):
        batches = [drawn_on(device, task, step, 64, config.seed) for config in configs]
        ensemble.step(batches, step)
        for model, optimizer, batch in zip(models[1], optimizers, batches, strict=True):
            train_step(Loss(model), optimizer, batch, base, step)
    worst = max(float((a - b).detach().abs().max()) for x, y in zip(ensemble.unstack(), models[1], strict=True)
                for a, b in zip(x.parameters(), y.parameters(), strict=True))  # fmt: skip
    yield row(
        "ensemble, float64: 50 steps against models trained alone", worst, "largest difference", "≤ 1e-9", worst <= 1e-9
    )


CHECKS = (forwards, sweeps, generation, data, training, ensembles)


def main(words: list[str] | None = None) -> int:
    """Print and store the table; how many checks failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(words)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")  # comparisons are of float32, not of TF32
    rows, start = [], time.perf_counter()
    for check in CHECKS:
        began = time.perf_counter()
        try:
            found = list(check(device, options.quick))
        except Exception as error:  # one check that breaks must not hide the others
            found = [
                row(f"{check.__name__} broke: {type(error).__name__}: {error}", float("nan"), "", "no exception", False)
            ]
        rows += [{"check": check.__name__, **one} for one in found]
        print(f"{check.__name__}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    table = pd.DataFrame(rows)
    options.folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.folder / "gpu.csv", index=False, float_format="%.4g")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {time.perf_counter() - start:.0f} s\n")
    print(table.to_string(index=False, float_format="%.4g"))
    failed = int((table["ok"] == False).sum())  # noqa: E712 (None is neither)
    print(f"\n{failed} checks failed")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
