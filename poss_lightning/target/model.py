"""The frozen target: any transformers causal LM, read as features and a head."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from poss_lightning.target import embedded
from poss_lightning.target.cache import TreeCache
from poss_lightning.target.chat import Chat


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
    context: int  # tokens the target was made to read
    rope_theta: float
    norm_eps: float

    def difference(self, other: "TargetSpec") -> str | None:
        """The first way in which two specs are not the same target, in words; None where they are."""
        for field, mine in asdict(self).items():
            theirs = getattr(other, field)
            if field != "name" and mine != theirs:
                return f"{field} {mine!r} ({self.name}) against {theirs!r} ({other.name})"
        return None


class Ends(nn.Module):
    """The target's two frozen ends, which a draft borrows: embedding and LM head. Never part of a checkpoint.

    With a `vocabulary` (token ids, ascending) the head has only these rows and speaks of the i-th of them.
    """

    def __init__(self, embedding: Tensor, head: Tensor, vocabulary: Tensor | None = None):
        super().__init__()
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

    def logits(self, features: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        return nn.functional.linear(features.to(self.head.dtype), self.head)

    def token_ids(self, rows: Tensor) -> Tensor:
        """Rows of the head -> the target's token ids."""
        return rows if self.vocabulary is None else self.vocabulary[rows]

    def restrict(self, vocabulary: Tensor | None) -> "Ends":
        """The same ends with the head cut to `vocabulary`; None leaves it whole."""
        return self if vocabulary is None else Ends(self.embedding, self.head, vocabulary.to(self.head.device))


