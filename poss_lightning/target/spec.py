"""What training and decoding know of a target without loading it: its sizes, and its frozen embedding and head."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from poss_lightning.machine import best_seconds
from poss_lightning.ranges import refuse_types

FEW = 32  # rows of features for which `project` may put the head on the left
LEAST_GAIN = 0.8  # the other order of a product is taken where it needs at most this share of the time of `linear`
Product = Callable[[Tensor, Tensor], Tensor]  # features (..., D) by a head (V, D) -> (..., V)


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """What a store or a draft must know of its target: which model it is, and its sizes."""

    name: str
    fingerprint: str = ""  # of the weights: the same for a model under any name, in bfloat16 or as it was saved
    template: str = ""  # digest of the chat template
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int  # tokens the target reads; with rotary angles of kind "longrope", those it reads with short factors
    rope_theta: float  # of its full attention, where layers differ
    norm_eps: float
    logit_scale: float = 1.0  # between head and softmax; see `EmbedHead`
    logit_cap: float | None = None
    layers: int | None = None  # decoder layers; None in files of before they were counted

    def __post_init__(self) -> None:
        """Raise ValueError for a field of another type, as a file from elsewhere may have it."""
        refuse_types(self, "target's ")

    def difference(self, other: "TargetSpec") -> str | None:
        """The first field in which two specs differ, in words; None where they are the same target."""
        for field, value in asdict(self).items():
            another = getattr(other, field)
            if field != "name" and value != another and not (field == "layers" and None in (value, another)):
                return f"{field} {value!r} ({self.name}) against {another!r} ({other.name})"
        return None


class EmbedHead(nn.Module):
    """The target's frozen embedding and LM head, which a draft borrows. Never part of a checkpoint.

    With a `vocabulary` (token ids, ascending) the head has only these rows, and its i-th logit is of the i-th of them.
    Some families scale logits (Granite, Cohere), others cap them softly (Gemma-2): cap * tanh(scale * head(f) / cap).
    """

    embedding: Tensor  # (all tokens, D)
    head_rows: Tensor  # (V, D), where the head is not the embedding
    vocabulary: Tensor | None

    def __init__(
        self,
        embedding: Tensor,
        head: Tensor,
        vocabulary: Tensor | None = None,
        scale: float = 1.0,
        cap: float | None = None,
    ):
        super().__init__()
        self.scale, self.cap = scale, cap
        self.tied = head is embedding and vocabulary is None
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        if not self.tied:
            rows = head.detach() if vocabulary is None else head.detach()[vocabulary]
            self.register_buffer("head_rows", rows, persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    @property
    def head(self) -> Tensor:
        """(V, D)"""
        return self.embedding if self.tied else self.head_rows

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)"""
        return nn.functional.embedding(tokens, self.embedding)

    def logits(self, features: Tensor, product: Product | None = None) -> Tensor:
        """(..., D) -> (..., V); rounded where the model itself rounds, so that its ties are ours.

        Args:
            product: multiplies features by the head; `project` by default.
        """
        logits = (product or project)(features.to(self.head.dtype), self.head)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def has_row(self, tokens: Tensor) -> Tensor:
        """For which of the target's token ids the head has a row; False for -1, which is no token."""
        if self.vocabulary is None:
            return tokens >= 0
        rows = torch.searchsorted(self.vocabulary, tokens.contiguous()).clamp(max=len(self.vocabulary) - 1)
        return self.vocabulary[rows] == tokens

    def restrict(self, vocabulary: Tensor | None) -> "EmbedHead":
        """The same with only the head's rows of `vocabulary`, unless it has only these already; None keeps all."""
        if vocabulary is None or self.vocabulary is not None:
            return self
        return EmbedHead(self.embedding, self.head, vocabulary.to(self.head.device), self.scale, self.cap)


# --- the product with a head ---


def project(features: Tensor, head: Tensor) -> Tensor:
    """Features (..., D) by the rows of a head (V, D) -> (..., V): `linear`, or what is faster on this CPU for few rows.

    Some CPUs repack the right operand of a product for their instructions, which in `linear` is the whole head. With
    the head on the left it is a few features; V is then not the innermost dimension in memory. `make bench` has times.
    """
    few = 1 < features.numel() // features.shape[-1] <= FEW
    if few and head.device.type == "cpu" and left_is_faster(head.dtype):
        return head_on_the_left(features, head)
    return nn.functional.linear(features, head)


def head_on_the_left(features: Tensor, head: Tensor) -> Tensor:
    """The product of `project` in the other order."""
    return (head @ features.flatten(0, -2).t()).t().unflatten(0, features.shape[:-1])


@torch.compiler.assume_constant_result
def left_is_faster(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies few features by a head faster in that order; timed once for each dtype."""
    return _left_over_linear(dtype) < LEAST_GAIN


@cache
@torch.inference_mode()
def _left_over_linear(dtype: torch.dtype) -> float:
    features, head = torch.ones(8, 512, dtype=dtype), torch.ones(32768, 512, dtype=dtype)
    ways = (head_on_the_left, nn.functional.linear)
    reversed_order, linear = best_seconds({way: partial(way, features, head) for way in ways}).values()
    return reversed_order / linear
