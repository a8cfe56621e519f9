"""Any patching or ablation sweep from the command line: a folder with tables, figures and a page; a stopped one goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import save_file

from interp import record
from interp.metrics import Metric, logit_difference
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.report.parts import fingerprint
from interp.report.sweep_inputs import Opened, given_pair, open_model, task_pairs
from interp.report.sweep_page import count, write_page
from interp.sweep import SweepPlan, SweepResult, plan_ablation, plan_sweep
from interp.sweep.execute import Estimate
from interp.tasks.task import Pairs

SITES = ("resid_pre", "attn_out", "ffn_out")
SETTINGS, PAGE = "settings.json", "index.html"
MAX_ROWS = 2_000_000  # of sweep.parquet; values.safetensors always holds every number


class SweepFolderError(RuntimeError):
    """A folder that holds another sweep, or something else."""


class OptionsError(ValueError):
    """Options that do not go together; the message names what was given and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `interp sweep` is asked for; its help says what each means."""

    model: str
    pairs: int = 0
    clean: str = ""
    corrupted: str = ""
    correct: str = ""
    wrong: str = ""
    sites: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    direction: str = "denoising"
    ablate: str = "none"
    window: int = 1
    exact: str = "rounding"
    engine: str = "fast"
    budget: float = 0.0
    check: int = 2
    folder: Path = Path("runs/sweep")
    device: str = "cpu"
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("pairs", "budget", "check", "threads"):
            if not getattr(self, name) >= 0:
                raise OptionsError(f"--{name} {getattr(self, name)} is not allowed; allowed: 0 or more")
        if self.ablates and self.direction != "denoising":
            raise OptionsError(
                f"--direction {self.direction} is not allowed with --ablate {self.ablate}, which has no second run"
            )
        if self.ablates and self.corrupted:
            raise OptionsError(
                f"--corrupted {self.corrupted!r} is not allowed with --ablate {self.ablate}, which runs clean prompts"
            )
        needed = ["clean", *([] if self.ablates else ["corrupted"]), "correct", "wrong"]
        missing = [f"--{name}" for name in needed if not getattr(self, name)]
        if self.typed and missing:
            raise OptionsError(f"{', '.join(missing)} missing; allowed: {', '.join(f'--{name}' for name in needed)} "
                               "together, or none of them")  # fmt: skip
        if self.typed and self.pairs:
            raise OptionsError(f"--pairs {self.pairs} is not allowed with --clean; allowed: one of the two")

    @property
    def ablates(self) -> bool:
        """Whether activations are ablated instead of patched."""
        return self.ablate != "none"

    @property
    def typed(self) -> bool:
        """Whether a prompt was given."""
        return bool(self.clean or self.corrupted or self.correct or self.wrong)

    @property
    def manner(self) -> dict[str, Any]:
        """Arguments of every sweep: how it is to be computed."""
        budget = self.budget * 1e9 or None
        return {"engine": self.engine, "exact": self.exact, "window": self.window, "budget": budget}


@dataclass(frozen=True)
class Ready:
    """A sweep whose model, prompts and plans are made: `words` says what it will cost, `run` leaves the folder."""

    asked: Asked
    opened: Opened
    pairs: Pairs
    plans: Mapping[str, SweepPlan]  # by direction
    estimates: Mapping[str, Estimate]
    settings: dict[str, Any]
    started: float

    @property
    def words(self) -> list[str]:
        """What will be run and what it will cost, a line each."""
        prompts = count(len(self.pairs), "prompt" if self.asked.ablates else "prompt pair")
        what = (
            f"{self.opened.title}: {prompts}, {' × '.join(self.settings['by'])} of {', '.join(self.settings['sites'])}"
        )
        prefix = f"before each prompt: {' '.join(self.opened.labels(torch.tensor(self.opened.prefix)))}"
        lines = [what, *([prefix] if self.opened.prefix else [])]
        lines += [f"{name}: {estimate}" for name, estimate in self.estimates.items()]
        going_on = (self.asked.folder / SETTINGS).exists()
        return [*lines, *([f"{self.asked.folder} holds a part of this sweep: going on"] if going_on else [])]

    def run(self, progress: bool = True) -> Path:
        """Every cell, then tables, figures and page; returns the page's path. Raises SweepInterrupted; the same call goes on."""
        folder = self.asked.folder
        record.write_json(folder / SETTINGS, self.settings)
        results = self.run_all(progress)
        effects = write_tables(folder, results)
        record.write_atomic(
            folder / "prompts.csv", lambda path: self.opened.table(self.pairs).to_csv(path, index=False)
        )
        page = write_page(self, results, effects)  # last: a folder with a page is finished
        for name in results:
            _checkpoint(folder, name).unlink(missing_ok=True)
        return page

    def run_all(self, progress: bool = True) -> dict[str, SweepResult]:
        """Every cell, by direction; what is finished is kept in the folder."""
        check, folder = self.asked.check, self.asked.folder
        return {name: plan.run(check, _checkpoint(folder, name), progress) for name, plan in self.plans.items()}


