"""Any TransformerLens bridge, or any transformers model that TransformerLens knows, as our `Hookable`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interp.bridges.huggingface import BridgeError, optional
from interp.bridges.lens_in.places import Pass, Place, attached, undisturbed
from interp.bridges.lens_in.survey import survey
from interp.hookable import Hookable
from interp.model.inputs import Inputs, InputsError, as_inputs, position_ids
from interp.model.tap import as_tap
from interp.sites import Site

_ATTENTION = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
_FFN = ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out")
_OUTER = ("W_E", "W_U", "b_U", "W_pos")


@dataclass(frozen=True)
class BridgedConfig:
    """Sizes of a bridged model. kind: "encoder" where a position was seen to read later ones.

    n_heads, n_kv_heads, d_head, d_ff are those of the first layer's activations. window: how many last keys a query
    may read where that is the same in every layer, else None.
    """

    architecture: str
    kind: str
    vocab: int
    n_layers: int
    n_ctx: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_ff: int | None
    window: int | None = None
    n_segments: int = 0


def from_transformer_lens(bridge: Any, self_test: bool = True) -> BridgedModel:
    """A TransformerLens bridge, or a transformers model, behind our protocol: every analysis runs on it.

    bridge: a TransformerBridge of TransformerLens 4.3 or later with one stack of blocks (left as it is), or a
    transformers model object, which is copied (left bit-identical; costs one copy of the weights) and bridged without a
    tokenizer, a hub or a disk. The logits are the model's own. self_test: write noise to every site and drop, with one
    warning that says why, those that do not change the output as a write there must (one forward pass for every 32 sites);
    False trusts the hook points.
    Either way a site is offered only if it is reached exactly once, in order, with the axes of the dictionary.
    Raises BridgeError for encoder-decoders, unknown architectures and heads that cannot be repeated on a stream.
    """
    optional("transformer_lens", "lens")
    bridges = optional("transformer_lens.model_bridge", "lens")
    if isinstance(bridge, Hookable):
        raise BridgeError(f"this {type(bridge).__name__} can already be read and changed here; allowed: a TransformerBridge or a "
                          "transformers model object")  # fmt: skip
    if not isinstance(bridge, bridges.TransformerBridge):
        bridge = _bridged(bridge)
    return BridgedModel(bridge, self_test)


def _bridged(model: Any) -> Any:
    """A bridge around a copy of a transformers model; nothing is looked up anywhere."""
    architecture = type(model).__name__
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise BridgeError(
            f"{architecture} is not supported; allowed: a TransformerBridge or a transformers model object"
        )
    known = optional("transformer_lens.factories.architecture_adapter_factory", "lens").SUPPORTED_ARCHITECTURES
    if architecture not in known:
        raise BridgeError(f"TransformerLens has no adapter for architecture {architecture}; it has {len(known)}, such as "
                          "GPT2LMHeadModel, LlamaForCausalLM, GPTNeoXForCausalLM")  # fmt: skip
    _one_stack(config, architecture)
    sources = optional("transformer_lens.model_bridge.sources", "lens")
    copied = copy.deepcopy(model).eval()
    return sources.build_bridge_from_module(copied, architecture, hf_config=copied.config, tokenizer=None)


def _one_stack(config: Any, architecture: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise BridgeError(f"{architecture} is an encoder-decoder; allowed: models with one stack of blocks (decoders, "
                          "encoders)")  # fmt: skip


class BridgedModel:
    """A bridged model as a `Hookable`: `model(inputs, tap)`, `sites`, `unembed`, `weight`, `config`.

    `bridge` is TransformerLens's object; `dropped` says for each site that its hook points promise, and that is not
    offered, why. Forward passes of one process run one after another, whatever thread asks.
    """

    can_resume = False

    def __init__(self, bridge: Any, self_test: bool) -> None:
        self.bridge, cfg = bridge, bridge.cfg
        architecture = str(cfg.architecture or type(bridge.original_model).__name__)
        _one_stack(getattr(bridge.original_model, "config", None), architecture)
        if not hasattr(bridge, "blocks") or cfg.is_audio_model or cfg.is_visual_model:
            raise BridgeError(f"{architecture} is not supported; allowed: text models with one stack of blocks")
        positions = optional("transformer_lens.utilities.position_ids", "lens")
        self._takes_positions = positions.accepts_mask_derived_position_ids(bridge.original_model)
        parameters = inspect.signature(bridge.original_model.forward).parameters
        self._options = {"use_cache": False} if "use_cache" in parameters else {}
        found = survey(self, architecture, self_test)
        self.config = BridgedConfig(architecture=architecture, **found.sizes)
        self.places: dict[Site, Place] = found.places
        self.sites: tuple[Site, ...] = (*found.places, Site("logits"))
        self.additive_stream: bool = found.additive
        self.dropped: dict[Site, str] = found.dropped
        self._left_padding = found.left_padding

    def __repr__(self) -> str:
        return f"BridgedModel({self.config!r}, {len(self.sites)} sites)"

    def __call__(self, inputs: Any, tap: Any = None) -> Tensor:
        """Logits [batch pos vocab]: the model's own, `tap` called at every site that it wants.

        Inputs.embeddings stand for the token embedding as it leaves its module, where `embed` is. Raises InputsError.
        """
        inputs, tap = as_inputs(inputs), as_tap(tap)
        if inputs.source is not None or inputs.prefix_length is not None:
            raise InputsError(f"{self.config.architecture} reads neither source nor prefix_length; allowed: None")
        if (
            inputs.mask is not None
            and not self._left_padding
            and bool((inputs.mask[:, 1:] > inputs.mask[:, :-1]).any())
        ):
            raise InputsError(f"{self.config.architecture} in {self.dtype} gives other logits with padding on the left than "
                              "without; allowed: padding on the right, or none")  # fmt: skip
        hooks = Pass(self.places, tap, inputs, self.weight).hooks()
        if inputs.embeddings is not None:
            point, given = self.bridge.hook_dict.get("embed.hook_out"), inputs.embeddings
            if point is None:
                raise InputsError(
                    f"{self.config.architecture} has no module that embeddings could replace; allowed: None"
                )
            hooks.insert(0, (point, lambda value: given.to(value)))
        logits = self.forward(inputs, hooks)
        return tap(Site("logits"), logits) if tap.wants(Site("logits")) else logits

    def forward(self, inputs: Inputs, hooks: list[Any]) -> Tensor:
        """The bridge's own forward pass with (hook point, function) pairs attached for its duration."""
        options: dict[str, Any] = dict(self._options)
        if inputs.mask is not None and not bool(inputs.mask.all()):
            options["attention_mask"] = inputs.mask.long()
            if self._takes_positions:
                options["position_ids"] = position_ids(inputs)
        if inputs.segments is not None:
            options["token_type_ids"] = inputs.segments.long()
        with undisturbed(self.bridge), attached(hooks):
            return self.bridge(inputs.tokens.long(), return_type="logits", **options)

    def unembed(self, stream: Tensor) -> Tensor:
        """Final norm, head and caps: stream [… d_model] -> logits [… vocab]."""
        bridge = self.bridge
        names = [getattr(bridge.adapter.component_mapping.get(part), "name", None) or ""
                 for part in ("ln_final", "unembed", "blocks")]  # fmt: skip
        shared = ".".join(_common(*(name.split(".")[:-1] for name in names[:2])))
        if shared and not names[2].startswith(shared):  # a masked-token head transforms the stream before its norm
            with undisturbed(bridge), attached([]):
                return bridge.original_model.get_submodule(shared)(stream)
        norm, head = getattr(bridge, "ln_final", None), bridge.unembed.original_component
        normed = stream if norm is None else norm.original_component(stream)
        return bridge.adapter.apply_output_logits_transform(head(normed))

    def weight(self, kind: str, layer: int | None = None, stack: str | None = None) -> Tensor | None:
        """ "W_Q" [head d_model d_head] … "b_out" with a layer; "W_E" [vocab d_model], "W_U", "b_U", "W_pos"; or None.

        W_K, W_V have the key and value heads. None when absent or not one matrix (mixtures of experts).
        """
        if stack is not None:
            raise ValueError(f"stack={stack!r}: a bridged model has one stack; allowed: None")
        if kind not in _ATTENTION + _FFN + _OUTER:
            raise ValueError(f"unknown weight {kind!r}; allowed: {', '.join(_ATTENTION + _FFN + _OUTER)}")
        if kind in _OUTER:
            return self._outer_weight(kind)
        blocks = self.bridge.blocks
        if layer is None or not 0 <= layer < len(blocks):
            raise ValueError(f"layer={layer!r} for {kind!r} is not allowed; allowed: 0 … {len(blocks) - 1}")
        part = getattr(blocks[layer], "attn" if kind in _ATTENTION else "mlp", None)
        found = _attribute(part, kind)
        axes = {"W": 3 if kind in _ATTENTION else 2, "b": 2 if kind in _ATTENTION[4:7] else 1}
        return found if isinstance(found, Tensor) and found.ndim == axes[kind[0]] else None

    def _outer_weight(self, kind: str) -> Tensor | None:
        bridge = self.bridge
        if kind == "b_U":  # TransformerLens adds a bias of zeros, as a buffer, to a head that has none
            return dict(bridge.unembed.original_component.named_parameters()).get("bias")
        found = _attribute(bridge, kind)
        return found if isinstance(found, Tensor) and bridge.cfg.d_model in found.shape else None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of the model by the bridge's name."""
        return self.bridge.named_parameters()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.bridge.original_model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' floating-point type."""
        return next(self.bridge.original_model.parameters()).dtype


def _attribute(owner: Any, name: str) -> Any:
    """The attribute, None where the bridge says that this architecture has no such thing."""
    try:
        return getattr(owner, name, None)
    except (ValueError, NotImplementedError, RuntimeError):
        return None


def _common(first: list[str], second: list[str]) -> list[str]:
    found = []
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        found.append(one)
    return found
