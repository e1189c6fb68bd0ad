"""Drafts before and after they read more, prompt by prompt: python experiments/before.py heads people"""

import sys
from dataclasses import replace
from pathlib import Path

from poss_lightning.evaluation.records import find_depths, read_records, read_runs
from poss_lightning.reports.compare import print_tables
from poss_lightning.reports.summary import summarise
from poss_lightning.reports.tables import method_tables

HERE = Path(__file__).parent


def main(before: str, after: str) -> None:
    for draft in ("hass", "poss2"):
        answers, known = [], {}
        for sweep in (before, after):
            folder, name = HERE / sweep / "cells" / draft / "seed-0", f"{draft} of {sweep}"
            answers += [replace(record, method=name) for record in read_records(folder)]
            known[name] = find_depths(read_runs(folder))[draft]
        reference = f"{draft} of {before}"
        summaries = summarise(answers, baseline=None, reference=reference, depths=known)
        print_tables(method_tables(summaries, None, reference))


if __name__ == "__main__":
    main(*sys.argv[1:])
