"""A corpus on disk: rows equal what `run` records, interruptions leave no trace, and only what is asked for is computed."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from strategies import Case, random_model, small, translator

from interp import Inputs, ModelConfig, Site, Transformer, corpus, run
from interp.at import SelectionError
from interp.corpus import CorpusError, open_activations
from interp.hookable import UnsupportedModelError
from interp.model.block import PreNormBlock
from interp.model.feedforward import FeedForward
from interp.model.inputs import InputsError
from interp.run import NaNWeightsError, NotReachedError
from interp.sites import UnknownSiteError
from interp.tokens import TokenizerError


def record_corpus(*arguments, **options):
    return corpus.record_corpus(*arguments, **{"progress": False, **options})


def draw(*shapes: tuple[int, int], vocab: int = 13) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, shape, generator=generator) for shape in shapes]


BATCHES = draw((3, 7), (2, 5), (4, 6), (1, 16), (3, 4), (2, 2))  # 21, 10, 24, 16, 12, 4 tokens
ROWS = 87


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def position_sites(model, stack=None) -> list[Site]:
    """Every site whose rows are the tokens of one stack."""
    return [
        s
        for s in model.sites
        if "position" in s.spec.axes and s.stack == stack and s.name not in ("cross_k", "cross_v")
    ]


def expected(model, inputs: Inputs, sites, read: Inputs) -> dict[Site, torch.Tensor]:
    """The rows that `run` records at the real tokens, one at a time."""
    got, mask = run(model, inputs, record=sites).cache, read.mask
    real = [(i, j) for i in range(read.batch) for j in range(read.length) if mask is None or bool(mask[i, j])]
    return {site: torch.stack([got[site][i, j] for i, j in real]) for site in sites}


@pytest.mark.parametrize(
    ("choices", "padding"),
    [
        (small(norm="rmsnorm", ffn="swiglu", positions="rotary", qk_norm=True), ((0, 0), (2, 0))),
        (small(n_kv_heads=1, window=3), ((3, 0), (0, 2))),
        (small(kind="encoder", norm_position="post", n_segments=3), ((0, 4), (1, 1))),
        (small(kind="prefix-decoder", ffn="none", head=False), ((0, 0), (0, 0))),
    ],
)
def test_every_row_is_what_run_records(tmp_path, choices, padding):
    prefixes = (2, 1) if choices.get("kind") == "prefix-decoder" else None
    model, inputs = Case(choices, padding, prefixes).build()
    sites = position_sites(model)
    got = record_corpus(model, [inputs, inputs.select([1])], sites, tmp_path / "a", shard_tokens=1)
    first, second = (expected(model, one, sites, one) for one in (inputs, inputs.select([1])))
    assert got.sites == tuple(sites) and len(got) == len(first[sites[0]]) + len(second[sites[0]])
    for site in sites:
        assert torch.equal(got[site][:], torch.cat([first[site], second[site]])), site
        assert got[site].shape == got[site][:].shape and got[site].dtype == got[site][:].dtype


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_an_encoder_decoders_two_sides(tmp_path, side):
    model, inputs = Case(translator(), ((0, 0), (2, 0)), source_padding=((0, 3), (1, 0)), source_length=5).build()
    read = inputs.encoder if side == "encoder" else inputs
    sites = position_sites(model, side)
    if side == "encoder":  # the keys and values that cross-attention reads are rows of the source
        sites += [site for site in model.sites if site.name in ("cross_k", "cross_v")]
    got = record_corpus(model, [inputs], sites, tmp_path / "a")
    for site, rows in expected(model, inputs, sites, read).items():
        assert torch.equal(got[site][:], rows), site
    table = got.table()
    assert table.token.tolist() == [int(read.tokens[i, j]) for i, j in zip(table.example, table.position, strict=True)]
    named = record_corpus(model, [inputs], f"{side}.resid_post", tmp_path / "named")
    assert {site.stack for site in named.sites} == {side}
    for site in named.sites:  # fewer sites are wanted, so attention may take its fused route
        assert torch.allclose(named[site][:], got[site][:], rtol=0, atol=1e-12)


def test_the_table_says_what_each_row_is(model, tmp_path):
    mask = torch.tensor([[False, True, True], [True, True, False]])
    padded = Inputs(torch.tensor([[0, 5, 6], [7, 8, 0]]), mask=mask)
    got = record_corpus(model, [torch.tensor([[1, 2]]), padded], "embed", tmp_path / "a", shard_tokens=1)
    assert list(got.table()) == ["example", "position", "token"]
    assert got.table().to_numpy().tolist() == [[0, 0, 1], [0, 1, 2], [1, 1, 5], [1, 2, 6], [2, 0, 7], [2, 1, 8]]
    assert got.table([-1, 0]).equals(
        pd.DataFrame({"example": [2, 0], "position": [1, 0], "token": [8, 1]}, index=[5, 0])
    )
    rows = got.table().query("token > 5").index
    assert torch.equal(got["embed"][rows], model.W_E[[6, 7, 8]])


@pytest.mark.parametrize(("position", "places"), [(-1, [2, 1]), ("subject", [1, 0]), (1, [1, 1])])
def test_one_row_per_example(model, tmp_path, position, places):
    mask = torch.tensor([[False, True, True], [True, True, False]])
    inputs = Inputs(torch.tensor([[0, 5, 6], [7, 8, 0]]), mask=mask, roles={"subject": torch.tensor([1, 0])})
    got = record_corpus(model, [inputs, inputs], "resid_post", tmp_path / "a", positions=position)
    want = run(model, inputs, record="resid_post").cache
    for site in got.sites:
        assert torch.equal(got[site][:], want[site][[0, 1, 0, 1], places * 2])
    assert got.table().example.tolist() == [0, 1, 2, 3] and got.table().position.tolist() == places * 2


def test_a_role_of_the_source_in_an_encoder(tmp_path):
    model, inputs = Case(translator()).build()
    inputs = replace(inputs, source_roles={"key": torch.tensor([2, 0])})
    got = record_corpus(model, [inputs], "encoder.final", tmp_path / "a", positions="key")
    assert torch.equal(
        got["encoder.final"][:], run(model, inputs, record="encoder.final").cache["encoder.final"][[0, 1], [2, 0]]
    )


def test_text_with_a_tokenizer_and_a_prefix(model, tmp_path):
    words = [chr(97 + i) for i in range(13)]
    got = record_corpus(model, [["b c d", "e"], ["f"]], "embed", tmp_path / "a", tokenizer=words, prefix=[0])
    assert got.table().token.tolist() == [0, 1, 2, 3, 0, 4, 0, 5] and got.index["prefix"] == [0]


# --- only what is asked for is computed --------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch) -> dict[str, list[int]]:
    """The layers whose block and FFN ran, in order, and how many vocabularies were scored."""
    seen: dict[str, list[int]] = {"blocks": [], "ffns": [], "heads": []}
    block, ffn, unembed = PreNormBlock.forward, FeedForward.forward, Transformer.unembed

    def counted_block(self, x, *rest, **more):
        seen["blocks"].append(self.sites.resid_pre.layer)
        return block(self, x, *rest, **more)

    def counted_ffn(self, *rest, **more):
        seen["ffns"].append(len(seen["blocks"]) - 1)
        return ffn(self, *rest, **more)

    def counted_unembed(self, *rest, **more):
        seen["heads"].append(1)
        return unembed(self, *rest, **more)

    monkeypatch.setattr(PreNormBlock, "forward", counted_block)
    monkeypatch.setattr(FeedForward, "forward", counted_ffn)
    monkeypatch.setattr(Transformer, "unembed", counted_unembed)
    return seen


@pytest.mark.parametrize(
    ("site", "blocks", "ffns", "heads"),
    [
        ("embed", [], [], 0),
        ("1.resid_post", [0, 1], [0, 1], 0),
        ("2.attn_out", [0, 1, 2], [0, 1], 0),  # the last block ends before its FFN
        ("3.resid_post", [0, 1, 2, 3], [0, 1, 2, 3], 0),
        ("final", [0, 1, 2, 3], [0, 1, 2, 3], 1),  # the final norm is in unembed; the logits are not computed
    ],
)
def test_nothing_after_the_last_site_is_run(work, tmp_path, monkeypatch, site, blocks, ffns, heads):
    model = Transformer(ModelConfig(vocab=13, n_layers=4, n_heads=2, d_model=8, n_ctx=16))
    if site == "final":
        monkeypatch.setattr(torch.nn.functional, "linear", self_refusing(torch.nn.functional.linear, rows=13))
    record_corpus(model, BATCHES[:1], ["0.resid_pre", site] if blocks else site, tmp_path / "a")
    assert work == {"blocks": blocks, "ffns": ffns, "heads": [1] * heads}


def self_refusing(linear, rows: int):
    """F.linear that fails on a weight of so many rows: the unembedding's."""

    def checked(x, weight, bias=None):
        assert len(weight) != rows, "logits were computed"
        return linear(x, weight, bias)

    return checked


