"""Slow twins, written from the definitions of METHOD.md, one slot, node or sample at a time."""

import math
from itertools import product

import torch
from torch import Tensor


def attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query (H, d) over a list of keys and values (kv heads, d): (H, d)."""
    rows = []
    for head, q in enumerate(query):
        shared = head * len(keys[0]) // len(query)
        k, v = (torch.stack([each[shared] for each in given]) for given in (keys, values))
        rows.append((k @ q * len(q) ** -0.5).softmax(0) @ v)
    return torch.stack(rows)


def rms_norm(x: Tensor, norm) -> Tensor:
    """(D,) -> (D,)"""
    return norm.weight * x / (x.square().mean() + norm.eps).sqrt()


def chain(draft, embedded: Tensor, features: Tensor, start: int, depth: int) -> list[Tensor]:
    """Draft along given tokens: slots 0..start hold the target's features, then the drafter feeds on itself.

    Args:
        embedded: (T, D), token on the right of each slot; features: (T, R).

    Returns:
        K outputs (D,): pass k stands at slot start + k - 1.
    """
    slots, outputs = [], []  # what is joined, the angles, and the first pass that reads it, of each slot

    def append(left: Tensor, first: int) -> None:
        position = len(slots)
        joined = draft.join(embedded[position][None, None], left[None, None])
        slots.append((joined, draft.rope_at(torch.tensor([[position]])), first))

    def layer(k: int):
        return draft.layers[draft.config.specialist_at(k)]

    def output(k: int) -> Tensor:
        """Pass k's prediction at the newest slot, which sees all the others, projected anew: (D,)."""
        pairs = []
        for joined, angles, first in slots[-(draft.config.window or 0) :]:
            pairs.append(layer(first if draft.config.kv == "shared" else k).keys_values(joined, angles))
        keys, values = ([x[0, :, 0] for x in each] for each in zip(*pairs, strict=True))
        joined, angles, _ = slots[-1]
        query = layer(k).queries(joined, angles)[0, :, 0]
        return layer(k).after_attention(joined, attention(query, keys, values)[None, :, None])[0, 0]

    for feature in features[: start + 1]:
        append(fuse(draft, feature), 1)
    for k in range(1, depth + 1):
        outputs.append(output(k))
        if len(slots) == len(embedded):
            break
        append(rms_norm(outputs[-1], draft.norm) if draft.config.norm_output else outputs[-1], k + 1)
    return outputs


def fuse(draft, read: Tensor) -> Tensor:
    """What a draft reads of the target at a slot, as a feature: (R,) -> (D,)."""
    if draft.config.kind == "eagle2":
        return read
    if draft.config.fc_norm:
        outputs = read.chunk(len(draft.fc_norm))
        read = torch.cat([rms_norm(output, norm) for output, norm in zip(outputs, draft.fc_norm, strict=True)])
    if draft.config.norm_before_fc:
        read = rms_norm(read, draft.fc_norm[0])
    return draft.fc.weight @ (draft.scale * read)


def _distributions(prediction, feature, head, scale=1.0, cap=None, draft_head=None):
    """p and q after one slot: (V,) each."""

    def logits(x):
        plain = head.double() @ x * scale
        return plain if cap is None else cap * torch.tanh(plain / cap)

    drafted = logits(prediction) if draft_head is None else draft_head.double() @ prediction
    return logits(feature).softmax(-1), drafted.softmax(-1)


def pass_losses(weights, predictions, features, counts, head, slot_weights=None, **between):
    """The loss of docs/METHOD.md, section 5, slot by slot in float64, with autograd through everything: K sums."""

    def value(guess, f):
        p, q = _distributions(guess, f, head, **between)
        top, distance = p.topk(min(10, len(p))).indices, (guess - f).abs()
        terms = {
            "feature": torch.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean(),
            "token": -(p * q.log()).sum(),
            "topk": -(p[top] * q[top].log()).sum(),
            "acceptance": -torch.minimum(p, q).sum().log(),
        }
        return sum(weight * terms[name] for name, weight in weights.items())

    sums = torch.zeros(len(predictions), dtype=torch.float64)
    for k, prediction in enumerate(predictions):
        for row, column in (counts > k).nonzero().tolist():
            found = value(prediction[row, column].double(), features[row, column].double())
            sums[k] += found * (1 if slot_weights is None else slot_weights[k][row][column])
    return sums


