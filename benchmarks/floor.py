"""How close rounds come to the memory bandwidth of a GPU, at the sizes of a large target.

A forward of few tokens cannot be faster than its weights and caches can be read. The floor is their bytes over the rate
at which the device copies. Weights are random: neither bytes nor time depend on them.
"""

from functools import partial
from statistics import median

import torch
from transformers import LlamaConfig

from benchmarks.measure import in_turn, seconds
from benchmarks.random_target import random_draft
from poss_lightning.clock import Clock
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.decoder import Decoder, Request
from poss_lightning.decoding.engine import Speculative
from poss_lightning.target.cache import SlotStore
from poss_lightning.target.model import Target

WARMUP = 4  # the prefill, and rounds that capture graphs
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    bos_token_id=None,
    eos_token_id=None,
)


# Milliseconds by arithmetic (bytes over bandwidth, and launches), which no GPU has confirmed yet.
EXPECTED = {"plain_step_ms": 5.6, "round_ms": 8.0}


def copy_rate(device: str, size: int = 2**30) -> float:
    """Bytes per second that the device reads and writes while it copies `size` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), 9, device)


def verify_bytes(engine: Speculative, nodes: int) -> int:
    """What a verifying forward must read: all weights but the embedding's other rows, keys and values."""
    target, cache = engine.target, engine.cache
    embedding = 0 if target.embed_head.tied else target.embed_head.embedding.nbytes
    weights = sum(parameter.nbytes for parameter in target.model.parameters()) - embedding
    (store,) = cache.stores.values()
    return weights + _cached(store, cache.slots.longest + nodes) * target.config.num_hidden_layers


def draft_bytes(engine: Speculative, depth: int) -> int:
    """What `depth` draft steps of single-layer specialists must read.

    At each step layer, head, keys and values; between steps `fc` and the projections.
    """
    drafter, draft, total = engine.drafter, engine.drafter.draft, 0
    projected = drafter.kv_weights.nbytes // len(draft.layers)  # weights of one specialist's keys and values
    for k in range(1, depth + 1):
        layer = draft.layers[draft.config.specialist_at(k)]
        own = sum(parameter.nbytes for parameter in layer.parameters()) - projected
        total += own + drafter.embed_head.head.nbytes
        total += _cached(drafter.store, drafter.slots.longest + (k - 1) * drafter.tree_width)
        if k < depth:
            readers = len({draft.config.kv_specialist(j, k + 1) for j in range(k + 1, drafter.depth + 1)})
            total += readers * projected + draft.fc.weight.nbytes
    return total


@torch.inference_mode()
def rounds_by_batch(
    target: Target,
    batches: tuple[int, ...],
    allocation: tuple[int, ...] = (3, 3),
    nodes: int = 60,
    prompt_tokens: int = 512,
    repeats: int = 20,
) -> dict[str, object]:
    """Rounds, their parts and plain steps of batches, with and without graphs, beside the time to read what they need.

    A plain step is a round of one node without a draft: its floor is that of verifying one node.
    """
    device = target.device.type
    rate = copy_rate(device, 2**30 if device == "cuda" else 2**22)
    draft, depth = random_draft(target, allocation), sum(allocation)
    found: dict[str, object] = {"copy_gigabytes_per_second": rate / 1e9, "expected, 8B, batch 1, H100": EXPECTED}
    for batch in batches:
        prompts = torch.randint(target.spec.vocab_size, (batch, prompt_tokens)).tolist()
        request = Request(prompts, 1 + (repeats + WARMUP) * (depth + 1), frozenset())
        for name, graphs in (("graphs", None), ("no graphs", False)):
            engine = Speculative(target, draft, depth=depth, nodes=nodes, graphs=graphs)
            seconds, step = (_seconds(one, request, repeats) for one in (engine, Autoregressive(target, graphs)))
            read = {"draft": draft_bytes(engine, depth), "verify": verify_bytes(engine, nodes)}
            read["round"] = sum(read.values())
            found[f"batch {batch}, {name}"] = {
                **{part: _compare_floor(seconds[part], needed, rate) for part, needed in read.items()},
                "commit": {"ms": 1000 * seconds["commit"]},
                "plain step": _compare_floor(step["round"], verify_bytes(engine, 1), rate),
            }
    return found


def _seconds(decoder: Decoder, request: Request, repeats: int) -> dict[str, float]:
    """Seconds of a round, the median, and of its parts, after the prefill and the rounds that capture graphs."""
    device = decoder.target.device
    clock = Clock(device)
    text = decoder.rounds(request, clock)
    in_turn({"round": partial(next, text)}, 0, device.type, WARMUP)
    before = clock.total()
    times = in_turn({"round": partial(next, text)}, repeats, device.type, warmup=0)["round"]
    parts = {name: (total - before.get(name, 0)) / repeats for name, total in clock.total().items()}
    return parts | {"round": median(times)}


def _compare_floor(measured: float, read: int, rate: float) -> dict[str, float]:
    return {"ms": 1000 * measured, "floor_ms": 1000 * read / rate, "over_floor": measured * rate / read}


def _cached(store: SlotStore, slots: int) -> int:
    """Bytes of keys and values of one layer's slots."""
    return 2 * store.keys[0, 0].nbytes * slots * store.batch
