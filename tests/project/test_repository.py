"""The repository as a whole: imports that point down, one list of dependencies, links that lead somewhere."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import yaml

from poss_lightning.draft.folder import SHIPPED, shipped
from poss_lightning.serving import plugin
from tests.support.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "poss_lightning"

# The table in ARCHITECTURE.md. A room is a module or a folder directly below poss_lightning/.
TABLE = re.findall(r"^\| (\d) \| (.+?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
LEVEL = {room: int(level) for level, rooms in TABLE for room in re.findall(r"`(\w+)/?`", rooms)}

# Where these libraries may be imported: rooms, or single modules of a room.
LIGHTNING = ("features.datamodule", "training", "evaluation.probe")
LIBRARIES = {
    **dict.fromkeys(("lightning", "pytorch_lightning", "lightning_fabric"), LIGHTNING),
    "transformers": ("target_model", "interop", "api"),
    "vllm": ("serving",),
}


def modules() -> Iterator[tuple[Path, str, list[tuple[int, str]]]]:
    """File and dotted name below the package of every module; line and dotted name of each import, in functions too.

    Imports below `if TYPE_CHECKING:` do not happen in a run.
    """
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text(), str(path)))]
        typing = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        skipped = {each for node in typing for each in ast.walk(node)}
        found = []
        for node in (node for node in nodes if node not in skipped):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.module and not node.level, f"{path}:{node.lineno}: imports are absolute"
                # `from poss_lightning import files` names a room, `from poss_lightning import __version__` does not
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        _, *inside = path.relative_to(ROOT).with_suffix("").parts
        yield path, ".".join(part for part in inside if part != "__init__") or "__init__", found


def may_import(module: str, name: str) -> bool:
    """Libraries in their places, and rooms of lower levels; in __init__ none, as `import poss_lightning` is free."""
    (top, *rest), room = name.split("."), module.split(".")[0]
    if places := LIBRARIES.get(top):
        return any(f"{module}.".startswith(f"{place}.") for place in places)
    return top != PACKAGE or rest[0] not in LEVEL or rest[0] == room or LEVEL[rest[0]] < LEVEL.get(room, 0)


def test_imports_point_down():
    found = [*modules()]
    assert {module.split(".")[0] for _, module, _ in found} == LEVEL.keys() | {"__init__"}
    wrong = [
        f"{path}:{line}: {module} must not import {name}"
        for path, module, own in found
        for line, name in own
        if not may_import(module, name)
    ]
    assert not wrong, "\n".join(["imports against ARCHITECTURE.md:", *wrong])


def test_environment_lists_the_dependencies_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert pip["pip"] == project["dependencies"]
    assert conda == [f"python{project['requires-python']}", "pip"]


def test_vllm_finds_our_plugin_and_the_plugin_our_model():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"poss_lightning": f"{plugin.__name__}:{plugin.register.__name__}"}
    module, name = plugin.MODEL.split(":")
    assert f"class {name}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()


READ = ("corpus/data/*.jsonl.gz", "evaluation/prompts/*.jsonl", "reports/page.html.j2")  # files that the package reads


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout knows what git ignores")
def test_the_wheel_has_what_the_package_reads():
    """Hatchling takes all of the package that git does not ignore, and conf/ by a line of its own."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": [PACKAGE], "force-include": {"conf": f"{PACKAGE}/conf"}}
    found = [[*(ROOT / PACKAGE).glob(pattern)] for pattern in READ]
    assert all(found), found
    drafts = [file for name in shipped() for file in (SHIPPED / name).iterdir()]
    files = [*chain(*found), *drafts, *(ROOT / "conf").rglob("*.yaml")]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    assert (ignored.returncode, ignored.stdout) == (1, ""), f"git ignores {ignored.stdout}{ignored.stderr}"


CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_local_links_lead_somewhere(path):
    """To a file, and in a page to a heading; except in code."""
    for link in map("".join, LINK.findall(CODE.sub("", path.read_text()))):
        file, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", link):
            page = path.parent / file if file else path
            assert page.is_file(), link
            assert not anchor or page.suffix != ".md" or anchor in anchors(page), link


def anchors(page: Path) -> set[str]:
    """Names of a page's headings in links, as MkDocs makes them."""
    headings = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_a_planted_fault_fits_the_code(mutant):
    """Each could be planted, once, and its tests exist; `make mutants` plants them."""
    text = (ROOT / PACKAGE / mutant.file).read_text()
    assert text.count(mutant.right) == 1
    ast.parse(text.replace(mutant.right, mutant.wrong))
    assert all((ROOT / "tests" / name).is_file() for name in mutant.tests.split())
