"""What comes with the package: `poss list` shows it, and prints a config to edit."""

from collections.abc import Iterator
from difflib import get_close_matches

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import CONFIG, SHIPPED, shipped
from poss_lightning.evaluation.hub import KNOWN
from poss_lightning.evaluation.suites import HUB, own_suites, read_suites
from poss_lightning.files import conf, conf_names

Row = tuple[str, str]  # a name, and a line about it


def list(name: str | None = None) -> None:
    """List configs, drafts and suites of questions by the names that other commands take, with a line about each.

    Args:
        name: name of a config, e.g. draft/poss2.yaml, to print instead: poss list draft/poss2.yaml > my.yaml

    Raises:
        FileNotFoundError: no config of that name.
    """
    if name is not None:
        return print(config_text(name), end="")
    sections = {
        "configs, for --config NAME; poss list NAME > my.yaml gives one to edit": configs(),
        "drafts of the embedded target, for --draft NAME and --drafts.ANY NAME": drafts(),
        'suites of questions, for --suites "[NAME]"; those of the hub need a network': suites(),
    }
    for number, (title, rows) in enumerate(sections.items()):
        rows = dict(rows)
        width = max(map(len, rows))
        print("\n" * bool(number) + title)
        print("\n".join(f"  {name:<{width}}  {line}" for name, line in rows.items()))


def config_text(name: str) -> str:
    """Return the text of a config of the package. Raises FileNotFoundError for any other name."""
    known, short = conf_names(), name.removeprefix("conf/")
    if short not in known:
        near = "".join(f"did you mean {each}? " for each in get_close_matches(short, known, 1))
        raise FileNotFoundError(f"name is {name!r}, which is not a config of the package; {near}poss list shows them")
    return conf(short).read_text()


def configs() -> Iterator[Row]:
    """List YAML files, each by its path in conf/; its first line is a comment that says what it is."""
    for name in conf_names():
        yield name, conf(name).read_text().partition("\n")[0].removeprefix("# ")


def drafts() -> Iterator[Row]:
    """List shipped drafts, each described by its config.json."""
    for name in shipped():
        path = SHIPPED / name / CONFIG
        config = DraftConfig.from_json(path.read_text(), path)
        layers, positions = len(config.allocation), sum(config.allocation)
        serve = "one layer" if layers == 1 else f"{layers} specialists"
        tokens = config.vocabulary_size or config.target.vocab_size
        yield name, f"{serve} for {positions} positions, allocation {[*config.allocation]}; proposes {tokens:,} tokens"


def suites() -> Iterator[Row]:
    """List the project's own suites, each with its first question, and those of the hub, each with its data set."""
    for name in own_suites():
        questions = read_suites([name])
        first = " ".join(questions[0].turns[0].split())
        if len(first) > 60:
            first = first[:60].rsplit(" ", 1)[0] + " …"
        yield name, f"{len(questions)} questions: {first}"
    for name, suite in KNOWN.items():
        place = ", ".join(filter(None, (suite.repo, suite.config, suite.split)))
        yield HUB + name, f"{suite.questions} questions of {place}"
