"""What `interp sweep` runs on: a model by name or folder, and pairs of its own task or one pair that is given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from interp.bridges import SMOLLM2_PREFIX, smollm2
from interp.device import device_named
from interp.model.checkpoint import CheckpointError, load, read_document
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.report.measure import largest_group, some_pairs
from interp.report.real import choose
from interp.tasks import ToyFacts, replacement_pairs, restore
from interp.tasks.shipped import shipped
from interp.tasks.task import Pairs, TaskError
from interp.tokens import HuggingFaceTokenizer, TokenizerError, as_tokenizer, labels

PAIRS = {"smollm2": 8}  # how many pairs unless said; any other model: 64
SOURCES = "'shipped', 'smollm2', or a folder written by interp.save or interp train"


class SweepInputsError(ValueError):
    """A model or prompts that cannot be swept; the message names what was given and what is allowed."""


@dataclass(frozen=True)
class Opened:
    """A model, what it is called, its tokenizer (None: token ids only), the ids before each text, its task if it has one."""

    model: Transformer
    name: str
    title: str
    tokenizer: Any = None
    prefix: tuple[int, ...] = ()
    task: Any = None

    def labels(self, tokens: torch.Tensor) -> list[str]:
        """The printed form of each token [n]."""
        return labels(self.tokenizer, tokens.cpu())

    def text(self, inputs: Inputs, row: int) -> str:
        """One sequence as a person reads it, without its padding."""
        tokens = inputs.tokens[row] if inputs.mask is None else inputs.tokens[row][inputs.mask[row]]
        joined = isinstance(self.tokenizer, HuggingFaceTokenizer)
        return ("" if joined else " ").join(self.labels(tokens))

    def table(self, pairs: Pairs) -> pd.DataFrame:
        """One row per pair: example, clean, corrupted (with an encoder their sources too), and the answers' first tokens."""
        columns: dict[str, Any] = {"example": range(len(pairs))}
        for name, inputs in (("clean", pairs.clean), ("corrupted", pairs.corrupted)):
            columns[name] = [self.text(inputs, i) for i in range(len(pairs))]
            if inputs.source is not None:
                columns[f"{name}_source"] = [self.text(inputs.encoder, i) for i in range(len(pairs))]
        return pd.DataFrame({**columns, "correct": self.labels(pairs.correct), "wrong": self.labels(pairs.wrong)})


def open_model(name: str, device: str = "cpu") -> Opened:
    """'shipped', 'smollm2' (a download the first time), a saved model's folder or a training folder. SweepInputsError."""
    if name == "shipped":
        model, task = shipped()
        found = Opened(model, name, "the toy model of made-up facts that ships with interp", task=task)
    elif name == "smollm2":
        model, tokenizer = smollm2()
        found = Opened(
            model, name, "SmolLM2-135M-Instruct", as_tokenizer(tokenizer), SMOLLM2_PREFIX, "true facts that it knows"
        )
    else:
        found = _saved(name)
    if found.task is not None and found.tokenizer is None:
        found = dataclasses.replace(found, tokenizer=getattr(found.task, "vocabulary", None))
    try:
        there = device_named(device)
    except ValueError as error:
        raise SweepInputsError(str(error)) from None
    return dataclasses.replace(found, model=found.model.to(there))


def _saved(name: str) -> Opened:
    """A folder of `save`, or the model/ in a folder of `train`."""
    folder = Path(name)
    if not folder.is_dir():
        raise SweepInputsError(f"model {name!r} is not allowed; allowed: {SOURCES}")
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    try:
        document = read_document(folder)
    except CheckpointError as error:
        unfinished = (folder / "config.json").is_file() and (folder / "state.safetensors").is_file()
        said = (
            "it holds a training that has not finished (interp train … --resume goes on)" if unfinished else str(error)
        )
        raise SweepInputsError(f"model {name!r} cannot be opened: {said}") from None
    return Opened(load(folder), str(folder.resolve()), f"the model in {folder}", task=_task(document.get("extra")))


def _task(extra: Any) -> Any:
    """The task that a training folder names beside its model; None where there is none of ours."""
    about = extra.get("task") if isinstance(extra, dict) else None
    try:
        return None if about is None else restore(about)
    except TaskError:  # a task that somebody wrote, of which only the name is known
        return None


