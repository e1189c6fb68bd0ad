"""The repository keeps its promises: one list of dependencies, imports that point down, links that lead somewhere."""

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
from poss_lightning.target import embedded
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
    """Yield (line, dotted name) of every import, also inside functions; `package` resolves relative ones.

    Those for type checkers alone, below `if TYPE_CHECKING:`, are no imports of a run.
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


def violations(root: Path) -> list[str]:
    """Imports in `root`/poss_lightning that break the picture, as `file:line: what is wrong; what would be right`."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        module = path.relative_to(root).with_suffix("").parts  # poss_lightning, room, …
        package = list(module[:-1])
        inside = ".".join(part for part in module[1:] if part != "__init__")
        room = module[1]
        if room != "__init__" and room not in LEVEL:
            found.append(f"{path.relative_to(root)}:1: room {room!r} has no level; give it one in LEVELS of {__file__}")
            continue
        for line, name in imports(ast.parse(path.read_text(), str(path)), package):
            if wrong := judge(inside, room, name):
                found.append(f"{path.relative_to(root)}:{line}: {wrong}")
    return found


def judge(inside: str, room: str, name: str) -> str | None:
    """Why module `inside` of `room` must not import `name`, or None if it may."""
    top, *rest = name.split(".")
    library = ALIASES.get(top, top)
    if library in LIBRARIES:
        allowed = LIBRARIES[library]
        if not any(f"{inside}.".startswith(f"{place}.") for place in allowed):
            return f"imports {library}; only {', '.join(allowed)} may"
    if top != PACKAGE or rest[0] not in LEVEL or rest[0] == room:
        return None
    if room == "__init__":
        return (
            f"the package's __init__ imports {rest[0]}; it may import no room, so that `import poss_lightning` is free"
        )
    mine, theirs = LEVEL[room], LEVEL[rest[0]]
    if theirs < mine:
        return None
    below = [other for level in range(mine) for other in sorted(LEVELS[level])]
    right = f"{room} may import {', '.join(below)}" if below else f"{room} may import no other room"
    return f"{room} (level {mine}) imports {rest[0]} (level {theirs}), imports point down only; {right}"


def test_imports_point_down():
    assert not (found := violations(ROOT)), "\n".join(["imports against ARCHITECTURE.md:", *found])


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        (
            "draft/unroll.py",
            "import torch\nfrom poss_lightning.decoding.trees import Tree\n",
            ":2: draft (level 4) imports",
        ),
        ("draft/unroll.py", "from poss_lightning import features\n", ":1: draft (level 4) imports features (level 4)"),
        ("decoding/engine.py", "from ..training import module\n", ":1: decoding (level 5) imports training (level 5)"),
        ("losses.py", "def late():\n    from poss_lightning import sampling\n", "losses may import files, machine"),
        (
            "draft/layer.py",
            "import lightning.pytorch as pl\n",
            "only features.datamodule, training, evaluation.probe may",
        ),
        ("__init__.py", "from poss_lightning.target import model\n", "it may import no room"),
        ("utils.py", "import os\n", "room 'utils' has no level"),
        ("draft/unroll.py", "from . import layer\nfrom .layer import x\nfrom ..target.model import y\n", None),
        ("cli.py", "from poss_lightning import demo, sweep\nfrom poss_lightning.decoding import engine\n", None),
    ],
)
def test_imports_against_the_picture_are_named(tmp_path, file, source, expected):
    write(tmp_path, file, source)
    found = violations(tmp_path)
    assert not found if expected is None else found[0].startswith(f"{PACKAGE}/{file}:") and expected in found[0]


def write(root: Path, file: str, source: str) -> None:
    path = root / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def import_graph() -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, also inside functions."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / PACKAGE).rglob("*.py")}
    graph = {}
    for module, path in files.items():
        found = {name for _, name in imports(ast.parse(path.read_text()), module.split(".")[:-1])}
        found |= {name.rpartition(".")[0] for name in found}  # `from module import name`
        graph[module] = found & files.keys() - {module}
    return graph


def test_imports_go_in_no_circle():
    assert list(TopologicalSorter(import_graph()).static_order())  # else a CycleError names the circle


def test_only_the_command_line_reads_arguments():
    """Functions call functions: nothing in the package runs a command, or reads what one prints."""
    modules = {path.name: path.read_text() for path in (ROOT / PACKAGE).rglob("*.py") if path.name != "cli.py"}
    assert not [name for name, text in modules.items() if "cli.run" in text]


def test_environment_lists_the_dependencies_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert pip["pip"] == project["dependencies"]
    assert conda == [f"python{project['requires-python']}", "pip"]


def test_a_first_day_needs_nothing_that_is_not_named():
    assert f"`{embedded.INSTALL}`" in (ROOT / "README.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"\.\[(\w+)\]", (ROOT / "notebooks" / "README.md").read_text())
    assert named == ["notebooks"] and any(line.startswith("jupyterlab") for line in extras["notebooks"])


READ = (  # what the package reads beside its modules
    "corpus/data/*.jsonl.gz",
    "evaluation/prompts/*.jsonl",
    "evaluation/prompts/probe/*.jsonl",
    "reports/page.html.j2",
)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what is ignored is known in a checkout alone")
def test_the_wheel_has_what_the_package_reads():
    """Hatchling takes what lies in the package and git does not ignore, and conf/ by its own line."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": [PACKAGE], "force-include": {"conf": f"{PACKAGE}/conf"}}
    found = {pattern: list((ROOT / PACKAGE).glob(pattern)) for pattern in READ}
    assert all(found.values()), found
    heads = [file for name in shipped() for file in (SHIPPED / name).iterdir()]
    files = [*chain.from_iterable(found.values()), *heads, *(ROOT / "conf").rglob("*.yaml")]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    assert (ignored.returncode, ignored.stdout) == (1, ""), f"git ignores {ignored.stdout}{ignored.stderr}"


LINK = re.compile(r"\]\(<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)


def broken(document: Path) -> list[str]:
    """Local links of a Markdown file that lead nowhere, as `file:line: link`; code is left out."""
    code = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
    text = code.sub(lambda found: "\n" * found.group().count("\n"), document.read_text())  # lines keep their numbers
    found = []
    for match in LINK.finditer(text):
        link = next(filter(None, match.groups())).partition("#")[0]
        if link and not re.match(r"[a-z]+:", link) and not (document.parent / link).exists():
            found.append(f"{document.name}:{text.count(chr(10), 0, match.start()) + 1}: {link} does not exist")
    return found


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
    ],
)
def test_local_links_lead_somewhere(name):
    assert broken(ROOT / name) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_a_fault_put_in_on_purpose_fits_the_code(mutant):
    """`make mutants` runs them; here only that each would be put in, once, and that its tests are there."""
    text = (ROOT / PACKAGE / mutant.file).read_text()
    assert text.count(mutant.right) == 1
    ast.parse(text.replace(mutant.right, mutant.wrong))
    assert all((ROOT / "tests" / name).is_file() for name in mutant.tests.split())
