"""How fast a corpus's residual stream goes to disk, next to transformers and TransformerLens with the same weights.

    python experiments/bench/recording.py [--threads N] [--rounds N]

GPT-2 small's shape (12 layers, d 768, vocab 50,257) with random weights, float32; a corpus of 2 batches of 4×64 tokens,
the stream after every layer, one safetensors file. The peers are what one would write: run, keep, concatenate, save.
They take turns in one process, and ratios are of medians. The clock starts when the first batch is asked for: what
`record_corpus` does once a call before that (it hashes the weights) is printed by itself. Memory is the highest resident
size during a turn above that at its start. transformers gives the last layer's stream after the final norm only, so its
rows of that layer are another quantity; "body" is its model without the head, which computes no logits, as ours does not.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from safetensors.torch import load_file, save_file

from interp.bridges import from_huggingface
from interp.corpus import open_activations, record_corpus

SIZE: dict[str, Any] = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 128}
N_BATCHES, BATCH, LENGTH = 2, 4, 64
Writer = Callable[[Iterable[torch.Tensor], Path], object]


class Corpus:
    """The batches, and when the first was asked for."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = torch.randint(0, SIZE["vocab_size"], (N_BATCHES, BATCH, LENGTH), generator=generator)
        self.began = 0.0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.began = time.perf_counter()
        yield from self.batches


def by_hand(streams: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> Writer:
    """Run each batch, keep every layer's rows, save them at the end."""

    def write(batches: Iterable[torch.Tensor], path: Path) -> None:
        path.mkdir()
        kept = [{name: value.flatten(0, 1) for name, value in streams(batch).items()} for batch in batches]
        save_file({name: torch.cat([one[name] for one in kept]) for name in kept[0]}, path / "all.safetensors")

    return write


def writers() -> dict[str, Writer]:
    """Every way of recording, with one set of weights."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZE)).eval()
    ours = from_huggingface(theirs)
    bridge = build_bridge_from_module(
        copy.deepcopy(theirs), type(theirs).__name__, hf_config=theirs.config, tokenizer=None, model_name="gpt2"
    )
    names = {f"blocks.{layer}.hook_resid_post": f"{layer}.resid_post" for layer in range(SIZE["n_layer"])}

    def hidden(model) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
        def streams(batch: torch.Tensor) -> dict[str, torch.Tensor]:
            states = model(batch, output_hidden_states=True, use_cache=False).hidden_states[1:]
            return dict(zip(names.values(), states, strict=True))

        return streams

    def lens(batch: torch.Tensor) -> dict[str, torch.Tensor]:
        cache = bridge.run_with_cache(batch, names_filter=lambda name: name in names)[1]
        return {site: cache[name] for name, site in names.items()}

    return {
        "interp": lambda batches, path: record_corpus(ours, batches, "resid_post", path, progress=False),
        "interp, layer 3 only": lambda batches, path: record_corpus(
            ours, batches, "3.resid_post", path, progress=False
        ),
        "transformers": by_hand(hidden(theirs)),
        "transformers, body": by_hand(hidden(theirs.transformer)),
        "TransformerLens": by_hand(lens),
    }


def resident(what: str) -> float:
    """This process's resident size in MB: now ("VmRSS") or at its highest since `reset_highest` ("VmHWM"). Linux only."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def reset_highest() -> None:
    """Give back what earlier turns freed, and let the highest resident size start again from the present one."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


@torch.no_grad()
def measure(functions: dict[str, Writer], rounds: int) -> pd.DataFrame:
    """One row per way and turn: seconds from the first batch on, seconds before it, MB above the start; first round dropped."""
    rows = []
    for turn in range(rounds + 1):
        for name, function in functions.items():
            with tempfile.TemporaryDirectory() as folder:
                corpus = Corpus()
                reset_highest()
                before, began = resident("VmRSS"), time.perf_counter()
                function(corpus, Path(folder) / "corpus")
                ended, highest = time.perf_counter(), resident("VmHWM")
            rows.append({"what": name, "turn": turn, "seconds": ended - corpus.began, "once": corpus.began - began,
                         "peak_MB": highest - before})  # fmt: skip
    return pd.DataFrame(rows).query("turn > 0")


@torch.no_grad()
def largest_difference(functions: dict[str, Writer]) -> float:
    """Of ours and TransformerLens's rows, every layer; transformers' too, but for the last layer."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / str(i) for i, name in enumerate(functions)}
        for name in ("interp", "TransformerLens", "transformers"):
            functions[name](Corpus(), paths[name])
        mine, worst = open_activations(paths["interp"]), 0.0
        for name in ("TransformerLens", "transformers"):
            rows = load_file(paths[name] / "all.safetensors")
            for site in mine.sites[: -1 if name == "transformers" else None]:
                worst = max(worst, float((mine[site][:] - rows[str(site)]).abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    functions, tokens = writers(), N_BATCHES * BATCH * LENGTH
    print(f"{N_BATCHES} batches of {BATCH}×{LENGTH} tokens, GPT-2 small's shape, random weights, float32, "
          f"{arguments.threads} thread(s), median of {arguments.rounds} alternating rounds; "
          f"largest difference of a shared value {largest_difference(functions):.1e}")  # fmt: skip
    table = measure(functions, arguments.rounds).groupby("what", sort=False)
    seconds = table["seconds"].agg(statistics.median)
    print(pd.DataFrame({
        "tokens per s": tokens / seconds,
        "time / transformers": seconds / seconds["transformers"],
        "fastest s": table["seconds"].min(),
        "slowest s": table["seconds"].max(),
        "once a call s": table["once"].agg(statistics.median),
        "peak MB": table["peak_MB"].agg(statistics.median),
    }).to_string(float_format=lambda value: f"{value:.3g}"))  # fmt: skip


if __name__ == "__main__":
    main()
