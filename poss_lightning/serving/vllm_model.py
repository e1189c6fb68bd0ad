"""Position specialists as a draft model of vLLM, from the folder that `poss convert --output_format vllm` writes.

A round in vLLM is one forward per drafted token. The first reads the slots of newly verified text, each later one the
slot of the token drafted last. Every forward projects its slots' keys and values for each specialist that will read
them, and runs one specialist (docs/METHOD.md, 6):

    forward              1         2         3         4         5         6
    serving, [2, 2, 2]   0         0         1         1         2         2
    keys and values of   0, 1, 2   0, 1, 2   1, 2      1, 2      2         2
    the same, shared     0         0         1         1         2         2     all in one cache

Letters as in vLLM: tensors have no batch dimension; S are the slots of all requests.
"""

# pyright: reportMissingImports=false
# vLLM has an environment of its own: make test-vllm

import json
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from poss_lightning.draft.config import DraftConfig
from poss_lightning.interop.layouts import METHODS
from poss_lightning.interop.settings import CONFIG_KEY, rope_parameters
from poss_lightning.serving.internals import check_engine, count_steps, draft_position, write_keys_values


class Specialist(nn.Module):
    """A decoder layer in the EAGLE-2 layout, as `draft.layer.Specialist`, from vLLM's parallel layers; Z is D."""

    parts = 1  # of z, each D wide

    def __init__(self, draft: DraftConfig, context: int, prefix: str):
        super().__init__()
        spec = draft.target
        width, head_dim, within = spec.hidden_size, spec.head_dim, f"{prefix}.self_attn"
        self.q_proj = ColumnParallelLinear(
            self.parts * width, spec.heads * head_dim, bias=False, prefix=f"{within}.q_proj"
        )
        self.kv_proj = QKVParallelLinear(  # without queries: it also works for specialists that do not run
            self.parts * width, head_dim, 0, spec.kv_heads, bias=False, prefix=f"{within}.kv_proj"
        )
        self.o_proj = RowParallelLinear(spec.heads * head_dim, width, bias=False, prefix=f"{within}.o_proj")
        self.mlp = LlamaMLP(width, draft.intermediate_size or spec.intermediate_size, "silu", prefix=f"{prefix}.mlp")
        self.post_attention_layernorm = RMSNorm(width, eps=draft.eps)
        self.norm_before_residual = draft.norm_before_residual
        self.rotary = get_rope(head_dim, context, rope_parameters=rope_parameters(draft))

    def keys_values(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project keys and values of an attention input: (S, Z) -> (S, kv heads * d) each."""
        keys, values = self.kv_proj(x)[0].chunk(2, dim=-1)
        keys, _ = self.rotary(positions, keys.contiguous())
        return keys, values

    def forward(self, positions: Tensor, z: Tensor, attention: Attention) -> Tensor:
        """(S, Z) -> predicted features (S, D); its keys and values go into the cache of `attention`."""
        x = self.attention_input(z)
        queries, _ = self.q_proj(x)
        queries, _ = self.rotary(positions, queries)
        attended, _ = self.o_proj(attention(queries, *self.keys_values(positions, x)))
        hidden = self.residual(z) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def attention_input(self, z: Tensor) -> Tensor:
        """Return what queries, keys and values are projected from: (S, Z) -> (S, Z)."""
        return z

    def residual(self, z: Tensor) -> Tensor:
        """Return what attention is added to: (S, Z) -> (S, D)."""
        return z


class NormedSpecialist(Specialist):
    """The EAGLE-3 layout: z is [e; h], not yet normed, and Z is 2D."""

    parts = 2

    def __init__(self, draft: DraftConfig, context: int, prefix: str):
        super().__init__(draft, context, prefix)
        self.input_layernorm = RMSNorm(draft.target.hidden_size, eps=draft.eps)
        self.hidden_norm = RMSNorm(draft.target.hidden_size, eps=draft.eps)

    def attention_input(self, z: Tensor) -> Tensor:
        embedded, hidden = z.chunk(2, dim=-1)
        return torch.cat([self.input_layernorm(embedded.contiguous()), self.hidden_norm(hidden.contiguous())], dim=-1)

    def residual(self, z: Tensor) -> Tensor:
        hidden = z.chunk(2, dim=-1)[1]
        return self.hidden_norm(hidden.contiguous()) if self.norm_before_residual else hidden


class Specialists(nn.Module):
    """All specialists after one `fc`, and the caches that they read.

    Args:
        draft: the sizes, and which specialist serves which position.
        depth: tokens drafted per round.
        context: tokens that rotary angles reach.
        vllm_config: for the caches.
        prefix: of the names of its layers.
    """

    def __init__(self, draft: DraftConfig, depth: int, context: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.draft, self.depth = draft, depth
        normed, width = bool(draft.aux_layers), draft.target.hidden_size
        parts = len(draft.aux_layers) if normed else 2
        self.embed_tokens = nn.Module()  # until vLLM puts the target's here, if it is as wide
        self.embed_tokens.register_buffer("weight", torch.empty(0, width), persistent=False)
        self.fc = ReplicatedLinear(parts * width, width, not normed, prefix=f"{prefix}.fc", return_bias=False)
        first = vllm_config.model_config.get_total_num_hidden_layers()  # vLLM numbers caches after the target's
        names = [f"{prefix}.layers.{first + index}" for index in range(len(draft.allocation))]
        layers = [(NormedSpecialist if normed else Specialist)(draft, context, name) for name in names]
        cached = 1 if draft.kv == "shared" else len(layers)
        self.layers = nn.ModuleList(layers)
        self.caches = nn.ModuleList(
            _make_cache(layer, draft.target.head_dim, vllm_config, f"{name}.self_attn.attn")
            for layer, name in list(zip(layers, names, strict=True))[:cached]
        )
        if norms := draft.input_norms:
            self.fc_norm = nn.ModuleList(RMSNorm(parts * width // norms, eps=draft.eps) for _ in range(norms))
        if draft.own_head:
            self.norm = RMSNorm(width, eps=draft.eps)

    def forward(self, input_ids: Tensor, positions: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the head and the next position read, (S, D) each, from tokens (S,) and the features on their left."""
        position = draft_position(self.caches[0])
        joined = torch.cat([self.embed_tokens(input_ids), features], dim=-1)
        z = joined if self.draft.aux_layers else self.fc(joined)
        serving = self.draft.specialist_at(position)
        # those that make keys and values of the slots that this position is the first to read
        makers = {self.draft.kv_specialist(each, position) for each in range(position, self.depth + 1)}
        for maker in makers - {serving}:
            layer = self._layer(maker)
            write_keys_values(self._cache(maker), *layer.keys_values(positions, layer.attention_input(z)))
        predicted = self._layer(serving)(positions, z, self._cache(serving))
        read = self.norm(predicted) if self.draft.own_head else predicted
        return read, read if self.draft.norm_output else predicted

    def fuse(self, layers: Tensor) -> Tensor:
        """Make features of the target's inner layers, side by side: (S, R) -> (S, D)."""
        if self.draft.input_norms:
            parts = layers.chunk(len(self.fc_norm), dim=-1)
            layers = torch.cat([norm(x.contiguous()) for norm, x in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(layers)

    def _layer(self, specialist: int) -> Specialist:
        return self.layers[specialist]  # pyright: ignore[reportReturnType] of a ModuleList

    def _cache(self, specialist: int) -> Attention:
        return self.caches[0 if self.draft.kv == "shared" else specialist]


class PossForCausalLM(Eagle3LlamaForCausalLM):
    """The draft as vLLM's proposer asks for it: it checks the class, so both kinds of drafts derive from EAGLE-3's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        nn.Module.__init__(self)
        check_engine(vllm_config)
        speculative = vllm_config.speculative_config
        self.config = config = speculative.draft_model_config.hf_config
        self.draft = draft = DraftConfig.from_json(json.dumps(getattr(config, CONFIG_KEY)), speculative.model)
        if speculative.method != METHODS[draft.kind]:
            raise ValueError(
                f"{speculative.model} is of kind {draft.kind}, and method is {speculative.method!r}; it must be "
                f"{METHODS[draft.kind]!r}"
            )
        prefix, context = maybe_prefix(prefix, "model"), config.max_position_embeddings
        self.model = Specialists(draft, speculative.num_speculative_tokens, context, vllm_config, prefix)
        self._build_head(maybe_prefix(prefix, "lm_head"))

    def _build_head(self, prefix: str) -> None:
        """Make what the base class computes logits with; vLLM lends the target's head if the draft has none."""
        spec, size = self.draft.target, self.draft.vocabulary_size
        rows = size or spec.vocab_size
        self.has_own_embed_tokens, self.has_own_lm_head = False, self.draft.own_head or size is not None
        if self.has_own_lm_head:
            self.lm_head = ParallelLMHead(rows, spec.hidden_size, prefix=prefix)
        self.logits_processor = LogitsProcessor(rows)
        self.config.draft_vocab_size = rows
        offsets = None if size is None else nn.Parameter(torch.zeros(size, dtype=torch.long), requires_grad=False)
        self.draft_id_to_target_id = offsets

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if inputs_embeds is not None:
            raise NotImplementedError("the draft reads text alone, and vLLM gave it embeddings")
        return self.model(input_ids, positions, hidden_states)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Make features of three inner layers: (S, 3D) -> (S, D). Only vLLM's method eagle3 calls it."""
        return self.model.fuse(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights; returns the parameters loaded, so that vLLM can name those that the file lacks."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=NAMES)


NAMES = WeightsMapper(
    orig_to_new_prefix={
        "fc.": "model.fc.",
        "fc_norm.": "model.fc_norm.",
        "input_norm.": "model.fc_norm.0.",
        "norm.": "model.norm.",
        "layers.": "model.layers.",
        "d2t": "draft_id_to_target_id",
        "t2d": None,
    },
    orig_to_new_substr={".self_attn.": "."},
    orig_to_new_stacked={
        ".k_proj": (".kv_proj", "k"),
        ".v_proj": (".kv_proj", "v"),
        ".gate_proj": (".gate_up_proj", 0),
        ".up_proj": (".gate_up_proj", 1),
    },
)


def _make_cache(layer: Specialist, head_dim: int, vllm_config: VllmConfig, name: str) -> Attention:
    """Make a KV cache, and attention over it, for the heads of `layer` that this process has."""
    attention = Attention(
        layer.q_proj.output_size_per_partition // head_dim,
        head_dim,
        head_dim**-0.5,
        num_kv_heads=layer.kv_proj.num_kv_heads,
        cache_config=vllm_config.cache_config,
        prefix=name,
    )
    count_steps(attention)
    return attention
