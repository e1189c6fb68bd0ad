"""`poss allocate`: propose an allocation from the drift of a single layer (the paper's third open question).

A specialist serves positions whose features have drifted about as far. So of all ways to cut K positions into S runs,
the proposal leaves the least drift variance within its runs: least squares about each run's mean.
"""

import logging
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from poss_lightning.evaluation.cells import packed_cells
from poss_lightning.evaluation.records import as_object
from poss_lightning.files import read_json
from poss_lightning.ranges import Position, check_numbers
from poss_lightning.reports.scalars import read_scalars, series_by_depth

DRIFT_TAG = "val_drift_l2"
UNTRAINED = 0.95  # drift at the first position, relative to the feature, of a layer that has learnt nothing
logger = logging.getLogger(__name__)


@check_numbers
def allocate(run: str, depth: Position | None = None) -> None:
    """Propose an allocation for every number of specialists, from the drift that a single layer's training logged.

    Args:
        run: folder of the training with its TensorBoard file, or of a cell of a sweep.
        depth: positions to allocate; all that were logged by default.
    """
    drift = read_drift(run, depth)
    if drift[0] >= UNTRAINED or drift[-1] < drift[0]:
        logger.warning(
            "%s: the layer looks untrained, so do not trust these allocations. The drift of a trained one is below 1, "
            "which is that of zeros, and grows with depth",
            run,
        )
    specialists = range(1, len(drift) + 1)
    proposed = [propose(drift, count) for count in specialists]
    within = [f"{100 * variance_within(drift, runs):.1f} %" for runs in proposed]
    table = pd.DataFrame({"specialists": specialists, "allocation": map(str, proposed), "drift within runs": within})
    print(f"Drift by depth: {', '.join(f'{value:.3f}' for value in drift)}\n\n{table.to_string(index=False)}")


def read_drift(run: str, depth: int | None = None) -> list[float]:
    """The last relative L2 distance by depth that a run logged, (K,).

    Raises:
        FileNotFoundError: no such folder.
        ValueError: it has no such scalars, those of several runs or of specialists, or fewer depths than asked for.
    """
    configs = {path: read_json(path) for path in sorted(Path(run).glob("draft-*/config.json"))}
    for cell in packed_cells(run):
        configs[cell.folder] = as_object(as_object(as_object(cell.facts.get("run")).get("methods")).get(cell.choice))
    for place, config in configs.items():
        if isinstance(allocation := config.get("allocation"), list) and len(allocation) > 1:
            raise ValueError(f"{place} is of specialists, {allocation}: drift is read of a single layer's training")
    drifts = [depths for scalars in read_scalars(run).values() if (depths := series_by_depth(scalars, DRIFT_TAG))]
    if len(drifts) != 1:
        raise ValueError(
            f"{run} holds {len(drifts)} runs that logged {DRIFT_TAG}; give the folder of one, the training of a draft "
            "of kind eagle2 (poss fit --name NAME), which logs it when it validates"
        )
    drift = [series[-1][1] for series in drifts[0].values()]
    if depth is not None and depth > len(drift):
        raise ValueError(f"depth is {depth}; {run} logged the drift of {len(drift)} positions")
    return drift[:depth]


def propose(drift: Sequence[float], specialists: int) -> list[int]:
    """The allocation to this number of specialists that leaves the least drift variance within its runs."""
    cuts = combinations(range(1, len(drift)), specialists - 1)
    allocations = ([stop - start for start, stop in pairwise((0, *cut, len(drift)))] for cut in cuts)
    return min(allocations, key=lambda runs: variance_within(drift, runs))


def variance_within(drift: Sequence[float], allocation: Sequence[int]) -> float:
    """Share of the drift's variance over positions that is left within the runs: 1 for one run, 0 for one each."""
    values = np.asarray(drift, dtype=float)
    runs = np.split(values, np.cumsum(allocation)[:-1])
    total = values.var() * len(values)
    return float(sum(run.var() * len(run) for run in runs) / total) if total else 0.0
