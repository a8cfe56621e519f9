"""Every method that reads the stream or its circuits on SmolLM2-135M, with time and peak memory; and against TransformerLens.

    python experiments/bench/reading.py [--methods eap acdc ...] [--threads 1]

Each method runs in a process of its own on four pairs of real fact prompts that the model knows; "peak" is the largest
resident memory of that process, of which "model" was there before. Against TransformerLens 4.3: its edge attribution (one
prompt pair at a time, edges between single positions; it refuses SmolLM2's grouped keys) on a small random GPT-2, same
numbers after a sum over positions, alternating, ratio of medians. Writes results/reading/{methods,peers}.csv."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import interp
from interp import circuits
from interp.record import write_atomic
from interp.report.real import choose

RESULTS = Path(__file__).parent / "results" / "reading"


def methods(model: Any, pairs: Any) -> dict[str, Callable[[], str]]:
    """What each method is asked, and what of its answer is noted."""
    given, metric = (model, pairs.clean, pairs.corrupted), interp.logit_difference(pairs.correct, pairs.wrong)

    def scores(method: Any, **more: Any) -> Any:
        return interp.edge_attribution(*given, metric, method, **more)

    def acdc() -> str:
        top = scores("eap-ig").top(100)
        found = interp.acdc(*given, 0.01, edges=top)
        return f"{int(found.kept.sum())} of 100 edges, damage {float(found.damage.mean()):.3f} nats"

    def faithful() -> str:
        areas = circuits.curve_areas(circuits.faithfulness(*given, metric, scores("eap-ig"))).set_index("method")
        return f"CPR {areas.loc['scores', 'CPR']:.3f}, random {areas.loc['random', 'CPR']:.3f}"

    def exact() -> str:
        ranked = scores("eap-ig")
        top = ranked.top(20)
        true = scores("exact", edges=top).mean[top]
        r = torch.corrcoef(torch.stack([true, ranked.mean[top]]))[0, 1]
        return f"20 edges; EAP-IG correlates {float(r):.3f}"

    def scrubbed() -> str:
        last = {f"a{model.config.n_layers - 1}.h{i}": "all" for i in range(model.config.n_heads)}
        table = circuits.causal_scrub(model, pairs.clean, metric, {"input": "all", **last}, samples=1)
        return f"loss {circuits.scrubbing_loss(table):.2f} if embeddings and the last layer's heads alone depend on the prompt"

    def tuned() -> str:
        text = torch.randint(0, model.config.vocab, (64, 32), generator=torch.Generator().manual_seed(0))
        lens = interp.TunedLens.train(model, text, ["10.resid_post", "20.resid_post"], steps=20)
        return f"20 steps on random tokens (time only), {len(lens.sites)} sites"

    def one_interchange() -> str:
        basis = torch.linalg.qr(torch.randn(model.config.d_model, 8, generator=torch.Generator().manual_seed(0)))[0]
        interp.interchange(model, pairs.corrupted, pairs.clean, "20.resid_post", -1, basis)
        return "one interchange in 8 dimensions"

    def attribution(steps: int | None) -> str:
        found = interp.attribution_patch(*given, metric, "resid_pre", steps=steps, check=20)
        return (
            f"{found.agreement.verdict}, Pearson {found.agreement.pearson:.3f} on {found.agreement.n_cells} exact cells"
        )

    credit = lambda: interp.direct_logit_attribution(model, pairs.clean, pairs.correct, pairs.wrong)  # noqa: E731
    return {
        "decompose": lambda: f"error {interp.decompose(model, pairs.clean, '29.resid_post').error:.1e}",
        "direct_logit_attribution": lambda: f"{len(credit())} rows",
        "logit_lens": lambda: f"{len(interp.logit_lens(model, pairs.clean))} rows",
        "TunedLens": tuned,
        "head_scores": lambda: f"{len(interp.head_scores(model, n=2, lengths=(12,)))} rows",
        "composition_scores (v)": lambda: f"{len(interp.composition_scores(model, ('v',)))} pairs of heads",
        "attribution_patch": lambda: attribution(None), "attribution_patch, 4 steps": lambda: attribution(4),
        "eap": lambda: f"completeness error {scores('eap').completeness:.3f}",
        "eap-ig": lambda: f"completeness error {scores('eap-ig').completeness:.3f}",
        "exact": exact, "acdc": acdc, "faithfulness": faithful, "causal_scrub": scrubbed, "interchange": one_interchange,
    }  # fmt: skip


def peak() -> float:
    """Of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def one(name: str, threads: int) -> dict[str, Any]:
    """A method's row, measured here."""
    torch.set_num_threads(threads)
    model, tokenizer = interp.smollm2()
    pairs = choose(tokenizer, 4).pairs
    method = methods(model, pairs)[name]
    before, began = peak(), time.perf_counter()
    said = method()
    return {"method": name, "seconds": round(time.perf_counter() - began, 1), "peak GB": round(peak(), 2),
            "model GB": round(before, 2), "found": said, "threads": threads}  # fmt: skip