def test_an_encoders_sites_need_no_decoder(work, tmp_path):
    model, inputs = Case(translator(n_encoder_layers=2)).build()
    record_corpus(model, [inputs], "encoder.0.resid_post", tmp_path / "a")
    assert work["blocks"] == [0] and not work["heads"]


def test_a_site_that_is_never_reached_is_an_error(model, tmp_path):
    class Short:
        """Advertises a site that it does not reach."""

        config, sites = model.config, (*model.sites, Site("resid_cross", 0))

        def __call__(self, inputs, tap=None):
            return model(inputs, tap)

    with pytest.raises(
        NotReachedError, match=r"batch 0: asked for but never reached in this forward pass: 0\.resid_cross"
    ):
        record_corpus(Short(), BATCHES, "0.resid_cross", tmp_path / "a")


# --- memory ------------------------------------------------------------------------------------------------------------------


def test_no_more_than_one_shard_and_one_batch_wait_in_memory(model, tmp_path, monkeypatch):
    room, taken, lag = [], [], []
    add = corpus._Recording.add

    def watched(self, rows, *columns):
        lag.append(len(taken) - self.batches)
        add(self, rows, *columns)
        room.append({name: len(value) for name, value in self.waiting.items()})

    def stream():
        for batch in BATCHES:
            taken.append(batch)
            yield batch

    monkeypatch.setattr(corpus._Recording, "add", watched)
    got = record_corpus(model, stream(), "embed", tmp_path / "a", shard_tokens=25)
    assert [shard["rows"] for shard in got.index["shards"]] == [31, 40, 16]  # each ends with the batch that reaches 25
    assert [shard["batches"] for shard in got.index["shards"]] == [2, 4, 6]
    assert max(max(one.values()) for one in room) <= 25 + max(batch.numel() for batch in BATCHES) and set(lag) == {0}
    longer = [BATCHES[3][:, :3], *BATCHES[:2]]  # 3, 21 and 10 tokens: more than the first batch made room for
    grown = record_corpus(model, longer, "embed", tmp_path / "longer", shard_tokens=4)
    assert [shard["rows"] for shard in grown.index["shards"]] == [24, 10]
    assert torch.equal(grown["embed"][:], model.W_E[torch.cat([batch.flatten() for batch in longer])])


