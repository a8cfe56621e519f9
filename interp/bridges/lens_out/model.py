"""Our Transformer behind TransformerLens's surface, so that its analyses and people's notebooks run on it unmodified."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interp.bridges.huggingface import BridgeError
from interp.bridges.lens_out.hooked import Hooks, activation_cache, slice_positions
from interp.bridges.lens_out.hooks import LensTap, Registry
from interp.bridges.lens_out.names import Place, hook_names
from interp.bridges.lens_out.parts import LensNorm, LensPart, hook_point, lens_block, lens_config
from interp.bridges.lens_out.torch_module import LensTorch
from interp.bridges.lens_out.weights import LensWeights
from interp.hookable import UnsupportedModelError
from interp.model.inputs import Inputs, InputsError, KVCache
from interp.model.transformer import Transformer
from interp.run import NotReachedError
from interp.sites import Site

RETURN_TYPES = ("logits", "loss", "both", None)


def to_transformer_lens(model: Transformer, tokenizer: Any = None) -> LensModel:
    """TransformerLens's model protocols and 3.x methods over a model, whose weights it shares and never changes.

    model: kind "decoder", "encoder" or "prefix-decoder", pre- or post-norm. tokenizer: any that `interp.tokenize`
    takes; without one, text raises TokenizerError. Raises BridgeError for another model.
    """
    if not isinstance(model, Transformer):
        raise BridgeError(f"to_transformer_lens takes an interp.Transformer, got {type(model).__name__}")
    if model.config.kind == "encoder-decoder":
        raise BridgeError("to_transformer_lens with kind='encoder-decoder' is not supported: TransformerLens's names have one "
                          "stack; allowed: 'decoder', 'encoder', 'prefix-decoder'")  # fmt: skip
    return LensModel(model, tokenizer)


class LensModel(LensTorch, LensWeights):
    """What `to_transformer_lens` gives; `model` (also `original_model`) is the Transformer it shares."""

    def __init__(self, model: Transformer, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cfg = lens_config(model)
        self.cfg.tokenizer_name = getattr(tokenizer, "name_or_path", None)
        self.registry, self.context_level = Registry(hook_names(model)), 0
        self.blocks = tuple(lens_block(model, layer, self.registry) for layer in range(self.cfg.n_layers))
        self.ln_final = LensNorm(model.final_norm, "ln_final", self.registry)
        self.embed = LensPart("embed", self.registry, {"W_E": lambda: self.W_E}, model.embedding)
        self.pos_embed = LensPart("pos_embed", self.registry, {"W_pos": lambda: self.W_pos})
        head = {"W_U": lambda: self.W_U, "b_U": lambda: self.b_U}
        self.unembed = (
            LensPart("unembed", self.registry, head, lambda x: x @ self.W_U + self.b_U) if model.config.head else None
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("hook_") and "registry" in self.__dict__:
            return hook_point(self.registry, "", name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"LensModel({self.model.config}, {len(self.registry.hooks)} hooks)"

    def __deepcopy__(self, memo: dict[int, Any]) -> LensModel:
        made = LensModel(copy.deepcopy(self.model, memo), self.tokenizer)  # parts read their model: build them anew
        for name in ("default_prepend_bos", "use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in"):
            setattr(made.cfg, name, getattr(self.cfg, name))
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, input: Any, **options: Any) -> Any:
        """One forward pass with the registered hooks; gradients as PyTorch's current mode has them.

        input: ids [batch pos], text, texts or Inputs; with start_at_layer a stream [batch pos d_model].
        options: return_type "logits" (default) | "loss" | "both" | None, loss_per_token, prepend_bos, padding_side,
        attention_mask [batch pos] (1 = real), tokens (with start_at_layer: for the loss, and a prefix decoder's
        Inputs), past_kv_cache (a KVCache, which grows), start_at_layer, stop_at_layer: run blocks start … stop−1
        alone; with stop, the stream before block `stop` is returned. Negative layers count from the end. Raises
        InputsError, TokenizerError, UnsupportedModelError.
        """
        return self._forward(self.tap(), input, **options)

    def _forward(
        self,
        tap: LensTap,
        input: Any,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        start_at_layer: int | None = None,
        tokens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: KVCache | None = None,
    ) -> Any:
        if return_type not in RETURN_TYPES:
            raise ValueError(
                f"return_type={return_type!r} is not allowed; allowed: {', '.join(map(repr, RETURN_TYPES))}"
            )
        if return_type in ("loss", "both") and (self.model.config.kind == "encoder" or not self.model.config.head):
            raise UnsupportedModelError(
                "the loss of the next token needs a decoder with a head; compute yours from the logits"
            )
        start, stop = self._span(start_at_layer, stop_at_layer)
        if start is None and stop is None:
            inputs = self.as_inputs(input, attention_mask, prepend_bos, padding_side)
            logits = self.model(inputs, tap, past_kv_cache)
        else:
            if past_kv_cache is not None:
                raise InputsError(
                    "past_kv_cache with start_at_layer or stop_at_layer is not allowed: some layers would not grow"
                )
            if start is None:
                inputs = self.as_inputs(input, attention_mask, prepend_bos, padding_side)
                stream = self.model.embed(inputs, tap)
            else:
                stream, inputs = self._residual(input, tokens, attention_mask)
            stream = self.model.blocks(stream, start or 0, self.cfg.n_layers if stop is None else stop, tap, inputs)
            if stop is not None:
                return stream
            logits = self.model.unembed(stream, tap)
        if return_type in ("logits", None):
            return logits if return_type else None
        if start is not None and tokens is None:
            raise InputsError("the loss with start_at_layer needs tokens= [batch pos]")
        loss = self.loss_fn(logits, inputs.tokens, _predicting(inputs), loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def _span(self, start: int | None, stop: int | None) -> tuple[int | None, int | None]:
        """start_at_layer and stop_at_layer counted from 0. InputsError out of range."""
        n, found = self.cfg.n_layers, []
        for name, layer in (("start_at_layer", start), ("stop_at_layer", stop)):
            if layer is not None and not -n <= layer <= n:
                raise InputsError(f"{name}={layer} is not allowed; allowed: {-n} … {n}")
            found.append(layer + n if layer is not None and layer < 0 else layer)
        if None not in found and found[0] > found[1]:
            raise InputsError(f"start_at_layer={start} lies after stop_at_layer={stop}")
        return found[0], found[1]

    def _residual(self, stream: Any, tokens: Tensor | None, attention_mask: Tensor | None) -> tuple[Tensor, Inputs]:
        if not isinstance(stream, Tensor) or not stream.is_floating_point() or stream.shape[-1] != self.cfg.d_model:
            found = f"{stream.dtype} {tuple(stream.shape)}" if isinstance(stream, Tensor) else type(stream).__name__
            raise InputsError(f"start_at_layer takes a stream [batch pos d_model={self.cfg.d_model}], got {found}")
        stream = (stream if stream.ndim == 3 else stream[None]).to(self.cfg.device)
        if tokens is None and self.model.config.kind == "prefix-decoder":
            raise InputsError(
                "start_at_layer of a prefix decoder needs tokens=Inputs(…, prefix_length=): who sees whom"
            )
        if tokens is None:
            tokens = torch.zeros(stream.shape[:2], dtype=torch.long)
        inputs = self.as_inputs(tokens, attention_mask, None, None)
        if inputs.tokens.shape != stream.shape[:2]:
            raise InputsError(f"tokens must have shape {tuple(stream.shape[:2])}, got {tuple(inputs.tokens.shape)}")
        return stream, inputs

    def loss_fn(
        self, logits: Tensor, tokens: Tensor, attention_mask: Tensor | None = None, per_token: bool = False
    ) -> Tensor:
        """Cross-entropy of each next token: a mean, or with per_token [batch pos−1], 0 where padding is read or predicted."""
        losses = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None].to(logits.device))[..., 0]
        if attention_mask is None:
            return losses if per_token else losses.mean()
        real = attention_mask.bool().to(losses.device)
        counted = real[:, :-1] & real[:, 1:]
        losses = losses.masked_fill(~counted, 0.0)
        return losses if per_token else losses.sum() / counted.sum()

    def run_with_hooks(
        self,
        input: Any,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        remove_batch_dim: bool = False,
        **options: Any,
    ) -> Any:
        """`forward` with further hooks, (name or function of names, function(value, hook)) pairs, for this run alone.

        They fire after the registered ones. reset_hooks_end=False registers them. Backward hooks belong to the graph of
        this run. remove_batch_dim: hooks see a batch of one without its axis. Raises UnknownHookError; NotReachedError for a
        named hook outside start_at_layer … stop_at_layer; ValueError for backward hooks without gradients.
        """
        if bwd_hooks and not torch.is_grad_enabled():
            raise ValueError("backward hooks cannot fire: gradients are off (torch.no_grad, inference mode)")
        hooks = self.made(fwd_hooks, bwd_hooks)
        self._check_reached([asked for asked, _ in (*fwd_hooks, *bwd_hooks) if isinstance(asked, str)], options)
        for hook in hooks if remove_batch_dim else ():
            hook.function = _without_batch(hook.function)
        try:
            return self._forward(self.tap(hooks), input, **options)
        finally:
            if not reset_hooks_end:
                self.registry.hooks += hooks
            for hook in hooks if clear_contexts else ():
                hook.point.clear_context()

    def run_with_cache(
        self,
        input: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        names_filter: Any = None,
        pos_slice: Any = None,
        incl_bwd: bool = False,
        device: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """(output of `forward`, ActivationCache of copies recorded after hooks), or a dict without return_cache_object.

        names_filter: see `filtered`. pos_slice: as TransformerLens's Slice; an int keeps the axis. incl_bwd: also the
        gradients of a scalar output (return_type="loss") as "<name>_grad"; no parameter's .grad is touched. device: where
        the cache goes. Only what is asked for is computed.
        Raises UnknownHookError, NotReachedError (a named place outside start_at_layer … stop_at_layer), InputsError,
        ValueError (incl_bwd without gradients or a scalar); ImportError for an ActivationCache without the extra.
        """
        names = self.filtered(names_filter)
        if names_filter is not None and not callable(names_filter):
            self._check_reached(names, options)
        if incl_bwd and not torch.is_grad_enabled():
            raise ValueError("incl_bwd=True needs gradients, which are off (torch.no_grad, inference mode)")
        tap = self.tap(record=names, gradients=incl_bwd)
        output = self._forward(tap, input, **options)
        values = dict(tap.recorded)
        if incl_bwd:
            values |= _gradients(output, tap.live)
        places = self.registry.places
        values = {
            name: slice_positions(value.to(device), pos_slice, places[name.removesuffix("_grad")])
            for name, value in values.items()
        }
        batch = next((value.shape[0] for value in values.values()), 1)
        if remove_batch_dim and batch != 1:
            raise InputsError(f"remove_batch_dim=True with a batch of {batch} is not allowed; allowed: a batch of 1")
        if not return_cache_object:
            return output, {name: value[0] for name, value in values.items()} if remove_batch_dim else values
        cache = activation_cache(self.model, values, self)
        return output, cache.remove_batch_dim(batch) if remove_batch_dim else cache

    def _check_reached(self, names: list[str], options: dict[str, Any]) -> None:
        """A named place that this call does not run raises."""
        start, stop = self._span(options.get("start_at_layer"), options.get("stop_at_layer"))
        missed = [name for name in names if not _runs(self.registry.places[name], start, stop)]
        if missed:
            raise NotReachedError(f"start_at_layer={start}, stop_at_layer={stop} does not reach {', '.join(missed)}")


def _runs(place: Place, start: int | None, stop: int | None) -> bool:
    if place.layer is not None:
        return (start or 0) <= place.layer and (stop is None or place.layer < stop)
    if isinstance(place, Site) and place.name in ("embed", "pos_embed"):
        return start is None
    return stop is None


def _without_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(value: Tensor, hook: Any) -> Tensor | None:
        if value.shape[0] != 1:
            raise InputsError(
                f"remove_batch_dim=True with a batch of {value.shape[0]} is not allowed; allowed: a batch of 1"
            )
        result = function(value[0], hook=hook)
        return result[None] if isinstance(result, Tensor) else result

    return call


def _gradients(output: Any, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of a scalar output at each recorded place; zeros where nothing depends on it."""
    if not isinstance(output, Tensor) or output.numel() != 1:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"incl_bwd=True needs a scalar output, got {found}; allowed: return_type='loss'")
    found = torch.autograd.grad(output, list(live.values()), allow_unused=True, materialize_grads=True)
    return {f"{name}_grad": gradient for name, gradient in zip(live, found, strict=True)}


def _predicting(inputs: Inputs) -> Tensor | None:
    """Real positions, from the last of a prefix on: inside a prefix nothing is predicted, everything is seen."""
    if inputs.prefix_length is None:
        return inputs.mask
    mask = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    return mask & (mask.long().cumsum(1) - 1 >= inputs.prefix_length[:, None].to(mask.device) - 1)
