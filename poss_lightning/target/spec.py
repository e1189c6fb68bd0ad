"""What training and decoding know of a target without having it: its spec, and its two frozen ends."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from poss_lightning.machine import best_seconds
from poss_lightning.target.masks import FULL

FEW = 32  # rows of features for which `project` may put the head on the left
LEAST_GAIN = 0.8  # of the time of `linear` that the other order may take, to be taken
Product = Callable[[Tensor, Tensor], Tensor]  # features (..., D) by a head (V, D) -> (..., V)


@dataclass(frozen=True)
class TargetSpec:
    """What a store or a draft must know of its target: who it is and how large."""

    name: str
    fingerprint: str  # of the weights: the same for a model under any name, in bfloat16 or the dtype it was saved in
    template: str  # digest of the chat template
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int  # tokens the target reads; with rotary angles of kind "longrope" those it reads with the short factors
    rope_theta: float  # of its full attention, where layers differ
    norm_eps: float
    logit_scale: float = 1.0  # what stands between head and softmax; see `Ends`
    logit_cap: float | None = None
    layers: int | None = None  # decoder layers; None in what was written before they were counted

    def difference(self, other: "TargetSpec") -> str | None:
        """The first way in which two specs are not the same target, in words; None where they are."""
        for field, mine in asdict(self).items():
            theirs = getattr(other, field)
            if field != "name" and mine != theirs and not (field == "layers" and None in (mine, theirs)):
                return f"{field} {mine!r} ({self.name}) against {theirs!r} ({other.name})"
        return None


def project(features: Tensor, head: Tensor) -> Tensor:
    """Features (..., D) by the rows of a head (V, D) -> (..., V): `linear`, or what is faster on this CPU for few rows.

    Some CPUs lay out the right of a product anew for their instructions, which in `linear` is all of the head. With the
    head on the left it is a few features; V is then not the innermost dimension in memory. `make bench` has the times.
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
    """Whether a CPU multiplies few features by a head faster in that order; timed once for a dtype."""
    return _left_over_linear(dtype) < LEAST_GAIN


@cache
@torch.inference_mode()
def _left_over_linear(dtype: torch.dtype) -> float:
    features, head = torch.ones(8, 512, dtype=dtype), torch.ones(32768, 512, dtype=dtype)
    ways = (head_on_the_left, nn.functional.linear)
    left, linear = best_seconds({way: partial(way, features, head) for way in ways}).values()
    return left / linear


class Ends(nn.Module):
    """The target's two frozen ends, which a draft borrows: embedding and LM head. Never part of a checkpoint.

    With a `vocabulary` (token ids, ascending) the head has only these rows and speaks of the i-th of them. Between head
    and softmax some families scale (Granite, Cohere), others cap softly (Gemma-2): cap * tanh(scale * head(f) / cap).
    """

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
        self.register_buffer("embedding", embedding.detach(), persistent=False)  # (all tokens, D)
        if not self.tied:
            rows = head.detach() if vocabulary is None else head.detach()[vocabulary]
            self.register_buffer("head_rows", rows, persistent=False)  # (V, D)
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    @property
    def head(self) -> Tensor:
        """(V, D)"""
        return self.embedding if self.tied else self.head_rows

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)"""
        return nn.functional.embedding(tokens, self.embedding)

    def logits(self, features: Tensor, product: Product = project) -> Tensor:
        """(..., D) -> (..., V); rounded where the model itself rounds, so that its ties are ours.

        `product` multiplies features by the head.
        """
        logits = product(features.to(self.head.dtype), self.head)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def token_ids(self, rows: Tensor) -> Tensor:
        """Rows of the head -> the target's token ids."""
        return rows if self.vocabulary is None else self.vocabulary[rows]

    def holds(self, tokens: Tensor) -> Tensor:
        """Which of the target's token ids the head has a row of; not of -1, which is none."""
        if self.vocabulary is None:
            return tokens >= 0
        rows = torch.searchsorted(self.vocabulary, tokens.contiguous()).clamp(max=len(self.vocabulary) - 1)
        return self.vocabulary[rows] == tokens

    def restrict(self, vocabulary: Tensor | None) -> "Ends":
        """The same ends with the head cut to `vocabulary`; None leaves it whole."""
        if vocabulary is None:
            return self
        return Ends(self.embedding, self.head, vocabulary.to(self.head.device), self.scale, self.cap)


def read_ends(model: nn.Module, spec: TargetSpec) -> Ends:
    """The ends of a model with this spec."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    rows = embedding.weight if tied else head.weight
    return Ends(embedding.weight, rows, scale=spec.logit_scale, cap=spec.logit_cap)


def read_spec(model: nn.Module, name: str, template: str) -> TargetSpec:
    """The spec of a model; `name` and `template` are as in `TargetSpec`.

    Raises:
        NotImplementedError: its embedding is no table, or its head no matrix.
        AttributeError: its config lacks a size.
    """
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise NotImplementedError("it has no plain embedding and LM head")
    rotary = _rotary(config)
    turns = [each["original_max_position_embeddings"] for each in rotary if each.get("rope_type") == "longrope"]
    return TargetSpec(
        name=name,
        fingerprint=_fingerprint(model),
        template=template,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=head.weight.shape[0],
        context=min([config.max_position_embeddings, *turns]),
        rope_theta=float(rotary[0].get("rope_theta", 10000.0)),
        norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        logit_scale=(getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        layers=config.num_hidden_layers,
    )


def _rotary(config: PreTrainedConfig) -> list[dict]:
    """Rotary parameters of every kind of layer, full attention's first; one where all are alike.

    Angles depend on a token's own position, but for two kinds: where the longest text in hand passes a length, those of
    "longrope" and "dynamic" change for all. One node of a tree would change another's, and keys in the cache have the
    old ones. So a context ends at that length, as it does by itself with "dynamic".
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if FULL not in parameters:
        return [parameters]
    return [parameters[FULL], *(each for kind, each in parameters.items() if kind != FULL)]


def _fingerprint(model: nn.Module) -> str:
    """A digest of 64 numbers of every parameter, rounded to bfloat16, in which most models are kept and run."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        sample = parameter.detach().flatten()[:64].to(torch.bfloat16).float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
