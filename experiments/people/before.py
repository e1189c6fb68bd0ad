"""The heads before and after they read people's kinds of text: python experiments/people/before.py"""

from dataclasses import replace
from pathlib import Path

from poss_lightning.evaluation.records import depths, read_records, read_runs
from poss_lightning.reports.compare import show
from poss_lightning.reports.summary import summarise
from poss_lightning.reports.tables import method_tables

HERE = Path(__file__).parent
CELLS = {"before": HERE.parent / "heads" / "cells", "after": HERE / "cells"}


def main() -> None:
    for head in ("hass", "poss2"):
        answers, known = [], {}
        for when, cells in CELLS.items():
            folder, name = [cells / head / "seed-0"], f"{head}, {when}"
            answers += [replace(record, method=name) for record in read_records(folder)]
            known[name] = depths(read_runs(folder))[head]
        reference = f"{head}, before"
        show(method_tables(summarise(answers, None, reference, known), None, reference))


if __name__ == "__main__":
    main()
