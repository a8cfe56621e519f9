"""The same sweep by us, by TransformerLens, by hooks on transformers' model, and by nnsight.

Every peer gets the same weights, prompts, dtype and threads, no gradient, and is timed from the two prompts to the values
of its cells, its clean run included. What it is spared: progress bars, recording sites that the sweep does not read.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp import logit_difference, patch_sweep
from sweeps.case import AXES, Case, Contender, Lap, timed


def ours(case: Case, engine: str) -> Contender:
    """`interp.patch_sweep` as a user calls it, its own check of some cells included."""
    metric = logit_difference(case.correct, case.wrong)
    model: Any = case.ours

    def lap() -> Lap:
        seconds, found = timed(lambda: patch_sweep(model, case.clean, case.corrupted, metric, sites=case.site,
                                                   by=AXES[case.site], engine=engine))  # type: ignore[arg-type]  # fmt: skip
        return Lap(seconds, found.values[case.site].flatten(0, -2), dict(found.work))

    return Contender("interp", lap, lap)


def transformer_lens(case: Case, sample: Sequence[int] | None = None) -> Contender:
    """TransformerLens' own function over all cells; with `sample` its same loop over those cells alone (`index_df`).

    A cell's time is one whole forward pass wherever its patch is, so the time of a sample is scaled by the number of cells.
    """
    from transformer_lens import patching
    from transformer_lens.model_bridge import sources
    from transformer_lens.utilities.components_utils import get_act_name

    theirs = copy.deepcopy(case.theirs)  # the bridge rewires the object it is given
    bridge: Any = sources.build_bridge_from_module(
        theirs, type(theirs).__name__, hf_config=theirs.config, tokenizer=None, model_name="gpt2"
    )
    bridge.eval()
    whole, setter = {
        "resid_pre": (patching.get_act_patch_resid_pre, patching.layer_pos_patch_setter),
        "z": (patching.get_act_patch_attn_head_out_by_pos, patching.layer_pos_head_vector_patch_setter),
    }[case.site]
    names = [get_act_name(case.site, layer) for layer in range(case.grid[0])]

    def sweep(cells: Sequence[int] | None) -> Lap:
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # its progress bar cannot be switched off
            cached, (_, cache) = timed(lambda: bridge.run_with_cache(case.clean, names_filter=names))
            given: tuple = (bridge, case.corrupted, cache, case.metric)
            if cells is None:
                patched, found = timed(lambda: whole(*given, reduce="none"))  # type: ignore[call-overload]
                return Lap(cached + patched, found.values.flatten(0, -2))
            table = pd.DataFrame(
                [case.cells[cell] for cell in cells], columns=["layer", "pos", "head"][: len(case.grid)]
            )
            patched, found = timed(lambda: patching.generic_activation_patch(
                *given, patch_setter=setter, activation_name=case.site, index_df=table, reduce="none"))  # fmt: skip
            return Lap(cached + patched * len(case.cells) / len(cells), found.values)

    few = range(min(3, len(case.cells)))
    return Contender("TransformerLens 4.3", lambda: sweep(sample), lambda: sweep(few), sample)


def hooks(case: Case) -> Contender:
    """What one writes by hand on transformers' model: a pre-hook on a block, one forward pass per cell.

    Its fastest settings for this: fused attention (the default), no key-value cache, one position unembedded.
    """
    theirs = case.theirs
    body = getattr(theirs, "transformer", None) or theirs.model
    blocks = body.h if hasattr(body, "h") else body.layers

    def forward(tokens: Tensor) -> Tensor:
        return case.metric(theirs(tokens, use_cache=False, logits_to_keep=1).logits)

    def sweep(cells: Sequence[tuple[int, ...]]) -> Tensor:
        streams: list[Tensor] = []
        with _pre_hooks(blocks, lambda _, given: streams.append(given[0])):
            forward(case.clean)
        found = []
        for layer, position in cells:

            def write(_, given, layer=layer, position=position):
                given[0][:, position] = streams[layer][:, position]

            with _pre_hooks([blocks[layer]], write):
                found.append(forward(case.corrupted))
        return torch.stack(found)

    @torch.no_grad()
    def lap(cells: Sequence[tuple[int, ...]] = case.cells) -> Lap:
        return Lap(*timed(lambda: sweep(cells)))

    return Contender("transformers, a hook per cell", lap, lambda: lap(case.cells[:3]))


@contextmanager
def _pre_hooks(blocks: Sequence[Any], function: Any) -> Iterator[None]:
    handles = [block.register_forward_pre_hook(function) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def nnsight(case: Case, python: Path, threads: int) -> Iterator[list[Contender]]:
    """Two ways to sweep in nnsight, in a process of its own environment that takes its turns when asked."""
    with tempfile.TemporaryDirectory() as folder:
        case.theirs.config.save_pretrained(folder)
        torch.save(case.theirs.state_dict(), Path(folder) / "weights.pt")
        named = {name: getattr(case, name) for name in ("clean", "corrupted", "correct", "wrong")}
        torch.save(named, Path(folder) / "prompts.pt")
        words = [str(python), str(Path(__file__).parent / "in_nnsight.py"), folder, str(threads)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

            def lap(way: str) -> Lap:
                assert process.stdin is not None and process.stdout is not None
                print(way, file=process.stdin, flush=True)
                answer = process.stdout.readline()
                if not answer:
                    raise RuntimeError(f"nnsight's process ended with code {process.wait()}; its error is above")
                found = json.loads(answer)
                return Lap(found["seconds"], torch.tensor(found["values"]))

            yield [
                Contender(f"nnsight 0.8, {name}", lambda way=way: lap(way), lambda way=way: lap(way))
                for way, name in (("cell", "a trace per cell"), ("layer", "a trace per layer"))
            ]
            assert process.stdin is not None
            process.stdin.close()


def matmul_rates(repeats: int = 5) -> list[tuple[int, Contender]]:
    """This machine's float32 matrix products: the operations of one, and a contender that times it."""
    sizes = ((2048, 768, 3072), (2048, 3072, 768), (2048, 768, 2304))
    return [(2 * rows * inner * columns, _matmul(rows, inner, columns, repeats)) for rows, inner, columns in sizes]


def _matmul(rows: int, inner: int, columns: int, repeats: int) -> Contender:
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)

    def lap() -> Lap:
        began = time.perf_counter()
        for _ in range(repeats):
            torch.nn.functional.linear(x, weight)
        return Lap((time.perf_counter() - began) / repeats)

    return Contender(f"[{rows} × {inner}] × [{inner} × {columns}]", lap, lap)
