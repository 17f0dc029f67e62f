"""HTML as a test reads it: checked for balance, taken apart into tables, facts and tags."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"br", "hr", "img", "input", "link", "meta", "col"}


class Parsed(HTMLParser):
    """Tags balanced, text of each cell, attributes that could reach the network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.facts: dict[str, str] = {}
        self.titles: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._name = ""
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if {"th", "td"} & set(self.open):
            self.tables[-1][-1][-1] += data
        if self.open and self.open[-1] == "title":
            self.titles.append(data)
        if self.open and self.open[-1] == "dt":
            self._name = data
        if self.open and self.open[-1] == "dd":
            self.facts[self._name] = self.facts.get(self._name, "") + data
