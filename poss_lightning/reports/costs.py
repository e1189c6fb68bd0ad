"""Whether drafting pays on the machine that decoded, and why: what `tree: auto` measured there, from run.json."""

from typing import Any

from poss_lightning.decoding.budget import Costs
from poss_lightning.reports.statistics import Comparison
from poss_lightning.reports.tables import Cell, Table

TREES = ((2, 8), (4, 16), (6, 60))  # draft steps and nodes of the rounds that are shown
TITLE = "What drafting costs on this machine, ms; a round pays where it brings more tokens than its break-even τ"


def read_costs(runs: dict[str, dict[str, Any]]) -> dict[str, Costs]:
    """What was measured for each method, where a run's `run.json` tells; of several runs the last."""
    found = {}
    for run in runs.values():
        for method, costs in run.get("costs", {}).items():
            found[method] = Costs(costs["draft_step"], {int(n): cost for n, cost in costs["verify"].items()})
    return found


def cost_table(costs: dict[str, Costs], speed_ups: dict[str, Comparison | None]) -> Table:
    """A row a method: its parts, the break-even of some rounds, and what came of it against plain decoding."""
    columns = [("plain", "step"), ("draft", "step")]
    columns += [("verify", f"{nodes} nodes") for _, nodes in TREES]
    columns += [(f"{steps} steps,", f"{nodes} nodes:", "τ >") for steps, nodes in TREES]
    columns += [("drafting", "pays")]
    rows = []
    for method, own in costs.items():
        milliseconds = [own.verify[1], own.draft_step, *(own.verify_seconds(nodes) for _, nodes in TREES)]
        cells = [Cell(f"{1000 * seconds:.1f}") for seconds in milliseconds]
        cells += [Cell(f"{own.break_even(steps, nodes):.2f}") for steps, nodes in TREES]
        rows.append(([method], [*cells, Cell(verdict(speed_ups.get(method)))]))
    return Table(TITLE, ["method"], columns, rows)


def verdict(speed_up: Comparison | None) -> str:
    """Whether a speed-up is above 1, by its interval."""
    if speed_up is None:
        return "not timed"
    if speed_up.low > 1:
        return "yes"
    return "no" if speed_up.high < 1 else "not shown"
