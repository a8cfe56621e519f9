"""The command line: parse, call, print."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


@dataclass(frozen=True)
class Train:
    """Train a toy model on a task and leave checkpoint, curves and provenance in a folder."""

    task: Annotated[str, tyro.conf.Positional]
    """Which task: facts, induction, copy, reverse, sort, dyck, lookahead, lookahead-causal."""
    folder: Path
    """Where to; must be new unless --resume."""
    resume: bool = False
    """Go on from the folder's last state (bit for bit as if never stopped, at the same thread count)."""
    n_subjects: int = 0
    """Task facts: how many made-up people, four facts each; 0 = 512."""
    n_layers: int = 0
    """Depth; 0 = the task's choice."""
    d_model: int = 0
    """Width; 0 = the task's choice."""
    steps: int = 0
    """Training steps; 0 = the task's choice."""
    batch_size: int = 0
    """Prompts per step; 0 = the task's choice."""
    learning_rate: float = 0.0
    """Peak learning rate; 0 = the task's choice."""
    seed: int = 0
    """Initial weights and data order."""
    device: str = "cpu"
    """Where to train."""
    threads: int = 0
    """CPU threads; 0 = PyTorch's choice."""


@dataclass(frozen=True)
class Report:
    """Train or reuse the toy model, open it and a real model up, and write one page."""

    folder: Path = Path("runs/report")
    """Where to; parts that are there and have the same settings are reused."""
    toy_only: bool = False
    """Leave the real model out (no download)."""
    pairs: int = 8
    """Prompt pairs of the real model's patching sweep."""


@dataclass(frozen=True)
class Compare:
    """Compare every site with transformers, TransformerLens and PyTorch on random models; exit 1 if any is too far."""

    folder: Path = Path("runs/compare")
    """Where to; must be new."""
    families: tuple[str, ...] = ("GPT-2", "BERT", "Llama", "Mistral", "Qwen2", "Qwen3", "torch")
    """Which model families; torch is our encoder-decoder against torch.nn.Transformer."""
    seed: int = 0
    """Weights and prompts."""


@dataclass(frozen=True)
class Sweep:
    """Patch or ablate a model place by place and leave tables, figures and a page in a folder; a stopped sweep goes on."""

    model: Annotated[str, tyro.conf.Positional]
    """shipped (the toy model in the package), smollm2 (a download of 93 MB, once), or a folder that interp.save or interp train
    wrote."""
    pairs: int = 0
    """How many prompt pairs of the model's own task (smollm2: facts that it knows); 0 = 64, for smollm2 8."""
    clean: str = ""
    """A prompt of your own instead: text, or token ids separated by spaces for a model without a tokenizer."""
    corrupted: str = ""
    """The prompt of equal length to patch from or into; not with --ablate."""
    correct: str = ""
    """The answer to --clean, one token (of text often with a leading space: " Paris")."""
    wrong: str = ""
    """The answer to --corrupted, one token. What is measured is logit(correct) - logit(wrong) at the last token."""
    sites: tuple[str, ...] = ()
    """Where; names joined by + are changed jointly: attn_out+ffn_out. Default: resid_pre attn_out ffn_out, of an
    encoder-decoder those of both stacks."""
    by: tuple[str, ...] = ()
    """The axes: layer or window, position or role, head or neuron. Default: layer position for prompts of one length without
    roles, else layer role."""
    direction: Literal["denoising", "noising", "both"] = "denoising"
    """denoising: clean values into the corrupted run; noising: the reverse."""
    ablate: Literal["none", "zero", "mean", "resample"] = "none"
    """Ablate on the clean prompts instead of patching: by zero, by the mean over prompts, by another prompt's value."""
    window: int = 1
    """With window among the axes: how many layers at a time (odd)."""
    exact: Literal["rounding", "bitwise"] = "rounding"
    """rounding: every shortcut; bitwise: only those that keep a full run's bits."""
    engine: Literal["fast", "reference"] = "fast"
    """reference: a full run per cell."""
    budget: float = 0.0
    """Memory that may be used, in GB; 0 = half of what is free."""
    check: int = 2
    """How many cells of each site to run again in full and compare."""
    folder: Path = Path("runs/sweep")
    """Where to; new, or an unfinished sweep with the same settings, which goes on."""
    device: str = "cpu"
    """Where to compute."""
    threads: int = 0
    """CPU threads; 0 = PyTorch's choice."""
    dry_run: bool = False
    """Say what it will cost and stop."""


