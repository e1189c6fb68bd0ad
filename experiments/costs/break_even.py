"""What specialists must bring to pay, and what they bring: python experiments/costs/break_even.py

A draft whose round takes r times as long pays from r times as many tokens a round on. Costs are those of `decode.json`
(random weights), gains those of experiments/methods (trained), which measured the same drafts.
"""

import json
from pathlib import Path
from statistics import median

from poss_lightning.evaluation.records import find_depths, read_cells, read_runs
from poss_lightning.reports.scalars import read_scalars
from poss_lightning.reports.seeds import summarise_seeds
from poss_lightning.reports.statistics import Comparison
from poss_lightning.reports.summary import ALL

HERE = Path(__file__).parent
METHODS = HERE.parent / "methods"
TRAINED = {  # names in decode.json -> choices of experiments/methods
    "[6]": "hass",
    "[6] wide": "hass-wide",
    "[3, 3]": "poss3",
    "[2, 2, 2]": "poss2",
    "[2, 2, 2] shared": "poss2-shared",
    "[1] * 6": "poss1",
}


def pace(choice: str) -> float:
    """Slots a second in training, the median of its trainings."""
    runs = read_scalars(METHODS / "cells" / choice).values()
    return median(scalars["throughput/slots_per_second"][-1][1] for scalars in runs)


def main() -> None:
    costs = json.loads((HERE / "decode.json").read_text())["costs"]
    rows = summarise_seeds(read_cells(METHODS), "hass", depths=find_depths(read_runs(METHODS)))
    taus = {row.choice: row for row in rows if (row.suite, row.measure) == (ALL, "tau_micro")}
    hass = taus["hass"].mean.value
    print(f"{'':18}{'weights':>9}{'cache':>9}  {'a round':20}{'must gain':>10}{'training':>10}  gains")
    for name, choice in TRAINED.items():
        cost, gain = costs[name], taus[choice].gain
        ratio = cost["round_ratio"]
        memory = f"{cost['weights_MB']:>6.1f} MB{cost['cache_bytes_a_token']:>7} B"
        time = f"{ratio['median']:.3f} ({ratio['low']:.2f}…{ratio['high']:.2f})   {100 * (ratio['median'] - 1):>8.1f} %"
        print(f"{name:18}{memory}  {time}{pace(choice):>8.0f}/s  {_per_cent(gain, hass) if gain else ''}")


def _per_cent(gain: Comparison, of: float) -> str:
    value, low, high = (100 * bound / of for bound in (gain.value, gain.low, gain.high))
    return f"{value:+.1f} % ({low:+.1f}…{high:+.1f})"


if __name__ == "__main__":
    main()
