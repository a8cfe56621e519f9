"""How far our numbers are from the peers': every shared site of random models of every family, and what is too far.

Offline: models are made from configs. float32 may differ by 1e-4 of a site's largest value; float64 by 1e-9, or 1e-6
where transformers itself computes in float32 whatever the model's type.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from interp.bridges.families import FAMILIES as KNOWN
from interp.bridges.huggingface import from_huggingface, optional
from interp.bridges.lens_in import from_transformer_lens
from interp.bridges.their_sites import PLACES, reading, torch_places
from interp.bridges.torch_transformer import from_torch_transformer
from interp.model.inputs import Inputs, InputsError
from interp.run import run
from interp.sites import Site, named

SIZES = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": 64}  # fmt: skip
GPT2_SIZES = {"vocab_size": 53, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 3000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
WINDOW = 5  # shorter than the sequences, so that it matters
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", {}),
    "BERT": ("BertModel", {}),
    "Llama": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "Qwen2": ("Qwen2ForCausalLM", {}),
    "Qwen3": ("Qwen3ForCausalLM", {"head_dim": 12}),
}
EVERY = (*FAMILIES, "torch")  # "torch": our encoder-decoder against torch.nn.Transformer
HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
OVERFLOW = ("transformers' own numbers are NaN: its mask holds float64's lowest number, which its float32 softmax reads as −inf, "
            "and a padding row in which everything is masked spreads NaN")  # fmt: skip
CASTS = ("its RMSNorm, rotary angles and softmax are computed in float32 whatever the model's type "
         "(lifted to float64, they equal ours to 1e-10: tests/bridges/test_huggingface.py)")  # fmt: skip
COLUMNS = [
    "peer",
    "family",
    "heads",
    "dtype",
    "padding",
    "site",
    "layers",
    "difference",
    "largest",
    "relative",
    "tolerance",
    "verdict",
    "note",
]


@dataclass(frozen=True)
class Case:
    """A model of one comparison: a family, its key-value heads, the type."""

    family: str
    heads: str
    dtype: str

    @property
    def architecture(self) -> str:
        """transformers' class."""
        return FAMILIES[self.family][0]

    @property
    def layernorm(self) -> bool:
        """Whether the family computes throughout in the model's type."""
        return self.family in ("GPT-2", "BERT")

    @property
    def tolerance(self) -> float:
        """Allowed difference over the site's largest value."""
        return 1e-4 if self.dtype == "float32" else 1e-9 if self.layernorm else 1e-6


def cases(families: Sequence[str] = EVERY) -> list[Case]:
    """Every combination; LayerNorm families have as many key-value heads as heads."""
    unknown = [name for name in families if name not in EVERY]
    if unknown:
        raise ValueError(f"family {unknown[0]!r} is not allowed; allowed: {', '.join(EVERY)}")
    every = (
        Case(*choice) for choice in itertools.product([name for name in families if name in FAMILIES], HEADS, DTYPES)
    )
    return [case for case in every if case.heads == "MHA" or not case.layernorm]


def compare(families: Sequence[str] = EVERY, seed: int = 0, progress: bool = True) -> pd.DataFrame:
    """One row per peer × case × padding × site name: the largest difference over layers, examples and entries at real positions.

    peer: "transformers" (eager attention, read by its modules' hooks), "TransformerLens" (a bridge of the same model, read
    through `from_transformer_lens`), "torch.nn.Transformer" (our encoder-decoder and encoder, both values of norm_first).
    relative = difference / largest. verdict: "equal" (relative <= tolerance), "too far", "peer not finite" (the peer's own
    numbers are NaN where ours are finite) or "not offered" (the bridge refuses such inputs). note explains every
    float64 row above 1e-9.
    """
    rows: list[dict[str, Any]] = []
    chosen = cases(families)
    with tqdm(total=len(chosen), disable=not progress, desc="comparing", unit="case") as bar:
        for case in chosen:
            rows += _case(case, seed)
            bar.update()
    if "torch" in families:
        rows += _torch(seed)
    return pd.DataFrame(rows, columns=COLUMNS)


