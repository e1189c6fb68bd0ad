"""Prompt lookup: what followed the same words earlier in the text, as a path below the root of a drafted tree.

text       a name , like Ada Lovelace , … a name , like        the last three tokens stood there before:
tree       like ── the                                         " Ada Lovelace ," joins the tree as a path;
             └──── Ada ── Lovelace ── ,                        where the draft has a token too, they share the node

It needs no training, and knows names, code and quotations; a draft knows the language (arXiv 2304.04487).
"""

import torch
from torch import Tensor

from poss_lightning.decoding.trees import Tree, root_tree

DEFAULT_LOOKUP = 10  # tokens of a continuation
NGRAM = 3  # last tokens to match, at most


class Lookup:
    """The current texts and their continuations; all shapes are static, and nothing synchronises with the host.

    Args:
        count: N, tokens of a continuation.

    Attributes:
        text: (B, C) tokens.
        continuation, matched: what `find` last returned, for the next round.
    """

    def __init__(self, count: int):
        self.count = count
        self.text = self.continuation = self.matched = torch.zeros(0, 0, dtype=torch.long)  # none, until `start`

    def start(self, tokens: Tensor, capacity: int) -> None:
        """Begin with right-padded texts (B, T); each may grow to `capacity`."""
        if self.text.shape != (len(tokens), capacity):
            self.text = tokens.new_zeros(len(tokens), capacity)
            self.continuation, self.matched = tokens.new_zeros(len(tokens), self.count), tokens.new_zeros(len(tokens))
        self.text[:, : tokens.shape[1]] = tokens

    def append(self, tokens: Tensor, lengths: Tensor) -> None:
        """Append tokens (B, n) after the root at `lengths` (B,); those that are not emitted will be overwritten."""
        index = lengths[:, None] + torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        self.text.scatter_(1, index.clamp(max=self.text.shape[1] - 1), tokens)

    def look(self, lengths: Tensor) -> None:
        """Store, in place, what `find` returns."""
        continuation, matched = self.find(lengths)
        self.continuation.copy_(continuation)
        self.matched.copy_(matched)

    def find(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Find continuations (B, N) of texts whose last token is at `lengths` (B,), and how many tokens matched (B,).

        Among the earlier positions where the most of the last NGRAM tokens match, the latest is taken. A continuation
        that reaches the text's end repeats itself; where nothing matches, it is -1.

        Examples:
            >>> lookup = Lookup(4)
            >>> lookup.start(torch.tensor([[7, 8, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6]]), capacity=6)
            >>> lookup.find(torch.tensor([5, 5]))
            (tensor([[ 5,  6,  7,  8],
                    [-1, -1, -1, -1]]), tensor([2, 0]))
        """
        at = torch.arange(self.text.shape[1], device=lengths.device)
        run, matched = at < lengths[:, None], torch.zeros_like(self.text)
        for back in range(NGRAM):
            last = self.text.gather(1, (lengths - back).clamp(min=0)[:, None])
            run = run & (self.text.roll(back, 1) == last) & (at >= back)
            matched += run
        latest = (matched * len(at) + at).max(1).indices  # the last position where nothing matches
        matched = matched.gather(1, latest[:, None])
        period = (lengths - latest).clamp(min=1)[:, None]
        ahead = latest[:, None] + 1 + at[: self.count] % period
        tokens = self.text.gather(1, ahead.clamp(max=len(at) - 1)).where(matched > 0, -1)
        return tokens, matched[:, 0]

    def select(self, rows: list[int]) -> None:
        """Keep only these texts."""
        if len(self.text):
            self.text, self.continuation, self.matched = self.text[rows], self.continuation[rows], self.matched[rows]


def join(tree: Tree, path: Tensor) -> Tree:
    """Append the tokens of a path (B, N) below the root; one that is drafted there already leads through that node.

    The number of added nodes never varies. A node that shares a drafted one repeats it, and a node without a token
    repeats the root's; the judge takes the first of equal nodes.
    """
    at = torch.zeros_like(path[:, :1])  # (B, 1) where the path is
    nodes, parents = tree.tokens.shape[1], []
    tokens = path.where(path >= 0, tree.tokens[:, :1])
    drafted = torch.arange(nodes, device=path.device) > 0  # the root is its own parent, and no child
    for i in range(path.shape[1]):
        parents.append(at)
        same = (tree.tokens == tokens[:, i : i + 1]) & (tree.parents == at) & drafted
        is_drafted, node = same.to(torch.int8).max(1, keepdim=True)
        at = node.where(is_drafted > 0, nodes + i)
    scores = torch.zeros_like(path, dtype=tree.scores.dtype)  # the draft has none
    added = Tree(tokens, torch.cat([*parents, at[:, :0]], dim=1), scores)
    return Tree(*(torch.cat(parts, dim=1) for parts in zip(tree, added, strict=True)))


class LookupAlone:
    """The `Drafter` of an engine with lookups alone: every tree is its root, and it has no cache."""

    depth, layers, room = 0, (), 0

    def start(self, *_: object, **__: object) -> None:
        """Do nothing."""

    append_context = select = start

    def draft(self, root: Tensor, plan: object, noise: object = None) -> Tree:
        """Return the root."""
        return root_tree(root)

    def state(self) -> list[Tensor]:
        """Return nothing."""
        return []
