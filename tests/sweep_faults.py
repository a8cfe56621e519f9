"""Deliberate faults of the sweep engine, in the manner of `faults.py`; name -> context manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from faults import make_fault

from interp.interventions import Scale
from interp.sweep import cells, grid, paths, walk
from interp.sweep.attend import Reader, Slots
from interp.sweep.cells import Grid
from interp.sweep.checkpoint import Checkpoint
from interp.sweep.cost import Cost
from interp.sweep.execute import Job
from interp.sweep.full import Full, ManyTap
from interp.sweep.layout import Reach
from interp.sweep.listed import Listed
from interp.sweep.live import Live
from interp.sweep.reading import Reading
from interp.sweep.result import SweepResult
from interp.sweep.walk import Stack, Walk

SWEEP_FAULTS: dict[str, Any] = {}


def fault(name: str, *targets: tuple[Any, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in SWEEP_FAULTS
        SWEEP_FAULTS[name] = make_fault(name, replacement, *targets)
        return replacement

    return register


# Attention over shared keys


@fault("own keys stand beside the base run's, not instead", (Slots, "__init__"))
def _(original, self, *arguments, **named):
    original(self, *arguments, **named)
    base, own = self.closed.clone()[..., : self.stop], self.closed[..., self.stop :]
    keys = self.split(self.key)[:, None, :, None]
    for example, _, each, _, query, key in (~own).nonzero().tolist():
        position = int(keys[example, 0, each, 0, key])
        if position < self.stop:
            base[example, 0, each, 0, query, position] = False
    self.closed = torch.cat([base, own], -1)


@fault("closed edges are read", (Slots, "__init__"))
def _(original, self, bucket, edges, cross, device):
    original(self, bucket, np.ones_like(edges), cross, device)


@fault("one column of the base run too few", (Slots, "__init__"))
def _(original, self, bucket, edges, cross, device):
    original(self, bucket, edges, cross, device)
    if self.stop > 1:
        keep = [i for i in range(self.closed.shape[-1]) if i != self.stop - 1]
        self.closed, self.stop = self.closed[..., keep], self.stop - 1


@fault("the base run's keys of another example", (Slots, "of"))
def _(original, self, base):
    return original(self, base.roll(1, 0))


@fault("values of one rectangle in the rows of another", (Reader, "_mix"))
def _(original, self, slots, pattern, v, z):
    original(self, slots, pattern, v, z)
    if len(self.slots) > 1 or slots.count > 1:
        rows = slice(slots.first, slots.first + slots.count)
        z[rows] = z[rows].roll(1, 0)


@fault("keys that are no rows forgotten", (walk._Chunk, "_reader"))
def _(original, self, stack, layer, live, layout, sites):
    found = original(self, stack, layer, live, layout, sites)
    if found.extra is None:
        return found
    keys, values = stack.at("k_rot" if stack.config.rotates else "k", layer), stack.at("v", layer)
    index = torch.from_numpy(layout.extra.example), torch.from_numpy(layout.extra.position)
    return replace(found, extra=(keys[index], values[index]))


@fault("rotary table of the position before", (Stack, "angles"))
def _(original, self, rows):
    return original(self, replace(rows, position=np.maximum(rows.position - 1, 0)))


@fault("the encoder's states are the base run's", (walk._Chunk, "_encoded"))
def _(original, self, live):
    found = original(self, live)
    stack = self.walk.encoder
    sequence, position = np.nonzero(found.mask)
    source = self.walk.base.cache[walk.Site("final", stack="encoder")]
    stream = source[torch.from_numpy(self.example[sequence]), torch.from_numpy(position)]
    return Live(stream if len(stream) else found.stream, found.slot) if stack is not None else found


# Which tokens a layer computes


@fault("needed tokens one too few", (Reach, "__init__"))
def _(original, self, edges, n_layers, last):
    original(self, edges, n_layers, last)
    for needed in self.needed[:-1]:
        needed[:, 0] = False


@fault("only a token's neighbours read it", (Reach, "readers"))
def _(original, self, live, example):
    found = original(self, live, example)
    near = live | np.pad(live, ((0, 0), (1, 0)))[:, :-1]
    return found & near


@fault("live tokens of the layer before forgotten", (walk, "lay_out"))
def _(original, reach, layer, live, touched, *rest):
    first = live & (live.cumsum(1) == 1)
    return original(reach, layer, first, touched, *rest)


@fault("half a block's rows not fed", (walk, "lay_out"))
def _(original, *arguments):
    found = original(*arguments)
    return replace(found, late=replace(found.late, **{name: value[:0] for name, value in vars(found.late).items()}))


@fault("changed queries reach nothing", (walk, "parts"))
def _(original, sites, layer, stack, middle):
    return {
        site: reach for site, reach in original(sites, layer, stack, middle).items() if site.name not in ("q", "q_rot")
    }


@fault("changed keys reach only their own token", (walk, "parts"))
def _(original, sites, layer, stack, middle):
    return {
        site: "row" if reach == "spread" else reach for site, reach in original(sites, layer, stack, middle).items()
    }


@fault("changes of later layers get no rows", (walk._Chunk, "_by_reach"))
def _(original, self, stack, layer):
    return original(self, stack, layer) if layer < 1 else {}


@fault("rows not live are taken from the position before", (Live, "gather"))
def _(original, self, rows, base):
    return original(self, rows, base.roll(1, 1))


# Cells


@fault("slices put into the wrong example", (Walk, "_read"))
def _(original, self, chunk, live, which, slices):
    rolled = slices.clone()
    original(self, chunk, live, which, rolled)
    slices.copy_(torch.where(rolled != slices, rolled.roll(1, 1), slices))


@fault("one head's difference is overlooked", (Grid, "_differs"))
def _(original, self, site, base):
    found = original(self, site, base)
    if found.ndim == 3:
        found[:, :, -1] = False
    return found


@fault("a patch is equal to the run it comes from", (Grid, "_differs"))
def _(original, self, site, base):
    return original(self, site, self.source)


@fault("cells in the order of another axis", (Grid, "_coordinate"))
def _(original, self, cells, *names):
    return original(self, len(self) - 1 - cells, *names)


@fault("a joint patch's later sites left out", (Listed, "touched"))
def _(original, self, cells, base, inputs):
    found = original(self, cells, base, inputs)
    for i, _cell in enumerate(cells):
        mine = [site for site in found if found[site][i].any()]
        for site in sorted(mine, key=self._order.__getitem__)[1:]:
            found[site][i] = False
    return found


@fault("the base run's changes left out of the cells", (Listed, "interventions"))
def _(original, self, cell, example=None):
    return list(self.changes[cell])


@fault("a chunk's cells change each other", (cells.Rows, "then"))
def _(original, self, other):
    found = original(self, other)
    return replace(found, cell=found.cell[::-1].copy()) if len(other) else found


@fault("a window is cut off at its centre", (grid, "layer_spans"))
def _(original, layers, by, window):
    return tuple(span[: window // 2 + 1] for span in original(layers, by, window))


@fault("values of another example are written", (grid.SiteGrid, "cells"))
def _(original, self, source, order, always=()):
    return original(self, {site: value.flip(0) for site, value in source.items()}, order, always)


# Full forwards, budget, checks, checkpoints


@fault("the canary is ignored", (Full, "_batch"))
def _(original, self, start, count):
    return count


@fault("every cell of a batch has the first one's changes", (ManyTap, "__init__"))
def _(original, self, cells, inputs, wanted):
    original(self, [cells[0]] * len(cells) if len(cells) else cells, inputs, wanted)


@fault("a forward resumes a layer late", (Full, "_entry"))
def _(original, self, site):
    return min(original(self, site) + 1, self.model.config.n_layers)


@fault("a budget is not looked at", (Job, "_rows_at_once"))
def _(original, self):
    return 1e9


@fault("rows of a cell are underestimated", (Cost, "rows"))
def _(original, self, touched, cells):
    return np.ones(cells)


@fault("the sampled check finds nothing", (Job, "_check"))
def _(original, self, values, count, seed):
    return 0.0, min(count, len(values))


@fault("a checkpoint of another sweep is taken", (Checkpoint, "part"))
def _(original, self, name, mark, empty):
    return original(self, name, self.marks.get(name, mark), empty)


@fault("a checkpoint forgets what is done", (Checkpoint, "part"))
def _(original, self, name, mark, empty):
    values, done = original(self, name, mark, empty)
    done[:] = False
    return values, done


@fault("finished cells are lost when stopped", (Checkpoint, "part"))
def _(original, self, name, mark, empty):
    values, done = original(self, name, mark, empty)
    return values.clone(), done


@fault("an out-of-memory chunk loses its second half", (Job, "_run"))
def _(original, self, chosen, touched):
    found = original(self, chosen, touched)
    if len(found) > 4:
        found[len(found) // 2 :] = found[0]
    return found


# Metrics, results, paths


@fault("the metric's slice of another position", (Reading, "of_run"))
def _(original, self, logits):
    return original(self, logits.roll(1, 1))


@fault("the metric's entries in another order", (Reading, "at"))
def _(original, self, *rest):
    return original(self, *rest).flip(-1)


@fault("a table's axes are swapped", (SweepResult, "_columns"))
def _(original, self, site):
    return {name: column[::-1] for name, column in original(self, site).items()}


@fault("a path takes what is sent twice", (paths._Paths, "_written"))
def _(original, self, change):
    return 2 * original(self, change)


@fault("other components respond to a sender", (paths, "Freeze"))
def _(original, site, run):
    return Scale(site, 1.0)


@fault("a receiver passes on what it did not receive", (paths._Paths, "_changes"))
def _(original, self, receiver, sender):
    return self.sent.interventions(sender) + original(self, receiver, sender)


@fault("full forwards of the cells before", (Full, "__call__"))
def _(original, self, chosen, touched):
    return original(self, chosen, {site: np.roll(mask, 1, 0) for site, mask in touched.items()})