def against_transformer_lens(repeats: int = 3) -> dict[str, Any]:
    """Edge attribution by TransformerLens and by us on a random 2-layer GPT-2."""
    from transformer_lens.model_bridge import sources
    from transformer_lens.tools.analysis import attribution_patching as theirs

    config = interp.ModelConfig(vocab=101, n_layers=2, n_heads=4, d_model=32, n_ctx=16, ffn="gelu_tanh", positions="learned",
                                tied_embeddings=True)  # fmt: skip
    model = interp.Transformer(config, seed=0)
    module = interp.to_huggingface(model)
    bridge: Any = sources.build_bridge_from_module(
        module, type(module).__name__, hf_config=module.config, tokenizer=None, model_name="gpt2"
    )
    bridge.eval()
    clean, corrupted = torch.randint(0, 101, (2, 4, 8), generator=torch.Generator().manual_seed(1))

    def peer() -> Any:
        return theirs.attribution_patch(bridge, clean, corrupted, lambda x: x[0, -1, 1] - x[0, -1, 2],
                                        theirs.EdgeAttributionConfig(granularity="edge"))  # fmt: skip

    def ours() -> Any:
        return interp.edge_attribution(
            model, clean, corrupted, interp.logit_difference(1, 2), "eap", direction="denoising"
        )

    laps: dict[str, list[float]] = {"ours": [], "theirs": []}
    found: dict[str, Any] = {}
    for _ in range(repeats):
        for name, call in (("ours", ours), ("theirs", peer)):
            began = time.perf_counter()
            found[name] = call()
            laps[name].append(time.perf_counter() - began)
    totals: dict[str, float] = {}
    for (writer, reader), value in found["theirs"].edge_scores.items():
        name = f"{_named(writer)}->{_named(reader)}"
        totals[name] = totals.get(name, 0.0) + float(value)
    mine = dict(zip(found["ours"].graph.edges, found["ours"].mean[found["ours"].graph.admitted].tolist(), strict=True))
    shared = sorted(set(mine) & set(totals))
    size = max(abs(mine[name]) for name in shared)
    ours_s, theirs_s = (statistics.median(laps[name]) for name in ("ours", "theirs"))
    return {"method": "eap", "edges": len(mine), "compared": len(shared),
            "largest difference / largest score": max(abs(mine[name] - totals[name]) for name in shared) / size,
            "interp s": ours_s, "transformer-lens s": theirs_s, "ratio": theirs_s / ours_s}  # fmt: skip


def _named(node: Any) -> str:
    """Their node by our name; nodes of theirs that we do not have keep their own."""
    kind, layer, head = node.kind, node.layer, node.head
    named = {"attn_head_out": f"a{layer}.h{head}", "mlp_out": f"m{layer}", "mlp_in": f"m{layer}", "logits": "logits",
             "embed": "input", "resid_pre": "input"}  # fmt: skip
    return named.get(kind) or (
        f"a{layer}.h{head}<{kind[0]}>" if kind in ("q_input", "k_input", "v_input") else str(node)
    )


def main(words: Sequence[str] | None = None) -> None:
    names = NAMES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=(*names, "peers"), default=(*names, "peers"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.one:
        print(json.dumps(one(asked.one, asked.threads)))
        return
    rows = []
    for name in asked.methods:
        if name == "peers":
            torch.set_num_threads(asked.threads)
            _save(asked.folder / "peers.csv", [against_transformer_lens()], "method")
            continue
        command = [sys.executable, __file__, "--one", name, "--threads", str(asked.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
        _save(asked.folder / "methods.csv", rows, "method")


def _save(path: Path, rows: list[dict[str, Any]], key: str) -> None:
    """Rows measured before stay unless measured again."""
    table = pd.DataFrame(rows)
    if path.exists():
        old = pd.read_csv(path)
        table = pd.concat([old[~old[key].isin(table[key])], table], ignore_index=True)
    write_atomic(path, lambda temporary: table.to_csv(temporary, index=False))
    print(table.to_string(index=False))


NAMES = ("decompose", "direct_logit_attribution", "logit_lens", "TunedLens", "head_scores", "composition_scores (v)",
         "attribution_patch", "attribution_patch, 4 steps", "eap", "eap-ig", "exact", "acdc", "faithfulness", "causal_scrub",
         "interchange")  # fmt: skip

if __name__ == "__main__":
    main()