class Target(nn.Module):
    """A frozen causal LM of unmodified transformers code, with its tokenizer and chat template.

    `features` are the inputs of the LM head, so `ends.logits(features)` are the model's logits (checked at loading).
    """

    def __init__(self, model: nn.Module, tokenizer, name: str):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer, getattr(model, "generation_config", None))
        model.generation_config = GenerationConfig()  # a baseline must not inherit the model's penalties or temperature
        self.ends = _ends(model, name)
        try:
            self.spec = _spec(model, self.chat, name)
            self._check()
        except (AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(f"target {name!r} ({type(model).__name__}) is not supported: {error}") from error

    @classmethod
    def load(cls, name: str = embedded.NAME, dtype: str = "bfloat16", device: str = "cpu") -> "Target":
        """Load a target.

        Args:
            name: "embedded", a local folder, or a hub id.
            dtype: "bfloat16", "float16" or "float32".
            device: where it computes, "cpu" or "cuda".

        Raises:
            FileNotFoundError: no such folder or hub id, a damaged one, or the embedded target's package is missing.
            ValueError: an unknown dtype or device; weights missing; a model whose logits are not head(feature).
        """
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype is {dtype!r}; it must be bfloat16, float16 or float32")
        _check_device(device)
        disable_progress_bar()  # loading is a matter of seconds here, and the bar would cut through ours
        source = _folder(name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            model, loading = AutoModelForCausalLM.from_pretrained(
                source, dtype=getattr(torch, dtype), output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            needs = "config.json, tokenizer.json and model.safetensors"
            raise FileNotFoundError(
                f"target {name!r} is not a whole model, which needs {needs}: {str(error).splitlines()[0]}"
            ) from error
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(
                f"target {name!r} lacks {len(missing)} weights, the first is {missing[0]}: get its files anew"
            )
        return cls(model.to(device), tokenizer, name)

    @property
    def device(self) -> torch.device:
        return self.ends.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.ends.embedding.dtype

    def cache(self, batch: int, capacity: int) -> TreeCache:
        """An empty cache of `batch` rows and `capacity` slots."""
        config = self.model.config.get_text_config()
        shape = (config.num_hidden_layers, batch, capacity, self.spec.kv_heads, self.spec.head_dim)
        return TreeCache(*shape, self.dtype, self.device)

    def features(self, tokens: Tensor, ancestors: Tensor, cache: TreeCache) -> Tensor:
        """Read n tokens behind the cache's verified slots, as a tree.

        Args:
            tokens: (B, n)
            ancestors: (B or 1, n, n) bool, True where token i sees token j of this call; itself included.
            cache: is written to, but nothing counts as verified until `append` or `keep`.

        Returns:
            (B, n, D), the features after each token.
        """
        cache.slots.open(tokens.shape[1])
        positions = cache.slots.length[:, None] + ancestors.sum(-1) - 1  # (B, n)
        mask = cache.slots.visible(ancestors)  # (B, 1, n, extent)
        return self.model.base_model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state

    def read(self, tokens: Tensor) -> Tensor:
        """Features of whole right-padded sequences, no cache: (B, T) -> (B, T, D). Padding harms nobody before it."""
        return self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state

    def read_layers(self, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `read`, with what some of the decoder layers put out: (B, T) -> (B, T, D), (B, T, n, D).

        Layers are counted from 1, as in the `hidden_states` of transformers, where 0 is the embedding. The last one is
        not among them: behind the norm it is the feature. EAGLE-3 takes 2, half of all, and all less 3.

        Raises:
            ValueError: no such layer.
        """
        self.check_layers(layers)
        read = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return read.last_hidden_state, torch.stack([read.hidden_states[layer] for layer in layers], dim=2)

    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Raise ValueError where `read_layers` cannot give one of them."""
        last = self.model.config.get_text_config().num_hidden_layers - 1
        if wrong := [layer for layer in layers if not 1 <= layer <= last]:
            raise ValueError(f"layers has {wrong[0]}; those of {self.spec.name} that can be kept are 1 to {last}")

    @torch.inference_mode()
    def _check(self) -> None:
        """Refuse a model whose logits are not head(feature), or whose features differ behind a cache and a mask."""
        tokens = torch.arange(8, device=self.device)[None] % self.spec.vocab_size
        features = self.read(tokens)
        logits, ours = self.model(tokens, use_cache=False).logits, self.ends.logits(features)
        if logits.shape != ours.shape or not torch.allclose(logits.float(), ours.float(), rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"target {self.spec.name!r} ({type(self.model).__name__}) is not supported: its logits are not "
                "head(feature) (a bias, a soft cap or a scale stands between), so a draft could not share its head"
            )
        cached = self.features(tokens, causal(8, self.device), self.cache(1, 8))
        distance = (cached.float() - features.float()).norm() / features.float().norm()
        if distance > (1e-3 if self.dtype == torch.float32 else 5e-2):
            raise ValueError(
                f"target {self.spec.name!r} ({type(self.model).__name__}) is not supported: its features behind a "
                f"cache and a 4-D mask are not those of a plain forward (relative distance {distance:.1g})"
            )


def _folder(name: str) -> Path:
    """The local folder of a target: the embedded one's, a user's, or a hub id's after its download."""
    if name == embedded.NAME:
        return embedded.folder()
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except (OSError, ValueError) as error:  # what the hub client's many kinds derive from
        raise FileNotFoundError(
            f"target {name!r} is neither a local folder nor a hub id that can be reached"
        ) from error


def _check_device(device: str) -> None:
    """Raise ValueError unless a tensor can be made there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {device!r}, which this machine or this torch does not have; try cpu") from error


def causal(count: int, device: torch.device) -> Tensor:
    """The ancestors of a plain text: (1, n, n), lower triangle."""
    return torch.ones(1, count, count, dtype=torch.bool, device=device).tril()


def _ends(model: nn.Module, name: str) -> Ends:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ValueError(
            f"target {name!r} ({type(model).__name__}) is not supported: it has no plain embedding and LM head"
        )
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    return Ends(embedding.weight, embedding.weight if tied else head.weight)


def _spec(model: nn.Module, chat: Chat, name: str) -> TargetSpec:
    config = model.config.get_text_config()
    context = config.max_position_embeddings
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and window < context:
        raise ValueError(
            f"target {name!r} ({type(model).__name__}) is not supported: its layers see a window of {window} tokens, "
            f"shorter than its context of {context}, and the mask of a tree does not hold windows yet"
        )
    return TargetSpec(
        name=name,
        fingerprint=_fingerprint(model),
        template=chat.digest,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        context=context,
        rope_theta=float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
        norm_eps=getattr(config, "rms_norm_eps", 1e-6),
    )


def _fingerprint(model: nn.Module) -> str:
    """A digest of 64 numbers of every parameter, rounded to bfloat16, in which most models are kept and run."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        sample = parameter.detach().flatten()[:64].to(torch.bfloat16).float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
