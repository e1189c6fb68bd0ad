"""Prose names only what exists: classes, their members, and files."""

import ast
import functools
import re
from pathlib import Path
from pydoc import locate

import pytest
from lightning.pytorch import callbacks

import poss_lightning
from tests.support.documents import DOCUMENTS, ROOT

PACKAGE = ROOT / "poss_lightning"
PAGES = [page for page in DOCUMENTS if not page.is_relative_to(ROOT / "experiments")]
PAGES += sorted((ROOT / "docs" / "api").glob("*.md"))

BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
CLASS = re.compile(r"`([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)(?:\.(\w+))?(?:\([^`\n]*)?`")  # and a member of it
FILE = re.compile(r"`((?:[\w/]+/)?\w+\.py)`")
PLACE = re.compile(r"((?:`[\w.]+`(?:, | and ))+)`([\w/]+\.py)`")  # names, and the file that defines them
DOTTED = re.compile(r"\bposs_lightning(?:\.\w+)+")  # in examples too
ELSEWHERE = {  # classes of other projects; and Python.h
    "Cache", "CustomSpecAlgo", "Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM", "LightningDataModule",
    "LightningModule", "LlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle4",
    "Python", "RadixAttention",
}  # fmt: skip


def assigned(node: ast.AST) -> set[str]:
    """Names and attributes that are assigned anywhere below a node."""
    found = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
    named = {ast.Name: "id", ast.Attribute: "attr"}
    return {getattr(each, named[type(each)]) for each in found if type(each) in named}


@functools.cache
def definitions(file: Path) -> dict[str, set[str]]:
    """Classes, functions and globals of a module; of a class also members, attributes and names of bases."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            found[node.name] = methods | assigned(node) | {ast.unparse(base) for base in node.bases}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = set()
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= {name: set() for name in assigned(node)}
    return found


@functools.cache
def everything() -> dict[str, set[str]]:
    """The definitions of all modules; classes of one name have the members of all."""
    found: dict[str, set[str]] = {}
    for folder in (PACKAGE, ROOT / "tests", ROOT / "benchmarks"):
        for name, members in (pair for file in folder.rglob("*.py") for pair in definitions(file).items()):
            found[name] = found.get(name, set()) | members
    return found


def has(name: str, member: str) -> bool:
    members = everything()[name]
    return member in members or any(has(base, member) for base in members & everything().keys() - {name})


@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_exists_in_lines_of_at_most_120_characters(document):
    """Tables and indented commands may be longer."""
    text = BLOCK.sub("", document.read_text())
    for line in text.splitlines():
        assert len(line) <= 120 or line.lstrip().startswith("|") or line.startswith("    "), line
    for name in {*DOTTED.findall(document.read_text())}:
        assert locate(name) is not None, f"{name} is nowhere"
    for name, member in CLASS.findall(text):
        assert name in everything() or name in ELSEWHERE or hasattr(callbacks, name), f"{name} is nowhere"
        assert not member or name not in everything() or has(name, member), f"{name} has no {member}"
    for file in FILE.findall(text):
        place = file.split("/")[0]
        if "/" in file and ((ROOT / place).is_dir() or (PACKAGE / place).is_dir()):
            assert (ROOT / file).is_file() or (PACKAGE / file).is_file(), f"{file} is nowhere"
    for names, file in PLACE.findall(text):
        if (module := PACKAGE / file).is_file():
            for name in re.findall(r"`(\w+)", names):
                assert name in definitions(module), f"{file} has no {name}"


def test_an_example_in_a_docstring_has_the_section_that_the_site_draws_as_code():
    kinds = ast.FunctionDef | ast.ClassDef | ast.Module
    trees = [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")]
    docs = [ast.get_docstring(node) or "" for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    assert all("Examples:\n" in doc for doc in docs if ">>>" in doc)


def test_the_messages_in_troubles_are_the_package_s():
    """Each `message` in the table's first column, from one … to the next."""
    nodes = [node for file in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    texts = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    rows = [line.split(" | ")[0] for line in (ROOT / "docs" / "troubles.md").read_text().splitlines()]
    messages = [each for row in rows if row.startswith("| `") for each in re.findall("`([^`]+)`", row)]
    pieces = [piece.strip(" ,:()") for message in messages for piece in message.split("…")]
    assert len(messages) > 20 and not [piece for piece in pieces if piece not in texts]


def test_the_api_page_lists_the_names_of_the_package():
    listed = re.findall(r"^\| \[`(\w+)`\]", (ROOT / "docs" / "api" / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(poss_lightning.__all__)
