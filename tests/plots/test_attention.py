"""The attention widget: what stands in its HTML, what it refuses, and what a browser shows when it is pointed at."""

import json
import re
import shutil
import subprocess
from html import unescape

import numpy as np
import pytest
import torch

from interp.plots.attention import attention_widget
from interp.plots.style import PlotError

BROWSER = shutil.which("chromium")
NASTY = ["</script>", " <b>", "a\nb", "<!--<script>", "__DATA__", "$5", "'\"&", "\u2028é\ud800"]


def patterns(*shape, seed=0):
    """Rows that sum to 1, some weights near 0 and some near 1."""
    return np.random.default_rng(seed).dirichlet(np.full(shape[-1], 0.3), size=shape[:-1])


def words(count):
    return [f" w{i}" for i in range(count)]


def data_of(widget):
    """The data in the script, read as JSON: the script's last argument."""
    return json.loads(re.search(r"^\}\)\((.*)\);$", widget.html, re.M)[1])


@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (3, 5, 5), (5, 5)])
def test_every_weight_is_there_to_three_digits(shape):
    pattern = patterns(*shape)
    data = data_of(attention_widget(pattern, words(5)))
    assert np.abs(np.array(data["values"]).reshape(shape) / 1000 - pattern).max() <= 5e-4 + 1e-12
    assert data["kind"] == {4: "layers", 3: "heads", 2: "one"}[len(shape)]
    assert data["same"] and data["layers"] == list(range(shape[0] if len(shape) == 4 else 1))


def test_tokens_are_data_and_never_markup():
    widget = attention_widget(patterns(1, 2, 8, 8), NASTY, title="</script><img src=x>")
    assert [token["text"] for token in data_of(widget)["queries"]] == NASTY
    assert data_of(widget)["title"] == "</script><img src=x>"
    assert widget.html.count("</script") == 1 and widget.html.count("<script") == 1 and "<!--" not in widget.html
    assert "<img" not in widget.html and "&lt;img src=x&gt;" in widget.html
    labels = [token["label"] for token in data_of(widget)["queries"]]
    assert labels[1:6] == ["·<b>", "a⏎b", "<!--<script>", "__DATA__", "$5"]


def test_nothing_is_fetched_and_the_page_is_whole(tmp_path):
    widget = attention_widget(patterns(2, 2, 3, 3), words(3), title="a <title>")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|src=", widget.html.replace("// ", ""))
    saved = widget.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert (
        saved.startswith("<!doctype html>")
        and widget._repr_html_() in saved
        and "<title>a &lt;title&gt;</title>" in saved
    )


def test_the_same_call_gives_the_same_bytes_and_another_pattern_another_name():
    name = re.compile(r'id="(attention-[0-9a-f]{12})"')
    one, again, other = (attention_widget(patterns(2, 3, 3, seed=seed), words(3)) for seed in (0, 0, 1))
    assert one == again and name.search(one.html)[1] != name.search(other.html)[1]


def test_a_model_of_twelve_by_twelve_heads_stays_small():
    for alpha in (0.3, 100.0):  # peaked, and spread: three digits nearly everywhere
        pattern = np.random.default_rng(0).dirichlet(np.full(20, alpha), size=(12, 12, 20))
        assert attention_widget(pattern, words(20)).size < 1e6


def test_tensors_of_any_kind_and_a_recorded_cache(model, tokens):
    import interp

    got = interp.run(model, tokens, record="pattern")
    stacked = got.cache.stack("pattern")[:, 1]
    seen = data_of(attention_widget(stacked, tokens[1].tolist()))
    expected = torch.stack([got.cache["0.pattern"][1], got.cache["1.pattern"][1]])
    assert np.abs(np.array(seen["values"]).reshape(expected.shape) / 1000 - expected.numpy()).max() <= 5e-4 + 1e-12
    assert [token["text"] for token in seen["queries"]] == [str(token) for token in tokens[1].tolist()]
    half = attention_widget(stacked.clone().requires_grad_().to(torch.bfloat16), words(7))  # rows miss 1 by rounding
    assert np.abs(np.array(data_of(half)["values"]) - np.array(seen["values"])).max() <= 4


def test_layers_keep_their_numbers_and_cross_attention_its_keys():
    data = data_of(attention_widget(patterns(2, 1, 3, 4), words(3), ["a", "b", "c", "d"], layers=[4, 9]))
    assert data["layers"] == [4, 9] and not data["same"]
    assert [token["text"] for token in data["keys"]] == ["a", "b", "c", "d"]


GOOD = patterns(2, 3, 4, 4)
UP = GOOD.copy()
UP[1, 2, 0, 3] = 1.25
NAN = GOOD.copy()
NAN[0, 1, 2, 3] = np.nan


