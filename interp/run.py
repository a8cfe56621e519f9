"""Read and change one forward pass: `run(model, inputs, record=, change=)`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from interp.display import cache_html, change_texts, run_html
from interp.hookable import Hookable, require_hookable
from interp.interventions import Intervention
from interp.model.inputs import Inputs, InputsError, as_inputs
from interp.sites import SITES, STACKS, Site, UnknownSiteError, expand, named, resolve, suggest
from interp.tokens import tokenize


class NotReachedError(RuntimeError):
    """A site that was asked for and that the forward pass never reached."""


class NaNWeightsError(ValueError):
    """Weights that are NaN or infinite."""


class Cache(Mapping[Site, Tensor]):
    """Recorded tensors by site: `cache["3.attn_out"]`, `cache[Site("embed")]`, `cache.stack("resid_post")`."""

    _repr_html_ = cache_html

    def __init__(self, values: dict[Site, Tensor]) -> None:
        self._values = values

    def __getitem__(self, site: Site | str) -> Tensor:
        site = Site.parse(site)
        found = named(site, self._values)
        if len(found) != 1:
            names = [str(s) for s in self._values]
            said = (
                f"can mean {' or '.join(map(str, found))}" if found else f"was not recorded{suggest(str(site), names)}"
            )
            raise KeyError(f"'{site}' {said}; recorded: {', '.join(names) or 'nothing'}")
        return self._values[found[0]]

    def __contains__(self, site: object) -> bool:
        try:
            return len(named(Site.parse(site), self._values)) == 1  # type: ignore[arg-type]
        except UnknownSiteError:
            return False

    def __iter__(self) -> Iterator[Site]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return "Cache(" + ", ".join(f"{site} {tuple(value.shape)}" for site, value in self.items()) + ")"

    def stack(self, name: str, stack: str | None = None) -> Tensor:
        """Every recorded layer's value of one site name, [layer batch …], in layer order.

        stack: which of an encoder-decoder's (where only one was recorded it need not be said). KeyError if none was.
        """
        if name.split(".")[0] in STACKS:  # "encoder.resid_post", as record= takes it
            first, _, name = name.partition(".")
            stack = stack or first
        if name not in SITES:
            raise UnknownSiteError(f"unknown site {name!r}{suggest(name, SITES)}; allowed: {', '.join(SITES)}")
        found = sorted((s for s in self if s.name == name and stack in (None, s.stack)), key=lambda s: s.layer or 0)
        if len({site.stack for site in found}) > 1:
            raise KeyError(f"{name!r} was recorded in both stacks; say stack='encoder' or stack='decoder'")
        if stack is not None and stack not in STACKS:
            raise UnknownSiteError(f"unknown stack {stack!r}; allowed: {', '.join(STACKS)}")
        if not found:
            raise KeyError(
                f"{name!r} was not recorded at any layer; recorded: {', '.join(map(str, self)) or 'nothing'}"
            )
        return torch.stack([self[site] for site in found])


@dataclass(frozen=True, eq=False)
class Run:
    """What one forward pass gave: logits [batch pos vocab], the recorded sites, and the inputs that were run.

    model: a weak reference, None after unpickling; `made_by` is the model while it exists. changes: the interventions in words.
    """

    logits: Tensor
    cache: Cache
    inputs: Inputs
    model: Any = field(default=None, repr=False)
    changes: tuple[str, ...] = field(default=(), repr=False)
    _repr_html_ = run_html

    @property
    def made_by(self) -> Any:
        """The model that was run, None when it is gone or not known."""
        return None if self.model is None else self.model()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "model": None}  # weak references cannot be pickled

    def __repr__(self) -> str:
        return f"Run(logits {tuple(self.logits.shape)}, {self.cache!r})"


def run(
    model: Hookable,
    inputs: Any,
    record: str | Site | Iterable[str | Site] = (),
    change: Intervention | Sequence[Intervention] = (),
    grad: bool = False,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
    wanted: Iterable[Site] = (),
) -> Run:
    """One forward pass that records sites and applies changes.

    record: sites or their text; a bare per-layer name ("resid_post") means every layer's. change: interventions;
    those at one site apply in list order, and a site is recorded after its changes. grad: keep the graph (default:
    no_grad). tokenizer, prefix: for text inputs; prefix is a list of token ids, none unless given. wanted: further
    sites that must be computed, so that several runs of one analysis take the same numerical route.
    Raises InputsError, UnknownSiteError, SelectionError, InterventionError, NotReachedError, NaNWeightsError.
    """
    inputs = prepare(model, inputs, tokenizer, prefix)
    tap = RunTap(model, inputs, record_sites(model, record), change, tuple(wanted), keep_graph=grad)
    with torch.set_grad_enabled(grad):
        logits = model(inputs, tap)
    tap.check_reached()
    if not bool(torch.isfinite(logits.detach().sum())):
        check_weights(model)
    return Run(logits, Cache(tap.recorded), inputs, weakref.ref(model), change_texts(tap.changes))


def record_sites(model: Hookable, record: str | Site | Iterable[str | Site]) -> list[Site]:
    """The sites that `record` names, in the order given, each once."""
    asked = [record] if isinstance(record, str | Site) else list(record or ())
    return list(dict.fromkeys(site for one in asked for site in expand(one, model.sites)))


def prepare(model: Hookable, inputs: Any, tokenizer: Any = None, prefix: Sequence[int] | None = None) -> Inputs:
    """Inputs on the model's device, every value checked against the model. Raises InputsError."""
    require_hookable(model)
    is_text = isinstance(inputs, str) or (isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], str))
    if is_text and tokenizer is not None:
        inputs = tokenize(inputs, tokenizer, prefix)
    elif prefix is not None:
        raise InputsError(f"prefix={list(prefix)} goes with text and tokenizer=; token ids carry their own prefix")
    inputs = as_inputs(inputs)
    check_inputs(model, inputs)
    inputs = replace(inputs, tokens=inputs.tokens.long())  # any integer type is accepted, one is used
    if inputs.source is not None:
        inputs = replace(inputs, source=inputs.source.long())
    for kind in ("roles", "source_roles"):
        inputs = replace(inputs, **{kind: {name: role.long() for name, role in getattr(inputs, kind).items()}})
    device = getattr(model, "device", None)
    return inputs if device is None else inputs.to(device)