def test_a_shard_of_wide_rows_ends_at_a_size(model, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SHARD_BYTES", 25 * (16 * 8 + 3 * 8))  # 25 rows of 16 float64 numbers and 3 integers
    got = record_corpus(model, BATCHES, "embed", tmp_path / "a")
    assert [shard["rows"] for shard in got.index["shards"]] == [31, 40, 16]
    monkeypatch.setattr(corpus, "SHARD_BYTES", 1)
    assert len(record_corpus(model, BATCHES, "embed", tmp_path / "b").index["shards"]) == len(BATCHES)


# --- interruptions -----------------------------------------------------------------------------------------------------------

OPTIONS = {"shard_tokens": 25, "dtype": torch.float32}


def interrupted(after: int):
    yield from BATCHES[:after]
    raise KeyboardInterrupt


@pytest.fixture
def whole(model, tmp_path) -> dict[str, bytes]:
    """The files of a recording that was never interrupted."""
    record_corpus(model, BATCHES, "resid_post", tmp_path / "whole", **OPTIONS)
    return files(tmp_path / "whole")


@pytest.mark.parametrize(("after", "again"), [(0, 6), (1, 6), (2, 4), (3, 4), (4, 2), (5, 2), (6, 2)])
def test_a_resumed_recording_equals_an_uninterrupted_one(model, tmp_path, whole, monkeypatch, after, again):
    folder, ran, rows = tmp_path / "a", [], corpus._rows
    with pytest.raises(KeyboardInterrupt):
        record_corpus(model, interrupted(after), "resid_post", folder, **OPTIONS)
    if after > 1:
        with pytest.raises(
            CorpusError, match=r"a is unfinished \((31|71) rows in [12] shards\); allowed: the same call"
        ):
            open_activations(folder)
    monkeypatch.setattr(corpus, "_rows", lambda *values: ran.append(1) or rows(*values))
    record_corpus(model, BATCHES, "resid_post", folder, **OPTIONS)
    assert files(folder) == whole and len(ran) == again  # of 6: those that no shard held


@pytest.mark.parametrize("writes", range(1, 9))
def test_killed_before_any_write_is_done(model, tmp_path, whole, monkeypatch, writes):
    """The writes: index, shard, index, shard, index, shard, index, finished index; each leaves its temporary name behind."""
    folder, done = tmp_path / "a", []

    class Killed(BaseException):
        pass

    def counted(function, rest):
        def write(path, *arguments):
            done.append(path.name)
            if len(done) == writes:
                (folder / rest).parent.mkdir(exist_ok=True)
                (folder / rest).write_bytes(b"half")
                raise Killed
            return function(path, *arguments)

        return write

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "write_json", counted(corpus.write_json, ".index.x1y.json"))
        patch.setattr(corpus, "write_atomic", counted(corpus.write_atomic, ".shard-00001.x1y.safetensors"))
        with pytest.raises(Killed):
            record_corpus(model, BATCHES, "resid_post", folder, **OPTIONS)
    assert len(done) == writes and any(path.name.startswith(".") for path in folder.iterdir())
    record_corpus(model, BATCHES, "resid_post", folder, **OPTIONS)
    assert files(folder) == whole


