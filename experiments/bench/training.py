"""How fast training is, next to a plain PyTorch loop of the same model, and ten seeds next to ten runs in sequence.

    python experiments/bench/training.py [--rows loop seeds] [--repeats N] [--threads N] [--quick]

loop: tokens per second of our loop against a hand-written GPT block and a stack of torch.nn.TransformerEncoderLayer, each in
a loop of a dozen lines that knows nothing of us; same sizes, same batches, AdamW, clipping, float32.
seeds: one training step of ten seeds of the facts task's model at batch 64 and 256, drawing the batches included: as one batched
model and one model after the other, both with default threads, and which way "auto" chooses.

Contenders alternate; ratios are of medians over turns of some steps each.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp import ModelConfig, Transformer
from interp.model.inputs import Inputs
from interp.tasks import ToyFacts
from interp.tasks.task import Batch, drawn_on
from interp.tasks.train_config import TrainConfig
from interp.training.ensemble import Ensemble
from interp.training.many import chosen
from interp.training.optimizer import make_optimizer
from interp.training.train import Loss, Watch, train_step

RESULTS = Path(__file__).parent / "results" / "training"
LOOPS = {  # layers, width, heads, vocabulary, batch, length
    "2 × 64, 256 × 6 tokens": (2, 64, 4, 260, 256, 6),
    "4 × 128, 32 × 64 tokens": (4, 128, 4, 2048, 32, 64),
    "6 × 256, 16 × 128 tokens": (6, 256, 8, 2048, 16, 128),
}
STEPS = 10


class GPTBlock(nn.Module):
    """The block as a tutorial writes it."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (part.view(b, n, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(d, dim=2))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(z.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Plain(nn.Module):
    """Embeddings, blocks, norm, head; `kind`: "hand" or "layer" (torch.nn.TransformerEncoderLayer)."""

    def __init__(self, kind: str, layers: int, d: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Parameter(torch.randn(length, d) * 0.02)
        layer = lambda: nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.blocks = nn.ModuleList(GPTBlock(d, heads) if kind == "hand" else layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x) if self.kind == "hand" else block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def plain_steps(model: Plain, config: TrainConfig, batches: list[Tensor]) -> Callable[[], None]:
    """A dozen lines: forward, next-token loss, backward, clip, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=config.betas, fused=True)

    def steps() -> None:
        for tokens in batches:
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            loss.item()

    return steps


def our_steps(model: Transformer, config: TrainConfig, batches: list[Tensor]) -> Callable[[], None]:
    """The inside of `interp.train`, watching for divergence as it does."""
    optimizer, loss, watch = make_optimizer(model, config), Loss(model), Watch(model, config)
    every = torch.arange(batches[0].shape[1] - 1).expand(len(batches[0]), -1)
    ours = [Batch(Inputs(tokens[:, :-1]), every, tokens[:, 1:]) for tokens in batches]

    def steps() -> None:
        for step, batch in enumerate(ours):
            watch(step, *train_step(loss, optimizer, batch, config, step))

    return steps


def alternate(contenders: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each turn, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def loop(repeats: int, quick: bool) -> pd.DataFrame:
    """Tokens per second of each loop."""
    rows = []
    for name, (layers, d, heads, vocab, batch, length) in list(LOOPS.items())[: 1 if quick else None]:
        config = TrainConfig(learning_rate=1e-4, weight_decay=0.01)
        generator = torch.Generator().manual_seed(0)
        batches = [torch.randint(vocab, (batch, length + 1), generator=generator) for _ in range(STEPS)]
        ours = Transformer(ModelConfig(vocab=vocab, n_layers=layers, n_heads=heads, d_model=d, n_ctx=length), seed=0)
        plain = {kind: Plain(kind, layers, d, heads, vocab, length) for kind in ("hand", "layer")}
        sizes = {sum(p.numel() for p in model.parameters()) for model in (ours, *plain.values())}
        assert len(sizes) == 1, sizes  # the same model
        contenders = {"interp": our_steps(ours, config, batches)}
        contenders |= {kind: plain_steps(model, config, batches) for kind, model in plain.items()}
        times = {kind: pd.Series(seconds).median() for kind, seconds in alternate(contenders, repeats).items()}
        tokens = batch * length * STEPS
        for kind, label in (("hand", "hand-written GPT block"), ("layer", "nn.TransformerEncoderLayer")):
            rows.append({"model": name, "against": label, "interp, tokens/s": tokens / times["interp"],
                         "plain, tokens/s": tokens / times[kind], "times faster": times[kind] / times["interp"]})  # fmt: skip
    return pd.DataFrame(rows)


def seeds(repeats: int, quick: bool) -> pd.DataFrame:
    """A step of ten seeds of the facts model: as one batched model, and one model after the other with default threads."""
    task, rows = ToyFacts(32 if quick else 512), []
    model, cpu = task.model_config(), torch.device("cpu")
    for batch in (64, 256):
        config = task.train_config(batch_size=batch)
        configs = [dataclasses.replace(config, seed=1000 + i) for i in range(2 if quick else 10)]
        models = [Transformer(model, seed=one.seed) for one in configs]
        ensemble = Ensemble(models, configs)
        alone = [(Loss(one), make_optimizer(one, config), Watch(one, config)) for one in models]
        now = itertools.count()  # the step, which both ways take in turn

        def stacked(ensemble: Ensemble = ensemble, now: Iterator[int] = now) -> None:
            step = next(now)
            batches = [drawn_on(cpu, task, step, one.batch_size, one.data) for one in ensemble.configs]
            losses, norms = ensemble.step(batches, step)
            for _, _, watch in alone:  # noqa: B023
                watch(step, losses[0], norms[0])

        def sequence(ensemble: Ensemble = ensemble, now: Iterator[int] = now) -> None:
            step = next(now)
            for one, (loss, optimizer, watch) in zip(ensemble.configs, alone, strict=True):  # noqa: B023
                watch(
                    step, *train_step(loss, optimizer, drawn_on(cpu, task, step, one.batch_size, one.data), one, step)
                )

        times = alternate({"sequence": sequence, "stacked": stacked}, 8 * repeats)
        middle = {way: pd.Series(seconds).median() for way, seconds in times.items()}
        ratios = pd.Series(times["sequence"]) / pd.Series(times["stacked"])
        rows.append({"batch": batch, "models": len(configs), "turns": 8 * repeats, "sequence, ms": 1000 * middle["sequence"],
                     "stacked, ms": 1000 * middle["stacked"], "times faster": middle["sequence"] / middle["stacked"],
                     "lower quartile": ratios.quantile(0.25), "upper quartile": ratios.quantile(0.75),
                     "auto": chosen(model, task, configs, cpu)})  # fmt: skip
    return pd.DataFrame(rows)


def equal(quick: bool) -> float:
    """The largest difference of 50 float64 steps of an ensemble of four from the same models trained alone."""
    task = ToyFacts(32)
    configs = [task.train_config(batch_size=64, seed=1000 + i, learning_rate=1e-3 * (i + 1)) for i in range(4)]
    models = [[Transformer(task.model_config(), seed=config.seed).double() for config in configs] for _ in range(2)]
    ensemble = Ensemble(models[0], configs)
    optimizers = [make_optimizer(model, config) for model, config in zip(models[1], configs, strict=True)]
    for step in range(5 if quick else 50):
        batches = [task.batch(step, 64, config.seed) for config in configs]
        ensemble.step(batches, step)
        for model, optimizer, config, batch in zip(models[1], optimizers, configs, batches, strict=True):
            train_step(Loss(model), optimizer, batch, config, step)
    pairs = zip(ensemble.unstack(), models[1], strict=True)
    return max(
        float((a - b).detach().abs().max())
        for x, y in pairs
        for a, b in zip(x.parameters(), y.parameters(), strict=True)
    )


def main(words: list[str] | None = None) -> None:
    """Print and store the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", nargs="+", default=["loop", "seeds"], choices=["loop", "seeds"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true")
    chosen_options = parser.parse_args(words)
    torch.set_num_threads(chosen_options.threads)
    chosen_options.folder.mkdir(parents=True, exist_ok=True)
    print(
        f"torch {torch.__version__}, {chosen_options.threads} thread(s), float32, medians of {chosen_options.repeats} turns\n"
    )
    for row in chosen_options.rows:
        table = {"loop": loop, "seeds": seeds}[row](chosen_options.repeats, chosen_options.quick)
        table.to_csv(chosen_options.folder / f"{row}.csv", index=False, float_format="%.4g")
        print(table.to_string(index=False, float_format="%.3g"), "\n")
    worst = equal(chosen_options.quick)
    print(f"after 50 float64 steps an ensemble's weights differ from the models trained alone by at most {worst:.1e}")


if __name__ == "__main__":
    main()
