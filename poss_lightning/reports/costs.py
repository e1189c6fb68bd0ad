"""Whether drafting pays on the machine that decoded, from the costs that `tree: auto` measured there."""

from collections.abc import Mapping
from typing import Any

from poss_lightning.decoding.costs import Costs
from poss_lightning.reports.statistics import Comparison
from poss_lightning.reports.tables import Cell, Table

TREES = ((2, 8), (4, 16), (6, 60))  # draft steps and nodes of the rounds that are shown
TITLE = "What drafting costs on this machine, ms; a round pays where it brings more tokens than its break-even τ"


def read_costs(runs: dict[str, dict[str, Any]]) -> dict[str, Costs]:
    """The costs of each method, where a `run.json` has them; of several runs the last."""
    by_method: dict[str, Costs] = {}
    for run in runs.values():
        for method, costs in run.get("costs", {}).items():
            by_method[method] = Costs(costs["draft_step"], {int(n): cost for n, cost in costs["verify"].items()})
    return by_method


def cost_table(costs: Mapping[str, Costs], speed_ups: Mapping[str, Comparison]) -> Table:
    """A row for each method: its costs, the break-even of some rounds, and whether it was faster than plain.

    Trees larger than the largest that was measured have empty cells.
    """
    columns = [("plain", "step"), ("draft", "step")]
    columns += [("verify", f"{nodes} nodes") for _, nodes in TREES]
    columns += [(f"{steps} steps,", f"{nodes} nodes:", "τ >") for steps, nodes in TREES]
    columns += [("drafting", "pays")]
    rows = []
    for method, cost in costs.items():
        largest = max(cost.verify)  # nothing is known of larger trees
        cells = [Cell(f"{1000 * seconds:.1f}") for seconds in (cost.verify[1], cost.draft_step)]
        cells += [Cell(f"{1000 * cost.verify_seconds(n):.1f}" if n <= largest else "") for _, n in TREES]
        cells += [Cell(f"{cost.break_even(steps, n):.2f}" if n <= largest else "") for steps, n in TREES]
        rows.append(([method], [*cells, Cell(say_if_faster(speed_ups.get(method)))]))
    return Table(TITLE, ["method"], columns, rows)


def say_if_faster(speed_up: Comparison | None) -> str:
    """Say whether a speed-up is above 1, by its interval."""
    if speed_up is None:
        return "not timed"
    if speed_up.low > 1:
        return "yes"
    return "no" if speed_up.high < 1 else "not shown"