def check_inputs(model: Hookable, inputs: Inputs) -> None:
    """Token ids, length and shapes against the model's config. Raises InputsError naming value and range."""
    config = model.config
    _check_tokens(inputs, config, "tokens", "mask")
    _check_optional(inputs, config)
    if config.kind == "encoder-decoder":
        _check_tokens(inputs.encoder, config, "source", "source_mask")
        if len(inputs.encoder.tokens) != inputs.batch:
            raise InputsError(
                f"source holds {len(inputs.encoder.tokens)} sequences; allowed: {inputs.batch}, as many as tokens"
            )
    if inputs.embeddings is not None:
        _check_shape("embeddings", inputs.embeddings, (*inputs.tokens.shape, config.d_model))
    for name, role in inputs.roles.items():
        _check_ints(f"role {name!r}", role, (inputs.batch,), inputs.length - 1)
    if inputs.source_roles and inputs.source is None:
        raise InputsError(
            f"source_roles name positions of a source: {', '.join(inputs.source_roles)}; these inputs have none"
        )
    for name, role in inputs.source_roles.items():
        _check_ints(f"source role {name!r}", role, (inputs.batch,), inputs.encoder.length - 1)


def _check_tokens(inputs: Inputs, config: Any, name: str, mask: str) -> None:
    """One stack's token ids and mask; `name` and `mask` are what the caller calls them."""
    tokens = inputs.tokens
    if not isinstance(tokens, Tensor):
        raise InputsError(f"{name} must be an int tensor [batch pos], got {type(tokens).__name__}")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise InputsError(f"{name} must have axes [batch pos], none empty; got shape {tuple(tokens.shape)}")
    if tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
        raise InputsError(f"{name} must be integers, got {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= config.vocab:
        bad = low if low < 0 else high
        where = "token id" if name == "tokens" else f"{name} token id"
        raise InputsError(f"{where} {bad} is outside the vocabulary; allowed: 0 … {config.vocab - 1}")
    if inputs.length > config.n_ctx:
        what = "a sequence" if name == "tokens" else f"a {name}"
        raise InputsError(f"{what} of {inputs.length} tokens is too long; allowed: at most n_ctx={config.n_ctx}")
    _check_shape(mask, inputs.mask, tokens.shape, torch.bool)
    if inputs.mask is not None and not bool(inputs.mask.any(1).all()):
        empty = (~inputs.mask.any(1)).nonzero()[:, 0].tolist()
        raise InputsError(f"every sequence needs a real token; the {mask} has none in {empty}")


def _check_optional(inputs: Inputs, config: Any) -> None:
    """The fields that only some models read: refused where they would be ignored, in range where they are read."""
    readers = {
        "prefix_length": ("kind='prefix-decoder'", config.kind == "prefix-decoder"),
        "segments": ("n_segments > 0", getattr(config, "n_segments", 0) > 0),
        "source": ("kind='encoder-decoder'", config.kind == "encoder-decoder"),
        "source_mask": ("kind='encoder-decoder'", config.kind == "encoder-decoder"),
    }
    for name, (needed, read) in readers.items():
        if getattr(inputs, name) is not None and not read:
            raise InputsError(f"{name} was given, but this model would ignore it; only a model with {needed} reads it")
    if inputs.segments is not None:
        _check_ints("segments", inputs.segments, inputs.tokens.shape, config.n_segments - 1)
    if inputs.prefix_length is not None:
        _check_ints("prefix_length", inputs.prefix_length, (inputs.batch,), inputs.length)
        real = inputs.length if inputs.mask is None else inputs.mask.sum(1).to(inputs.prefix_length.device)
        if bool((inputs.prefix_length > real).any()):
            row = int((inputs.prefix_length > real).nonzero()[0, 0])
            raise InputsError(f"prefix_length holds {int(inputs.prefix_length[row])} for example {row}; allowed: at most its "
                              "real tokens, padding is no part of a prefix")  # fmt: skip


def _check_ints(name: str, value: Tensor, shape: Any, high: int) -> None:
    _check_shape(name, value, shape)
    if value.dtype.is_floating_point or value.dtype == torch.bool:
        raise InputsError(f"{name} must be integers, got {value.dtype}")
    if int(value.min()) < 0 or int(value.max()) > high:
        bad = int(value.min()) if int(value.min()) < 0 else int(value.max())
        raise InputsError(f"{name} holds {bad}; allowed: 0 … {high}")


def _check_shape(name: str, value: Tensor | None, shape: Any, dtype: torch.dtype | None = None) -> None:
    if value is None:
        return
    if tuple(value.shape) != tuple(shape):
        raise InputsError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
    if dtype is not None and value.dtype != dtype:
        raise InputsError(f"{name} must be {dtype}, got {value.dtype}")


def check_weights(model: Any) -> None:
    """Raise NaNWeightsError for the first parameter that is not finite."""
    for name, parameter in getattr(model, "named_parameters", list)():
        bad = int((~torch.isfinite(parameter)).sum())
        if bad:
            raise NaNWeightsError(f"weight {name!r} has {bad} NaN or infinite entries of {parameter.numel()}")


class RunTap:
    """Applies changes, then records; belongs to one forward pass."""

    def __init__(self, model, inputs, record, changes, wanted=(), keep_graph=False) -> None:
        self.inputs, self.keep_graph, self.output = inputs, keep_graph, model.sites[-1]
        self.record = set(record)
        self.changes: dict[Site, list[Intervention]] = {}
        for change in (changes,) if isinstance(changes, Intervention) else changes or ():
            if not isinstance(change, Intervention):
                raise TypeError(f"change must hold interventions such as Replace(site, value), got {change!r}")
            site = resolve(change.place, model.sites)
            if site != change.place:  # the stack was left out
                change = replace(change, site=site)
            self.changes.setdefault(site, []).append(change)
        self.wanted = self.record | set(self.changes) | {resolve(site, model.sites) for site in wanted}
        self.recorded: dict[Site, Tensor] = {}
        self.reached: set[Site] = set()
        self._kept: set[int] = set()

    def wants(self, site: Site) -> bool:
        return site in self.wanted

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        if site not in self.wanted:
            return value
        self.reached.add(site)
        for change in self.changes.get(site, ()):
            value = self.changed(site, value, change)
        if site in self.record:
            self.recorded[site] = self._keep(site, value)
        return value

    def changed(self, site: Site, value: Tensor, change: Intervention) -> Tensor:
        """The value after one change."""
        return change.apply(value, self.inputs)

    def _keep(self, site: Site, value: Tensor) -> Tensor:
        """The value itself where nothing else can write to it, else a copy (stream entering a block = leaving the last)."""
        if self.keep_graph:
            return value  # a copy would not lie on the path from this site to the logits
        storage = value.untyped_storage()
        shared = (
            storage.nbytes() != value.numel() * value.element_size()
            or storage.data_ptr() in self._kept
            or site == self.output
        )
        self._kept.add(storage.data_ptr())
        return value.detach().clone() if shared else value.detach()

    def check_reached(self) -> None:
        missing = [str(site) for site in self.wanted if site not in self.reached]
        if missing:
            raise NotReachedError(f"asked for but never reached in this forward pass: {', '.join(sorted(missing))}")