def test_resuming_with_other_batches_is_refused(model, tmp_path):
    def begin(name):
        with pytest.raises(KeyboardInterrupt):
            record_corpus(model, interrupted(5), "embed", tmp_path / name, shard_tokens=25)
        return tmp_path / name

    folder = begin("a")
    before = files(folder)
    changed = [batch.clone() for batch in BATCHES]
    changed[2][3, 5] = (changed[2][3, 5] + 1) % 13
    words = "batch 3: .*shard-00001.safetensors was recorded from other batches than those up to this one"
    with pytest.raises(CorpusError, match=words):
        record_corpus(model, changed, "embed", folder, shard_tokens=25)
    masked = [*BATCHES[:2], Inputs(BATCHES[2], mask=torch.ones(4, 6).bool()), *BATCHES[3:]]
    with pytest.raises(CorpusError, match=words):  # an explicit mask takes another numerical route
        record_corpus(model, masked, "embed", folder, shard_tokens=25)
    with pytest.raises(CorpusError, match=r"batch 1: .*or cut otherwise"):
        record_corpus(model, [BATCHES[0][:2], BATCHES[0][2:], *BATCHES[1:]], "embed", folder, shard_tokens=25)
    with pytest.raises(CorpusError, match=r"batches ended after 3: .*a was recorded from 4 or more"):
        record_corpus(model, BATCHES[:3], "embed", folder, shard_tokens=25)
    assert files(folder) == before  # a refusal changes nothing


