"""poss_lightning: position specialists for speculative decoding, trained with PyTorch Lightning.

A frozen *target* language model is sped up by a small *draft* that predicts its next features. Position Specialists
(PosS, arXiv 2506.03566) give every run of draft positions a decoder layer of its own. There is one draft model, one
unroll, one loss and one engine; EAGLE, HASS, PosS-n, EAGLE-3 and SPEED are configurations of them.

Letters used in every shape comment:

    B  sequences                             K  draft positions (the depth)
    T  tokens, or slots, of a sequence       N  nodes of a draft tree, root included
    D  width of the target's hidden state    P  tokens already verified
    V  vocabulary (the draft's, in a loss)   S  slots, where sequences are flattened
    H  attention heads                       C  capacity of a cache, in slots
    Z  width of a slot's z                   R  width of what a draft reads of the target
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# oneDNN, which computes products on CPUs, keeps code for each of the last 1,024 shapes. Batches of a training differ in
# shape, so a long one would keep gigabytes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

if TYPE_CHECKING:
    from poss_lightning.api import load
    from poss_lightning.decoding.plans import TreePlan
    from poss_lightning.draft.kinds import load_draft, make_draft
    from poss_lightning.evaluation.probe import Replay
    from poss_lightning.evaluation.rounds import read_rounds
    from poss_lightning.extraction import extract
    from poss_lightning.features.datamodule import FeatureDataModule
    from poss_lightning.features.store import FeatureStore
    from poss_lightning.metrics import UnrollAcceptance
    from poss_lightning.reports.results import results
    from poss_lightning.training.callbacks import DraftFolders
    from poss_lightning.training.module import DraftModule

__version__ = "0.1.0"
__all__ = [
    "DraftFolders",
    "DraftModule",
    "FeatureDataModule",
    "FeatureStore",
    "Replay",
    "TreePlan",
    "UnrollAcceptance",
    "extract",
    "load",
    "load_draft",
    "make_draft",
    "read_rounds",
    "results",
]

_MODULES = {
    "DraftFolders": "training.callbacks",
    "DraftModule": "training.module",
    "FeatureDataModule": "features.datamodule",
    "FeatureStore": "features.store",
    "Replay": "evaluation.probe",
    "TreePlan": "decoding.plans",
    "UnrollAcceptance": "metrics",
    "extract": "extraction",
    "load": "api",
    "load_draft": "draft.kinds",
    "make_draft": "draft.kinds",
    "read_rounds": "evaluation.rounds",
    "results": "reports.results",
}


def __getattr__(name: str):
    """Each of these when it is asked for: importing the package imports no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"poss_lightning.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
