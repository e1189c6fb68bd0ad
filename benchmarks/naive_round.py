"""A round as published code takes it, written from docs/METHOD.md: what `make bench-decode` holds ours against.

The tree is made node by node, in Python. Every specialist keeps keys and values of its own, grown by concatenation, and
runs as a whole layer over each slot that it has not read. PosS-1, depth 6, tree width 10, three new tokens:

    position   1   2   3   4   5   6
    rows       3  13  23  33  43  53     168 in all

The target's cache is transformers' own, of which the accepted path is selected; the judge first gathers the logits of
every path. What is not the method's is as in ours: attention, dtypes, the target's forward. One prompt, greedy.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from poss_lightning.clock import Clock
from poss_lightning.draft.specialists import Specialists
from poss_lightning.target.model import Target


class Node(NamedTuple):
    """A token of a tree; parents come before their children, the root is its own."""

    token: int
    parent: int
    score: float  # log-probability of the path


class NaiveRounds:
    """Decodes one prompt round by round.

    Args:
        target: a model whose layers all see the whole text.
        draft, depth, nodes, tree_width: as `Speculative` has them.
    """

    def __init__(self, target: Target, draft: Specialists, depth: int = 6, nodes: int = 60, tree_width: int = 10):
        self.target, self.draft = target, copy.deepcopy(draft).to(target.device, target.dtype).eval()
        self.embed_head = target.embed_head.restrict(self.draft.vocabulary)
        self.depth, self.nodes, self.tree_width = depth, nodes, min(tree_width, self.embed_head.head.shape[0])

    @torch.inference_mode()
    def start(self, prompt: list[int]) -> int:
        """Read a prompt; its first new token."""
        self.cache, self.text, self.clock = DynamicCache(), [], Clock(self.target.device)
        features, logits = self._read_target([Node(token, max(i - 1, 0), 0.0) for i, token in enumerate(prompt)])
        self.text = [*prompt, logits[0, -1].argmax().item()]
        self.fresh = features  # (1, n, D) on the left of the verified slots that no specialist has read
        spec = self.draft.config.target
        nothing = features.new_zeros(1, spec.kv_heads, 0, spec.head_dim)
        self.past = [(nothing, nothing) for _ in self.draft.layers]  # keys and values of verified slots
        return self.text[-1]

    @torch.inference_mode()
    def round(self) -> list[int]:
        """The tokens that one round emits. Leaves its `tree` and the `rows` that went through a draft layer."""
        with self.clock.part("draft"):
            self.tree = self._draft_tree()
        with self.clock.part("verify"):
            features, logits = self._read_target(self.tree)
        with self.clock.part("judge"):
            path, emitted = self._judge(logits)
        with self.clock.part("commit"):
            verified = len(self.text) - 1
            keep = torch.tensor([*range(verified), *(verified + n for n in path)], device=features.device)
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys.index_select(2, keep), layer.values.index_select(2, keep)
            self.fresh = features[:, path]
            self.text += emitted
        return emitted

    def _judge(self, logits: Tensor) -> tuple[list[int], list[int]]:
        """Nodes of the longest path that the target says, and what it emits: the best of the paths to all leaves."""
        inner, paths = {node.parent for node in self.tree[1:]}, []
        for leaf in range(len(self.tree)):
            if leaf not in inner:
                paths.append([leaf])
                while paths[-1][0]:
                    paths[-1].insert(0, self.tree[paths[-1][0]].parent)
        longest = max(map(len, paths))
        padded = torch.tensor([path + [-1] * (longest - len(path)) for path in paths], device=logits.device)
        choices = logits[0, padded].argmax(-1).tolist()  # of (leaves, longest, V)
        best: tuple[list[int], list[int]] = [], []
        for path, said in zip(paths, choices, strict=True):
            taken = 1
            while taken < len(path) and self.tree[path[taken]].token == said[taken - 1]:
                taken += 1
            if taken > len(best[0]):
                best = path[:taken], said[:taken]
        return best

    def _draft_tree(self) -> list[Node]:
        """The `nodes` best of all that are scored, parents before their children."""
        self.rows = 0
        fresh = self.fresh.shape[1]
        first = len(self.text) - 1 - fresh  # the slot that the fresh ones begin with
        # Of every slot of this round: its token, its place in the text, and the slots of this round that it sees.
        self.slots = [(self.text[first + i + 1], first + i, set(range(i + 1))) for i in range(fresh)]
        self.left = self.fresh  # (1, slots, D) the features on their left
        self.unread = [0] * len(self.past)  # the first slot of this round that a specialist has not read
        self.grown = list(self.past)  # keys and values, drafted slots included
        nodes, frontier, rows = [Node(self.text[-1], 0, 0.0)], [0], [fresh - 1]  # the root's slot is the last fresh one
        for k in range(1, self.depth + 1):
            # Without the batch dimension: a product with a part of (1, n, D) would first copy the whole head.
            predicted = self._run(self.draft.config.specialist_at(k))[0, -len(frontier) :]  # (M, D)
            logs, tokens = self.embed_head.logits(predicted).float().log_softmax(-1).topk(self.tree_width, dim=-1)
            tokens, level = self.draft.token_ids(tokens).tolist(), []
            for parent, logs_of, tokens_of in zip(frontier, logs.tolist(), tokens, strict=True):
                for log, token in zip(logs_of, tokens_of, strict=True):
                    level.append(len(nodes))
                    nodes.append(Node(token, parent, nodes[parent].score + log))
            if k == self.depth:
                break
            best = sorted(level, key=lambda node: -nodes[node].score)[: self.tree_width]
            above = [frontier.index(nodes[node].parent) for node in best]  # in the old frontier
            self.left = torch.cat([self.left, predicted[None, above]], dim=1)
            seen = [self.slots[rows[i]][2] for i in above]
            rows = list(range(len(self.slots), len(self.slots) + len(best)))
            place = first + fresh + k - 1
            self.slots += [
                (nodes[node].token, place, sees | {row}) for node, sees, row in zip(best, seen, rows, strict=True)
            ]
            frontier = best
        for specialist, (keys, values) in enumerate(self.grown):  # what was drafted is forgotten
            if self.unread[specialist]:
                kept = first + fresh
                self.past[specialist] = keys[:, :, :kept], values[:, :, :kept]
        ranked = sorted(range(len(nodes)), key=lambda node: -nodes[node].score)[: self.nodes]
        places = {node: place for place, node in enumerate(sorted(ranked))}
        return [nodes[node]._replace(parent=places[nodes[node].parent]) for node in places]

    def _run(self, specialist: int) -> Tensor:
        """A whole layer over the slots that it has not read: (1, n, D). Specialists have one layer here."""
        layer, start = self.draft.layers[specialist], self.unread[specialist]
        device, slots = self.left.device, self.slots[start:]
        tokens = torch.tensor([[token for token, _, _ in slots]], device=device)
        z = self.draft.join(self.embed_head.embed(tokens), self.left[:, start:])  # (1, n, D)
        rope = self.draft.rope_at(torch.tensor([[place for _, place, _ in slots]], device=device))
        grown = zip(self.grown[specialist], layer.keys_values(z, rope), strict=True)
        keys, values = (torch.cat(pair, dim=2) for pair in grown)
        table = [[slot in seen for slot in range(len(self.slots))] for _, _, seen in slots]
        now = torch.tensor(table, device=device)  # (n, slots)
        earlier = now.new_ones(len(slots), keys.shape[2] - len(self.slots))
        mask = torch.cat([earlier, now], dim=1)[None, None]
        attended = torch.nn.functional.scaled_dot_product_attention(
            layer.queries(z, rope), keys, values, attn_mask=mask, enable_gqa=True
        )
        self.grown[specialist], self.unread[specialist] = (keys, values), len(self.slots)
        self.rows += len(slots)
        return layer.after_attention(z, attended)

    def _read_target(self, nodes: list[Node]) -> tuple[Tensor, Tensor]:
        """Features (1, n, D) and logits (1, n, V) of a tree behind the text without its last token, the root."""
        device, verified = self.target.device, max(len(self.text) - 1, 0)
        mask = torch.zeros(len(nodes), verified + len(nodes), dtype=torch.bool)
        mask[:, :verified] = True
        depths = []
        for n, node in enumerate(nodes):
            if n:
                mask[n] = mask[node.parent]
            mask[n, verified + n] = True
            depths.append(depths[node.parent] + 1 if n else 0)
        features = self.target.model.base_model(
            input_ids=torch.tensor([[node.token for node in nodes]], device=device),
            attention_mask=mask[None, None].to(device),
            position_ids=torch.tensor([depths], device=device) + verified,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        return features, self.target.embed_head.logits(features)
