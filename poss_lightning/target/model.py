"""The frozen target: any causal LM of transformers, used as features and a head."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import Cache

from poss_lightning.files import fetch
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.prepack import Steady, product_with
from poss_lightning.target import embedded
from poss_lightning.target.by_position import ByPosition
from poss_lightning.target.cache import TreeCache
from poss_lightning.target.chat import Chat
from poss_lightning.target.describe import decoding_copy, embed_head_of, fingerprint, plain_embed_head, spec_of
from poss_lightning.target.grouped_attention import GROUPED, attending_by, mask_copies
from poss_lightning.target.loading import explain_failure, load_config, load_model, reason
from poss_lightning.target.masks import layer_masks, layer_windows
from poss_lightning.target.placement import Parallel, placement
from poss_lightning.target.template import Variables, token_ids
from poss_lightning.terminal import announced

logger = logging.getLogger(__name__)

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a hub repository that are downloaded
#        r a b c d   the tree that a target must get right when it is loaded: r(a(c) b(d))
TREE = ((1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 1, 0, 0), (1, 1, 0, 1, 0), (1, 0, 1, 0, 1))
PATHS = ((0, 1, 3), (0, 2, 4))
READS_MASKS = (GROUPED, "sdpa", "eager")  # other attention takes no tree's mask
OWN_LOGITS = (
    "its logits are not head(feature), scaled or softly capped as its config says (a bias or a step of its own stands "
    "between), so a draft could not share its head"
)


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
            known = {"vocab_size": rows, "fingerprint": fingerprint(model), "template": self.chat.template.digest}
            self.spec = spec_of(model.config, name, **known)
            token_ids(
                getattr(getattr(model, "generation_config", None), "eos_token_id", None), "its eos_token_id", rows
            )
            self._find_parts()
            self.windows = layer_windows(self.config, self.spec.context)
            self._check()
            self.by_position = self._find_by_position()
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
            dtype: "auto" for what the device multiplies fastest, "bfloat16", "float16" or "float32"; None for the dtype
                of its files.
            device: "auto" for "cuda", else "mps", else "cpu"; or one of these.
            parallel: "none" for one device; "layers" to spread its layers over all GPUs.
            spared: with "layers", number of a GPU that gets none.
            chat_template_kwargs: variables of the chat template, as {"enable_thinking": False}.
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
        self.by_position = self._find_by_position()

    def _find_parts(self) -> None:
        """Find the model's embedding and head, copy the rest for decoding; and where a layer keeps keys and values."""
        self.embed_head, self.by_position = embed_head_of(self.model, self.spec), None
        steady = self.device.type == "cpu" and self._asked_exact is not False
        self.backbone = decoding_copy(self.model, steady)
        self.config = self.backbone.config.get_text_config()
        self._head_product = (Steady if steady else product_with)(self.embed_head.head)
        if self.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, for tens of ms, whenever a text has grown
        self.layer_devices = [self.device] * self.config.num_hidden_layers
        if self.spans_devices:
            cache = DynamicCache()
            with torch.inference_mode():
                self._base_forward(cache, input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device))
            self.layer_devices = [layer.keys.device for layer in cache.layers]  # pyright: ignore

    def _base_forward(self, cache: Cache | None, **inputs: Any) -> Any:
        """Run the model without its head; `cache` is read and written."""
        return self.backbone(**inputs, **{self._cache_name: cache}, use_cache=cache is not None)

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
        if self.by_position:
            capacity = self.by_position.shapes.round_extent(capacity)
        sizes: dict[str, Any] = {"heads": self.spec.kv_heads, "head_dim": self.spec.head_dim, "dtype": self.dtype}
        return TreeCache(self.layer_devices, self.device, batch, capacity, **sizes)

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
            exact: with the bits of plain decoding, if the target can; paths have at most `by_position.TAIL` nodes.
        """
        features, draft_input = self.forward_tree(tokens, ancestors, cache, layers, exact)
        return draft_input, self.logits(features)

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
            exact: see `verify`.

        Returns:
            The features, and a draft's input: the same, or the outputs of `layers` (B, n, R).
        """
        slots = cache.slots
        slots.open(tokens.shape[1])
        positions = slots.lengths[:, None] + ancestors.sum(-1) - 1  # (B, n)
        # A node beyond the context is never emitted; it must not change others' angles, nor ask for unlearnt positions.
        angles = positions.clamp(max=self.spec.context - 1)
        # Once for all layers, where they lie on one device and have the same heads; others repeat it for themselves.
        copies = mask_copies(self.config, tokens.shape[1]) if len(cache.stores) == 1 else 1
        if exact and self.by_position:
            mask, attention = self.by_position.read(ancestors, positions, slots, copies)
        else:
            visible = slots.tree_mask(ancestors)
            mask, attention = layer_masks(self.windows, visible, angles, slots.lengths, self.dtype, copies), None
        with self._kept(layers) as inner, attending_by(attention) if attention else nullcontext():
            output = self._base_forward(cache, input_ids=tokens, attention_mask=mask, position_ids=angles)
        features = output.last_hidden_state.to(self.device)
        return features, torch.cat([inner[i] for i in layers], dim=-1) if layers else features

    # --- whole texts, without a cache ---

    def text_features(self, tokens: Tensor) -> Tensor:
        """Compute features of whole right-padded texts: (B, T) -> (B, T, D). Padding changes nothing before it."""
        return self.text_layers(tokens, ())[0]

    def text_layers(self, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return `text_features`, and outputs of some decoder layers: (B, T) -> (B, T, D), (B, T, n, D).

        Layers are counted from 1, as in the `hidden_states` of transformers, where 0 is the embedding. The output of
        the last one is the feature before the final norm.
        """
        with self._kept(layers) as inner:
            output = self._base_forward(None, input_ids=tokens)
        features = output.last_hidden_state.to(self.device)
        none = features[:, :, None][:, :, :0]
        return features, torch.stack([inner[i] for i in layers], dim=2) if layers else none

    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Raise ValueError if a store cannot keep one of them; the last one, after the norm, is the feature."""
        last = self.config.num_hidden_layers - 1
        if wrong := [layer for layer in layers if not 1 <= layer <= last]:
            raise ValueError(f"layers has {wrong[0]}; those of {self.spec.name} that can be kept are 1 to {last}")

    @contextmanager
    def _kept(self, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Collect the outputs of these layers from the forwards in the block."""
        kept: dict[int, Tensor] = {}

        def keep(i: int, module: nn.Module, inputs: Any, output: Any) -> None:
            kept[i] = (output if isinstance(output, Tensor) else output[0]).to(self.device)

        with ExitStack() as hooks:
            for i in layers:
                hooks.enter_context(self._decoder_layers()[i - 1].register_forward_hook(partial(keep, i)))
            yield kept

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

    # --- checks when it is loaded ---

    @torch.inference_mode()
    def _check(self) -> None:
        """Raise NotImplementedError if logits, inner layers or features under a mask are not the model's."""
        if (attention := self.config._attn_implementation) not in READS_MASKS:
            raise NotImplementedError(f"it attends by {attention}: load it with attn_implementation='sdpa'")
        tokens = torch.arange(8, device=self.device)[None] % self.spec.vocab_size
        with reason("transformers itself cannot read 8 tokens with it"), self.without_defaults() as model:
            output = model.base_model(tokens, use_cache=False, output_hidden_states=True)
            logits = model(tokens, use_cache=False).logits.to(self.device)
        theirs = output.last_hidden_state.to(self.device)
        features, inner = self.text_layers(tokens, layers := tuple(range(1, self.config.num_hidden_layers)))
        if not features.isfinite().all():
            raise NotImplementedError(f"its features are not finite in {self.dtype_name}: choose a different dtype")
        self._check_near(features, theirs, "its features")
        with reason(OWN_LOGITS):
            ours = self.embed_head.logits(theirs)
        states = torch.stack([state.to(self.device) for state in output.hidden_states]).float()  # (L + 1, 1, 8, D)
        if any((states - inner[:, :, i - 1]).flatten(1).norm(dim=1).argmin() != i for i in layers):
            raise NotImplementedError("the outputs of its decoder layers are not its hidden states")
        if logits.shape != ours.shape or not torch.allclose(logits.float(), ours.float(), rtol=1e-3, atol=1e-3):
            raise NotImplementedError(OWN_LOGITS)
        self._check_tree("")
        if any(self.windows.values()):
            usual = self.config.sliding_window, self.windows
            self.config.sliding_window = 5  # for transformers' masks
            self.windows = layer_windows(self.config, self.spec.context)
            try:
                self._check_tree(" and windows")
            finally:
                self.config.sliding_window, self.windows = usual

    def _check_tree(self, suffix: str) -> None:
        """Compare `TREE` after 8 tokens with each of its paths as a separate text."""
        tokens = torch.arange(13, device=self.device)[None] % self.spec.vocab_size
        text, nodes = tokens.split([8, 5], dim=1)
        cache = self.new_cache(1, 13)
        with reason("its attention does not take a tree's mask and cache"):  # keys of other sizes, a mask of 2 axes
            before, _ = self.forward_tree(text, causal_ancestors(8, self.device), cache)  # (1, 8, D)
            cache.append([8])
            tree, _ = self.forward_tree(nodes, torch.tensor([TREE], device=self.device) > 0, cache)  # (1, 5, D)
        paths = torch.tensor(PATHS, device=self.device)
        plain = self.text_features(torch.cat([text.expand(2, -1), nodes[0, paths]], dim=1))  # (2, 11, D)
        ours = torch.cat([before.expand(2, -1, -1), tree[0, paths]], dim=1)
        self._check_near(ours, plain, f"its features behind a cache and a tree's mask{suffix}")

    @torch.inference_mode()
    def _find_by_position(self) -> ByPosition | None:
        """Return how to attend by position if a trial gives plain decoding's bits; None, and a line of the log, if not.

        Raises:
            NotImplementedError: it does not, and was asked for.
        """
        if self._asked_exact is False or (self._asked_exact is None and self.device.type != "cpu"):
            return None
        try:
            if self.device.type != "cpu" or self.config._attn_implementation != GROUPED:
                where = self.config._attn_implementation if self.device.type == "cpu" else self.device.type
                raise NotImplementedError(f"it attends by {where}")
            self.by_position = ByPosition(self.windows, self.dtype, self.spec.head_dim)
            self._check_bits()
        except NotImplementedError as error:
            self.by_position = None
            if self._asked_exact:
                raise NotImplementedError(f"exact is true, but {error}") from error
            logger.info("drafted tokens of %s may differ where rounding breaks a tie: %s", self.spec.name, error)
        return self.by_position

    def _check_bits(self) -> None:
        """Raise NotImplementedError unless a path of a tree has the bits of plain steps: node i below (i - 1) // 2."""
        count, path = 63, [0, 2, 5, 12, 26, 54]
        ancestors = torch.eye(count, dtype=torch.bool, device=self.device)
        for node in range(1, count):
            ancestors[node] |= ancestors[(node - 1) // 2]
        tokens = (torch.arange(24 + count, device=self.device) * 7 % self.spec.vocab_size)[None]
        text, nodes = tokens.split([24, count], dim=1)

        def read_text() -> TreeCache:
            cache = self.new_cache(1, 24 + count)
            self.forward_tree(text, causal_ancestors(24, self.device), cache)
            cache.append([24])
            return cache

        _, expected = self.verify(nodes, ancestors[None], read_text())
        cache = read_text()
        for node in path:
            _, logits = self.verify(nodes[:, node : node + 1], causal_ancestors(1, self.device), cache)
            cache.append([1])
            if not logits[0, 0].equal(expected[0, node]):
                raise NotImplementedError("the bits of a tree's node depend on the other nodes")

    def _check_near(self, ours: Tensor, plain: Tensor, what: str) -> None:
        distance = (ours.float() - plain.float()).norm() / plain.float().norm()
        if not distance <= (1e-3 if self.dtype == torch.float32 else 5e-2):
            raise NotImplementedError(f"{what} are not those of a plain forward (relative distance {distance:.1g})")


def causal_ancestors(count: int, device: torch.device) -> Tensor:
    """Return the ancestors in a plain text: (1, n, n), lower triangle."""
    return torch.ones(1, count, count, dtype=torch.bool, device=device).tril()