def test_a_finished_folder_is_opened_and_its_batches_not_read(model, tmp_path):
    record_corpus(model, BATCHES, "embed", tmp_path / "a")
    before = files(tmp_path / "a")

    def never():
        raise AssertionError("read")
        yield

    assert len(record_corpus(model, never(), "embed", tmp_path / "a")) == ROWS
    assert files(tmp_path / "a") == before


def _another(model) -> Transformer:
    other = Transformer(model.config, seed=None).double()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_another_recording_is_refused_naming_both(model, tmp_path, finished):
    folder = tmp_path / "a"
    stream = BATCHES if finished else interrupted(5)
    if finished:
        record_corpus(model, stream, "embed", folder, shard_tokens=25)
    else:
        with pytest.raises(KeyboardInterrupt):
            record_corpus(model, stream, "embed", folder, shard_tokens=25)
    before = files(folder)
    deeper = random_model({"vocab": 13, "n_layers": 1, "n_heads": 4, "d_model": 16, "n_ctx": 16})
    nudged = _another(model)
    with torch.no_grad():
        nudged.blocks[1].ffn.down.weight[-1, -1] += 1e-12
    for asked, options, words in [
        (
            deeper,
            {},
            r"config={.*'n_layers': 2.*}, this call asks for {.*'n_layers': 1.*}; allowed: the same, or a new",
        ),
        (nudged, {}, r"weights='[0-9a-f]{64}', this call asks for '[0-9a-f]{64}'"),
        (model, {"sites": "0.z"}, r"sites=\['embed'\], this call asks for \['0.z'\]"),
        (model, {"dtype": torch.float16}, "dtype='as computed', this call asks for 'torch.float16'"),
        (model, {"positions": -1}, "positions=None, this call asks for -1"),
        (model, {"shard_tokens": 26}, "shard_tokens=25, this call asks for 26"),
    ]:
        with pytest.raises(CorpusError, match=words):
            record_corpus(asked, BATCHES, options.pop("sites", "embed"), folder, **{"shard_tokens": 25, **options})
    assert files(folder) == before
    assert (
        len(record_corpus(_another(model), BATCHES, "embed", folder, shard_tokens=25)) == ROWS
    )  # equal weights, equal model


def test_other_versions_may_read_but_not_go_on(model, tmp_path, monkeypatch):
    record_corpus(model, BATCHES, "embed", tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        record_corpus(model, interrupted(5), "embed", tmp_path / "part", shard_tokens=25)
    monkeypatch.setattr(corpus, "version", lambda name: "99")
    assert len(record_corpus(model, BATCHES, "embed", tmp_path / "whole")) == ROWS
    with pytest.raises(CorpusError, match=r"versions={.*'torch': '[2-9].*}, this call asks for {.*'torch': '99'}"):
        record_corpus(model, BATCHES, "embed", tmp_path / "part", shard_tokens=25)


def test_a_folder_of_something_else_is_left_alone(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CorpusError, match=r"holds other files, such as notes.txt; allowed: a new folder, an empty one"):
        record_corpus(model, BATCHES, "embed", tmp_path)
    (tmp_path / "empty").mkdir()
    assert len(record_corpus(model, BATCHES, "embed", tmp_path / "empty")) == ROWS


# --- types and values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_smaller_types_are_rounded_once(model, tmp_path, dtype):
    got = record_corpus(model, BATCHES, "1.resid_post", tmp_path / "a", dtype=dtype, shard_tokens=30)
    exact = record_corpus(model, BATCHES, "1.resid_post", tmp_path / "b")
    assert got["1.resid_post"].dtype == dtype and exact["1.resid_post"].dtype == torch.float64
    assert torch.equal(got["1.resid_post"][:], exact["1.resid_post"][:].to(dtype))
    assert got.index["dtype"] == str(dtype) and exact.index["dtype"] == "as computed"


def test_a_bfloat16_model_is_stored_as_it_computes(tmp_path):
    model = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=16)).bfloat16()
    got = record_corpus(model, BATCHES[:1], ["0.norm1_scale", "0.resid_post"], tmp_path / "a")
    want = run(model, BATCHES[0], record=["0.norm1_scale", "0.resid_post"]).cache
    for site in got.sites:
        assert got[site].dtype == want[site].dtype and torch.equal(got[site][:], want[site].flatten(0, 1))


