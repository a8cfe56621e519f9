"""Generation, and what PyTorch code asks of a module: both are the model's."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from interp.bridges.lens_out.hooked import LensHooked
from interp.bridges.lens_out.text import LensText
from interp.generate import generate
from interp.model.transformer import Transformer


class LensTorch(LensHooked, LensText):
    """The adapter's weights, mode and device are its model's."""

    def generate(
        self,
        input: Any,
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | list[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        padding_side: str | None = "left",
        attention_mask: Tensor | None = None,
        return_type: str | None = "input",
        seed: int = 0,
        verbose: bool = False,
    ) -> Any:
        """Prompt and new tokens, as text if the prompt was ("input"), "str" or "tokens" [batch pos]; registered hooks hold.

        Sampled from `seed` alone unless do_sample=False. With hooks every step runs the whole sequence, so that they see
        it. Without an eos_token_id, given or the tokenizer's, generation does not stop early. Raises InputsError.
        """
        if return_type not in ("input", "str", "tokens", "tensor"):
            raise ValueError(f"return_type={return_type!r} is not allowed; allowed: 'input', 'str', 'tokens'")
        inputs = self.as_inputs(input, attention_mask, prepend_bos, padding_side)
        eos = eos_token_id if eos_token_id is not None else self._special("eos")
        stop = () if eos is None or not stop_at_eos else eos
        heat = temperature if do_sample else 0.0
        model: Any = _WithHooks(self) if self.registry.hooks else self.model
        made: Any = generate(model, inputs, max_new_tokens, heat, top_k, top_p, stop, seed, use_cache=use_past_kv_cache)
        tokens = torch.cat([inputs.tokens, getattr(made, "tokens", made)], 1)
        is_text = isinstance(input, str) or (isinstance(input, list | tuple) and isinstance(input[0], str))
        if return_type in ("tokens", "tensor") or (return_type == "input" and not is_text):
            return tokens
        text = self.to_string(tokens)
        return text[0] if isinstance(input, str) else text

    # What is PyTorch's is the model's.

    @property
    def original_model(self) -> Transformer:
        """The Transformer itself, whose mode TransformerLens's analyses check."""
        return self.model

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    parameters = property(lambda self: self.model.parameters)
    named_parameters = property(lambda self: self.model.named_parameters)
    modules = property(lambda self: self.model.modules)
    state_dict = property(lambda self: self.model.state_dict)
    load_state_dict = property(lambda self: self.model.load_state_dict)
    zero_grad = property(lambda self: self.model.zero_grad)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert the model's weights."""
        self.model.to(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Self:
        """Put the model in training mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model in evaluation mode."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether the model's weights are differentiated."""
        self.model.requires_grad_(requires_grad)
        return self


class _WithHooks:
    """The model for `generate`: each forward pass also calls the adapter's hooks."""

    def __init__(self, adapter: LensTorch) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter.model, name)

    def __call__(self, inputs: Any, tap: Any = None) -> Tensor:
        return self._adapter.model(inputs, self._adapter.tap())
