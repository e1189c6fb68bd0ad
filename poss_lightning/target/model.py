"""The frozen target: any transformers causal LM, read as features and a head."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from poss_lightning.files import fetch
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.target import embedded
from poss_lightning.target.cache import Packed, SlotStore, TreeCache
from poss_lightning.target.chat import Chat
from poss_lightning.target.masks import LayerMasks
from poss_lightning.target.spec import read_ends, read_spec

#        r a b c d   the tree that a target reads when it is loaded: r(a(c) b(d))
TREE = ((1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 1, 0, 0), (1, 1, 0, 1, 0), (1, 0, 1, 0, 1))
PATHS = ((0, 1, 3), (0, 2, 4))


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
        _hold_angles(model)
        self.config = model.config.get_text_config()
        try:
            self.spec = read_spec(model, name, self.chat.digest)
            self.ends = read_ends(model, self.spec)
            self.masks = LayerMasks.of(self.config, self.spec.context)
            self._check()
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # whatever its code raises
            raise ValueError(f"target {name!r} ({type(model).__name__}) is not supported: {error}") from error

    @classmethod
    def load(cls, name: str = embedded.NAME, dtype: str | None = "auto", device: str = "auto") -> "Target":
        """Load a target.

        Args:
            name: "embedded", a local folder, or a hub id.
            dtype: "auto" for what the device multiplies fastest, "bfloat16", "float16" or "float32"; None for that of
                its files.
            device: where it computes: "auto" for "cuda", else "mps", else "cpu"; or one of these.

        Raises:
            FileNotFoundError: no such folder or hub id, a damaged one, or the embedded target's package is missing.
            ValueError: an unknown dtype or device; weights missing; a model whose logits are not head(feature).
        """
        device = choose_device(device)
        if dtype is not None:
            dtype = choose_dtype(dtype, device)
        disable_progress_bar()  # loading is a matter of seconds here, and the bar would cut through ours
        source = _folder(name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            model, loading = AutoModelForCausalLM.from_pretrained(
                source, dtype=getattr(torch, dtype) if dtype else "auto", output_loading_info=True
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

    @property
    def dtype_name(self) -> str:
        """As options and files name it, e.g. bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    def cache(self, batch: int, capacity: int) -> TreeCache:
        """An empty cache of `batch` rows and `capacity` slots."""
        shape = (self.config.num_hidden_layers, batch, capacity, self.spec.kv_heads, self.spec.head_dim)
        return TreeCache(SlotStore(*shape, self.dtype, self.device))

    def features(self, tokens: Tensor, ancestors: Tensor, cache: TreeCache, packed: Packed | None = None) -> Tensor:
        """Read n tokens behind the cache's verified slots, as a tree.

        Args:
            tokens: (B, n)
            ancestors: (B or 1, n, n) bool, True where token i sees token j of this call; itself included.
            cache: is written to, but nothing counts as verified until `append` or `keep`.
            packed: read only these M tokens of the batch, side by side.

        Returns:
            (B, n, D), the features after each token; (1, M, D) where they are packed.
        """
        return self.seen(tokens, ancestors, cache, packed)[0]

    def seen(
        self,
        tokens: Tensor,
        ancestors: Tensor,
        cache: TreeCache,
        packed: Packed | None = None,
        layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """`features`, and what a draft reads: the same, or what these layers put out side by side, (B, n, R)."""
        cache.slots.open(tokens.shape[1])
        positions = cache.slots.length[:, None] + ancestors.sum(-1) - 1  # (B, n)
        # A node beyond the context is never emitted; it must not turn others' angles, or ask for a position not learnt.
        positions = positions.clamp(max=self.spec.context - 1)
        mask = self.masks(cache.slots.visible(ancestors), positions, cache.slots.length, self.dtype, packed)
        if packed is not None:
            cache.slots.pack(packed)
            tokens, positions = packed.lay(tokens), packed.lay(positions)
        read = self.model.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=bool(layers),
        )
        features = read.last_hidden_state
        return features, torch.cat([read.hidden_states[layer] for layer in layers], dim=-1) if layers else features

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
        last = self.config.num_hidden_layers - 1
        if wrong := [layer for layer in layers if not 1 <= layer <= last]:
            raise ValueError(f"layers has {wrong[0]}; those of {self.spec.name} that can be kept are 1 to {last}")

    @torch.inference_mode()
    def _check(self) -> None:
        """Raise NotImplementedError where logits are not those of `ends`, or features differ behind cache and mask."""
        tokens = torch.arange(8, device=self.device)[None] % self.spec.vocab_size
        logits, ours = self.model(tokens, use_cache=False).logits, self.ends.logits(self.read(tokens))
        if logits.shape != ours.shape or not torch.allclose(logits.float(), ours.float(), rtol=1e-3, atol=1e-3):
            raise NotImplementedError(
                "its logits are not head(feature), scaled or softly capped as its config says (a bias or a step of its "
                "own stands between), so a draft could not share its head"
            )
        self._check_tree("")
        if any(self.masks.windows.values()):
            with self._narrowed(5):
                self._check_tree(" and windows")

    def _check_tree(self, more: str) -> None:
        """Read `TREE` behind 8 tokens, and each of its paths as a text of its own."""
        tokens = torch.arange(13, device=self.device)[None] % self.spec.vocab_size
        text, nodes = tokens.split([8, 5], dim=1)
        cache = self.cache(1, 13)
        before = self.features(text, causal(8, self.device), cache)  # (1, 8, D)
        cache.append([8])
        tree = self.features(nodes, torch.tensor([TREE], device=self.device) > 0, cache)  # (1, 5, D)
        paths = torch.tensor(PATHS, device=self.device)
        plain = self.read(torch.cat([text.expand(2, -1), nodes[0, paths]], dim=1)).float()  # (2, 11, D)
        ours = torch.cat([before.expand(2, -1, -1), tree[0, paths]], dim=1).float()
        distance = (ours - plain).norm() / plain.norm()
        if not distance <= (1e-3 if self.dtype == torch.float32 else 5e-2):
            raise NotImplementedError(
                f"its features behind a cache and a tree's mask{more} are not those of a plain forward (relative "
                f"distance {distance:.1g})"
            )

    @contextmanager
    def _narrowed(self, window: int) -> Iterator[None]:
        """Give sliding layers a short window; the mask alone makes it, and transformers makes masks by the config."""
        usual = self.config.sliding_window, self.masks
        self.config.sliding_window = window
        self.masks = LayerMasks.of(self.config, self.spec.context)
        try:
            yield
        finally:
            self.config.sliding_window, self.masks = usual


def _folder(name: str) -> Path:
    """The local folder of a target: the embedded one's, a user's, or a hub id's after its download."""
    if name == embedded.NAME:
        return embedded.folder()
    return fetch(name, "target", ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])


def _hold_angles(model: nn.Module) -> None:
    """Within the context "dynamic" rotary angles never turn, but their code asks the device whether, at every forward.

    A CUDA graph cannot ask, and a batch of transformers' `generate` may run beyond it for the sake of its longest row.
    """
    held = {"dynamic": "default"}
    for module in model.modules():
        if isinstance(kinds := getattr(module, "rope_type", None), dict):  # by kind of layer
            module.rope_type = {layers: held.get(kind, kind) for layers, kind in kinds.items()}
        elif kinds in held:
            module.rope_type = held[kinds]


def causal(count: int, device: torch.device) -> Tensor:
    """The ancestors of a plain text: (1, n, n), lower triangle."""
    return torch.ones(1, count, count, dtype=torch.bool, device=device).tril()