def test_a_number_that_a_smaller_type_cannot_hold_is_an_error(tmp_path):
    model = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=16))
    with torch.no_grad():
        model.W_E[5] = 1e5
    words = r"batch 1: 'embed' reaches 1e\+05, which torch.float16 cannot hold; allowed: dtype=torch.bfloat16"
    with pytest.raises(CorpusError, match=words):
        record_corpus(model, [torch.tensor([[1]]), torch.tensor([[5]])], "embed", tmp_path / "a", dtype=torch.float16)
    assert len(record_corpus(model, [torch.tensor([[5]])], "embed", tmp_path / "a", dtype=torch.bfloat16)) == 1


def test_nan_weights_are_named_and_other_nans_are_values(tmp_path):
    model = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=16))
    embeddings = torch.ones(1, 2, 8)
    embeddings[0, 1, 3] = float("nan")
    got = record_corpus(model, [Inputs(torch.tensor([[1, 2]]), embeddings=embeddings)], "embed", tmp_path / "a")
    assert got["embed"][:].isnan().sum() == 1
    with torch.no_grad():
        model.blocks[0].ffn.down.weight[0, 0] = float("nan")
    with pytest.raises(NaNWeightsError, match=r"'blocks.0.ffn.down.weight' has 1 NaN"):
        record_corpus(model, BATCHES, "0.resid_post", tmp_path / "b")


# --- reading -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def got(model, tmp_path):
    """Three shards of 31, 40 and 16 rows."""
    return record_corpus(model, BATCHES, ["embed", "1.z"], tmp_path / "acts", shard_tokens=25)


def test_rows_are_read_across_shards(model, got):
    everything = model.W_E[torch.cat([batch.flatten() for batch in BATCHES])].detach()
    rows = got["embed"]
    assert len(rows) == len(got) == ROWS and rows.shape == (ROWS, 16) and got["1.z"].shape == (ROWS, 4, 4)
    for index in (
        slice(None), slice(10, 20), slice(25, 75), slice(-3, None), slice(0, 87, 13), slice(None, None, -1), slice(5, 5),
        [0, 86, 31, 30, 70, 71, 30], [-1, -87], (1, 2), range(29, 33), [], torch.tensor([80, 1]),
    ):  # fmt: skip
        want = (
            everything[list(index) if isinstance(index, range | tuple) else index]
            if index != slice(None, None, -1)
            else everything.flip(0)
        )
        assert torch.equal(rows[index], want), index
    assert torch.equal(rows[-1], everything[-1]) and torch.equal(rows[40], everything[40])
    assert sum(1 for _ in rows) == ROWS


def test_what_is_read_is_a_copy(got):
    for index in (slice(0, 4), [0, 50], 3):
        before = got["embed"][index].clone()
        got["embed"][index].zero_()
        assert torch.equal(got["embed"][index], before) and before.abs().sum() > 0


