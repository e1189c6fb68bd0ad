"""Online features: the target computes those of every batch in the training process; nothing is on disk."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.features.shards import TokenizedText
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import Batch
from poss_lightning.features.texts import SampleSource
from poss_lightning.features.writing import tokenize, within_context
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.ranks import local_rank, own_gpu, this_rank
from poss_lightning.target.generation import pad_right
from poss_lightning.target.model import Target
from poss_lightning.target.placement import Parallel
from poss_lightning.target.spec import EmbedHead

LOGIT_SLOTS = 256  # slots whose logits exist at once


class OnlineFeatures(SampleSource):
    """What a `FeatureStore` offers, but samples come without features; `fill` computes them.

    Args:
        model: the target. It stays in the process and, unless it spans several devices, follows the batches to theirs.
        texts: conversations, tokenized and cut.
    """

    def __init__(self, model: Target, texts: list[TokenizedText]):
        self.model, self.target, self.texts = model, model.spec, texts
        self.ids = [text.id for text in texts]
        self.lengths = np.array([len(text.tokens) for text in texts])
        self.spans = [np.array(text.spans).reshape(-1, 2) for text in texts]
        self.layers = ()

    @classmethod
    def load(
        cls,
        corpus: str,
        target: str,
        max_length: int,
        dtype: str,
        parallel: Parallel,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> "OnlineFeatures":
        """Load the target and read the conversations; arguments and errors are those of `poss extract`."""
        conversations = read_conversations(corpus)
        device, spared = ("cpu", None) if parallel == "none" else ("auto", local_rank())  # on a CPU until a batch moves
        dtype = choose_dtype(dtype, choose_device())
        model = Target.load(target, dtype, device, parallel, spared, chat_template_kwargs)
        tell = this_rank().rank == 0
        return cls(model, tokenize(model, conversations, within_context(model, max_length, tell), tell))

    def __getitem__(self, index: int) -> Sample:
        text = self.texts[index]
        tokens = torch.tensor(text.tokens)
        return Sample(text.id, tokens, torch.full_like(tokens, -1), text.spans, torch.empty(len(tokens), 0))

    def tokens(self, index: int) -> np.ndarray:
        """The tokens of a sample: (T,)"""
        return np.array(self.texts[index].tokens)

    def conversations(self) -> list[str]:
        """For every sample the digest of all that is said in its conversation."""
        return [text.conversation for text in self.texts]

    @torch.inference_mode()
    def draft_input(self, index: int) -> Tensor:
        """What a draft reads of a sample, computed on the GPU of this process where it has one: (T, R)"""
        device = choose_device()
        self._move_target(own_gpu(local_rank()) if device == "cuda" else device)
        return self._forward(torch.tensor([self.texts[index].tokens], device=self.model.device))[1][0]

    def select(self, layers: tuple[int, ...]) -> "OnlineFeatures":
        """The same texts, for a draft that reads these layers."""
        self.model.check_layers(layers)
        selected = OnlineFeatures(self.model, self.texts)
        selected.layers = tuple(layers)
        return selected

    def __getstate__(self) -> dict[str, Any]:
        """What a loader's workers get where they are not forked: they read texts, and need no target."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    def embed_head(self) -> EmbedHead:
        """The target's embedding and head."""
        shared = self.model.embed_head
        return EmbedHead(shared.embedding, shared.head, scale=shared.scale, cap=shared.cap)

    @torch.no_grad()  # not inference_mode: autograd keeps the features
    def fill(self, batch: Batch) -> Batch:
        """The batch with features, the draft's input, and the target's most likely tokens wherever a pass counts."""
        device = batch.tokens.device
        self._move_target(device)
        parts = batch.parts()
        texts = [batch.tokens[part].tolist() for part in parts]
        lengths = np.array(list(map(len, texts)))
        width = self.target.hidden_size
        features = torch.zeros(*batch.tokens.shape, width, dtype=self.model.dtype, device=device)
        inputs = features.new_zeros(*batch.tokens.shape, len(self.layers) * width) if self.layers else features
        for group in group_by_length(lengths):
            computed = self._forward(pad_right([texts[i] for i in group], self.model.device))
            for i, row, draft_input in zip(group, *computed, strict=True):
                features[parts[i]], inputs[parts[i]] = row[: lengths[i]], draft_input[: lengths[i]]
        known = (batch.counts[:, :-1] > 0).nonzero() + torch.tensor([0, 1], device=batch.counts.device)
        greedy = batch.greedy.clone()
        for row, slot in (some.unbind(1) for some in known.split(LOGIT_SLOTS)):
            logits = self.model.logits(features[row, slot].to(self.model.device))
            greedy[row, slot] = logits.max(-1).indices.to(device)
        return batch._replace(features=features, draft_input=inputs, greedy=greedy)

    def _move_target(self, device: torch.device | str) -> None:
        if not self.model.spans_devices and self.model.device != torch.device(device):
            self.model.move(device)

    def _forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and the draft's input: (B, T) -> (B, T, D), (B, T, R)."""
        features, outputs = self.model.text_layers(tokens, self.layers)
        return features, outputs.flatten(2) if self.layers else features


def group_by_length(lengths: np.ndarray) -> list[list[int]]:
    """Texts in groups of similar length, the longest first; no group is padded to more tokens than all texts have."""
    groups: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= lengths.sum():
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
