"""What is taken of a transformers model: its spec, its embedding and head, a copy of the rest for decoding."""

import copy
import hashlib
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from poss_lightning.prepack import Switch, make_steady, prepack
from poss_lightning.target_model.grouped_attention import GROUPED
from poss_lightning.target_model.masks import FULL
from poss_lightning.target_model.spec import EmbedHead, TargetSpec


def plain_embed_head(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Return the embedding and LM head of a model; NotImplementedError if they are not a table and a matrix."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise NotImplementedError("it has no plain embedding and LM head")
    return embedding, head


def embed_head_of(model: PreTrainedModel, spec: TargetSpec) -> EmbedHead:
    """Return the frozen embedding and head of a model with this spec, in the model's own memory.

    Only an embedding that lies on another device is copied to that of the head, where features come out.

    Raises:
        NotImplementedError: as `plain_embed_head`.
    """
    embedding, head = plain_embed_head(model)
    rows = head.weight.detach()
    tied = head.weight is embedding.weight or rows.data_ptr() == embedding.weight.data_ptr()
    table = rows if tied else embedding.weight.detach().to(rows.device)
    return EmbedHead(table, rows, scale=spec.logit_scale, cap=spec.logit_cap)


def decoding_copy(model: PreTrainedModel, steady: bool) -> tuple[Any, Switch]:
    """Copy a model without its head for decoding: in eval mode, with the same parameters and buffers.

    Its heads attend in groups, its products are prepacked; if asked, they are steady where the switch is on. "Dynamic"
    rotary angles are fixed: within a target's context they never change, but their code asks the device whether they
    should, which a CUDA graph cannot.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied: Any = copy.deepcopy(model.base_model, shared).eval()
    config = copied.config.get_text_config()
    # Eager attention caps its scores, or adds to them; some classes know attention by name, not the interface.
    if config._attn_implementation == "sdpa" and model._supports_attention_backend:
        config._attn_implementation = GROUPED
    for module in copied.modules():
        if hasattr(module, "rope_type"):
            module.rope_type = _without_dynamic(module.rope_type)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    has_room = 3 * sum(weight.nbytes for weight in model.parameters()) < memory  # for a layout of each
    switch = make_steady(copied, has_room) if steady else Switch()
    if has_room and not steady:
        prepack(copied)
    _fuse_norms(copied, switch)
    return copied, switch


@torch.no_grad()
def _fuse_norms(copied: nn.Module, switch: Switch) -> None:
    """Let each RMSNorm be torch's where the switch is on, one kernel on a GPU for eight, where a trial finds it equal.

    It rounds once where transformers' rounds twice. So features of texts, without the switch, are transformers' own.
    """
    for norm in copied.modules():
        weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if type(norm).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and isinstance(eps, float):
            fused = partial(nn.functional.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)
            x = torch.linspace(-2, 3, 2 * len(weight), dtype=weight.dtype, device=weight.device).view(2, -1)
            near = 2 * torch.finfo(weight.dtype).eps
            if weight.is_meta or torch.allclose(fused(x).float(), norm(x).float(), rtol=near, atol=near):
                norm.forward = switch.between(fused, norm.forward)


def _without_dynamic(kinds: Any) -> Any:
    """Return kinds of rotary angles, one or one per kind of layer, with "default" for "dynamic"."""
    if isinstance(kinds, dict):
        return {layers: _without_dynamic(kind) for layers, kind in kinds.items()}
    return "default" if kinds == "dynamic" else kinds


def spec_of(config: PreTrainedConfig, name: str, **known: Any) -> TargetSpec:
    """Return the spec of a model with this config; `known` are fields that the config does not state.

    Raises:
        NotImplementedError: the config lacks a size, or has one for each layer.
    """
    config = config.get_text_config()
    try:
        return TargetSpec(name=name, **_sizes(config) | known)
    except (AttributeError, RuntimeError) as error:  # the second, of transformers, where layers differ
        name = getattr(error, "name", None) or str(error).split("'")[1]
        raise NotImplementedError(f"its {type(config).__name__} has no {name}, or not one for all layers") from error


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    rope, heads = _rope_parameters(config), config.num_attention_heads
    # As falcon-7b and StarCoder say that all heads share one key; falcon-40b copies keys for every head.
    shared = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "heads": heads,
        "kv_heads": 1 if shared else getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": config.vocab_size,
        "context": _context(config.max_position_embeddings, rope),
        "rope_theta": float(rope[0].get("rope_theta", 10000.0)),
        "norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "logit_scale": (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0),
        "logit_cap": getattr(config, "final_logit_softcapping", None),
        "layers": config.num_hidden_layers,
    }


def _rope_parameters(config: PreTrainedConfig) -> list[dict]:
    """Return the rotary parameters of each kind of layer, full attention's first; one entry if all are the same."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {name: angles for name, angles in parameters.items() if isinstance(angles, dict)}  # nobody reads the rest
    return [kinds[name] for name in sorted(kinds, key=lambda name: name != FULL)] or [parameters]


def _context(stated: int, rope: list[dict]) -> int:
    """Return how many tokens a model reads: `max_position_embeddings`, or as many as its stretched angles reach.

    A yarn factor stretches the original length. So do linear and llama3 factors, unless the config states the stretched
    length already, as Llama 3's does beside an original one, and Gemma-3's for layers of which some are not stretched.

    With longrope and dynamic angles all tokens' angles change once a forward's longest text passes some length: a node
    of a tree would change the others', and keys in the cache would have the old ones. So a context ends at that length.
    """
    full = rope[0]
    kind, original = full.get("rope_type", ""), full.get("original_max_position_embeddings") or stated
    stretches = {"yarn": True, "llama3": original >= stated, "linear": len(rope) == 1, "proportional": len(rope) == 1}
    if stretches.get(kind):
        stated = max(stated, int(original * (full.get("factor") or 1)))
    long = [angles for angles in rope if angles.get("rope_type") == "longrope"]
    return min([stated, *(angles.get("original_max_position_embeddings", stated) for angles in long)])


def fingerprint(model: PreTrainedModel) -> str:
    """Compute two digests of all parameters, rounded to bfloat16, in which most models are kept and run.

    The first is of the 64 numbers at its beginning, and older files have it alone. The second is of all numbers of a
    vector and one of every row of a matrix, so that it notices a head whose last rows were trained.
    """
    first, rows = hashlib.sha256(), hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        value = parameter.detach()
        for digest, sample in ((first, value.flatten()[:64]), (rows, _one_of_each_row(value))):
            digest.update(name.encode() + sample.to(torch.bfloat16).float().cpu().numpy().tobytes())
    return first.hexdigest()[:16] + rows.hexdigest()[:16]


def _one_of_each_row(parameter: Tensor) -> Tensor:
    """Take one number of each row, (..., R, C) -> (all rows,), from scattered columns; a vector (C,) as it is."""
    if parameter.ndim < 2:
        return parameter.flatten()
    rows = parameter.flatten(0, -2)
    numbers = torch.arange(len(rows), device=rows.device)
    return rows[numbers, numbers * 997 % rows.shape[1]]
