"""Slow twins, written from the definitions of METHOD.md, one slot, node or sample at a time."""

import torch
from torch import Tensor


def visible_sets(k: int, slots: int) -> list[list[int | None]]:
    """Row t, column s: which set z^m the key at slot s comes from for pass k's query at slot t; None is hidden."""
    table = []
    for t in range(slots):
        row: list[int | None] = []
        for s in range(slots):
            if s > t:
                row.append(None)
            elif t - s <= k - 2:
                row.append(k - 1 - (t - s))
            else:
                row.append(0)
        table.append(row)
    return table


def draw_sets(k: int, rows: range, slots: int) -> str:
    """The drawing of docs/METHOD.md, section 4."""
    table = visible_sets(k, slots)
    return "\n".join(" ".join("." if m is None else str(m) for m in table[t]) for t in rows)


def attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query (H, d) over a list of keys and values (kv heads, d): (H, d)."""
    groups = query.shape[0] // keys[0].shape[0]
    rows = []
    for head in range(query.shape[0]):
        k = torch.stack([key[head // groups] for key in keys])
        v = torch.stack([value[head // groups] for value in values])
        rows.append((k @ query[head] * query.shape[-1] ** -0.5).softmax(0) @ v)
    return torch.stack(rows)


class SlotBySlot:
    """A drafter with plain lists for a cache, fed one slot at a time, that re-projects everything at every step."""

    def __init__(self, draft):
        self.draft = draft
        self.slots: list[tuple[Tensor, int, int]] = []  # z (D,), position and first reader of every slot it may see

    def project(self, layer, z: Tensor, position: int):
        return layer.keys_values(z[None, None], self.draft.rotation(torch.tensor([[position]])))

    def output(self, k: int) -> Tensor:
        """Pass k's prediction at the newest slot, which sees all the others: (D,)."""
        layer = self.draft.serving(k)
        z, position, _ = self.slots[-1]
        query = layer.queries(z[None, None], self.draft.rotation(torch.tensor([[position]])))[0, :, 0]
        pairs = [
            self.project(self.draft.serving(first) if self.draft.config.kv == "shared" else layer, z, position)
            for z, position, first in self.slots
        ]
        attended = attention(query, [key[0, :, 0] for key, _ in pairs], [value[0, :, 0] for _, value in pairs])
        return layer.finish(z[None, None], attended[None, :, None])[0, 0]


def chain(draft, embedded: Tensor, features: Tensor, start: int, depth: int) -> list[Tensor]:
    """Draft along given tokens: slots 0..start hold the target's features, then the drafter feeds on itself.

    Args:
        embedded: (T, D), token on the right of each slot; features: (T, D).

    Returns:
        K outputs (D,): pass k stands at slot start + k - 1.
    """
    drafter = SlotBySlot(draft)
    for slot in range(start + 1):
        drafter.slots.append((draft.join(embedded[slot][None, None], features[slot][None, None])[0, 0], slot, 1))
    outputs = []
    for k in range(1, depth + 1):
        outputs.append(drafter.output(k))
        slot = start + k
        if slot == len(embedded):
            break
        drafter.slots.append((draft.join(embedded[slot][None, None], outputs[-1][None, None])[0, 0], slot, k + 1))
    return outputs


def pass_losses(predictions, features, counts, head, w_feature, w_token, w_topk, topk=10, scale=1.0, cap=None):
    """The loss of docs/METHOD.md, section 5, slot by slot, with autograd through everything: K sums."""

    def logits(feature):
        plain = head.double() @ feature * scale
        return plain if cap is None else cap * torch.tanh(plain / cap)

    sums = []
    for k, prediction in enumerate(predictions, 1):
        total = torch.zeros((), dtype=torch.float64)
        for row, column in (counts >= k).nonzero().tolist():
            f, guess = features[row, column].double(), prediction[row, column].double()
            p, log_q = logits(f).softmax(-1), logits(guess).log_softmax(-1)
            top = p.topk(topk).indices
            distance = (guess - f).abs()
            smooth = torch.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean()
            total = total + w_feature * smooth - w_token * (p * log_q).sum() - w_topk * (p[top] * log_q[top]).sum()
        sums.append(total)
    return torch.stack(sums)


def ancestors(parents: list[int]) -> list[list[bool]]:
    table = [[False] * len(parents) for _ in parents]
    for node in range(len(parents)):
        here = node
        table[node][here] = True
        while here != 0:
            here = parents[here]
            table[node][here] = True
    return table


def judge(tokens: list[int], parents: list[int], choice: list[int]) -> tuple[list[int], list[int]]:
    """Walk from the root to the child that is the target's choice: nodes of the path, and the tokens emitted."""
    path, emitted = [0], []
    while True:
        wanted = choice[path[-1]]
        emitted.append(wanted)
        children = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == wanted]
        if not children:
            return path, emitted
        path.append(children[0])