@pytest.mark.parametrize("size", [1, 16, 31, 40, 87, 1000])
def test_shuffled_batches_cover_every_row_once(got, size):
    order = torch.cat(list(got.row_batches(size, shuffle_seed=5)))
    assert order.sort().values.tolist() == list(range(ROWS)) and order.tolist() != list(range(ROWS))
    assert torch.equal(order, torch.cat(list(got.row_batches(7, shuffle_seed=5))))  # whatever the size
    assert not torch.equal(order, torch.cat(list(got.row_batches(size, shuffle_seed=6))))
    sizes = [len(batch) for batch in got.batches("embed", size, shuffle_seed=5)]
    assert sizes == [size] * (ROWS // size) + [ROWS % size] * (ROWS % size > 0)
    for site in ("embed", "1.z"):  # the same order for every site
        assert torch.equal(torch.cat(list(got.batches(site, size, shuffle_seed=5))), got[site][order])
    runs = torch.bucketize(order, torch.tensor([31, 71]), right=True).unique_consecutive()
    assert len(runs) == 3  # one shard after the other


def test_unshuffled_batches_are_in_order(got):
    assert torch.equal(torch.cat(list(got.batches("1.z", 10))), got["1.z"][:])
    assert [len(batch) for batch in got.batches("1.z", 29)] == [29, 29, 29]


def test_what_it_says_about_itself(got):
    assert repr(got).endswith(
        "acts: 87 rows of 15 examples, 2 sites 'embed' … '1.z', as computed, 0.0 MB in 3 shard(s))"
    )
    assert repr(got["1.z"]) == "SiteRows('1.z' (87, 4, 4), torch.float64, on disk)"
    assert got.index["config"]["n_layers"] == 2 and got.index["versions"]["torch"]


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (87, IndexError, "row 87 is out of range; allowed: 0 … 86, or negative from the end"),
        ([0, -88], IndexError, "row -88 is out of range"),
        ([0.5], CorpusError, r"rows must be an int, a slice, or ints \[row\], got float64 \(1,\)"),
        (torch.ones(87).bool(), CorpusError, r"got bool \(87,\)"),
        ([[1, 2]], CorpusError, r"got int64 \(1, 2\)"),
        ("all", CorpusError, "got <U3"),
        (None, CorpusError, "got object"),
    ],
)
def test_rows_that_are_not_there(got, index, error, words):
    with pytest.raises(error, match=words):
        got["embed"][index]


def test_sites_that_are_not_there(got, tmp_path):
    with pytest.raises(KeyError, match=r"'0.z' was not recorded, did you mean '1.z'.; recorded: embed, 1.z"):
        got["0.z"]
    with pytest.raises(UnknownSiteError, match="unknown site 'resid'"):
        got["resid"]
    model, inputs = Case(translator()).build()
    two = record_corpus(model, [inputs], ["decoder.resid_pre"], tmp_path / "two")
    assert torch.equal(two["0.resid_pre"][:], two["decoder.0.resid_pre"][:])
    with pytest.raises(CorpusError, match="size=0 is not allowed; allowed: an int from 1"):
        next(got.batches("embed", 0))


# --- folders that cannot be read ---------------------------------------------------------------------------------------------