def random_source(case: Case, seed: int) -> Any:
    """A transformers model with every parameter random, norm gains and biases too; eager attention."""
    transformers = optional("transformers", "hf")
    architecture, options = FAMILIES[case.family]
    sizes = dict(GPT2_SIZES if case.family == "GPT-2" else SIZES)
    if not case.layernorm:
        sizes["num_key_value_heads"] = HEADS[case.heads]
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    name = (
        architecture.replace("ForCausalLM", "Config")
        .replace("LMHeadModel", "Config")
        .replace("BertModel", "BertConfig")
    )
    with torch.random.fork_rng(devices=[]):
        config = getattr(transformers, name)(**{**sizes, **options, **tokens}, attn_implementation="eager")
        keywords = dict(KNOWN[architecture].keywords)
        model = getattr(transformers, architecture)(config, **keywords).to(DTYPES[case.dtype]).eval()
    scatter(model, seed)
    return model


@torch.no_grad()
def scatter(model: nn.Module, seed: int) -> None:
    """Draw every parameter: norm gains around 1, the rest around 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
        parameter.copy_(centre + 0.18 * noise)  # about 1/sqrt(d_model), so that activations keep their size


def prompts(padding: str, seed: int) -> Inputs:
    """Four sequences of 14 tokens, or of 14, 11, 6 and 2, padded on the "left" or "right"."""
    tokens = torch.randint(0, 53, (4, 14), generator=torch.Generator().manual_seed(seed + 1))
    left = torch.arange(14)[None] >= torch.tensor([[0], [3], [8], [12]])
    return Inputs(tokens, mask={"none": None, "left": left, "right": left.flip(1)}[padding])


def _case(case: Case, seed: int) -> Iterator[dict[str, Any]]:
    source = random_source(case, seed)
    ours = from_huggingface(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sites that the bridge does not offer are not shared
        wrapped = from_transformer_lens(_with_head(source))
    note = CASTS if case.dtype == "float64" and not case.layernorm else ""
    for padding in ("none", "left", "right"):
        inputs = prompts(padding, seed)
        mine = run(ours, inputs, record=list(ours.sites)).cache
        about = {"family": case.family, "heads": case.heads, "dtype": case.dtype, "padding": padding}
        theirs = read_transformers(source, inputs)
        yield from _rows("transformers", about, mine, theirs, inputs, case.tolerance, note)
        try:
            bridged = run(wrapped, inputs, record=[site for site in wrapped.sites if site in mine]).cache
        except InputsError as error:  # the bridge cannot take such inputs, and says so
            yield {"peer": "TransformerLens", **about, "site": "logits", "layers": 0, "tolerance": case.tolerance,
                   "verdict": "not offered", "note": str(error)}  # fmt: skip
            continue
        yield from _rows("TransformerLens", about, mine, bridged, inputs, case.tolerance, note)


def _with_head(source: Any) -> Any:
    """What TransformerLens bridges: the model itself, or for the BERT body the masked-token model around the same weights."""
    if type(source).__name__ != "BertModel":
        return source
    with torch.random.fork_rng(devices=[]):
        whole = optional("transformers", "hf").BertForMaskedLM(source.config).to(source.dtype).eval()
    whole.bert.load_state_dict(source.state_dict())
    return whole


def read_transformers(source: Any, inputs: Inputs) -> dict[Site, Tensor]:
    """Every site that transformers' modules show, with the position ids that its own generate() gives padded prompts."""
    mask = torch.ones_like(inputs.tokens) if inputs.mask is None else inputs.mask.long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with reading(source, PLACES[type(source).__name__](source.config)) as found:
        out = source(input_ids=inputs.tokens, attention_mask=mask, position_ids=positions, output_attentions=True)
    found |= {Site("pattern", layer): weights for layer, weights in enumerate(out.attentions)}
    if "logits" in out:
        found[Site("logits")] = out.logits
    return found


