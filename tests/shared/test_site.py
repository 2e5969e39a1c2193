"""The pages of the documentation site are complete; `make site` builds it, and mkdocs checks links and anchors."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from docs.site import api_reference, hooks, stage
from laps_sd.v1 import admin_pb2, gateway_link_pb2, inference_pb2, worker_link_pb2

CONTRACTS = {
    "inference": inference_pb2,
    "admin": admin_pb2,
    "gateway_link": gateway_link_pb2,
    "worker_link": worker_link_pb2,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    stage.main(out)
    return out


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return api_reference.reference_pages()


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_reference_has_every_call_message_and_field(reference: dict[str, str], name: str) -> None:
    page, file = reference[name], CONTRACTS[name].DESCRIPTOR

    for service in file.services_by_name.values():
        assert f"\n## Service {service.name}\n" in page
        assert all(f"\n| `{method.name}` | " in page for method in service.methods)
    for message in file.message_types_by_name.values():
        section = page.partition(f"\n## {message.name}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", section, re.MULTILINE)
        assert [(field.number, field.name) for field in message.fields] == [(int(a), b) for a, b in rows]


def test_the_reference_has_types_and_comments(reference: dict[str, str]) -> None:
    page = reference["inference"]

    assert (
        "| 2 | `temperature` | optional float | 0 is greedy, and so is any value between 0 and 0.00001. Default 1. |"
        in page
    )
    assert "| 12 | `logit_bias` | map of uint32 to float | Added to the logits" in page
    assert "| 2 | `text` | string<br>one of `prompt` | Plain text, tokenized unchanged. |" in page
    assert "| 5 | `logprobs` | repeated [TokenLogprobs](#tokenlogprobs) |" in page
    assert "| stream of [GenerateEvent](#generateevent) | Attaches to an existing request" in page
    assert "\n* Every accepted request has exactly one end" in page


def test_every_link_of_a_page_leads_to_something_on_the_site(site: Path) -> None:
    pages = site / "pages"
    broken = [
        f"{page.relative_to(pages)}: {target}"
        for page in pages.rglob("*.md")
        for target in re.findall(r"\]\((?!https?://)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if (stage.ROOT / os.path.normpath(page.relative_to(pages).parent / target)).exists()
        and not (page.parent / target).is_file()
    ]

    assert broken == []
    assert (pages / "docs/figures/serve.svg").is_file()
    assert "[the public contract](../../protos/inference.md#cursor)" in stage.with_site_links(
        Path("docs/how-to/x.md"),
        "[the public contract](../../protos/laps_sd/v1/inference.proto#cursor)",
        pages,
    )
    assert (
        stage.with_site_links(Path("docs/x.md"), "in [the simulator](../simulator).", pages)
        == "in the simulator."
    )


def test_every_page_is_in_the_navigation(site: Path) -> None:
    named = re.findall(
        r"^ *- (?:.+: )?(\S+\.md)$", (site / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    pages = [str(path.relative_to(site / "pages")) for path in (site / "pages").rglob("*.md")]

    assert sorted(named) == sorted(pages)
    assert len(pages) > 80


def test_every_code_block_begins_as_mkdocs_reads_it(site: Path) -> None:
    fences = [
        (str(path.relative_to(site / "pages")), line)
        for path in (site / "pages").rglob("*.md")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.lstrip().startswith("```")
    ]

    assert len(fences) > 200
    assert [one for one in fences if not re.fullmatch(r" *```\w*", one[1])] == []


def test_long_words_of_a_table_can_break_and_nothing_else_changes() -> None:
    row = '<tr>\n<td><code>LAPS_SD_SHARDS_FILE</code></td>\n<td><a href="settings.md#a_long_name">a_long_name_of_a_page</a> x_y</td>\n</tr>'
    long = f"<tr><td><code>workers.{'a' * 40}</code></td></tr>"
    text = "<p><code>LAPS_SD_SCHEDULER_SEEDS_FILE</code></p><pre><code>a_long_name_of_a_page</code></pre>"

    broken = hooks.on_page_content(row + long + text)

    assert broken.replace("<wbr>", "") == row + long + text
    assert broken.startswith("<tr>\n<td><code>LAPS_SD_SHARDS_FILE</code></td>")
    assert (
        '<a href="settings.md#a_long_name">a_<wbr>long_<wbr>name_<wbr>of_<wbr>a_<wbr>page</a> x_y</td>'
        in broken
    )
    assert "<code>workers.<wbr>aaa" in broken
    assert broken.endswith(text)
