"""nnsight's side of sweep.py, run by the Python of an environment that has it: a sweep per line of standard input.

    python in_nnsight.py FOLDER THREADS        FOLDER: config.json and weights.pt of GPT-2, prompts.pt

Each line says how ("cell": a trace per cell; "layer": a trace per layer with an invoke per position, which nnsight's own
pages recommend for a layer × position map); each answer is one line of JSON: seconds, values [cell][example].
"""

import json
import sys
import time
from pathlib import Path

import torch
from nnsight import TransformersModel, save  # type: ignore[import-not-found]
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

OPTIONS = {"use_cache": False, "logits_to_keep": 1}


def load(folder: Path) -> tuple:
    """The wrapped model and the prompts. The tokenizer is a stub: every prompt is token ids."""
    theirs = GPT2LMHeadModel(GPT2Config.from_pretrained(folder)).eval()
    theirs.load_state_dict(torch.load(folder / "weights.pt"))
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, "x")), pad_token="x")
    return TransformersModel(theirs, tokenizer=words, task="text-generation"), torch.load(folder / "prompts.pt")


def clean_streams(model, prompts):
    """The clean run's resid_pre of every layer."""
    with model.trace(prompts["clean"], **OPTIONS):
        streams = save([block.input.clone() for block in model.transformer.h])
    return streams


def by_cell(model, prompts):
    """One trace per cell."""
    streams, found = clean_streams(model, prompts), []
    for layer in range(len(streams)):
        for position in range(prompts["clean"].shape[1]):
            with model.trace(prompts["corrupted"], **OPTIONS):
                model.transformer.h[layer].input[:, position] = streams[layer][:, position]
                logits = model.lm_head.output[:, -1].save()
            found.append(metric(logits, prompts))
    return torch.stack(found)


def by_layer(model, prompts):
    """One trace per layer, its positions batched as invokes."""
    streams, found = clean_streams(model, prompts), []
    for layer in range(len(streams)):
        with model.trace(**OPTIONS) as tracer:
            row = save([])
            for position in range(prompts["clean"].shape[1]):
                with tracer.invoke(prompts["corrupted"]):
                    model.transformer.h[layer].input[:, position] = streams[layer][:, position]
                    row.append(model.lm_head.output[:, -1].clone())
        found += [metric(logits, prompts) for logits in row]
    return torch.stack(found)


def metric(logits, prompts):
    """Logit difference [batch] of logits [batch vocab]."""
    rows = torch.arange(len(logits))
    return logits[rows, prompts["correct"]] - logits[rows, prompts["wrong"]]


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    model, prompts = load(Path(sys.argv[1]))
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the library prints is no answer
    for line in sys.stdin:
        sweep = {"cell": by_cell, "layer": by_layer}[line.strip()]
        began = time.perf_counter()
        with torch.no_grad():
            values = sweep(model, prompts)
        print(json.dumps({"seconds": time.perf_counter() - began, "values": values.tolist()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
