"""CUDA graphs without a GPU: a stand-in bakes in the tensors of a capture, as CUDA does, and runs no Python."""

from contextlib import nullcontext

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.target.graphs import Graphs


class Baked(Graphs):
    """What is captured reads and writes the very tensors of its first run; its results stay in place."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.enabled, self.captures = True, 0

    def _capture(self, work, state):
        saved, form = [tensor.clone() for tensor in state], None

        def flat():
            nonlocal form
            leaves, form = tree_flatten(work(lambda name: nullcontext()))
            return leaves

        def restore():
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)

        results = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat()]
        restore()
        graph = make_fx(flat)()
        restore()

        def replay():
            for result, value in zip(results, graph(), strict=True):
                if isinstance(result, torch.Tensor):
                    result.copy_(value)

        self.captures += 1
        return [("whole", replay)], tree_unflatten(results, form)


def baked(decoder):
    """The decoder with its graphs replaced by the stand-in."""
    (decoder.loop if isinstance(decoder, Autoregressive) else decoder).graphs = Baked()
    return decoder


def graphs_of(decoder) -> Graphs:
    """Those of an engine or a plain loop."""
    return decoder.loop.graphs if isinstance(decoder, Autoregressive) else decoder.graphs


def captured(decoder):
    """The decoder with steps as graphs: those of CUDA where it has them, else the stand-in's."""
    return decoder if graphs_of(decoder).enabled else baked(decoder)


def count_captures(decoder) -> list[None]:
    """A list that grows by every capture of its graphs from now on."""
    graphs, counted = graphs_of(decoder), []
    capture = graphs._capture
    graphs._capture = lambda *given: counted.append(None) or capture(*given)
    return counted
