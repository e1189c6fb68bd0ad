"""What training and decoding know of a target without loading it: its sizes, and its frozen embedding and head."""

from dataclasses import asdict, dataclass

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from poss_lightning.prepack import Product
from poss_lightning.ranges import refuse_types
from poss_lightning.target_model.fingerprints import same_weights


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """What a store or a draft must know of its target: its identity and its sizes."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    fingerprint: str = ""  # of the weights (`same_weights`), under any name, in bfloat16 or as they were saved
    template: str = ""  # digest of the chat template
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int  # tokens that the target reads, see `describe.spec_of`
    rope_theta: float  # of its full attention, where layers differ
    norm_eps: float
    layers: int  # of the decoder
    logit_scale: float = 1.0  # between head and softmax; see `EmbedHead`
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a field of another type, as a foreign file may have."""
        refuse_types(self, "target's ")

    def difference(self, other: "TargetSpec") -> str | None:
        """Name the first field in which two specs differ; None if they describe the same target."""
        for field, value in asdict(self).items():
            compared = getattr(other, field)
            same = field == "name" or value == compared or (field == "fingerprint" and same_weights(value, compared))
            if not same:
                return f"{field} {value!r} ({self.name}) against {compared!r} ({other.name})"
        return None


class EmbedHead(nn.Module):
    """The target's frozen embedding and LM head, which a draft borrows. Never part of a checkpoint.

    With a `vocabulary` (token ids, ascending) the head keeps only these rows, and logit i is that of the i-th of them.
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
        """Embed tokens: (B, T) -> (B, T, D)."""
        return nn.functional.embedding(tokens, self.embedding)

    def logits(self, features: Tensor, product: Product | None = None) -> Tensor:
        """Compute logits (..., D) -> (..., V), rounded where the model itself rounds, so that its ties are ours.

        `product` is how to multiply by the head; by default `linear`.
        """
        features = features.to(self.head.dtype)
        logits = product(features) if product else nn.functional.linear(features, self.head)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def has_row(self, tokens: Tensor) -> Tensor:
        """Return whether the head has a row for each token id; False for -1, which is no token."""
        if self.vocabulary is None:
            return tokens >= 0
        rows = torch.searchsorted(self.vocabulary, tokens.contiguous()).clamp(max=len(self.vocabulary) - 1)
        return self.vocabulary[rows] == tokens

    def restrict(self, vocabulary: Tensor | None) -> "EmbedHead":
        """Keep only the head's rows of `vocabulary`, unless that is None or the head is restricted already."""
        if vocabulary is None or self.vocabulary is not None:
            return self
        return EmbedHead(self.embedding, self.head, vocabulary.to(self.head.device), self.scale, self.cap)
