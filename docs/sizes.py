"""`python docs/sizes.py` prints the table of sizes in docs/clusters.md, from the sizes of targets and drafts alone."""

import torch
from transformers import AutoConfig

from poss_lightning.draft.config import DraftOptions
from poss_lightning.draft.kinds import make_draft
from poss_lightning.features.manifest import vector_bytes
from poss_lightning.target_model.describe import spec_of

FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
TARGETS = {
    "Llama-3.1-8B": ("llama", 128256, (4096, 14336, 32, 32, 8)),
    "Llama-2-13B": ("llama", 32000, (5120, 13824, 40, 40, 40)),
    "Qwen3-8B": ("qwen3", 151936, (4096, 12288, 36, 32, 8)),
}
LAYERS: dict = {"kind": "eagle3", "vocabulary_size": 32000}
DRAFTS: dict[str, dict] = {
    "HASS": {"allocation": [6]},
    "PosS-2": {"allocation": [2, 2, 2]},
    "EAGLE-3": {"allocation": [8], **LAYERS},
    "SPEED": {"allocation": [3, 3, 2], "kv": "shared", **LAYERS},
    "DFlash": {"allocation": [7], "kind": "block", "block_layers": 5},
}

print("| target | draft | parameters, M | of a specialist, M | moments, GB | bytes per token | in float8 |")
print("|---|---|---|---|---|---|---|")
for target, (family, vocabulary, sizes) in TARGETS.items():
    known = {"vocab_size": vocabulary, "head_dim": 128} | dict(zip(FIELDS, sizes, strict=True))
    spec = spec_of(AutoConfig.for_model(family, **known), target)
    for draft, options in DRAFTS.items():
        config = DraftOptions(**options).config_for(spec)
        with torch.device("meta"):
            size = config.vocabulary_size
            made = make_draft(config, size and torch.arange(size, device="cpu"))
        whole, specialist = (sum(p.numel() for p in part.parameters()) / 1e6 for part in (made, made.layers[0]))
        vectors = 1 + len(config.aux_layers)  # and two ids
        exact, float8 = (vectors * vector_bytes(spec.hidden_size, torch.bfloat16, x) + 8 for x in ("exact", "float8"))
        row = f"{whole:.1f} | {specialist:.1f} | {8 * whole / 1e3:.1f} | {exact:,} | {float8:,}"
        print(f"| {target} | {draft} | {row} |")
