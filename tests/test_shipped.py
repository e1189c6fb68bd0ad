"""What comes with the package: each name that is listed is one that commands take, with a line about it."""

from poss_lightning.draft.folder import find_draft, shipped
from poss_lightning.evaluation.suites import HUB_SUITES, own_suites
from poss_lightning.files import conf
from tests.support.command import run_in


def test_every_name_is_listed_with_a_line_and_taken_by_commands(tmp_path):
    folder = conf("demo.yaml").parent
    configs = [path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")]
    suites = [*own_suites(), *(f"hub:{name}" for name in HUB_SUITES)]
    result = run_in(tmp_path, "list")
    assert result.code is None and not list(tmp_path.iterdir())
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines() if line.startswith("  "))
    assert {*lines} == {*configs, *shipped(), *suites} and all(lines.values())
    assert all(conf(name).read_text().startswith(f"# {lines[name]}\n") for name in configs)
    assert set(shipped()) == {"embedded-hass", "embedded-poss2"} and all(map(find_draft, shipped()))
    assert lines["embedded-poss2"] == "allocation [2, 2, 2], proposes 32,768 tokens"


def test_a_config_is_printed_to_edit_and_any_other_name_is_refused(tmp_path):
    assert run_in(tmp_path, "list", "conf/draft/poss2.yaml").out == conf("draft/poss2.yaml").read_text()
    words = "name is '../pyproject.toml', which is not a config of the package; poss list shows them"
    assert run_in(tmp_path, "list", "../pyproject.toml").code == f"poss list: {words}"
