"""The weights of a whole model under TransformerLens's names, and what it computes from weights alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from interp.bridges.huggingface import optional
from interp.bridges.lens_out.parts import LensNorm, LensPart
from interp.hookable import UnsupportedModelError
from interp.model.positions import sinusoidal
from interp.model.transformer import Transformer


class LensWeights:
    """Weights stacked over layers: `W_Q` [layer head d_model d_head], …; grouped `W_K`, `W_V` keep their own heads.

    Stacks are copies; `blocks[l].attn.W_Q` and the like are views of the model's own parameters.
    """

    model: Transformer
    cfg: Any  # a LensConfig; Any, so that type checkers take it for TransformerLens's own
    blocks: tuple[LensPart, ...]
    ln_final: LensNorm

    def _stack(self, part: str, name: str) -> Tensor:
        if part == "mlp" and self.cfg.attn_only:
            raise UnsupportedModelError(f"{name}: this model has no FFN (ffn='none')")
        if name == "W_gate" and not self.cfg.gated_mlp:
            raise UnsupportedModelError("W_gate: this model's FFN has no gate")
        return torch.stack([getattr(getattr(block, part), name) for block in self.blocks])

    # Absent biases are zeros; an absent matrix raises UnsupportedModelError.
    W_Q = property(lambda self: self._stack("attn", "W_Q"))
    W_K = property(lambda self: self._stack("attn", "W_K"))
    W_V = property(lambda self: self._stack("attn", "W_V"))
    W_O = property(lambda self: self._stack("attn", "W_O"))
    b_Q = property(lambda self: self._stack("attn", "b_Q"))
    b_K = property(lambda self: self._stack("attn", "b_K"))
    b_V = property(lambda self: self._stack("attn", "b_V"))
    b_O = property(lambda self: self._stack("attn", "b_O"))
    W_in = property(lambda self: self._stack("mlp", "W_in"))
    W_out = property(lambda self: self._stack("mlp", "W_out"))
    W_gate = property(lambda self: self._stack("mlp", "W_gate") if self.cfg.gated_mlp else None)
    b_in = property(lambda self: self._stack("mlp", "b_in"))
    b_out = property(lambda self: self._stack("mlp", "b_out"))

    @property
    def W_E(self) -> Tensor:
        """[d_vocab d_model], the model's own."""
        return self.model.W_E

    @property
    def W_U(self) -> Tensor:
        """[d_model d_vocab], the model's own, no norm folded in. UnsupportedModelError without a head."""
        if self.model.W_U is None:
            raise UnsupportedModelError("W_U: this model has no unembedding (head=False)")
        return self.model.W_U

    @property
    def b_U(self) -> Tensor:
        """[d_vocab], zeros when the model has none."""
        return self._zeros(self.cfg.d_vocab) if self.model.b_U is None else self.model.b_U

    @property
    def W_pos(self) -> Tensor:
        """[n_ctx d_model], learned or sinusoidal. UnsupportedModelError for rotary or no positions."""
        if self.model.W_pos is not None:
            return self.model.W_pos
        if self.model.config.positions != "sinusoidal":
            raise UnsupportedModelError(f"W_pos: this model has positions={self.model.config.positions!r}")
        ids = torch.arange(self.cfg.n_ctx, device=self.cfg.device)
        return sinusoidal(ids, self.cfg.d_model, self.cfg.dtype)

    @property
    def W_E_pos(self) -> Tensor:
        """Token and position embeddings as one matrix [d_vocab + n_ctx, d_model]."""
        return torch.cat([self.W_E, self.W_pos])

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.cfg.device, dtype=self.cfg.dtype)

    def _per_query_head(self, weight: Tensor) -> Tensor:
        """Grouped keys or values [layer kv_head …] repeated for every query head that reads them."""
        return weight.repeat_interleave(self.cfg.n_heads // weight.shape[1], 1)

    @property
    def QK(self) -> Any:
        """FactoredMatrix [layer head d_model d_model]: W_Q W_Kᵀ, grouped keys repeated. ImportError without the extra."""
        lens = optional("transformer_lens", "lens")
        return lens.FactoredMatrix(self.W_Q, self._per_query_head(self.W_K).transpose(-2, -1))

    @property
    def OV(self) -> Any:
        """FactoredMatrix [layer head d_model d_model]: W_V W_O, grouped values repeated. ImportError without the extra."""
        lens = optional("transformer_lens", "lens")
        return lens.FactoredMatrix(self._per_query_head(self.W_V), self.W_O)

    @torch.no_grad()
    def all_composition_scores(self, mode: str) -> Tensor:
        """‖A B‖ / (‖A‖ ‖B‖) of each head with each later one [layer head layer head], 0 elsewhere; mode "Q", "K" or "V"."""
        if mode not in ("Q", "K", "V"):
            raise ValueError(f"mode={mode!r} is not allowed; allowed: 'Q', 'K', 'V'")
        optional("transformer_lens", "lens")
        utilities = optional("transformer_lens.utilities", "lens")
        right = {"Q": self.QK, "K": self.QK.T, "V": self.OV}[mode]
        scores = utilities.composition_scores(self.OV, right, broadcast_dims=True)
        layer = torch.arange(self.cfg.n_layers, device=scores.device)
        return torch.where(layer[:, None, None, None] < layer[None, None, :, None], scores, 0.0)

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """Sum [d_model] of the output biases before block `layer`; mlp_input: with that block's attention's own.

        Raises ValueError for a layer outside 0 … n_layers (with mlp_input, n_layers − 1).
        """
        last = self.cfg.n_layers - int(mlp_input)
        if not 0 <= layer <= last:
            raise ValueError(f"layer={layer} is not allowed; allowed: 0 … {last}")
        total = self._zeros(self.cfg.d_model)
        for number, block in enumerate(self.blocks[: layer + int(mlp_input)]):
            total = total + block.attn.b_O
            if include_mlp_biases and not self.cfg.attn_only and number < layer:
                total = total + block.mlp.b_out
        return total

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """Directions [… d_model] whose product with the normalised stream (`ln_final.hook_normalized`) is each token's logit.

        That is γ ⊙ W_U[:, token]: the final norm's gain is part of it, as after TransformerLens's folding, so that
        `ActivationCache.logit_attrs` sums to the logit without β W_U + b_U. `model.W_U` itself has no gain in it.
        """
        index: Any = self.to_single_token(tokens) if isinstance(tokens, str) else tokens  # type: ignore[attr-defined]
        if isinstance(index, Tensor) and index.numel() == 1:
            index = int(index)  # TransformerLens drops every axis of a single token
        columns = self.W_U.T[index]
        return columns if self.ln_final.weight is None else columns * self.ln_final.weight

    @property
    def all_head_labels(self) -> list[str]:
        """L0H0, L0H1, …"""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]

    def blocks_with(self, submodule: str) -> list[tuple[int, LensPart]]:
        """(layer, block) of every block that has this part: "attn", "mlp", "ln1", "ln2"."""
        return [(layer, block) for layer, block in enumerate(self.blocks) if submodule in block.parts]

    def layer_types(self) -> list[str]:
        """What each block holds: "attn+mlp" or "attn"."""
        return ["attn" if self.cfg.attn_only else "attn+mlp"] * self.cfg.n_layers

    def tl_parameters(self) -> dict[str, Tensor]:
        """Every weight by TransformerLens's name; grouped keys and values repeated per query head, as TransformerLens 4 does."""
        found = {"embed.W_E": self.W_E}
        if self.cfg.positional_embedding_type == "standard":
            found["pos_embed.W_pos"] = self.W_pos
        repeat = self.cfg.n_heads // self.model.config.kv_heads
        for layer, block in enumerate(self.blocks):
            for part, held in ((part, getattr(block, part)) for part in block.parts):
                names = (
                    [name for name in ("w", "b") if getattr(held, name) is not None] if part[:2] == "ln" else held.parts
                )
                for name in names:
                    value = getattr(held, name)
                    grouped = name in ("W_K", "W_V", "b_K", "b_V")
                    found[f"blocks.{layer}.{part}.{name}"] = value.repeat_interleave(repeat, 0) if grouped else value
        for name in ("w", "b"):
            if getattr(self.ln_final, name) is not None:
                found[f"ln_final.{name}"] = getattr(self.ln_final, name)
        return found if self.model.W_U is None else {**found, "unembed.W_U": self.W_U, "unembed.b_U": self.b_U}

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The pairs of `tl_parameters`."""
        return iter(self.tl_parameters().items())
