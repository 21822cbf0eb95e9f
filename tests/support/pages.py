"""The pages that users read: README, CONTRIBUTING, CHANGELOG and docs/, and what stands in them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.rig import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str | None = None) -> list[Block]:
    text = page.read_text()
    found = [
        Block(name(page), text.count("\n", 0, match.start()) + 1, match[2], textwrap.dedent(match[3]))
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def code(page: Path) -> Iterator[str]:
    """Everything on a page that is set as code: blocks that are not Python, and `inline`."""
    yield from (block.text for block in blocks(page) if block.language != "python")
    yield from (match[1].replace("\n", " ") for match in _INLINE.finditer(prose(page)))


def anchors(page: Path) -> set[str]:
    """What links to a heading of this page say after the #, as GitHub and the site make it."""
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def links(page: Path) -> Iterator[str]:
    """Where the links and pictures of a page lead."""
    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", "", prose(page).replace("[`", "[").replace("`]", "]"))
    yield from re.findall(r"\]\(([^)\s]+)\)", text)
    yield from re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", text)
