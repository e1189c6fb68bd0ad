"""What comes with the package: `poss list` shows it, and prints a config to edit."""

from importlib.resources import files

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import CONFIG, SHIPPED, shipped
from poss_lightning.evaluation.suites import HUB, HUB_SUITES, own_suites, read_suites
from poss_lightning.files import conf, conf_names

CORPUS = files("poss_lightning") / "corpus" / "data" / "smollm2-135m.jsonl.gz"  # written by the embedded target


def list(name: str | None = None) -> None:
    """List configs, drafts and suites of questions by the names that other commands take, with a line about each.

    Args:
        name: name of a config, e.g. draft/poss2.yaml, to print instead: poss list draft/poss2.yaml > my.yaml

    Raises:
        FileNotFoundError: no config of that name.
    """
    if name is not None:
        short = name.removeprefix("conf/")
        if short not in conf_names():
            raise FileNotFoundError(f"name is {name!r}, which is not a config of the package; poss list shows them")
        return print(conf(short).read_text(), end="")
    first_lines = {name: conf(name).read_text().partition("\n")[0].removeprefix("# ") for name in conf_names()}
    own = {name: f"{len(read_suites([name]))} questions" for name in own_suites()}
    hub = {HUB + name: suite.repo for name, suite in HUB_SUITES.items()}
    sections = {
        "configs, for --config NAME; poss list NAME > my.yaml gives one to edit": first_lines,
        "drafts of the embedded target, for --draft NAME and --drafts.ANY NAME": {n: _draft(n) for n in shipped()},
        'suites of questions, for --suites "[NAME]"; those of the hub need a network': own | hub,
    }
    for title, rows in sections.items():
        width = max(map(len, rows))
        print(f"{title}\n" + "".join(f"  {name:<{width}}  {line}\n" for name, line in rows.items()))


def _draft(name: str) -> str:
    path = SHIPPED / name / CONFIG
    config = DraftConfig.from_json(path.read_text(), path)
    return f"allocation {[*config.allocation]}, proposes {config.vocabulary_size or config.target.vocab_size:,} tokens"
