"""The contents of the dashboard as plain values, without a writer or a training."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from torch import Tensor

from poss_lightning import plots
from poss_lightning.metrics import BINS
from poss_lightning.target import embedded

KINDS = ("unroll", "chain", "tree")  # of pos-acc
LABELS = ("label", "token", "kind", "following", "slot", "__seq_next__")  # of a point; the last draws paths
DECIMALS = 4  # of a point's coordinates

CHARTS = {  # category, chart and tag; a tag that ends in / has a scalar for each depth, and their mean
    "τ: tokens per round": {
        "in trees (replayed)": "val/tau_tree",
        "in chains (replayed)": "val/tau_chain",
    },
    "Loss, all depths together": {
        "validation": "val/loss",
        "training": "train/loss",
    },
    "Loss by depth: first, last, mean": {
        "validation": "val_loss/",
        "training": "train_loss/",
        "validation, features (smooth L1)": "val_feature_loss/",
        "validation, tokens (cross-entropy)": "val_token_loss/",
        "validation, ten most likely": "val_topk_loss/",
    },
    "Acceptance by position: first, last, mean": {
        "in trees (replayed)": "val_pos_acc_tree/",
        "in chains (replayed)": "val_pos_acc_chain/",
        "unrolled (teacher-forced), validation": "val_pos_acc_unroll/",
        "unrolled (teacher-forced), training": "train_pos_acc_unroll/",
    },
    "Feature drift by depth: first, last, mean": {
        "cosine (1 is none)": "val_drift_cosine/",
        "relative L2 (0 is none)": "val_drift_l2/",
        "norm ratio (1 is none)": "val_drift_norm_ratio/",
    },
}


def layout(depth: int) -> dict[str, dict[str, list]]:
    """Charts of TensorBoard's custom scalars: a regular expression each, matched from the beginning of a tag.

    TensorBoard draws all lines of a run in one colour. So each chart shows one measurement at few depths, to compare
    runs.
    """
    few = rf"(depth_1|depth_{depth}|mean)$"
    return {
        category: {chart: ["Multiline", [tag + (few if tag.endswith("/") else "$")]] for chart, tag in charts.items()}
        for category, charts in CHARTS.items()
    }


def count_histograms(counts: Tensor) -> dict[int, dict]:
    """Arguments of `add_histogram_raw` by depth, from the slots by cosine (K, BINS), without empty depths.

    All depths have the same range, so that they can be compared.
    """
    edges = np.linspace(-1, 1, BINS + 1)
    filled = counts.sum(0).nonzero()[:, 0].tolist()
    shown = slice(filled[0], filled[-1] + 1) if filled else slice(0)
    middles = (edges[:-1] + edges[1:])[shown] / 2
    return {
        depth: {
            "min": edges[shown.start],
            "max": edges[shown.stop],
            "num": sum(slots),
            "sum": np.dot(slots, middles),
            "sum_squares": np.dot(slots, np.square(middles)),
            "bucket_limits": edges[1:][shown].tolist(),
            "bucket_counts": slots,
        }
        for depth, slots in enumerate(counts[:, shown].tolist(), 1)
        if sum(slots)
    }


def draw_acceptance(logged: dict[str, float], depth: int, step: int, start: dict[str, float]) -> Figure:
    """Plot pos-acc by position from scalars by name: a curve per kind, and that of trees before the first step."""
    drawn = {}
    for name, kind, values in [(kind, kind, logged) for kind in KINDS] + [("tree at the start", "tree", start)]:
        by_depth = {k: values.get(f"val_pos_acc_{kind}/depth_{k}") for k in range(1, depth + 1)}
        tau = values.get(f"val/tau_{kind}")
        if shown := {k: plots.Value(value) for k, value in by_depth.items() if value is not None}:
            drawn[name + (f", τ {tau:.2f}" if tau else "")] = shown
    figure = plots.curves(
        {f"Acceptance after {step} steps": drawn}, "draft position", "accepted, if reached", share=True
    )
    figure.axes[0].set(xlim=(0.8, depth + 0.2), ylim=(0, 1))  # the same at every step
    return figure


def make_points(
    target: Tensor, draft: Tensor, tokens: list[int], following: list[int], spell: Callable[[int], str]
) -> tuple[np.ndarray, list[tuple]]:
    """Points of the projector, (S * (K + 1), D), and their `LABELS`: the target's features, then those of each depth.

    A path leads from the target's feature of a slot through its depths. The arguments are those of `DeepSlots`, and
    `spell`, which gives the text of a token.
    """
    words = [(spell(token), spell(later)) for token, later in zip(tokens, following, strict=True)]
    labels = []
    for depth in range(len(draft) + 1):
        kind = f"depth {depth}" if depth else "target"
        for slot, (token, later) in enumerate(words):
            onward = slot + (depth + 1) * len(words) if depth < len(draft) else ""
            labels.append((f"{token} @{depth or 'target'}", token, kind, later, slot, onward))
    every = torch.cat([target, draft.flatten(0, 1)])
    return every.double().numpy().round(DECIMALS), labels


def load_speller(target: str) -> Callable[[int], str]:
    """A function that gives the text of a token, or its id where the tokenizer is not here. It never downloads."""
    file = _tokenizer_file(target)
    if file is None:
        return str
    tokenizer = Tokenizer.from_file(str(file))

    def spell(token: int) -> str:
        text = tokenizer.decode([token], skip_special_tokens=False)
        return repr(text)[1:-1].replace(" ", "·")  # tabs and newlines would break the table

    return spell


def _tokenizer_file(target: str) -> Path | None:
    name = "tokenizer.json"
    try:
        folder = embedded.folder() if target == embedded.NAME else Path(target)
        cached = None if folder.is_dir() else try_to_load_from_cache(target, name)
    except (OSError, ValueError):  # the embedded target is not installed; not a hub id
        return None
    file = Path(cached) if isinstance(cached, str) else folder / name
    return file if file.is_file() else None
