"""How long a forward pass takes, next to transformers with the same weights, and what recording costs.

    python experiments/bench/forward.py [--threads N] [--rounds N]

Three measurements alternate in one process: transformers, ours without a tap, ours recording every site but head_out
(TransformerLens with --lens: its plain pass and its full cache). Ratios are of medians; a Llama config of SmolLM2's
width with random weights, 4 sequences of 128 tokens, float32, no gradient.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import pandas as pd
import torch
import transformers

from interp import run
from interp.bridges import from_huggingface

SIZES = {
    "d 576, 6 layers, vocab 49,152": {"hidden_size": 576, "num_hidden_layers": 6, "num_attention_heads": 9,
                                      "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152},
    "d 768, 6 layers, vocab 50,257": {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12,
                                      "num_key_value_heads": 12, "intermediate_size": 2048, "vocab_size": 50257},
    "d 256, 4 layers, vocab 1,024": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
                                     "num_key_value_heads": 4, "intermediate_size": 688, "vocab_size": 1024},
}  # fmt: skip


def measure(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each function, taking turns; the first round is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            if turn:
                times[name].append(1000 * (time.perf_counter() - began))
    return times


@torch.no_grad()
def compare(size: dict, rounds: int, lens: bool) -> pd.DataFrame:
    """One row per ratio: numerator, denominator, medians in ms, ratio of medians."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**size, max_position_embeddings=512)
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = from_huggingface(theirs)
    tokens = torch.randint(0, size["vocab_size"], (4, 128))
    sites = [site for site in ours.sites if site.name != "head_out"]
    worst = float((ours(tokens) - theirs(tokens).logits).abs().max())
    functions: dict[str, Callable[[], object]] = {
        "transformers": lambda: theirs(tokens, use_cache=False),
        "interp": lambda: ours(tokens),
        "interp, every site": lambda: run(ours, tokens, record=sites),
    }
    pairs = [("interp", "transformers"), ("interp, every site", "interp")]
    if lens:
        functions |= _lens(theirs, tokens)
        pairs += [("TransformerLens", "transformers"), ("TransformerLens, full cache", "TransformerLens"),
                  ("TransformerLens, full cache", "interp, every site")]  # fmt: skip
    median = {name: statistics.median(times) for name, times in measure(functions, rounds).items()}
    rows = [
        {
            "what": top,
            "against": bottom,
            "ms": median[top],
            "against_ms": median[bottom],
            "ratio": median[top] / median[bottom],
        }
        for top, bottom in pairs
    ]
    return pd.DataFrame(rows).assign(largest_logit_difference=worst)


def _lens(theirs, tokens) -> dict[str, Callable[[], object]]:
    import copy

    from transformer_lens.model_bridge.sources import build_bridge_from_module

    bridge = build_bridge_from_module(
        copy.deepcopy(theirs), type(theirs).__name__, hf_config=theirs.config, tokenizer=None, model_name="llama"
    )
    return {
        "TransformerLens": lambda: bridge(tokens),
        "TransformerLens, full cache": lambda: bridge.run_with_cache(tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--lens", action="store_true", help="also measure TransformerLens")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"4×128 tokens, float32, {arguments.threads} thread(s), median of {arguments.rounds} alternating rounds")
    table = pd.concat(
        [compare(size, arguments.rounds, arguments.lens).assign(size=name) for name, size in SIZES.items()]
    )
    print(table[["size", "what", "against", "ms", "against_ms", "ratio", "largest_logit_difference"]]
          .to_string(index=False, float_format=lambda value: f"{value:.3g}"))  # fmt: skip


if __name__ == "__main__":
    main()
