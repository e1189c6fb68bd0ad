"""The contents of the dashboard as plain values, without a writer or a training."""

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from poss_lightning import plots
from poss_lightning.metrics import BINS

KINDS = ("unroll", "chain", "tree")  # of pos-acc

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
