"""The fast engine: many cells walk through the blocks together, each with only the tokens that its changes reach.

Every line of a block but attention treats tokens one by one, so the model's own blocks run on one long row of tokens,
[1 row d_model], whatever cells, examples and positions those are; only attention has to know who reads whom (`Reader`).
Cells join the row at the layer that they change, starting from the base run's stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.model.inputs import Edges, Inputs, Memory, cross_edges, position_ids
from interp.model.positions import rotary_table
from interp.model.transformer import Transformer
from interp.sites import Site
from interp.sweep.attend import Reader, Slots
from interp.sweep.base import Recorded
from interp.sweep.cells import Cells, Rows
from interp.sweep.layout import Layout, Reach, edges_of, lay_out, middle_of, parts
from interp.sweep.live import Live, RowTap, to_index


class Stack:
    """What one stack of blocks needs to walk: its blocks, its mask and its share of the base run."""

    def __init__(
        self, blocks: Any, config: Any, inputs: Any, last: np.ndarray, stack: str | None, base: Any, sites
    ) -> None:
        self.blocks, self.config, self.stack, self.base, self.length = blocks, config, stack, base, inputs.length
        self.device = inputs.tokens.device
        self.edges = edges_of(config, inputs)
        self.reach = Reach(self.edges, len(blocks), last)
        self.idle = config.norm_position == "pre"  # a post-norm block has no value between its stream and its queries
        self.parts = [parts(sites, layer, stack, middle_of(config)) for layer in range(len(blocks))]
        self._slots: tuple[Layout, list[Slots]] | None = None
        self.rotary = None
        if config.positions == "rotary":
            self.rotary = rotary_table(config, position_ids(inputs), blocks[0].attention.qkv.weight.dtype)

    def at(self, name: str, layer: int) -> Tensor:
        return self.base[Site(name, layer, self.stack)]  # type: ignore[arg-type]

    def angles(self, rows: Rows) -> tuple[Tensor, Tensor] | None:
        """The rotary table of each row [1 row 1 n]."""
        if self.rotary is None:
            return None
        cos, sin = self.rotary
        example = rows.example if len(cos) > 1 else np.zeros_like(rows.example)
        pick = to_index(example, cos), to_index(rows.position, cos)
        return cos[pick][None], sin[pick][None]

    def slots(self, layout: Layout) -> list[Slots]:
        """The rectangles in which a layer's rows read, made once for layers that share a layout."""
        if self._slots is None or self._slots[0] is not layout:
            self._slots = layout, [Slots(bucket, self.edges, False, self.device) for bucket in layout.buckets]
        return self._slots[1]


class Walk:
    """All that chunks share; calling it with a chunk's cells gives the slices that the metric reads."""

    def __init__(self, model: Transformer, cells: Cells, base: Recorded) -> None:
        self.model, self.cells, self.base, self.reading = model, cells, base, base.reading
        self.work: Counter[str] = Counter()
        self.dry = False  # count only
        self.limit = base.inputs.tokens.numel()  # rows that the budget allows at once
        self.sites = set(cells.sites) | {change.place for change in cells.always}
        config, inputs = model.config, base.inputs
        name = model.sites[-1].stack
        self.decoder = Stack(model.blocks, config, inputs, base.reading.needed, name, base.cache, model.sites)
        self.encoder = None
        if model.encoder is not None:
            mask = cross_edges(inputs).mask
            source = inputs.encoder
            readable = np.ones(tuple(source.tokens.shape), dtype=bool) if mask is None else mask[:, 0, 0].cpu().numpy()
            self.readable = readable
            self.encoder = Stack(
                model.encoder.blocks, config.encoder, source, readable, "encoder", base.cache, model.sites
            )

    @torch.no_grad()
    def __call__(self, cells: np.ndarray, touched: Mapping[Site, np.ndarray]) -> Tensor:
        """cells [cell]; touched: per site bool [cell batch row_axis] -> the metric [cell batch]."""
        slices = self.base.slice.expand(len(cells), *self.base.slice.shape).clone()
        which, chunk = self._chunk(cells, touched)
        if len(which):
            self._read(chunk, chunk.run(), which, slices)
        return self.reading.of_slices(slices)

    def count(self, cells: np.ndarray, touched: Mapping[Site, np.ndarray]) -> Counter[str]:
        """The work that the cells would be, from their layout alone."""
        before, self.work, self.dry = self.work, Counter(), True
        try:
            which, chunk = self._chunk(cells, touched)
            if len(which):
                chunk.run()
            return self.work
        finally:
            self.work, self.dry = before, False

    def _chunk(self, cells: np.ndarray, touched: Mapping[Site, np.ndarray]) -> tuple[np.ndarray, _Chunk]:
        """The (cell, example) pairs that change at all: which of `cells` each belongs to, and the pairs."""
        moved = np.zeros((len(cells), self.base.inputs.batch), dtype=bool)
        for mask in touched.values():
            moved |= mask.any(2)
        which, example = np.nonzero(moved)
        return which, _Chunk(
            self, cells[which], example, {site: mask[which, example] for site, mask in touched.items()}
        )

    def _read(self, chunk: _Chunk, live: Live, which: np.ndarray, slices: Tensor) -> None:
        """Unembed the live tokens that the metric reads and put their entries into the slices."""
        s, reading = self.model.site_names, self.reading
        ends = {site for site in (s.final_scale, s.final_hat, s.final, s.logits) if site in self.sites}
        positions = reading.positions.cpu().numpy()
        mask = live.mask.copy()
        for site in ends & set(chunk.touched):
            mask |= chunk.touched[site]
        sequence, number = np.nonzero(np.take_along_axis(mask, positions[chunk.example], 1))
        if not len(sequence):
            return
        example = chunk.example[sequence]
        rows = Rows(sequence, chunk.cell[sequence], example, positions[example, number])
        stream = live.gather(rows, self.decoder.at("resid_post", len(self.decoder.blocks) - 1))
        entries = None if reading.entries is None else reading.entries[to_index(example, stream)]
        tap = RowTap(self, ends, rows)
        logits = self.model.unembed(stream[None], tap, None if entries is None else entries[None])[0]
        slices[to_index(which[sequence], stream), to_index(example, stream), to_index(number, stream)] = logits
        self.work["unembedded rows"] += len(rows)