@pytest.mark.parametrize(
    ("pattern", "tokens", "options", "said"),
    [
        (GOOD, words(5), {}, r"tokens has 5 entries; allowed: 4, one per query"),
        (GOOD, words(4), {"key_tokens": words(3)}, r"key_tokens has 3 entries; allowed: 4, one per key"),
        (GOOD, "four", {}, r"tokens is one text, 'four'; allowed: 4 texts"),
        (patterns(2, 3, 4), words(3), {}, r"3 queries and 4 keys \(2, 3, 4\); it needs key_tokens=, 4 texts"),
        (GOOD[None], words(4), {}, r"shape \(1, 2, 3, 4, 4\); allowed: \[layer head query key\], .*choose one example"),
        (GOOD[0, 0, 0], words(4), {}, r"shape \(4,\); allowed"),
        (GOOD[:0], words(4), {}, r"shape \(0, 3, 4, 4\); allowed: .*no axis empty"),
        ("text", words(4), {}, r"must be numbers .*, got str"),
        (NAN, words(4), {}, r"pattern\[0, 1, 2, 3\] is nan; allowed: weights in 0 … 1 \(1 of 96 are NaN"),
        (UP, words(4), {}, r"pattern\[1, 2, 0, 3\] is 1.25; allowed: weights in 0 … 1 \(1 of 96 are outside"),
        (-GOOD, words(4), {}, r"allowed: weights in 0 … 1"),
        (np.full((4, 4), 0.5), words(4), {}, r"pattern\[0\], .*sums to 2; allowed: at most 1"),
        (GOOD, words(4), {"layers": [1]}, r"layers=\[1\] does not fit a pattern with 2 layers"),
        (GOOD[0], words(4), {"layers": [1]}, r"layers=\[1\] does not fit a pattern with no layer axis"),
        (np.zeros((5, 1000, 1000)), words(1000), {}, r"5,000,000 weights; allowed: at most 4,000,000"),
    ],
)
def test_bad_input_is_named(pattern, tokens, options, said):
    with pytest.raises(PlotError, match=said):
        attention_widget(pattern, tokens, **options)


def in_browser(folder, body, script, address=""):
    """What `script` returned, run in a page 300 ms after it was loaded."""
    page = folder / "page.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><style>button,h3{{display:none!important}}canvas{{width:1px}}</style>{body}'
        "<script>const hosts = document.querySelectorAll('.interp-attention');"
        "const inside = n => hosts[n].shadowRoot, one = (n, what) => inside(n).querySelector(what);"
        "const fire = (what, type, more) => what.dispatchEvent(new PointerEvent(type, {bubbles: true, ...more}));"
        "const press = (what, key) => what.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));"
        "const said = n => one(n, '.say').textContent, state = n => ({...hosts[n].dataset});"
        "const chips = n => [...inside(n).querySelectorAll('.tokens button')];"
        "setTimeout(() => { let out; try { out = (function () {"
        + script
        + "})(); } catch (error) { out = String(error); }"
        "const shown = document.createElement('pre'); shown.id = 'out'; shown.textContent = JSON.stringify(out);"
        "document.body.append(shown); }, 300);</script>",
        encoding="utf-8",
    )
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        f"--disable-component-update --disable-sync --user-data-dir={folder / 'profile'} --hide-scrollbars "
        "--window-size=1280,900 --virtual-time-budget=3000 --dump-dom"
    )
    call = [str(BROWSER), *flags.split(), page.as_uri() + address]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(unescape(re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)[1]))


needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")