def task_pairs(opened: Opened, n: int, by: tuple[str, ...]) -> Pairs:
    """`n` pairs of the model's own task (0: its default); of one length where they are swept by position."""
    if opened.task is None:
        raise SweepInputsError(f"{opened.title} names no task to take pairs from; allowed: --clean, --corrupted, --correct "
                               f"and --wrong, as {_form(opened)}")  # fmt: skip
    wanted = n or PAIRS.get(opened.name, 64)
    if opened.name == "smollm2":
        found = choose(opened.tokenizer, wanted).pairs
    elif isinstance(opened.task, ToyFacts):
        prompts = opened.task.splits["held_out"]
        found = some_pairs(replacement_pairs(largest_group(prompts) if "position" in by else prompts), wanted)
    else:
        found = opened.task.pairs(wanted)
    if n > len(found):
        alike = " of equal length" if "position" in by else ""
        raise SweepInputsError(f"--pairs {n} is not allowed; allowed: 1 … {len(found)}, as many as there are{alike}")
    return found


def given_pair(opened: Opened, clean: str, corrupted: str, correct: str, wrong: str) -> Pairs:
    """One pair from what was typed; without `corrupted` (an ablation) the clean prompt stands for both."""
    if opened.model.config.kind == "encoder-decoder":
        raise SweepInputsError(
            "--clean is not allowed for an encoder-decoder, which reads a source and a target; allowed: its task's pairs"
        )
    rows = [_prompt(opened, "--clean", clean), _prompt(opened, "--corrupted", corrupted or clean)]
    if len(rows[0]) != len(rows[1]):
        shown = [" | ".join(opened.labels(torch.tensor(row))) for row in rows]
        raise SweepInputsError(f"--clean has {len(rows[0])} tokens ({shown[0]}) and --corrupted {len(rows[1])} ({shown[1]}); "
                               "allowed: prompts of equal length")  # fmt: skip
    if corrupted and rows[0] == rows[1]:
        raise SweepInputsError(f"--corrupted {corrupted!r} is the clean prompt; allowed: one that differs in a token")
    answers = [_token(opened, "--correct", correct), _token(opened, "--wrong", wrong)]
    if answers[0] == answers[1]:
        raise SweepInputsError(f"--correct {correct!r} and --wrong {wrong!r} are the same token; allowed: two tokens")
    inputs = [Inputs(torch.tensor([row])) for row in rows]
    right, other = torch.tensor(answers)[:, None]
    return Pairs(inputs[0], inputs[1], right, other, pd.DataFrame({"prompt": [clean]}))


def _form(opened: Opened) -> str:
    if opened.tokenizer is not None:
        return "text"
    return f"token ids 0 … {opened.model.config.vocab - 1} separated by spaces (the model has no tokenizer)"


def _ids(opened: Opened, option: str, text: str) -> list[int]:
    """Token ids of what was typed, nothing added. SweepInputsError."""
    if opened.tokenizer is not None:
        try:
            return opened.tokenizer.ids(text)
        except TokenizerError as error:
            raise SweepInputsError(f"{option} {text!r}: {error}") from None
    vocab = opened.model.config.vocab
    if not all(word.isdecimal() and int(word) < vocab for word in text.split()):
        raise SweepInputsError(f"{option} {text!r} is not allowed; allowed: {_form(opened)}")
    return [int(word) for word in text.split()]


def _prompt(opened: Opened, option: str, text: str) -> list[int]:
    ids = _ids(opened, option, text)
    if not ids:
        raise SweepInputsError(f"{option} {text!r} has no tokens; allowed: {_form(opened)}")
    return [*opened.prefix, *ids]


def _token(opened: Opened, option: str, text: str) -> int:
    """The id of one answer, which must be a single token."""
    ids = _ids(opened, option, text)
    if len(ids) == 1:
        return ids[0]
    parts = " | ".join(opened.labels(torch.tensor(ids))) if ids else "none"
    spaced = len(ids) > 1 and not text.startswith(" ") and len(_ids(opened, option, f" {text}")) == 1
    hint = f", such as {' ' + text!r} with its leading space" if spaced else ""
    raise SweepInputsError(f"{option} {text!r} is {len(ids)} tokens ({parts}); allowed: a single token{hint}")