class _Chunk:
    """Some cells on their way: `cell`, `example` [sequence], `touched` per site bool [sequence row_axis]."""

    def __init__(self, walk: Walk, cell: np.ndarray, example: np.ndarray, touched: dict[Site, np.ndarray]) -> None:
        self.walk, self.cell, self.example, self.touched = walk, cell, example, touched
        self.memory: Live | None = None

    def run(self) -> Live:
        """Through the encoder, where there is one, and the blocks; the live tokens after the last."""
        walk = self.walk
        encoder = walk.encoder
        if encoder is not None:
            self.memory = self._encoded(self._through(encoder, self._embedded(encoder, "encoder")))
        return self._through(walk.decoder, self._embedded(walk.decoder, walk.decoder.stack))

    def _through(self, stack: Stack, live: Live) -> Live:
        layout, settled = None, False
        for layer in range(len(stack.blocks)):
            touched = self._by_reach(stack, layer)
            memory = None if stack.stack == "encoder" or self.memory is None else self.memory.mask
            if not touched and not len(live.stream) and memory is None:
                continue
            # The same tokens as in the layer before, all of them still needed: the same layout.
            settled = settled and not touched and not (live.mask & ~stack.reach.needed[layer + 1][self.example]).any()
            if not settled or layout is None:
                readable = None if memory is None else self.walk.readable
                layout = lay_out(
                    stack.reach, layer, live.mask, touched, self.cell, self.example, memory, readable, stack.idle
                )
            before, live = live.mask, self._block(stack, layer, live, layout)
            settled = not touched and not len(layout.extra) and bool((live.mask == before).all())
        return live

    def _by_reach(self, stack: Stack, layer: int) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for site, reach in stack.parts[layer].items():
            mask = self.touched.get(site)
            if mask is not None and mask.any():
                found[reach] = found[reach] | mask if reach in found else mask
        return found

    def _block(self, stack: Stack, layer: int, live: Live, layout: Layout) -> Live:
        """One block: rows in full, `late` ones from its middle on."""
        walk, block = self.walk, stack.blocks[layer]
        shape = (len(self.cell), stack.length)
        walk.work["token_layers"] += len(layout.rows)
        walk.work["reading_token_layers"] += len(layout.rows) - len(layout.fresh)
        walk.work["key_value_token_layers"] += len(layout.extra)
        walk.work["ffn_token_layers"] += len(layout.late)
        walk.work["memory_token_layers"] += len(layout.memory)
        rows = layout.rows.then(layout.late) if len(layout.late) else layout.rows
        if walk.dry or not len(rows):
            return Live.of(live.stream.new_empty(len(rows), live.stream.shape[1]), rows, shape)
        sites = {site for site in walk.sites if (site.layer, site.stack) == (layer, stack.stack)}
        base, base_middle = stack.at("resid_pre", layer), stack.at(block.middle.name, layer)
        middle = base_middle[:0, 0]
        if len(layout.rows):
            x = live.gather(layout.rows, base)[None]
            reader = self._reader(stack, layer, live, layout, sites)
            taken = block.sites.resid_pre, live.missing(layout.rows)
            fresh = None if len(layout.fresh) == len(layout.rows) else (block.sites.norm1, layout.fresh)
            tap = RowTap(walk, sites, layout.rows, layout.memory, taken, fresh)
            edges, angles = Edges(None, False, False, read=reader), stack.angles(layout.rows.pick(layout.fresh))
            middle = block.mix(x, tap, edges, angles, None, self._memory(stack, layer, layout))[0]
        if len(layout.late):
            late = base_middle[to_index(layout.late.example, middle), to_index(layout.late.position, middle)]
            every = np.ones(len(layout.late), dtype=bool)
            late = RowTap(walk, sites, layout.late, taken=(block.middle, every))(block.middle, late[None])[0]
            middle = torch.cat([middle, late])
        return Live.of(block.feed(middle[None], RowTap(walk, sites - {block.middle}, rows))[0], rows, shape)

    def _reader(self, stack: Stack, layer: int, live: Live, layout: Layout, sites: set[Site]) -> Reader:
        block, extra = stack.blocks[layer], None
        if len(layout.extra):
            x = live.gather(layout.extra, stack.at("resid_pre", layer))[None]
            tap = RowTap(self.walk, sites, layout.extra, taken=(block.sites.resid_pre, live.missing(layout.extra)))
            k, v = block.keys_values(x, tap, stack.angles(layout.extra))
            extra = k[0], v[0]
        keys = stack.at("k_rot" if stack.config.rotates else "k", layer)
        return Reader(keys, stack.at("v", layer), stack.slots(layout), extra, self._waiting(stack, layer, layout))

    @staticmethod
    def _waiting(stack: Stack, layer: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor] | None:
        """The base run's queries of the rows that have none of their own."""
        if len(layout.fresh) == len(layout.rows):
            return None
        queries = stack.at("q_rot" if stack.config.rotates else "q", layer)
        others = np.ones(len(layout.rows), dtype=bool)
        others[layout.fresh] = False
        others = np.flatnonzero(others)
        place = layout.rows.example[others] * stack.length + layout.rows.position[others]
        base = queries.flatten(0, 1).index_select(0, to_index(place, queries))
        return base, to_index(layout.fresh, queries), to_index(others, queries)

    def _memory(self, stack: Stack, layer: int, layout: Layout) -> Memory | None:
        """What cross-attention reads: the cells' own source states and the base run's keys and values."""
        if self.memory is None or stack.stack == "encoder":
            return None
        base = self.walk.base
        source = base.cache[Site("final", stack="encoder")]
        states = self.memory.gather(layout.memory, source)[None]
        edges = np.broadcast_to(self.walk.readable[:, None], (len(source), stack.length, source.shape[1]))
        slots = [Slots(bucket, edges, True, source.device) for bucket in layout.buckets]
        reader = Reader(stack.at("cross_k", layer), stack.at("cross_v", layer), slots)
        return Memory(states, Edges(None, False, False, read=reader))

    def _embedded(self, stack: Stack, name: str | None) -> Live:
        """Sequences whose embedding is changed start with the tokens that the change makes another."""
        walk, shape = self.walk, (len(self.cell), stack.length)
        sites = {site for site in walk.sites if site.name in ("embed", "pos_embed") and site.stack == name}
        masks = [self.touched[site] for site in sites if site in self.touched]
        empty = stack.at("resid_pre", 0)[:0, 0]
        mask = np.logical_or.reduce(masks) if masks else np.zeros(shape, dtype=bool)
        chosen = np.flatnonzero(mask.any(1))
        if not len(chosen):
            return Live(empty, np.full(shape, -1, dtype=np.int64))
        inputs = walk.base.inputs if name != "encoder" else walk.base.inputs.encoder
        size = max(
            1, walk.limit // stack.length
        )  # sequences embedded at once, whole, though few of their tokens change
        pieces = [self._embed(chosen[i : i + size], mask, inputs, sites, name) for i in range(0, len(chosen), size)]
        sequence, position = np.nonzero(mask)
        rows = Rows(sequence, self.cell[sequence], self.example[sequence], position)
        return Live.of(torch.cat(pieces), rows, shape)

    def _embed(
        self, chosen: np.ndarray, mask: np.ndarray, inputs: Inputs, sites: set[Site], name: str | None
    ) -> Tensor:
        """The changed embeddings of some sequences' tokens [row d_model], where `mask` [sequence pos] says."""
        walk, length = self.walk, mask.shape[1]
        position, sequence = np.tile(np.arange(length), len(chosen)), np.repeat(chosen, length)
        row_tap = RowTap(walk, sites, Rows(sequence, self.cell[sequence], self.example[sequence], position))

        def tap(site: Site, value: Tensor) -> Tensor:
            return row_tap(site, value.flatten(0, 1)[None])[0].unflatten(0, value.shape[:2])

        part = inputs.select(to_index(self.example[chosen], inputs.tokens))
        x = walk.model.embed_source(part, tap) if name == "encoder" else walk.model.embed(part, tap)
        return x[torch.from_numpy(mask[chosen]).to(x.device)]

    def _encoded(self, live: Live) -> Live:
        """The encoder's last step on the live source tokens: its norm, where it has one, and `encoder.final`."""
        walk = self.walk
        model, stack = walk.model, walk.encoder
        assert model.encoder is not None and stack is not None
        s, mask = model.encoder.site_names, live.mask.copy()
        ends = {site for site in (s.final_scale, s.final_hat, s.final) if site in walk.sites}
        for site in ends & set(self.touched):
            mask |= self.touched[site]
        mask &= walk.readable[self.example]
        sequence, position = np.nonzero(mask)
        rows = Rows(sequence, self.cell[sequence], self.example[sequence], position)
        x = live.gather(rows, stack.at("resid_post", len(stack.blocks) - 1))
        return Live.of(model.encoder.finish(x[None], RowTap(walk, ends, rows))[0], rows, mask.shape)