@needs_browser
def test_a_pointer_a_tap_and_the_keys_show_the_weights_of_the_array(tmp_path):
    """All in one start of the browser: hover a cell by its pixels, leave, tap, arrow keys, a token, a nasty one."""
    pattern = patterns(2, 3, 8, 8)
    widget = attention_widget(pattern, NASTY, title="<i>nasty</i>")
    other = attention_widget(patterns(4, 6, seed=1), words(4), words(6))
    out = in_browser(
        tmp_path,
        widget.html + other.html + widget.html,
        """
        const out = {}, map = one(0, '.map'), box = map.getBoundingClientRect();
        out.first = state(0); out.nodes = document.querySelectorAll('b, img, i, h3').length;
        out.thumbs = inside(0).querySelectorAll('.heads button').length;
        inside(0).querySelectorAll('.heads button')[5].click();
        // The map is square cells that end 2 pixels before the right and the lower edge.
        const pixels = map.getContext('2d'), cell = (box.height - 2 - edge()) / 8;
        function edge() { // labels above the cells: found by looking for the frame's grey at the right end
          const ratio = map.height / box.height, column = pixels.getImageData(map.width - 4, 0, 1, map.height).data;
          for (let y = 0; y < map.height; y++) if (column[4 * y] < 200) return y / ratio + 1;
        }
        const put = (query, key) =>
          ({clientX: box.right - 2 - cell * (7.5 - key), clientY: box.bottom - 2 - cell * (7.5 - query)});
        fire(map, 'pointermove', put(3, 4)); out.hover = [state(0), said(0), chips(0).map(chip => chip.lastChild.textContent)];
        fire(map, 'pointermove', {pointerType: 'touch', ...put(0, 0)}); out.finger = state(0);
        fire(map, 'pointerleave', {}); out.left = [state(0), said(0)];
        fire(map, 'click', put(7, 2)); fire(map, 'pointerleave', {}); out.tapped = state(0);
        press(map, 'ArrowUp'); press(map, 'ArrowLeft'); press(map, 'ArrowLeft'); press(map, 'ArrowLeft'); out.moved = state(0);
        press(map, 'Escape'); out.cleared = state(0);
        fire(chips(0)[1], 'pointerenter', {}); out.token = [state(0), said(0)];
        for (const key of ['ArrowUp', 'ArrowUp', 'ArrowLeft']) press(one(0, '.heads'), key);
        out.keys = state(0);
        out.focused = inside(0).activeElement.getAttribute('aria-label');
        out.others = [state(1), state(2)]; out.ids = [...hosts].map(host => host.id);
        out.labels = chips(0).map(chip => chip.firstChild.textContent);
        out.visible = getComputedStyle(chips(0)[0]).display;
        return out;
        """,
    )
    assert isinstance(out, dict), out
    weight = lambda layer, head, query, key: f"{pattern[layer, head, query, key]:.3f}"  # noqa: E731
    assert out["thumbs"] == 6 and out["nodes"] == 0 and out["first"]["head"] == "0.0" and out["first"]["query"] == ""
    shown, said, numbers = out["hover"]
    assert (shown["head"], shown["query"], shown["key"], shown["weight"]) == ("1.2", "3", "4", weight(1, 2, 3, 4))
    assert said == f'{weight(1, 2, 3, 4)}query 3 "<!--<script>" → key 4 "__DATA__"'
    for number, value in zip(numbers, pattern[1, 2, 3], strict=True):
        assert abs(float(number) - value) < 0.0056 if number else value < 0.0055
    assert out["finger"] == shown  # a finger on its way scrolls
    assert out["left"][0]["query"] == "" and out["left"][0]["weight"] == ""
    assert (out["tapped"]["query"], out["tapped"]["key"], out["tapped"]["weight"]) == ("7", "2", weight(1, 2, 7, 2))
    assert (out["moved"]["query"], out["moved"]["key"], out["moved"]["weight"]) == ("6", "0", weight(1, 2, 6, 0))
    assert out["cleared"]["query"] == ""
    assert out["token"][0]["query"] == "1" and out["token"][0]["key"] == ""
    strongest = pattern[1, 2, 1].argmax()
    assert out["token"][1].startswith(
        f'query 1 " <b>" looks at {json.dumps(NASTY[strongest])} {weight(1, 2, 1, strongest)}, '
    )
    assert out["keys"]["head"] == "0.1" and out["focused"] == "head 0.1"
    assert out["others"][0]["head"] == "" and out["others"][1]["head"] == "0.0" and out["others"][1]["query"] == ""
    assert len(set(out["ids"])) == 3 and out["ids"][2] == out["ids"][0] + "-2"
    assert out["labels"][:4] == ["</script>", "·<b>", "a⏎b", "<!--<script>"]
    assert out["visible"] != "none"  # the page's own style sheet, which hides buttons, stays outside


@needs_browser
def test_a_link_names_a_head_and_a_cell_and_a_telephone_shows_the_whole_map(tmp_path):
    pattern = patterns(2, 12, 20, 20)
    long = [f" longer word {i}" for i in range(20)]
    named, plain = attention_widget(pattern, long, layers=[3, 7]), attention_widget(pattern[0, 0], words(20))
    out = in_browser(
        tmp_path,
        f'<div style="width:374px">{named.html}</div>{plain.html}',  # a window of the browser has at least 500 pixels
        """
        const overflow = ['.scroll', '.heads', '.box'].map(part => one(0, part).scrollWidth - one(0, part).clientWidth);
        // As in a notebook that writes a cell's output into the page and runs its script by itself: nothing says where it stood.
        const late = document.createElement('div'), code = hosts[1].nextElementSibling.textContent;
        document.body.append(late);
        const place = `<div class="interp-attention" data-widget="${hosts[1].id}">empty</div>`;
        late.innerHTML = '<p></p>' + place + place;
        new Function(code)(); new Function(code)(); new Function(code)();
        const written = [...late.children].slice(1).map(host => [host.id, !!host.shadowRoot, host.textContent]);
        return {overflow, box: one(0, '.box').getBoundingClientRect().width, link: state(0), other: state(1), written,
                name: hosts[1].id};
        """,
        "#select=7.11&hover=19,4",
    )
    assert isinstance(out, dict), out
    assert (out["link"]["head"], out["link"]["weight"]) == ("7.11", f"{pattern[1, 11, 19, 4]:.3f}")
    assert out["other"]["query"] == ""
    assert out["overflow"] == [0, 0, 0] and out["box"] <= 374
    assert out["written"] == [[f"{out['name']}-2", True, ""], [f"{out['name']}-3", True, ""]]