def test_damaged_and_foreign_folders(model, got):
    folder, shard = got.folder, got.folder / "shard-00001.safetensors"
    whole, index = shard.read_bytes(), (folder / "index.json").read_text()
    shard.write_bytes(whole[:-7])
    words = rf"shard-00001.safetensors has {len(whole) - 7} bytes, its index says {len(whole)}; record the corpus again"
    with pytest.raises(CorpusError, match=words):
        open_activations(folder)
    with pytest.raises(CorpusError, match=words):
        record_corpus(model, BATCHES, ["embed", "1.z"], folder, shard_tokens=25)
    shard.write_bytes(b"\xff" * len(whole))
    with pytest.raises(CorpusError, match=r"shard-00001.safetensors cannot be read: .*; record the corpus again"):
        open_activations(folder)["embed"][40]
    shard.unlink()
    with pytest.raises(CorpusError, match=r"shard-00001.safetensors is missing"):
        open_activations(folder)
    (folder / "index.json").write_text(index[:50])
    with pytest.raises(CorpusError, match=r"index.json is not JSON"):
        open_activations(folder)
    (folder / "index.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(CorpusError, match=r"index.json has format 'other'; allowed: 'interp-activations-1'"):
        open_activations(folder)
    (folder / "index.json").write_text("[1]")
    with pytest.raises(CorpusError, match=r"has format 'list'"):
        open_activations(folder)
    (folder / "index.json").unlink()
    with pytest.raises(CorpusError, match=r"acts is no recording: index.json is missing; allowed: a folder written by"):
        open_activations(str(folder))


# --- what cannot be recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sites": "0.pattern"}, CorpusError, "'0.pattern' has axes head, query, key: values of edges between tokens"),
        ({"sites": ["embed", "scores"]}, CorpusError, "'0.scores' has axes head, query, key"),
        ({"sites": []}, CorpusError, "sites is empty: nothing to record"),
        ({"sites": "resid_past"}, UnknownSiteError, "did you mean 'resid_post'"),
        (
            {"positions": True},
            CorpusError,
            r"positions=True is not allowed; allowed: None \(every real token\), an int or",
        ),
        ({"positions": [0, 1]}, CorpusError, r"positions=\[0, 1\] is not allowed"),
        ({"positions": "subject"}, SelectionError, "batch 0: unknown role 'subject' for positions"),
        ({"positions": 3}, SelectionError, "batch 5: positions 3 is out of range; allowed: 0 … 1"),
        (
            {"dtype": torch.int8},
            CorpusError,
            "dtype=torch.int8 is not allowed; allowed: None, torch.float16, torch.bfloat16",
        ),
        ({"shard_tokens": 0}, CorpusError, "shard_tokens=0 is not allowed; allowed: an int from 1"),
        ({"batches": []}, CorpusError, "batches ended after 0: nothing to record"),
        (
            {"batches": BATCHES[0]},
            CorpusError,
            r"batches is one Tensor; allowed: an iterable of batches, such as \[batch\]",
        ),
        ({"batches": Inputs(BATCHES[0])}, CorpusError, "batches is one Inputs"),
        ({"batches": "a b c"}, CorpusError, "batches is one str"),
        ({"batches": 5}, CorpusError, "batches is one int"),
        ({"batches": [*BATCHES, torch.tensor([[13]])]}, InputsError, "batch 6: token id 13 is outside the vocabulary"),
        ({"batches": [BATCHES[0], "a b"]}, InputsError, "batch 1: .*strings also need tokenizer="),
        (
            {"batches": [["a"], ["a zz"]], "tokenizer": ["a", "b"]},
            TokenizerError,
            "batch 1: 'zz' is not in the vocabulary",
        ),
        ({"prefix": [1]}, InputsError, "batch 0: prefix="),
    ],
)
def test_what_cannot_be_recorded_is_said_and_leaves_no_folder(model, tmp_path, options, error, words):
    arguments = {"batches": BATCHES, "sites": "embed", **options}
    with pytest.raises(error, match=words):
        record_corpus(model, arguments.pop("batches"), arguments.pop("sites"), tmp_path / "a", **arguments)
    assert not (tmp_path / "a").exists()


def test_sites_of_both_sides_are_refused(tmp_path):
    model, inputs = Case(translator()).build()
    for sites in ("resid_post", ["encoder.embed", "decoder.embed"], ["0.cross_k", "0.cross_q"]):
        with pytest.raises(
            CorpusError, match=r"has rows for the source's tokens, '.*' for the target's; allowed: sites of one"
        ):
            record_corpus(model, [inputs], sites, tmp_path / "a")


def test_something_that_is_no_model(tmp_path):
    with pytest.raises(UnsupportedModelError, match="a Linear cannot be read"):
        record_corpus(torch.nn.Linear(2, 2), BATCHES, "embed", tmp_path / "a")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_bridged_model_is_recorded_like_any_other(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformer_lens")
    from interp import from_transformer_lens

    config = transformers.GPT2Config(vocab_size=13, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = from_transformer_lens(transformers.GPT2LMHeadModel(config).eval())
    sites = [site for site in model.sites if "position" in site.spec.axes]
    got = record_corpus(model, BATCHES[:2], sites, tmp_path / "a")
    caches = [run(model, batch, record=sites).cache for batch in BATCHES[:2]]
    for site in sites:
        assert torch.equal(got[site][:], torch.cat([cache[site].flatten(0, 1) for cache in caches])), site
    record_corpus(model, BATCHES[:2], "0.resid_pre", tmp_path / "b")  # ended early: no hook is left behind
    assert torch.equal(run(model, BATCHES[0]).logits, run(model, BATCHES[0]).logits)
    assert not any(
        module._forward_hooks for module in model.bridge.modules() if "hook" in type(module).__name__.lower()
    )
