"""A hook of mkdocs (mkdocs.yml): files outside docs/ that pages link to are part of the site, so that no link leaves it.

A page of docs/ links to `../README.md` or `../examples/...`, which is right in a checkout. In the site that file lies under
`repository/`: Markdown as a page, Python and C as a page that shows the source, anything else as it is.

After the build it looks at the pages once more, as a browser would: everything that they refer to is there, and nothing is loaded
from another host.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "repository"
SOURCE = {".py": "python", ".c": "c", ".toml": "toml", "": "text"}

_REFERENCE = re.compile(r"(?:href|src|srcset)=\"([^\"]+)\"")
_LOADED = re.compile(r"(?:src|srcset|rel=\"stylesheet\" href)=\"([^\"]+)\"")
_TARGET = re.compile(r"(?<=\]\()[^)\s#]+|(?<=src=\")[^\"#]+|(?<=srcset=\")[^\"#]+")


def on_files(files: Files, config: Any) -> Files:
    """Adds every file that a page links to, and that those link to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    added: set[str] = set()
    while waiting:
        page = waiting.pop()
        for target in _outside(page, (ROOT / page).read_text()):
            if target not in added:
                added.add(target)
                files.append(_file(target, config))
                if target.endswith(".md"):
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads the links of a page to where those files are in the site."""
    uri = page.file.src_uri
    origin = uri.removeprefix(f"{FOLDER}/") if uri.startswith(f"{FOLDER}/") else f"docs/{uri}"

    def replaced(match: re.Match[str]) -> str:
        target = _resolved(origin, match[0])
        if target is None:
            return match[0]
        return posixpath.relpath(_site_uri(target), PurePosixPath(uri).parent.as_posix())

    return _TARGET.sub(replaced, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Ends the build if a page refers to a file that is not there, or loads something from elsewhere."""
    site = Path(config["site_dir"])
    wrong = []
    for page in sorted(site.rglob("*.html")):
        text = page.read_text()
        wrong += [f"{page.name} loads {found}" for found in _LOADED.findall(text) if urlsplit(found).netloc]
        for reference in _REFERENCE.findall(text):
            address = urlsplit(reference)
            target = page.parent / unquote(address.path)
            if not address.scheme and page.name != "404.html" and not target.exists():
                wrong.append(f"{page.name} refers to {reference}")
    if wrong:
        raise PluginError("\n".join(["the site is not complete:", *wrong]))


def _outside(page: str, markdown: str) -> Iterator[str]:
    for match in _TARGET.finditer(markdown):
        if (target := _resolved(page, match[0])) is not None and not target.startswith("docs/"):
            yield target


def _resolved(page: str, link: str) -> str | None:
    """A link of a page, as a path in the repository; None if it leads to no file of it."""
    if urlsplit(link).scheme:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return target if not target.startswith("..") and (ROOT / target).is_file() else None


def _site_uri(target: str) -> str:
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{FOLDER}/{target}" + (".md" if Path(target).suffix in SOURCE else "")


def _file(target: str, config: Any) -> File:
    if (language := SOURCE.get(Path(target).suffix)) is None:
        return File.generated(config, _site_uri(target), abs_src_path=str(ROOT / target))
    text = (ROOT / target).read_text()
    return File.generated(config, _site_uri(target), content=f"# {target}\n\n`````{language}\n{text}\n`````\n")