def prepare(asked: Asked) -> Ready:
    """Open the model, choose the prompts, plan, and look at the folder; nothing is written."""
    started = time.time()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    opened = open_model(asked.model, asked.device)
    if asked.typed:
        pairs = given_pair(opened, asked.clean, asked.corrupted, asked.correct, asked.wrong)
    else:
        pairs = task_pairs(opened, asked.pairs, asked.by)
    if asked.ablate in ("mean", "resample") and len(pairs) < 2:
        raise OptionsError(
            f"--ablate {asked.ablate} of one prompt is not allowed; allowed: 'zero', or 2 prompts or more (--pairs)"
        )
    by, sites = asked.by or default_axes(pairs.clean), asked.sites or default_sites(opened.model)
    plans = _plans(asked, opened, pairs, sites, by)
    settings = {"model": opened.name, "weights": fingerprint(opened.model), **_deciding(asked), "sites": sites, "by": by,
                "pairs": len(pairs), "threads": torch.get_num_threads()}  # fmt: skip
    check_folder(asked.folder, settings)
    estimates = {name: plan.estimate for name, plan in plans.items()}
    return Ready(asked, opened, pairs, plans, estimates, settings, started)


def default_axes(inputs: Inputs) -> tuple[str, str]:
    """Layer × position for prompts of one length without roles, else layer × role."""
    padded = inputs.mask is not None and not bool(inputs.mask.all())
    return ("layer", "role" if inputs.roles or inputs.source_roles or padded else "position")


def default_sites(model: Transformer) -> tuple[str, ...]:
    """The stream, attention's and the FFN's output, where the model has them; of an encoder-decoder in both stacks."""
    there = dict.fromkeys((site.stack, site.name) for site in model.sites)
    stacks = dict.fromkeys(stack for stack, _ in there)
    return tuple(f"{stack}.{name}" if stack else name for stack in stacks for name in SITES if (stack, name) in there)


def groups(sites: Sequence[str]) -> list[Any]:
    """The sites as `patch_sweep` takes them; those joined by + are a tuple."""
    return [tuple(one.split("+")) if "+" in one else one for one in sites]


def metric_of(pairs: Pairs) -> Metric:
    """The logit difference of the pairs' answers, where they are read."""
    return logit_difference(pairs.correct, pairs.wrong, pairs.position)


def _plans(
    asked: Asked, opened: Opened, pairs: Pairs, sites: Sequence[str], by: tuple[str, ...]
) -> dict[str, SweepPlan]:
    """One plan per direction, or the ablation's."""
    model, metric, names = opened.model, metric_of(pairs), groups(sites)
    if asked.ablates:
        value: Any = asked.ablate
        plan = plan_ablation(model, pairs.clean, metric, value, names, by, **asked.manner)
        return {f"ablation ({asked.ablate})": plan}
    directions: Any = ("denoising", "noising") if asked.direction == "both" else (asked.direction,)
    plans = {one: plan_sweep(model, pairs.clean, pairs.corrupted, metric, names, by, one, **asked.manner)
             for one in directions}  # fmt: skip
    for name, plan in plans.items():  # equal baselines are refused now, not after the run
        SweepResult("logit_difference", "logits", name, {}, {}, {}, plan.clean, plan.corrupted).effect()
    return plans


def _deciding(asked: Asked) -> dict[str, Any]:
    """The options that decide a sweep's numbers."""
    return {name: value for name, value in vars(asked).items() if name not in ("model", "folder", "budget", "check")}


def check_folder(folder: Path, settings: dict[str, Any]) -> None:
    """SweepFolderError or FileExistsError unless the folder is new or holds an unfinished sweep of these settings."""
    if (folder / PAGE).exists():
        raise FileExistsError(f"{folder} holds results already; results are never overwritten, choose a new --folder")
    if not folder.exists() or not any(not entry.name.startswith(".") for entry in folder.iterdir()):
        return
    if not (folder / SETTINGS).is_file():
        raise SweepFolderError(f"{folder} is not empty and holds no sweep; choose a new --folder")
    try:
        old = dict(json.loads((folder / SETTINGS).read_text()))
    except (ValueError, TypeError) as error:
        raise SweepFolderError(f"{folder / SETTINGS} is not a sweep's settings: {error}") from None
    new = json.loads(json.dumps(settings, default=str))
    differing = [f"{name}: {old.get(name)!r} there, {new.get(name)!r} asked for"
                 for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]  # fmt: skip
    if differing:
        raise SweepFolderError(f"{folder} holds another sweep, unfinished ({'; '.join(differing)}); allowed: its settings, or "
                               "another --folder")  # fmt: skip


def _checkpoint(folder: Path, name: str) -> Path:
    return folder / f"checkpoint-{name.split()[0]}.safetensors"


def write_tables(folder: Path, results: Mapping[str, SweepResult]) -> pd.DataFrame:
    """effect.csv, sweep.parquet (up to MAX_ROWS rows) and values.safetensors; returns what is in effect.csv."""
    parts = [one.effect_table().assign(n=len(one.clean), direction=name) for name, one in results.items()]
    effects = pd.concat(parts, ignore_index=True)
    effects = effects[["direction", *(name for name in effects if name != "direction")]]
    record.write_atomic(folder / "effect.csv", lambda path: effects.to_csv(path, index=False))
    if sum(values.numel() for one in results.values() for values in one.values.values()) <= MAX_ROWS:
        tables = [one.table().assign(direction=name) for name, one in results.items()]
        record.write_table(folder / "sweep.parquet", pd.concat(tables, ignore_index=True))
    tensors, axes = {}, {}
    for name, one in results.items():
        tensors |= {f"{name}.{site}": values.contiguous() for site, values in one.values.items()}
        tensors |= {"clean": one.clean} if one.corrupted is None else {"clean": one.clean, "corrupted": one.corrupted}
        axes |= {f"{name}.{site}": dict(zip(one.axes[site], one.coordinates[site], strict=True)) for site in one.values}
    about = {"axes": json.dumps(axes)}
    record.write_atomic(folder / "values.safetensors", lambda path: save_file(tensors, path, metadata=about))
    return effects
