"""The command line: parse, call, print."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from interp.cli import train
from interp.cli.train import Train


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
class Claims:
    """Test the textbook's claims: measure what is missing, print a verdict for each hypothesis, write a page."""

    profile: Literal["quick", "standard", "full"] = "quick"
    """quick: under 15 minutes on two cores, few seeds. standard: ten seeds, hours. full: needs a GPU or a cluster."""
    only: tuple[str, ...] = ()
    """Ids of claims (F2) or hypotheses (F2.special), or names of studies (F2.curve); the rest is decided from what is there."""
    folder: Path = Path("runs/claims")
    """Where tables and the page go; finished units there are reused. experiments/results/claims holds the committed ones."""
    engine: Literal["local", "serial", "ray"] = "local"
    """Where units run."""
    workers: int = 0
    """Units at a time; 0 = one per CPU."""
    show: bool = False
    """Measure nothing: decide from what is in the folder."""


@dataclass(frozen=True)
class Runs:
    """Compare training runs: one page with their settings, curves and last scores."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Training folders, or folders of them."""
    page: Path = Path("runs/runs")
    """Where to; a page that is there is written anew."""


@dataclass(frozen=True)
class Info:
    """What a model consists of and costs: parameters, sites and their shapes, FLOPs and bytes of a forward pass and a sweep."""

    model: Annotated[str, tyro.conf.Positional] = ""
    """shipped, smollm2, a folder that interp.save or interp train wrote, or a transformers folder or hub name (needs interp[hf]).
    Default: what is installed, and the shipped model."""
    length: int = 0
    """Tokens of the inputs that sizes are given for; 0 = 128, or the most that the model takes."""
    batch: int = 1
    """Sequences of these inputs."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `interp`."""
    words = sys.argv[1:] if arguments is None else arguments
    hints = {
        "train": " (--resume goes on)",
        "sweep": "; the same command goes on",
        "claims": "; the same command goes on",
    }
    try:
        if words[:1] == ["train"]:  # its options depend on the task
            train.main(words[1:])
            return
        command = tyro.extras.subcommand_cli_from_dict(
            {
                "report": Report,
                "train": Train,
                "runs": Runs,
                "sweep": Sweep,
                "claims": Claims,
                "compare": Compare,
                "info": Info,
            },
            args=words,
            description="interp: open a transformer up.",
        )
        {Report: _report, Runs: _runs, Sweep: _sweep, Claims: _claims, Compare: _compare, Info: _info}[type(command)](
            command
        )
    except KeyboardInterrupt:
        sys.exit("interrupted; what had finished is kept" + hints.get(words[0], ""))
    except (ValueError, OSError, RuntimeError, AssertionError, LookupError) as error:
        sys.exit(f"interp: {error}")


def _runs(command: Runs) -> None:
    from interp.report import runs

    found = runs.opened(command.folders)
    print("\n".join(runs.words(found)))
    print(f"wrote {runs.build(command.page, found)}")


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


def _claims(command: Claims) -> None:
    from interp.report import claims

    page, found = claims.build(command.profile, command.only, command.folder, command.engine, command.workers or None,
                               not command.show)  # fmt: skip
    print("\n".join(claims.lines(found)))
    print(f"wrote {page}")


def _compare(command: Compare) -> None:
    from interp.report.compare import build

    page, too_far = build(command.folder, command.families, command.seed)
    print(f"{too_far} comparisons above their tolerance; wrote {page}")
    if too_far:
        raise ValueError(f"{too_far} comparisons are above their tolerance; see {page}")


def _info(command: Info) -> None:
    from interp.cli import info

    print("\n".join(info.lines(command.model, command.length, command.batch)))
