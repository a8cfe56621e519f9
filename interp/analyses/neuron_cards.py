"""One neuron on one card: what it reads and writes, what sets it off with the coefficient at every token, what it promotes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd
import torch

from interp.analyses.ffn_memory import ffn_values, read_vectors
from interp.analyses.triggers import Triggers
from interp.hookable import Hookable, require_weight
from interp.run import prepare, run
from interp.sites import Site
from interp.tokens import labels, pad

BEFORE, AFTER = 24, 8  # tokens shown around a trigger
STYLE = """
.neuron-card{font:14px/1.45 system-ui,sans-serif;color:#1c2330;background:#fff;border:1px solid #d5dae2;border-radius:8px;
padding:12px 14px;margin:0 0 14px;max-width:960px;box-sizing:border-box;overflow-wrap:anywhere}
.neuron-card h3{font-size:16px;margin:0 0 2px}.neuron-card p{margin:0 0 8px;color:#4a5363;font-size:12.5px}
.neuron-card h4{font-size:13px;margin:10px 0 3px}.neuron-card .sides{display:grid;gap:0 18px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,280px),1fr))}
.neuron-card ol{margin:0;padding:0;list-style:none}.neuron-card .triggers li{padding:3px 0;border-top:1px solid #edf0f4}
.neuron-card .m{display:inline-block;min-width:4.6em;font:12px ui-monospace,monospace;color:#4a5363}
.neuron-card .t{white-space:pre-wrap;font:13px/1.6 ui-monospace,monospace;border-radius:2px}
.neuron-card .peak{outline:1.5px solid #1c2330;outline-offset:-1px}
.neuron-card .tokens li{display:inline-block;margin:0 5px 5px 0;padding:1px 6px;background:#f2f4f7;border-radius:4px;
font:13px ui-monospace,monospace;white-space:pre-wrap}.neuron-card .tokens small{color:#4a5363;margin-left:5px}
"""


@dataclass(frozen=True, eq=False)
class NeuronCard:
    """One neuron, ready to be looked at: shows itself in a notebook, `.html()` for a page, `str()` for a terminal.

    norms: of what it reads ("key", or "gate" and "up") and writes ("value"). triggers: columns sign, rank, coefficient, example,
    position, token, text. tokens: every token of those examples, columns example, position, token, text, coefficient. values:
    columns sign, rank, token, text, score (sign 1 = promoted when the coefficient is positive). through: what stands between
    value and vocabulary.
    """

    layer: int
    neuron: int
    norms: Mapping[str, float]
    triggers: pd.DataFrame
    tokens: pd.DataFrame
    values: pd.DataFrame
    through: str
    corpus: str

    def __repr__(self) -> str:
        norms = ", ".join(f"|{name}| {norm:.3g}" for name, norm in self.norms.items())
        lines = [f"neuron {self.layer}.{self.neuron}  ({norms})"]
        for sign in self.signs:
            mark, rows = "+" if sign > 0 else "−", self.triggers[self.triggers["sign"] == sign]
            lines.append(f" {mark}: {_promotes(sign)} " + " ".join(repr(text) for text in self._promoted(sign)["text"]))
            for row in rows.to_dict("records"):
                before, peak, after = self._around(row)
                said = self.gap.join([*before["text"], f"[{peak['text'].iloc[0]}]", *after["text"]])
                lines.append(f"   {row['coefficient']:+8.3g}  {said!r}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.html()

    @property
    def signs(self) -> list[int]:
        """+ first; − only where the neuron has triggers with a negative coefficient."""
        return [sign for sign in (1, -1) if sign == 1 or (self.triggers["sign"] == sign).any()]

    @property
    def gap(self) -> str:
        """What stands between tokens: nothing where they bring their own spaces, a space between toy words or ids."""
        return "" if self.tokens["text"].str.startswith((" ", "Ġ")).any() else " "

    def html(self, style: bool = True) -> str:
        """The card as HTML that needs nothing else; style=False leaves the style sheet out, for a page that has it once."""
        norms = " · ".join(f"‖{escape(name)}‖ {norm:.3g}" for name, norm in self.norms.items())
        head = f"<h3>Neuron {self.layer}.{self.neuron}</h3><p>{norms} · {escape(self.corpus)}</p>"
        sides = "".join(f"<section>{self._side(sign)}</section>" for sign in self.signs)
        sheet = f"<style>{STYLE}</style>" if style else ""
        return f'{sheet}<article class="neuron-card">{head}<div class="sides">{sides}</div></article>'

    def _side(self, sign: int) -> str:
        name = "positive" if sign > 0 else "negative"
        rows = self.triggers[self.triggers["sign"] == sign]
        items = "".join(f'<li><span class="m">{_signed(row["coefficient"])}</span>{self._sentence(row)}</li>'
                        for row in rows.to_dict("records"))  # fmt: skip
        found = f'<ol class="triggers">{items}</ol>' if items else "<p>no sentence sets it off</p>"
        promoted, pushed = self._promoted(sign), self._promoted(-sign)
        return (f"<h4>Coefficient {name}: set off by</h4>{found}<h4>then promotes</h4>{_chips(promoted, 1)}"
                f"<h4>and suppresses</h4>{_chips(pushed, -1)}")  # fmt: skip

    def _promoted(self, sign: int) -> pd.DataFrame:
        return self.values[self.values["sign"] == sign]

    def _around(self, trigger: Mapping[Any, Any]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """The tokens before a trigger, its own, and those after it."""
        said, at = self.tokens[self.tokens["example"] == trigger["example"]], trigger["position"]
        place = said["position"]
        return (
            said[(place < at) & (place >= at - BEFORE)],
            said[place == at],
            said[(place > at) & (place <= at + AFTER)],
        )

    def _sentence(self, trigger: Mapping[Any, Any]) -> str:
        largest = self.triggers["coefficient"].abs().max()
        spans = []
        for part, rows in zip(("", " peak", ""), self._around(trigger), strict=True):
            for text, m in zip(rows["text"], rows["coefficient"], strict=True):
                red, green, blue = (27, 108, 168) if m > 0 else (209, 73, 91)
                strength = min(abs(m) / largest, 1.0) * 0.6
                colour = f"background:rgba({red},{green},{blue},{strength:.2f})" if strength >= 0.03 else ""
                spans.append(f'<span class="t{part}" style="{colour}" title="{_signed(m)}">{escape(text)}</span>')
        places = self.tokens.loc[self.tokens["example"] == trigger["example"], "position"]
        begin = "…" if places.min() < trigger["position"] - BEFORE else ""
        end = "…" if places.max() > trigger["position"] + AFTER else ""
        return begin + self.gap.join(spans) + end


def _signed(number: float) -> str:
    return f"{number:+.3g}".replace("-", "−", 1) if number < 0 else f"{number:+.3g}"


def _promotes(sign: int) -> str:
    return "promotes" if sign > 0 else "promotes (−v)"


def _chips(rows: pd.DataFrame, sign: int) -> str:
    return '<ol class="tokens">' + "".join(
        f"<li>{escape(visible(text))}<small>{_signed(sign * score)}</small></li>"
        for text, score in zip(rows["text"], rows["score"], strict=True)
    ) + "</ol>"  # fmt: skip


def visible(text: str) -> str:
    """A token as it is printed, with what cannot be seen replaced: spaces at its ends, line ends, tabs."""
    inner = text.strip(" ")
    if not inner:
        return "␣" * len(text) or "∅"
    left, right = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    shown = "␣" * left + inner + "␣" * right
    return shown.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


@torch.no_grad()
def neuron_card(
    model: Hookable,
    layer: int,
    neuron: int,
    triggers: Triggers,
    tokenizer: Any = None,
    n: int = 4,
    k: int = 10,
    norm: str = "none",
) -> NeuronCard:
    """A card for one neuron: its `n` strongest triggers of each sign, and the `k` tokens that its value promotes and suppresses.

    triggers: of `corpus_triggers`; the sentences listed are run again, so that every token shows its coefficient. norm: what
    the value is read through, as of `ffn_values`. Raises NeuronError for a layer or neuron that is not there.
    """
    found = triggers.table(layer, [neuron], tokenizer, k=n)
    values = [ffn_values(model, layer, [neuron], k, sign, tokenizer, norm) for sign in (1, -1)]
    written = require_weight(model, "W_out", layer)[neuron]
    norms = {name: float(part[:, neuron].norm()) for name, part in read_vectors(model, layer).items()}
    tokens = _coefficients(model, layer, neuron, triggers, list(dict.fromkeys(found["example"])), tokenizer)
    through = values[0]["through"].iloc[0]
    about = f"{triggers.examples:,} sentences, {triggers.positions:,} positions read · value read through: {through}"
    columns = ["sign", "rank", "coefficient", "example", "position", "token", "text"]
    return NeuronCard(layer, neuron, {**norms, "value": float(written.norm())}, found[columns], tokens,
                      pd.concat(values, ignore_index=True), through, about)  # fmt: skip


def _coefficients(
    model, layer: int, neuron: int, triggers: Triggers, examples: Sequence[int], tokenizer
) -> pd.DataFrame:
    """The neuron's coefficient at every token of these sentences."""
    rows: list[tuple[int, int, int, str, float]] = []
    if examples:
        said = [triggers.sentences[example] for example in examples]
        site = Site("ffn_act", layer, model.sites[-1].stack)
        inputs = prepare(model, pad([tokens for tokens, _ in said]))
        act = run(model, inputs, record=site).cache[site][..., neuron].tolist()
        for example, (tokens, start), coefficients in zip(examples, said, act, strict=True):
            places = range(start, start + len(tokens))
            rows += zip([example] * len(tokens), places, tokens, labels(tokenizer, tokens), coefficients, strict=False)
    return pd.DataFrame(rows, columns=["example", "position", "token", "text", "coefficient"])


def cards_page(cards: Iterable[NeuronCard], title: str, about: str = "") -> str:
    """One HTML page of cards that needs nothing else; `about` is a sentence above them."""
    shown = "\n".join(card.html(style=False) for card in cards)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>body{{margin:0 auto;padding:14px;max-width:960px;font:15px/1.5 system-ui,sans-serif;color:#1c2330;background:#f7f8fa}}
h1{{font-size:22px;margin:0 0 4px}}{STYLE}</style></head>
<body><h1>{escape(title)}</h1><p>{escape(about)}</p>
{shown}
</body></html>
"""
