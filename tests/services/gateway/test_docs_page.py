"""The page at /docs: whole, linked in itself, and served without anything of another server."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from gateway.api.description import openapi_json
from gateway.api.docs_page import docs_page
from tests.services.gateway.conftest import Served

VOID = {"meta"}


class Reader(HTMLParser):
    """Reads links, ids and sources, and that each element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_closed_and_its_links_lead_somewhere() -> None:
    reader = Reader()
    reader.feed(docs_page().decode())
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert {link.removeprefix("#") for link in reader.links} - {"openapi.json"} <= set(reader.ids)
    assert not reader.tags & {"script", "link", "img", "iframe"}
    assert "://" not in re.sub(r"<[^>]*>", "", docs_page().decode())


def test_every_path_and_every_field_of_a_chat_is_there() -> None:
    page = docs_page().decode()
    description = json.loads(openapi_json())
    for path in description["paths"]:
        assert f"<code>{path}</code>" in page
    for field in description["components"]["schemas"]["ChatBody"]["properties"]:
        assert f"<code>{field}</code>" in page


async def test_it_is_served_without_a_key(served: Served) -> None:
    async with served.session.get(served.url + "/docs") as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert await response.read() == docs_page()
