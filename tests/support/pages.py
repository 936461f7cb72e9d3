"""A page as a browser would read it, and what in it is alive."""

import re
from html.parser import HTMLParser


class PageReader(HTMLParser):
    """Reads a page as a browser would.

    Attributes:
        text: of the whole page.
        tags: of its elements, in their order.
        attributes: tag, name and value of every attribute.
        cards: the values of each silo's card, by silo and by term.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.cards: dict[str, dict[str, str]] = {}
        self._card = ""
        self._term = ""
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "article":
            self._card = str(dict(attrs)["id"]).removeprefix("silo-")
            self.cards[self._card] = {}
        if tag in ("dt", "dd"):
            self._open = tag
        if tag == "dt":
            self._term = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._card = ""
        if tag == self._open:
            self._open = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._card and self._open == "dt":
            self._term += data
        elif self._card and self._open == "dd":
            self.cards[self._card][self._term] = self.cards[self._card].get(self._term, "") + data


def active_content(page: str) -> list[str]:
    """Everything in a page that runs, loads, sends or leads elsewhere."""
    read = PageReader(page)
    active = [
        tag
        for tag in read.tags
        if tag in {"script", "iframe", "object", "embed", "form", "link", "base"}
    ]
    for tag, name, value in read.attributes:
        inside = value.startswith(("#", "data:image/png;base64,"))
        if name.startswith("on") or (
            name in {"src", "href", "srcset", "xlink:href", "action"} and not inside
        ):
            active.append(f"{tag} {name}={value[:40]}")
    return active + re.findall(r"url\(|@import", page)
