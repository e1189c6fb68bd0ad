"""What specialists bring over one layer, setting by setting: python experiments/scale/gains.py

Both of a pair are trained alike, so each pair is compared by itself, and p is not corrected for the other settings.
"""

from dataclasses import replace
from pathlib import Path

from poss_lightning.evaluation.records import find_depths, read_cells, read_runs
from poss_lightning.reports.compare import print_tables
from poss_lightning.reports.seeds import summarise_seeds
from poss_lightning.reports.tables import seed_tables

METHOD, REFERENCE = "poss2", "hass"
HERE = Path(__file__).parent
CELLS = [HERE / "cells", *(HERE.parent / "methods" / "cells" / choice for choice in (METHOD, REFERENCE))]


def main() -> None:
    cells, known = read_cells(CELLS), find_depths(read_runs(CELLS))
    tables = []
    for setting in dict.fromkeys(choice.partition(".")[2] for choice, _ in cells):
        pair = [name + ("." + setting if setting else "") for name in (METHOD, REFERENCE)]
        own = {cell: records for cell, records in cells.items() if cell[0] in pair}
        means, gains, *_ = seed_tables(summarise_seeds(own, pair[1], depths=known), pair[1])
        tables += [replace(means, title=setting or "80 steps, all texts, the target's width"), gains]
    print_tables(tables)


if __name__ == "__main__":
    main()