def _rows(
    peer: str, about: dict[str, Any], mine: Mapping[Site, Tensor], theirs: Mapping[Site, Tensor], inputs: Inputs,
    tolerance: float,
    note: str = "",
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One row per site name (and stack): the layer that differs most."""
    names = dict.fromkeys((site.stack, site.name) for site in theirs if named(site, mine))
    for stack, name in names:
        sites = [site for site in theirs if (site.stack, site.name) == (stack, name)]
        apart, largest, verdict = 0.0, 0.0, ""
        for site in sites:
            a, b = (_real(site, found[site], inputs) for found in (mine, theirs))
            if bool(b.isnan().any()) and not bool(a.isnan().any()):
                verdict = "peer not finite"
            elif a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
                apart = float("inf")
            else:
                a, b = a[a.isfinite()].double(), b[b.isfinite()].double()
                apart, largest = max(apart, float((a - b).abs().max())), max(largest, float(b.abs().max()))
        if verdict:
            apart = largest = float("nan")
        relative = apart / largest if largest else apart
        verdict = verdict or ("equal" if relative <= tolerance else "too far")
        explained = OVERFLOW if verdict == "peer not finite" else note if relative > 1e-9 else ""
        yield {"peer": peer, **about, "site": f"{stack}.{name}" if stack else name, "layers": len(sites), "difference": apart,
               "largest": largest, "relative": relative, "tolerance": tolerance, "verdict": verdict,
               "note": explained}  # fmt: skip


def _real(site: Site, value: Tensor, inputs: Inputs) -> Tensor:
    """The values at real positions (queries, for edges)."""
    mask = inputs.source_mask if site.stack == "encoder" else inputs.mask
    if mask is None:
        return value
    return (value.movedim(2, 1) if "query" in site.spec.axes else value)[mask]


def _torch(seed: int) -> Iterator[dict[str, Any]]:
    """Both norm positions, both types, with and without padding of source and target."""
    for norm_first, (dtype, kind), padding in itertools.product((True, False), DTYPES.items(), (False, True)):
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that norm_first has no nested tensors
            theirs = nn.Transformer(32, 4, 2, 3, 44, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=kind)
        scatter(theirs, seed)  # left in training mode without dropout: evaluation would take PyTorch's fused encoder
        ours = from_torch_transformer(theirs, vocab=2, n_ctx=16)
        generator = torch.Generator().manual_seed(seed + 2)
        source, target = (torch.randn(3, n, 32, generator=generator, dtype=torch.float64).to(kind) for n in (9, 7))
        masks = [torch.arange(n)[None] < torch.tensor([[n], [n - 2], [n - 4]]) for n in (9, 7)]
        source_mask, mask = masks if padding else (None, None)
        tokens = [torch.zeros(x.shape[:2], dtype=torch.long) for x in (target, source)]
        inputs = Inputs(tokens[0], mask=mask, source=tokens[1], source_mask=source_mask)
        mine: dict[Site, Tensor] = {}

        def tap(site: Site, value: Tensor, mine=mine, source=source, target=target) -> Tensor:
            if site.name == "embed":
                value = source if site.stack == "encoder" else target
            mine[site] = value
            return value

        with reading(theirs, torch_places(2, 3, norm_first)) as found:
            ours(inputs, tap)
            theirs(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(7, dtype=kind),
                   src_key_padding_mask=None if source_mask is None else _additive(source_mask, kind),
                   memory_key_padding_mask=None if source_mask is None else _additive(source_mask, kind),
                   tgt_key_padding_mask=None if mask is None else _additive(mask, kind))  # fmt: skip
        about = {"family": f"encoder-decoder, {'pre' if norm_first else 'post'}-norm", "heads": "MHA", "dtype": dtype,
                 "padding": "right" if padding else "none"}  # fmt: skip
        yield from _rows("torch.nn.Transformer", about, mine, found, inputs, 1e-4 if dtype == "float32" else 1e-10)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where real, −∞ where padding: of the same type as the causal mask."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
