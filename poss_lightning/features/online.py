"""Online features: the target computes those of every batch in the training process; nothing is on disk."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.features.shards import TargetReader, TokenizedText, greedy_tokens
from poss_lightning.features.source import SampleSource
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import Batch
from poss_lightning.features.writing import describe_overflow, tokenize, within_context
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.ranks import local_rank, own_gpu, this_rank
from poss_lightning.target_model.loading import Parallel
from poss_lightning.target_model.model import Target
from poss_lightning.target_model.spec import EmbedHead

REPORT_EVERY_BATCHES = 64  # after which the host asks which of their texts were left out

logger = logging.getLogger(__name__)


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
        self._filled: list[tuple[list[str], Tensor]] = []  # texts, and whether each is kept, since the last report

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
        model = Target.load(target, dtype, device, parallel, spared, chat_template_kwargs, exact=False)
        tell = this_rank().rank == 0
        return cls(model, tokenize(model, conversations, within_context(model, max_length, tell), tell))

    def __getitem__(self, index: int) -> Sample:
        text = self.texts[index]
        tokens = torch.tensor(text.tokens)
        return Sample(text.id, tokens, torch.full_like(tokens, -1), text.spans, torch.empty(len(tokens), 0))

    def tokens(self, index: int) -> np.ndarray:
        return np.array(self.texts[index].tokens)

    def conversations(self) -> list[str]:
        return [text.conversation for text in self.texts]

    @torch.inference_mode()
    def draft_input(self, index: int) -> Tensor:
        """Compute a sample's draft input, on the GPU of this process if it has one: (T, R)"""
        device = choose_device()
        self._move_target(own_gpu(local_rank()) if device == "cuda" else device)
        read = TargetReader(self.model, self.layers).read([self.texts[index].tokens])
        return read.layers.flatten(1) if self.layers else read.features

    def select(self, layers: tuple[int, ...]) -> "OnlineFeatures":
        self.model.check_layers(layers)
        selected = OnlineFeatures(self.model, self.texts)
        selected.layers = tuple(layers)
        return selected

    def __getstate__(self) -> dict[str, Any]:
        """Leave the target out for workers that are not forked: they only read texts."""
        return {name: value for name, value in vars(self).items() if name not in ("model", "_filled")}

    def embed_head(self) -> EmbedHead:
        shared = self.model.embed_head
        return EmbedHead(shared.embedding, shared.head, scale=shared.scale, cap=shared.cap)

    @torch.no_grad()  # not inference_mode: autograd keeps the features
    def fill(self, batch: Batch) -> Batch:
        """Fill in features, the draft's input, and the target's most likely tokens in the answers.

        Nothing counts in a text whose features are not finite: it is left out, and `report` names it.
        """
        device = batch.tokens.device
        self._move_target(device)
        parts, lengths, reader = batch.parts(), np.concatenate(batch.lengths), TargetReader(self.model, self.layers)
        width = self.target.hidden_size
        features = torch.zeros(*batch.tokens.shape, width, dtype=self.model.dtype, device=device)
        inputs = features.new_zeros(*batch.tokens.shape, len(self.layers) * width) if self.layers else features
        argmax, passes = batch.target_argmax.clone(), batch.mask.passes.clone()
        is_finite = torch.zeros(len(parts), dtype=torch.bool, device=device)
        for group in group_by_length(lengths):
            read = reader.read([batch.tokens[parts[i]] for i in group])
            sizes = lengths[group].tolist()
            found = *read, *greedy_tokens(self.model, read, sizes, [batch.spans[i] for i in group])
            for i, *text in zip(group, *(values.split(sizes) for values in found), strict=True):
                own, layers, greedy, finite = (values.to(device) for values in text)
                is_finite[i] = is_kept = finite.all()
                features[parts[i]] = own.where(is_kept, 0)
                if self.layers:
                    inputs[parts[i]] = layers.flatten(1).where(is_kept, 0)
                argmax[parts[i]] = greedy.where(is_kept, -1)
                passes[parts[i]] *= is_kept
        self._filled.append((batch.ids, is_finite))
        if len(self._filled) == REPORT_EVERY_BATCHES:
            self.report()
        mask = replace(batch.mask, passes=passes)
        return replace(batch, features=features, draft_input=inputs, target_argmax=argmax, mask=mask)

    def report(self) -> None:
        """Log which texts were left out of the batches since the last report; this waits for the device."""
        ids = [name for names, _ in self._filled for name in names]
        kept = torch.cat([kept for _, kept in self._filled]).tolist() if ids else []
        self._filled.clear()
        if left_out := [name for name, keep in zip(ids, kept, strict=True) if not keep]:
            logger.warning("left out of the loss %s", describe_overflow(left_out, len(ids), self.model.dtype_name))

    def _move_target(self, device: torch.device | str) -> None:
        if not self.model.spans_devices and self.model.device != torch.device(device):
            self.model.move(device)


def group_by_length(lengths: np.ndarray) -> list[list[int]]:
    """Group texts by length, longest first; no group, padded, has more tokens than all texts together."""
    groups: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= lengths.sum():
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