@dataclass(frozen=True)
class Info:
    """What is installed, and the sites of the shipped model."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `interp`."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"report": Report, "train": Train, "sweep": Sweep, "compare": Compare, "info": Info},
        args=arguments,
        description="interp: open a transformer up.",
    )
    try:
        {Train: _train, Report: _report, Sweep: _sweep, Compare: _compare, Info: _info}[type(command)](command)
    except KeyboardInterrupt:
        hints = {Train: " (--resume goes on)", Sweep: "; the same command goes on"}
        sys.exit("interrupted; what had finished is kept" + hints.get(type(command), ""))
    except (ValueError, OSError, RuntimeError, AssertionError, LookupError) as error:
        sys.exit(f"interp: {error}")


def _train(command: Train) -> None:
    import torch

    from interp import record
    from interp.plots import training_curves
    from interp.training import train

    task = _task(command)
    if command.threads:
        torch.set_num_threads(command.threads)
    chosen = {"steps": command.steps, "batch_size": command.batch_size, "learning_rate": command.learning_rate}
    config = task.train_config(seed=command.seed, **{name: value for name, value in chosen.items() if value})
    sizes = {"d_model": command.d_model, "n_layers": command.n_layers}
    model = task.model_config(**{name: value for name, value in sizes.items() if value})
    result = train(model, task, config, command.folder, resume=command.resume, device=command.device)
    figure = training_curves(result.curves, title=str(task.name))
    record.write_atomic(command.folder / "curves.png", lambda path: figure.savefig(path, dpi=150))
    for split, row in result.curves.groupby("split", sort=False).last().iterrows():
        print(f"{split}: {100 * row['accuracy']:.2f}% of asked tokens, {100 * row['exact']:.2f}% of {int(row['n'])} examples, "
              f"{row['nats']:.4f} nats")  # fmt: skip
    wanted = "; ".join(map(str, task.goals))
    print(
        f"{'learned' if result.success else 'NOT learned'} ({wanted}) in {result.seconds:.0f} s; {command.folder}/model"
    )


def _task(command: Train) -> Any:
    from interp.tasks import ToyFacts, as_task

    if command.n_subjects and command.task != "facts":
        raise ValueError(f"n_subjects={command.n_subjects} is not allowed for task {command.task!r}; it is for 'facts'")
    return ToyFacts(n_subjects=command.n_subjects) if command.n_subjects else as_task(command.task)


def _report(command: Report) -> None:
    from interp.report import build

    page = build(command.folder, real=not command.toy_only, n_pairs=command.pairs)
    print(f"wrote {page}")


def _sweep(command: Sweep) -> None:
    from interp.report.sweep import Asked, prepare

    ready = prepare(Asked(**{name: value for name, value in vars(command).items() if name != "dry_run"}))
    print("\n".join(ready.words), flush=True)
    if not command.dry_run:
        print(f"wrote {ready.run()}")


def _compare(command: Compare) -> None:
    from interp.report.compare import build

    page, too_far = build(command.folder, command.families, command.seed)
    print(f"{too_far} comparisons above their tolerance; wrote {page}")
    if too_far:
        raise ValueError(f"{too_far} comparisons are above their tolerance; see {page}")


def _info(command: Info) -> None:
    import platform

    import torch

    from interp import record, shipped

    about = record.provenance()
    print(f"python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in about["versions"].items()))
    print(f"threads {torch.get_num_threads()}, GPU {about['machine']['gpu'] or 'none'}")
    model, task = shipped()
    print(f"shipped model: {model.config}\n{len(task.prompts)} prompts of task {task.name!r}; sites of layer 0:")
    print("  " + ", ".join(str(site) for site in model.sites if site.layer == 0))
