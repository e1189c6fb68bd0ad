"""What comes with the package: each name that is listed is one that commands take, with a line about it."""

from poss_lightning import shipped
from poss_lightning.draft.folder import find_draft
from poss_lightning.evaluation.hub import KNOWN
from poss_lightning.evaluation.suites import own_suites
from poss_lightning.files import conf, find_config
from tests.support.command import run_in


def test_every_name_is_listed_with_a_line_and_taken_by_commands(tmp_path):
    configs, drafts, suites = (dict(rows) for rows in (shipped.configs(), shipped.drafts(), shipped.suites()))
    files = {path.resolve() for path in conf("demo.yaml").parent.rglob("*.yaml")}
    assert {conf(name).resolve() for name in configs} == files and all(map(find_config, configs))
    assert set(drafts) == {"embedded-hass", "embedded-poss2"} and all(map(find_draft, drafts))
    assert list(suites) == [*own_suites(), *(f"hub:{name}" for name in KNOWN)]
    result = run_in(tmp_path, "list")
    assert result.code is None and not list(tmp_path.iterdir())
    lines = {line.split()[0]: line for line in result.out.splitlines() if line.startswith("  ")}
    assert all(lines[name].endswith(text) and text for name, text in (configs | drafts | suites).items())
    assert all(conf(name).read_text().startswith(f"# {text}\n") for name, text in configs.items())
    assert "3 specialists for 6 positions, allocation [2, 2, 2]; proposes 32,768 tokens" in lines["embedded-poss2"]


def test_a_config_is_printed_to_edit_and_any_other_name_is_refused(tmp_path):
    assert run_in(tmp_path, "list", "conf/draft/poss2.yaml").out == conf("draft/poss2.yaml").read_text()
    for name, near in (("draft/pos2.yaml", "did you mean draft/poss2.yaml? "), ("../pyproject.toml", "")):
        words = f"name is {name!r}, which is not a config of the package; {near}poss list shows them"
        assert run_in(tmp_path, "list", name).code == f"poss list: {words}"
