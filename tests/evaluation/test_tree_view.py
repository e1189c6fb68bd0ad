"""Rounds as the terminal shows them."""

import math

import pytest

from poss_lightning.evaluation.tree_view import DraftedTree, draw

WORDS = ["the", "cat", "dog", "sat", "ran", "\n", " down"]
#         the(cat(sat(\n) ran) dog), of which the target accepts cat and sat, and adds down
CHANCES = [1.0, 0.62, 0.21, 0.4, 0.09, 0.05]
DRAFTED = DraftedTree([0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 3], [math.log(chance) for chance in CHANCES], [0, 1, 3], 6)

WHOLE = r"""
the
├─ ✓ cat 62.0 %
│  ├─ ✓ sat 40.0 %
│  │  ├─ \n 5.0 %
│  │  └─ +  down
│  └─ ran 9.0 %
└─ dog 21.0 %
"""

CUT = """
the
├─ ✓ cat 62.0 %
│  └─ ✓ sat 40.0 %
│     └─ +  down
├─ dog 21.0 %
└─ … 2 more
"""


@pytest.mark.parametrize(("lines", "expected"), [(7, WHOLE), (6, CUT)])  # just enough, and one too few
def test_a_round_is_drawn(lines, expected):
    assert "\n" + draw(DRAFTED, WORDS.__getitem__, lines=lines) + "\n" == expected


def test_what_is_shown_is_a_tree_within_its_lines():
    """A node of the path may be the least probable of all; equal scores do not orphan a child."""
    nodes = list(range(60))
    chain = DraftedTree(nodes, [max(node - 1, 0) for node in nodes], [0.0] * 60, [0], 7)
    broad = DraftedTree(nodes, [0] * 60, [-float(node) for node in nodes], [0, 59], 7)
    deep, wide = (draw(drafted, str).splitlines() for drafted in (chain, broad))
    assert len(deep) == len(wide) == 24
    assert deep[-1] == "└─ … 38 more" and "+ 7" in deep[-2]
    assert wide[-3:] == ["├─ ✓ 59 0.0 %", "│  └─ + 7", "└─ … 38 more"]
    ended = draw(DRAFTED._replace(bonus=None), WORDS.__getitem__, lines=1)  # what was accepted is always there
    assert ended.splitlines()[1:] == ["├─ ✓ cat 62.0 %", "│  └─ ✓ sat 40.0 %", "└─ … 3 more"]
