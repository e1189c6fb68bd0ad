"""The frozen target: any causal LM of transformers, used as features and a head."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import Cache

from poss_lightning.files import fetch
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.prepack import product_with
from poss_lightning.target_model import embedded
from poss_lightning.target_model.cache import TreeCache
from poss_lightning.target_model.chat import Chat
from poss_lightning.target_model.checks import check_target, find_by_position
from poss_lightning.target_model.describe import (
    decoding_copy,
    embed_head_of,
    fingerprint,
    plain_embed_head,
    spec_of,
)
from poss_lightning.target_model.grouped_attention import attending_by, mask_copies
from poss_lightning.target_model.loading import Parallel, explain_failure, load_config, load_model, placement
from poss_lightning.target_model.masks import layer_masks, layer_windows
from poss_lightning.target_model.template import Variables, token_ids
from poss_lightning.terminal import announced

if TYPE_CHECKING:
    from poss_lightning.target_model.checks import Reader

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a hub repository that are downloaded


class Target(nn.Module):
    """A causal LM of unmodified transformers code, with its tokenizer and chat template. The model stays as it is.

    Features are the inputs of the LM head, so `embed_head.logits(features)` are the model's logits (checked here).
    The model may lie on several devices (`device_map`); features, embedding and head are on the head's device, and so
    is a draft.

    Args:
        model: a causal LM of transformers.
        tokenizer: a fast one, with a chat template.
        name: for messages and files.
        chat_template_kwargs: variables of the chat template.
        exact: compute a drafted token's logits with the bits of plain decoding, so that both write the same text in any
            dtype; None does so on a CPU where a trial agrees, and logs why elsewhere not.

    Raises:
        ValueError: the model is not supported, or not exact where that was asked; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        name: str,
        chat_template_kwargs: Variables | None = None,
        exact: bool | None = None,
    ):
        super().__init__()
        self._asked_exact = exact
        self.model, self.tokenizer = model, tokenizer
        self.chat = Chat(tokenizer, getattr(model, "generation_config", None), chat_template_kwargs)
        # transformers has warned of the longer name since 5.24, and accepts it until 5.40.
        self._cache_name = "cache" if "cache" in signature(model.base_model.forward).parameters else "past_key_values"
        self.spans_devices = len({value.device for value in model.parameters()}) > 1
        try:
            rows = len(plain_embed_head(model)[1].weight)
            identity = {"vocab_size": rows, "fingerprint": fingerprint(model), "template": self.chat.template.digest}
            self.spec = spec_of(model.config, name, **identity)
            token_ids(
                getattr(getattr(model, "generation_config", None), "eos_token_id", None), "its eos_token_id", rows
            )
            self._find_parts()
            self.windows = layer_windows(self.config, self.spec.context)
            check_target(self)
            self.by_position = find_by_position(self, exact)
        except Exception as error:  # whatever its code, or the device, raises
            raise ValueError(explain_failure(name, error, type(model).__name__)) from error

    @classmethod
    def load(
        cls,
        name: str = embedded.NAME,
        dtype: str | None = "auto",
        device: str = "auto",
        parallel: Parallel = "none",
        spared: int | None = None,
        chat_template_kwargs: Variables | None = None,
        exact: bool | None = None,
    ) -> "Target":
        """Load a target.

        Args:
            name: "embedded", a local folder, or a hub id.
            dtype, device, parallel, chat_template_kwargs: see `TargetOptions`; a dtype of None is that of its files.
            spared: with "layers", number of a GPU that gets none.
            exact: see `Target`.

        Raises:
            FileNotFoundError: no such folder or hub id, or the embedded target's package is missing.
            ValueError: an unknown dtype or device; not a model of transformers, or a damaged one; weights missing; a
                model whose logits are not head(feature).
        """
        device = choose_device(device)
        dtype = dtype and choose_dtype(dtype, device)
        folder = embedded.folder() if name == embedded.NAME else fetch(name, "target", FILES)
        config = load_config(name, folder)
        placed = placement(config, device, parallel, spared)
        with announced(f"loading target {name}"):
            model, tokenizer, as_saved = load_model(name, folder, config, dtype, device, placed)
        with announced(f"checking target {name}"):
            target = cls(model.requires_grad_(False), tokenizer, name, chat_template_kwargs, exact)
        if as_saved:
            target.spec = replace(target.spec, fingerprint=as_saved)
        if target.device.type == "cuda" and placed:
            torch.cuda.set_device(target.device)  # where the draft computes, and what clocks measure
        return target

    def move(self, device: torch.device | str) -> None:
        """Take a model on one device to another, without a second embedding and head: they stay the model's own."""
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        self._find_parts()
        self.by_position = find_by_position(self, self._asked_exact)

    def _find_parts(self) -> None:
        """Find the model's embedding and head, copy the rest for decoding; and where a layer keeps keys and values."""
        self.embed_head = embed_head_of(self.model, self.spec)
        self.by_position: Reader | None = None
        steady = self.device.type == "cpu" and self._asked_exact is not False
        self.backbone, self._decoding = decoding_copy(self.model, steady)
        self.config = self.backbone.config.get_text_config()
        self._head_product = (self._decoding.steady if steady else product_with)(self.embed_head.head)
        self.steady_rows = self._decoding.rows  # from so many on, a product on a CPU is `Steady`
        if self.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, for tens of ms, whenever a text has grown
        self.layer_devices = [self.device] * self.config.num_hidden_layers
        if self.spans_devices:
            cache = DynamicCache()
            with torch.inference_mode():
                self._base_forward(cache, input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device))
            self.layer_devices = [layer.keys.device for layer in cache.layers]  # pyright: ignore

    def _base_forward(
        self, cache: Cache | None, layers: tuple[int, ...] = (), **inputs: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the model without its head: features, and the outputs of these layers; `cache` is read and written."""
        outputs: dict[int, Tensor] = {}

        def keep(i: int, module: nn.Module, inputs: Any, output: Any) -> None:
            outputs[i] = (output if isinstance(output, Tensor) else output[0]).to(self.device)

        with ExitStack() as hooks:
            for i in layers:
                hooks.enter_context(self._decoder_layers()[i - 1].register_forward_hook(partial(keep, i)))
            output = self.backbone(**inputs, **{self._cache_name: cache}, use_cache=cache is not None)
        return output.last_hidden_state.to(self.device), [outputs[i] for i in layers]

    @property
    def device(self) -> torch.device:
        return self.embed_head.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_head.embedding.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype as options and files name it, e.g. bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_graphs(self) -> bool:
        """Whether its steps can be CUDA graphs: not if they pass from device to device."""
        return self.device.type == "cuda" and not self.spans_devices

    def new_cache(self, batch: int, capacity: int) -> TreeCache:
        """Allocate an empty cache of `batch` rows and `capacity` slots."""
        capacity = self.by_position.fit(capacity) if self.by_position else capacity
        sizes: dict[str, Any] = {"heads": self.spec.kv_heads, "head_dim": self.spec.head_dim, "dtype": self.dtype}
        cache = TreeCache(self.layer_devices, self.device, batch, capacity, **sizes)
        cache.slots.min_extent = self.by_position.room if self.by_position else 0
        return cache

    def logits(self, features: Tensor) -> Tensor:
        """Compute the model's logits: (..., D) -> (..., V)."""
        return self.embed_head.logits(features, self._head_product)

    def check_tokens(self, tokens: Iterable[int], what: str) -> None:
        """Raise ValueError if embedding or head has no row for a token of `what`."""
        rows = min(self.spec.vocab_size, len(self.embed_head.embedding))
        if unknown := {token for token in tokens if not 0 <= token < rows}:
            token, name = min(unknown), self.spec.name
            raise ValueError(
                f"token {token} of {what} ({self.tokenizer.decode([token])!r}) is not one of {name}'s {rows}: the "
                f"tokenizer has {len(self.tokenizer)}; use that of these weights, or resize the embedding"
            )

    # --- trees, after a cache ---

    @property
    def exact(self) -> bool:
        """Whether a drafted token's logits have the bits of plain decoding."""
        return self.by_position is not None

    def verify(
        self,
        tokens: Tensor,
        ancestors: Tensor,
        cache: TreeCache,
        layers: tuple[int, ...] = (),
        exact: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return a draft's input (B, n, R) and the logits (B, n, V) after each node of a tree, or after one token.

        Args:
            tokens, ancestors, cache, layers: see `forward_tree`.
            exact: with the bits of plain decoding, if the target can; the tree keeps the `limit` of `by_position`.
        """
        nodes = tokens.shape[1]
        with self._decoding.on():
            features, draft_input = self.forward_tree(tokens, ancestors, cache, layers, exact)
            return draft_input[:, :nodes], self.logits(features)[:, :nodes]

    def forward_tree(
        self,
        tokens: Tensor,
        ancestors: Tensor,
        cache: TreeCache,
        layers: tuple[int, ...] = (),
        exact: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute features (B, n, D) after each of n tokens, which form a tree after the cache's verified slots.

        Args:
            tokens: (B, n)
            ancestors: (B or 1, n, n) bool, True where token i sees token j of this call; itself included.
            cache: is written to, but nothing counts as verified until `append` or `keep_path`.
            layers: whose outputs a draft reads, side by side.
            exact: see `verify`; then there may be more than n of all outputs, of which the rest mean nothing.

        Returns:
            The features, and a draft's input: the same, or the outputs of `layers` (B, n, R).
        """
        slots, by_position = cache.slots, self.by_position if exact else None
        more = by_position.added_nodes(*tokens.shape) if by_position else 0
        slots.open(tokens.shape[1] + more)
        positions = slots.lengths[:, None] + ancestors.sum(-1) - 1  # (B, n)
        # A node beyond the context is never emitted; it must not change others' angles, nor ask for unlearnt positions.
        angles = positions.clamp(max=self.spec.context - 1)
        if by_position:
            group = self.spec.heads // self.spec.kv_heads
            mask, attention = by_position.read(self.windows, ancestors, positions, cache, group)
            attending = attending_by(attention, self.config, angles.shape[1])
            tokens, angles = (pad(each, (0, more)) for each in (tokens, angles))
        else:
            # Once for all layers, if they lie on one device and have the same heads; others repeat it for themselves.
            copies = mask_copies(self.config, tokens.shape[1]) if len(cache.stores) == 1 else 1
            visible, attending = slots.tree_mask(ancestors), nullcontext()
            mask = layer_masks(self.windows, visible, angles, slots.lengths, self.dtype, copies)
        with attending:
            features, inner = self._base_forward(
                cache, layers, input_ids=tokens, attention_mask=mask, position_ids=angles
            )
        return features, torch.cat(inner, dim=-1) if layers else features

    # --- whole texts, without a cache ---

    def text_features(self, tokens: Tensor) -> Tensor:
        """Compute features of whole right-padded texts: (B, T) -> (B, T, D). Padding changes nothing before it."""
        return self.text_layers(tokens, ())[0]

    def text_layers(self, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return `text_features`, and outputs of some decoder layers: (B, T) -> (B, T, D), (B, T, n, D).

        Layers are counted from 1, as in the `hidden_states` of transformers, where 0 is the embedding. The output of
        the last one is the feature before the final norm.
        """
        features, inner = self._base_forward(None, layers, input_ids=tokens)
        return features, torch.stack(inner, dim=2) if layers else features[:, :, None][:, :, :0]

    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Raise ValueError if a store cannot keep one of them; the last one, after the norm, is the feature."""
        last = self.config.num_hidden_layers - 1
        if wrong := [layer for layer in layers if not 1 <= layer <= last]:
            raise ValueError(f"layers has {wrong[0]}; those of {self.spec.name} that can be kept are 1 to {last}")

    def _decoder_layers(self) -> nn.ModuleList:
        count, lists = self.config.num_hidden_layers, self.backbone.modules()
        if found := [each for each in lists if isinstance(each, nn.ModuleList) and len(each) == count]:
            return found[0]
        raise NotImplementedError(f"it has no list of {count} decoder layers")

    @contextmanager
    def without_defaults(self) -> Iterator[Any]:
        """Yield the user's model for `generate`: in eval mode, without penalties that its files ask for."""
        model, usual, was_training = self.model, self.model.generation_config, self.model.training
        model.generation_config = GenerationConfig()
        try:
            yield model.eval()
        finally:
            model.generation_config = usual
            model.train(was_training)