def dpace(predictions, features, counts, head, **between):
    """Weights by pass, row and slot, chain by chain: those of a chain from its first slot on, as far as it counts."""
    batch, count = counts.shape
    weights = [[[0.0] * count for _ in range(batch)] for _ in predictions]
    for row, start in product(range(batch), range(count)):
        reached = [1.0]
        for k, prediction in enumerate(predictions[: count - start]):
            slot = start + k
            if counts[row, slot] < k + 1:
                break
            p, q = _distributions(prediction[row, slot], features[row, slot], head, **between)
            reached.append(reached[-1] * float(0.5 * q[p.argmax()].detach() + 0.5))
        for k in range(len(reached) - 1):
            weights[k][row][start + k] = sum(reached[k + 1 :])
    return weights


def noise(seed: int, place: int, token: int) -> float:
    """Gumbel's, of a token at a place of the text with this seed."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0x735A2D97 % 2**32
        return x ^ x >> 15

    first = mix(seed % 2**32)
    second = mix(seed // 2**32 ^ first)
    keys = [mix((key + place) % 2**32) for key in (first, second)]
    bits = mix(((mix(token) ^ keys[0]) + keys[1]) % 2**32) % 2**31
    return -math.log(-math.log1p(-bits / 2**31))


def ancestor_mask(parents: list[int]) -> list[list[bool]]:
    table = [[False] * len(parents) for _ in parents]
    for node, row in enumerate(table):
        row[0] = True
        while node:
            row[node], node = True, parents[node]
    return table


def judge(tokens: list[int], parents: list[int], choice: list[int]) -> tuple[list[int], list[int]]:
    """Walk from the root to the child that is the target's choice: nodes of the path, and the tokens emitted."""
    path, emitted, children = [], [], [0]
    while children:
        path.append(children[0])
        emitted.append(choice[path[-1]])
        children = [n for n in range(1, len(tokens)) if (parents[n], tokens[n]) == (path[-1], emitted[-1])]
    return path, emitted


