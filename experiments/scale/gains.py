"""What specialists bring over one layer, setting by setting: python experiments/scale/gains.py

Both of a pair are trained alike, so each pair is compared by itself, and p is not corrected for the other settings.
"""

from pathlib import Path

from rich.console import Console

from poss_lightning.evaluation.records import depths, read_cells, read_runs
from poss_lightning.reports.compare import seed_table
from poss_lightning.reports.seeds import over_seeds

CELLS = str(Path(__file__).parent / "cells")
METHOD, REFERENCE = "poss2", "hass"


def main() -> None:
    cells, known = read_cells(CELLS), depths(read_runs(CELLS))
    for setting in dict.fromkeys(choice.partition(".")[2] for choice, _ in cells):
        pair = [name + ("." + setting if setting else "") for name in (METHOD, REFERENCE)]
        own = {cell: records for cell, records in cells.items() if cell[0] in pair}
        rows = [
            row for row in over_seeds(own, pair[1], depths=known) if (row.suite, row.measure) == ("all", "tau_macro")
        ]
        Console().print(seed_table(f"tau_macro, {setting or 'as the others'}", rows, pair[1]))


if __name__ == "__main__":
    main()
