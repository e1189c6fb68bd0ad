"""A round in the terminal: the tree of drafted tokens, the path that the target accepted, and the bonus token.

the
├─ ✓ cat 62.0 %
│  ├─ ✓ sat 40.0 %
│  │  └─ + down
│  └─ ran 9.0 %
├─ dog 21.0 %
└─ … 31 more
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from poss_lightning.decoding.decoder import Progress
from poss_lightning.target_model.generation import until_stop

MAX_LINES = 24  # so that a round fits a terminal


class DraftedTree(NamedTuple):
    """One round of one text: N nodes, the root first and every parent before its children."""

    tokens: list[Any]  # (N,) ids, or texts
    parents: list[int]  # (N,)
    scores: list[float]  # (N,) log-probability of the path from the root, by the draft
    path: list[int]  # nodes accepted, from the root on
    bonus: Any  # the target's own token after the path; None where the text ended there


def drafted_tree(step: Progress, stops: frozenset[int]) -> DraftedTree:
    """Return the tree of a round's first text, with its accepted path and bonus token."""
    tree, verdict = step.tree, step.verdict
    assert tree is not None and verdict is not None, "a step without a draft has no tree"
    accepted = int(verdict.accepted[0])
    emitted = until_stop(verdict.tokens[0, : accepted + 1].tolist(), stops)
    path = verdict.path[0, : min(accepted, len(emitted)) + 1].tolist()
    bonus = emitted[accepted] if len(emitted) > accepted else None
    return DraftedTree(tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.scores[0].tolist(), path, bonus)


def draw(drafted: DraftedTree, text: Callable[[Any], str], lines: int = MAX_LINES) -> str:
    """Draw the tree, more likely children first, with the probability of paths; ✓ marks accepted tokens, + the bonus.

    The least probable nodes are left out where the tree needs more `lines`, but never the accepted path.
    """
    tokens, parents, scores, path, bonus = drafted
    shown = most_likely_nodes(drafted, lines - (bonus is not None))
    below: dict[int, list[tuple[str, int | None]]] = defaultdict(list)  # labels below each node, and their nodes
    for node in sorted(shown - {0}, key=lambda node: (-scores[node], node)):
        sign = "✓ " if node in path else ""
        label = f"{sign}{_plain(text(tokens[node]))} {100 * math.exp(scores[node]):.1f} %"
        below[parents[node]].append((label, node))
    if bonus is not None:
        below[path[-1]].append((f"+ {_plain(text(bonus))}", None))
    if more := len(tokens) - len(shown):
        below[0].append((f"… {more} more", None))
    return "\n".join([_plain(text(tokens[0])), *_branches(below, 0)])


def most_likely_nodes(drafted: DraftedTree, lines: int) -> set[int]:
    """Choose the accepted path, and the most likely nodes that fit in `lines`; every node's parent is among them."""
    if len(drafted.tokens) > lines:
        lines -= 1  # says how many nodes are left out
    shown = set(drafted.path)
    for node in sorted(range(len(drafted.tokens)), key=lambda node: (-drafted.scores[node], node)):
        if len(shown) < lines:
            shown.add(node)
    return shown


def _branches(below: dict[int, list[tuple[str, int | None]]], node: int) -> list[str]:
    lines = []
    for place, (label, child) in enumerate(below[node], start=1):
        last = place == len(below[node])
        lines.append(("└─ " if last else "├─ ") + label)
        if child is not None:
            lines += [("   " if last else "│  ") + line for line in _branches(below, child)]
    return lines


def _plain(text: str) -> str:
    return repr(text)[1:-1]
