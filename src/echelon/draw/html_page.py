"""HTML pages with their data inside: one file that needs no network."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

DATA_MARK = '"DATA"'
"""where a template takes the data, inside a script"""


def page(title: str, body: str, style: str) -> str:
    """The text of an HTML file."""
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n{body}</html>\n"
    )


def fill_template(package: str, template: str, data: Any, marks: dict[str, str]) -> str:
    """The page of a package's template, with `data` as JSON and the marks before it replaced, each once."""
    page = files(package).joinpath(template).read_text(encoding="utf-8")
    before, mark, after = page.partition(DATA_MARK)
    assert mark
    for name, value in marks.items():
        before = before.replace(name, value, 1)
    # Inside a script, only "</" could end it.
    return before + json.dumps(data, separators=(",", ":")).replace("</", "<\\/") + after