class PublishedDraft:
    """An EAGLE-2 draft as its authors compute it, by the names in their file: every slot anew at every step, no cache.

    Args:
        tensors, config: of model.safetensors and config.json.
        runs: positions that each layer serves; the last goes on.
    """

    def __init__(self, tensors: dict[str, Tensor], config: dict, runs: list[int]):
        self.tensors, self.config = {name: tensor.float() for name, tensor in tensors.items()}, config
        numbered = [f"layers.{i}" for i, run in enumerate(runs) for _ in range(run)]
        self.names = ["midlayer"] if "midlayer.hidden_norm.weight" in tensors else numbered

    def layer(self, k: int) -> str:
        """That serves position k."""
        return self.names[min(k, len(self.names)) - 1]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0)

    def frequency(self, i: int, half: int) -> float:
        """Of pair i: theta^(-2i/d), and with rope_scaling as Llama 3.1's reference code (`apply_scaling`) has it."""
        frequency, scaling = self.config["rope_theta"] ** (-i / half), self.config.get("rope_scaling")
        if not scaling:
            return frequency
        assert scaling["rope_type"] == "llama3"
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0), 1)
        return kept * frequency + (1 - kept) * frequency / scaling["factor"]

    def rope(self, x: Tensor) -> Tensor:
        """Pairs (i, i + d/2) of slot t by t times their frequency: (T, d) -> (T, d)"""
        half = x.shape[-1] // 2
        angles = torch.tensor([[t * self.frequency(i, half) for i in range(half)] for t in range(len(x))])
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def attend(self, of: str, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        """What the layer of that name attends to: (T, whatever it reads) -> (T, D)

        Args:
            cache: keys and values of the first slots, whoever made them; those of the others join it.
        """
        count, shared = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        sizes = {"q": count, "k": shared, "v": shared}
        made = {name: self.linear(f"{of}.self_attn.{name}_proj", x).chunk(size, -1) for name, size in sizes.items()}
        queries, keys = ([self.rope(head) for head in made[name]] for name in "qk")
        values = made["v"]
        if cache is not None:
            made = [*keys, *values]
            old = cache or [each[:0] for each in made]
            cache[:] = [torch.cat([kept, each[len(kept) :]]) for kept, each in zip(old, made, strict=True)]
            keys, values = cache[:shared], cache[shared:]
        hidden = torch.full((len(x), len(x)), -torch.inf).triu(1)
        attended = []
        for head, query in enumerate(queries):
            key, value = keys[head * shared // count], values[head * shared // count]
            attended.append((query @ key.T / query.shape[-1] ** 0.5 + hidden).softmax(-1) @ value)
        return self.linear(f"{of}.self_attn.o_proj", torch.cat(attended, dim=-1))

    def rest(self, of: str, h: Tensor) -> Tensor:
        """What the layer of that name makes of its residual after attention: (T, D) -> (T, D)"""
        normed = self.norm(f"{of}.post_attention_layernorm", h)
        gate = torch.nn.functional.silu(self.linear(f"{of}.mlp.gate_proj", normed))
        return h + self.linear(f"{of}.mlp.down_proj", gate * self.linear(f"{of}.mlp.up_proj", normed))

    def chain(self, embedding: Tensor, tokens: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """What it predicts at the newest slot, step by step: K features (D,).

        Args:
            tokens: (T + K - 1,), x_{t+1} of every slot; features: (T, D), the target's of the first T.
        """
        outputs = []
        for k in range(1, depth + 1):
            slots = torch.cat([embedding[tokens[: len(features)]].float(), features], dim=-1)
            of, z = self.layer(k), self.linear("fc", slots)
            outputs.append(self.rest(of, z + self.attend(of, z))[-1])
            features = torch.cat([features, outputs[-1][None]])
        return outputs


class PublishedEagle3(PublishedDraft):
    """An EAGLE-3 draft likewise, or SPEED's: layers that all read one cache, as its trainer has it."""

    def chain(self, embedding: Tensor, tokens: Tensor, read: Tensor, depth: int) -> list[Tensor]:
        """What it says at the newest slot, step by step: K logits (V,) of the target's tokens, -inf where it has none.

        Args:
            tokens: as above; read: (T, nD), outputs of n of the target's layers, side by side.
        """
        if self.config.get("fc_norm"):
            outputs = read.unflatten(-1, (-1, embedding.shape[-1])).unbind(-2)
            read = torch.cat([self.norm(f"fc_norm.{i}", output) for i, output in enumerate(outputs)], dim=-1)
        if self.config.get("norm_before_fc"):
            read = self.norm("input_norm", read)
        h, said, cache = self.linear("fc", read), [], []
        for k in range(1, depth + 1):
            of, e = self.layer(k), embedding[tokens[: len(h)]].float()
            hidden = self.norm(f"{of}.hidden_norm", h)
            joined = torch.cat([self.norm(f"{of}.input_layernorm", e), hidden], dim=-1)
            residual = hidden if self.config.get("norm_before_residual") else h
            output = self.rest(of, residual + self.attend(of, joined, cache))[-1:]
            normed = self.norm("norm", output)
            h = torch.cat([h, normed if self.config.get("norm_output") else output])
            said.append(torch.full((len(embedding),), -torch.inf))
            for row, logit in enumerate(self.linear("lm_head", normed[0])):
                offset = int(self.tensors["d2t"][row]) if "d2t" in self.tensors else 0
                said[-1][row + offset] = logit
        return said


def block(draft, embedded: Tensor, read: Tensor, start: int) -> list[Tensor]:
    """Places 0 ... K of the block that begins at slot `start` of a text, one query at a time: (D,) each.

    Args:
        embedded: (T, D), token on the right of each slot; read: (T, R).
    """
    config = draft.config
    context = [rms_norm(draft.fc.weight @ (x * draft.scale), draft.context_norm) for x in read]

    def turned(layer, name, x, position):
        heads = (layer.get_submodule(f"{name}_proj").weight @ x).view(-1, layer.head_dim)
        if name == "v":
            return heads
        heads = torch.stack([rms_norm(head, layer.get_submodule(f"{name}_norm")) for head in heads])
        angles = draft.rope_at(torch.tensor([[position]]))
        first, second = heads.chunk(2, dim=-1)
        return heads * angles.cos[0, 0] + torch.cat([-second, first], -1) * angles.sin[0, 0]

    hidden = [embedded[start], *[draft.mask] * config.depth]
    for layer in draft.layers:
        normed = [rms_norm(x, layer.input_norm) for x in hidden]
        oldest = max(0, start + 1 - (config.window or start + 1))
        seen = [(context[t], t) for t in range(oldest, start + 1)]
        seen += [(x, start + 1 + place) for place, x in enumerate(normed)]
        keys, values = ([turned(layer, name, *slot) for slot in seen] for name in "kv")
        queries = [turned(layer, "q", x, start + 1 + place) for place, x in enumerate(normed)]
        hidden = [
            x + layer.o_proj.weight @ attention(q, keys, values).flatten() for x, q in zip(hidden, queries, strict=True)
        ]
        normed = [rms_norm(x, layer.norm) for x in hidden]
        inner = [torch.nn.functional.silu(layer.gate_proj.weight @ x) * (layer.up_proj.weight @ x) for x in normed]
        hidden = [x + layer.down_proj.weight @ y for x, y in zip(hidden, inner, strict=True)]
    return hidden
