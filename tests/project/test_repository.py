"""The repository as a whole: imports that point down, one list of dependencies, links that lead somewhere."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest
import yaml

from poss_lightning.draft.folder import SHIPPED, shipped
from tests.support.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "poss_lightning"

# The picture in ARCHITECTURE.md. A room is a module or a folder directly below poss_lightning/.
LEVELS = {
    0: {"files", "machine", "ranges", "terminal", "versions"},
    1: {"clock", "configs", "ranks", "work", "sampling", "losses", "metrics", "plots"},
    2: {"target"},
    3: {"corpus"},
    4: {"draft", "features"},
    5: {"training", "decoding", "interop"},
    6: {"evaluation", "serving"},
    7: {"reports", "extract", "synthesize", "shipped"},
    8: {"demo", "sweep"},
    9: {"cli"},
}
LEVEL = {room: level for level, rooms in LEVELS.items() for room in rooms}

# Where these libraries may be imported: rooms, or single modules of a room.
LIBRARIES = {
    "lightning": ("features.datamodule", "training", "evaluation.probe"),
    "transformers": ("target", "interop"),
    "vllm": ("serving",),
}
ALIASES = {"pytorch_lightning": "lightning", "lightning_fabric": "lightning"}


def imports(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, also inside functions; `package` resolves relative ones.

    Imports below `if TYPE_CHECKING:` do not happen in a run.
    """
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {each for node in typing for each in ast.walk(node)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from poss_lightning import target` names a room, `from poss_lightning import __version__` does not
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def modules() -> Iterator[tuple[str, str, list[tuple[int, str]]]]:
    """File, dotted name below the package, and imports of every module."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        file = path.relative_to(ROOT)
        _, *inside = file.with_suffix("").parts
        found = imports(ast.parse(path.read_text(), str(path)), [PACKAGE, *inside[:-1]])
        yield str(file), ".".join(part for part in inside if part != "__init__") or "__init__", list(found)


def violations() -> list[str]:
    """Imports against the picture, as `file:line: what is wrong`."""
    return [
        f"{file}:{line}: {wrong}"
        for file, module, found in modules()
        for line, name in found or [(1, module)]
        if (wrong := judge(module, name))
    ]


def judge(module: str, name: str) -> str | None:
    """Why a module must not import `name`; None if it may."""
    top, *rest = name.split(".")
    room, library = module.split(".")[0], ALIASES.get(top, top)
    if room not in LEVEL and room != "__init__":
        return f"room {room!r} has no level; give it one in LEVELS of {__file__}"
    allowed = LIBRARIES.get(library)
    if allowed and not any(f"{module}.".startswith(f"{place}.") for place in allowed):
        return f"imports {library}; only {', '.join(allowed)} may"
    if top != PACKAGE or rest[0] not in LEVEL or rest[0] == room:
        return None
    if room == "__init__":
        return f"the package's __init__ imports {rest[0]}; it may import no room, as `import poss_lightning` is free"
    mine, theirs = LEVEL[room], LEVEL[rest[0]]
    return None if theirs < mine else f"{room} (level {mine}) imports {rest[0]} (level {theirs}); imports point down"


def test_imports_point_down():
    assert not (found := violations()), "\n".join(["imports against ARCHITECTURE.md:", *found])


def test_imports_go_in_no_circle():
    """Not even inside functions."""
    found = {f"{PACKAGE}.{module}": {name for _, name in own} for _, module, own in modules()}
    graph = {
        module: {place for name in names for place in (name, name.rpartition(".")[0])} & found.keys() - {module}
        for module, names in found.items()
    }
    assert list(TopologicalSorter(graph).static_order())  # else a CycleError names the circle


def test_environment_lists_the_dependencies_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert pip["pip"] == project["dependencies"]
    assert conda == [f"python{project['requires-python']}", "pip"]


READ = (  # files that the package reads
    "corpus/data/*.jsonl.gz",
    "evaluation/prompts/*.jsonl",
    "reports/page.html.j2",
)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout knows what git ignores")
def test_the_wheel_has_what_the_package_reads():
    """Hatchling takes all of the package that git does not ignore, and conf/ by a line of its own."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": [PACKAGE], "force-include": {"conf": f"{PACKAGE}/conf"}}
    found = {pattern: list((ROOT / PACKAGE).glob(pattern)) for pattern in READ}
    assert all(found.values()), found
    drafts = [file for name in shipped() for file in (SHIPPED / name).iterdir()]
    files = [*chain.from_iterable(found.values()), *drafts, *(ROOT / "conf").rglob("*.yaml")]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    assert (ignored.returncode, ignored.stdout) == (1, ""), f"git ignores {ignored.stdout}{ignored.stderr}"


LINK = re.compile(r"\]\(<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)


def broken(document: Path) -> list[str]:
    """Local links of a Markdown file that lead nowhere, as `file:line: link`, except in code."""
    code = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
    text = code.sub(lambda found: "\n" * found.group().count("\n"), document.read_text())  # lines keep their numbers
    found = []
    for match in LINK.finditer(text):
        link = next(filter(None, match.groups())).partition("#")[0]
        if link and not re.match(r"[a-z]+:", link) and not (document.parent / link).exists():
            found.append(f"{document.name}:{text.count(chr(10), 0, match.start()) + 1}: {link} does not exist")
    return found


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_local_links_lead_somewhere(path):
    assert broken(path) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_a_planted_fault_fits_the_code(mutant):
    """Each could be planted, once, and its tests exist; `make mutants` plants them."""
    text = (ROOT / PACKAGE / mutant.file).read_text()
    assert text.count(mutant.right) == 1
    ast.parse(text.replace(mutant.right, mutant.wrong))
    assert all((ROOT / "tests" / name).is_file() for name in mutant.tests.split())
