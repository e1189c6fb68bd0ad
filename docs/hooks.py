"""MkDocs' hooks: what the pages link to in the repository is copied into the site, Markdown as pages of their own.

A file PATH of the repository stands at repository/PATH in the site, and links lead there; so no page needs the address
of a code host. A link to a folder leads to its README.md or sweep.yaml.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PLACE = "repository"
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def in_repository(page: str) -> str:
    """The path in the repository of a page of the site."""
    return page.removeprefix(f"{PLACE}/") if page.startswith(f"{PLACE}/") else f"docs/{page}"


def in_site(path: str) -> str:
    """The path in the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{PLACE}/{path}"


def target(page: str, link: str) -> str | None:
    """The file of the repository that a link on a page of the site leads to; None for other links."""
    if re.match(r"[a-z]+:|#|/", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(page)), link.partition("#")[0]))
    inside = [path, *(f"{path}/{name}" for name in ("README.md", "sweep.yaml"))]
    return next((each for each in inside if (ROOT / each).is_file()), None)


def links(text: str) -> list[str]:
    """The links of Markdown, but for those in code."""
    return [found[2] for found in LINK.finditer(CODE.sub("", text))]


def on_files(files: Files, config) -> Files:
    """Add every file of the repository that a page links to, and what that links to."""
    pages = [file.src_uri for file in files.documentation_pages()]
    pages += [f"{PLACE}/{name}" for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    while pages:
        page = pages.pop()
        path = in_repository(page)
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
        if page.endswith(".md") and (ROOT / path).is_file():
            found = {target(page, link) for link in links((ROOT / path).read_text())}
            pages += [in_site(each) for each in found if each and files.get_file_from_path(in_site(each)) is None]
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Turn links to files of the repository into links within the site."""
    here = page.file.src_uri

    def change(found: re.Match) -> str:
        path = target(here, found[2])
        if path is None:
            return found[0]
        anchor = found[2].partition("#")[1:]
        return found[1] + os.path.relpath(in_site(path), posixpath.dirname(here) or ".") + "".join(anchor) + found[3]

    kept = [(found.start(), found.end()) for found in CODE.finditer(markdown)]
    return LINK.sub(
        lambda found: found[0] if any(start < found.start() < end for start, end in kept) else change(found), markdown
    )


def on_page_content(html: str, page, config, files: Files) -> None:
    """Refuse an example that is drawn as nested quotes, as one below `Example:` is: `Examples:` heads a section."""
    if re.search(r"(<blockquote>\s*){2}", html):
        raise PluginError(f"{page.file.src_uri}: a docstring's >>> is drawn as a quote: head its section `Examples:`")
