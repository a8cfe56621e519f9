"""Runs trained together as one batched model, each with a folder of its own."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from interp.tasks.task import drawn_on
from interp.training.ensemble import Ensemble
from interp.training.folder import RunFolder, Trained, TrainingFolderError, result_of
from interp.training.judge import goals_met
from interp.training.state import read_state, write_state
from interp.training.train import DivergedError, Watch, evaluate


class Stack:
    """The runs that go on together: names, their ensemble, their curves."""

    def __init__(
        self, homes: Mapping[str, RunFolder], state: Path, progress: bool, device: torch.device, ended: Collection[str]
    ) -> None:
        """homes: every run's folder by name. state: the file to go on from. ended: runs that need no more training."""
        self.homes, self.state, self.progress = homes, state, progress
        self.names, self.start, self.seconds = list(homes), 0, 0.0
        first = next(iter(homes.values()))
        self.task, self.config = first.task, first.config
        self.rows: dict[str, list[dict]] = {name: [] for name in homes}
        self.ensemble = Ensemble(
            [home.first().to(device) for home in homes.values()], [home.config for home in homes.values()]
        )
        if state.exists():
            read_state(state, self._take)
            lacking = [name for name in homes if name not in self.names and name not in ended]
            if lacking:
                raise TrainingFolderError(f"{state} holds {', '.join(self.names)} on their way, without {', '.join(lacking)}; "
                                          "allowed: the same runs, or a new folder")  # fmt: skip

    def run(self, found: dict[str, Trained]) -> None:
        """Until every run has met its end; `found` gets those that it lacks."""
        began, config = time.perf_counter() - self.seconds, self.config
        watches = {name: self._watch(name, k) for k, name in enumerate(self.names)}
        keep, device = set(config.kept), self.ensemble.device
        if self.start == 0 and 0 in keep:
            self._keep(0, found)
        bar = tqdm(range(self.start, config.steps), initial=self.start, total=config.steps, disable=not self.progress,
                   desc=f"{len(self.names)} × {self.task.name}")  # fmt: skip
        for step in bar:
            configs = self.ensemble.configs
            drawn = [drawn_on(device, self.task, step, one.batch_size, one.data) for one in configs]
            losses, norms = self.ensemble.step(drawn, step)
            done, ends = step + 1, {}
            settle = done % config.evaluate_every == 0 or done % config.checkpoint_every == 0 or done == config.steps
            if settle or device.type == "cpu":
                losses, norms = losses.cpu(), norms.cpu()
            for name, loss, norm in zip(self.names, losses, norms, strict=True):
                try:
                    watches[name](step, loss, norm)
                    if settle:
                        watches[name].settle()
                except DivergedError as error:
                    ends[name] = str(error)
            if done % config.evaluate_every == 0 or done == config.steps:
                self._evaluate(done, watches, time.perf_counter() - began, ends)
            if done in keep:
                self._keep(done, found)
            if ends or done == config.steps:
                self._leave(ends, done == config.steps, found)
                if not self.names:
                    break
            if done % config.checkpoint_every == 0 and done < config.steps:
                self._write(done, time.perf_counter() - began)
            if settle:
                bar.set_postfix({"runs": len(self.names), "loss": f"{float(losses.mean()):.3f}"})

    def _watch(self, name: str, k: int) -> Watch:
        return Watch(self.ensemble.member(k), self.ensemble.configs[k], self.rows[name],
                     lambda: self.ensemble.gradients(self.names.index(name)))  # fmt: skip

    def _evaluate(self, done: int, watches: dict[str, Watch], seconds: float, ends: dict[str, str]) -> None:
        """One row per run and split; runs that may stop at their goals and meet them end."""
        for k, name in enumerate(self.names):
            if name in ends:
                continue
            config = self.ensemble.configs[k]
            new = evaluate(self.ensemble.member(k), self.task, done, watches[name].loss, config.rate(done - 1), seconds)
            self.rows[name] += new
            if config.stop == "goals" and goals_met(self.task, new):
                ends[name] = ""

    def _keep(self, done: int, found: dict[str, Trained]) -> None:
        for k, name in enumerate(self.names):
            if name not in found:
                self.homes[name].keep(self.ensemble.member(k), done)

    def _leave(self, ends: dict[str, str], everyone: bool, found: dict[str, Trained]) -> None:
        """Close the folders of runs that have ended and go on with the others."""
        for k, name in enumerate(self.names):
            if not (everyone or name in ends) or name in found:
                continue
            home = self.homes[name]
            if ends.get(name):
                home.fail(ends[name], self.rows[name])
                found[name] = home.ended()
                continue
            model = self.ensemble.alone(k)
            found[name] = result_of(model, self.task, home.config, self.rows[name], home.path, "stacked")
            home.close(found[name])
        stay = [] if everyone else [k for k, name in enumerate(self.names) if name not in ends]
        self.names = [self.names[k] for k in stay]
        if stay and ends:
            self.ensemble = self.ensemble.pick(stay)

    def _write(self, done: int, seconds: float) -> None:
        """The state that a killed training goes on from, runs that have ended since included."""
        about = {
            "step": done,
            "seconds": seconds,
            "runs": {name: self.homes[name].identity for name in self.names},
            "rows": {name: self.rows[name] for name in self.names},
        }
        write_state(self.state, self.ensemble.state(), about)

    def _take(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        names = list(about["runs"])
        if any(name not in self.homes or self.homes[name].identity != run for name, run in about["runs"].items()):
            raise ValueError(f"it is the state of {', '.join(names)} with their settings")
        self.ensemble = self.ensemble.pick([self.names.index(name) for name in names])
        self.ensemble.load_state(tensors)
        self.start, self.seconds, self.names = about["step"], about["seconds"], names
        self.rows |= about["rows"]
