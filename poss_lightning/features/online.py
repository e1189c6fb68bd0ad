"""Online features: the target reads every batch when it is needed, in the training process; nothing is on disk."""

import copy

import numpy as np
import torch
from torch import Tensor

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.features.extract import read_texts
from poss_lightning.features.schedule import buckets
from poss_lightning.features.shards import Text
from poss_lightning.features.store import SOME, Sample, commonest
from poss_lightning.features.stream import Batch
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.target.generation import pad
from poss_lightning.target.model import Target
from poss_lightning.target.spec import Ends, TargetSpec

ROWS = 256  # slots whose logits exist at once


class OnlineFeatures:
    """What a `FeatureStore` offers, but samples come without features; `fill` makes them.

    Args:
        model: the target; it stays in the process, and follows the batches to their device.
        texts: conversations, rendered and cut.
    """

    def __init__(self, model: Target, texts: list[Text]):
        self.model, self.texts = model, texts
        self.ids = [text.id for text in texts]
        self.lengths = np.array([len(text.tokens) for text in texts])  # (samples,)
        self.spans = [np.array(text.spans).reshape(-1, 2) for text in texts]
        self.layers: tuple[int, ...] = ()  # that a draft reads

    @classmethod
    def read(cls, corpus: str, target: str, max_length: int, dtype: str) -> "OnlineFeatures":
        """Load the target and read the conversations; `poss extract` tells of the arguments and the errors."""
        conversations = read_conversations(corpus)
        model = Target.load(target, choose_dtype(dtype, choose_device()), "cpu")  # it follows the batches
        return cls(model, read_texts(model, conversations, min(max_length, model.spec.context)))

    def __getitem__(self, index: int) -> Sample:
        text = self.texts[index]
        tokens = torch.tensor(text.tokens)
        return Sample(text.id, tokens, torch.full_like(tokens, -1), text.spans, torch.empty(len(tokens), 0))

    def select(self, layers: tuple[int, ...]) -> "OnlineFeatures":
        """The same, for a draft that reads these layers."""
        self.model.check_layers(layers)
        selected = copy.copy(self)
        selected.layers = tuple(layers)
        return selected

    @property
    def target(self) -> TargetSpec:
        return self.model.spec

    def ends(self) -> Ends:
        """The target's embedding and head."""
        ends = self.model.ends
        return Ends(ends.embedding, ends.head, scale=ends.scale, cap=ends.cap)

    def common_tokens(self, size: int) -> Tensor | None:
        """As of a `FeatureStore`."""
        answers = (text.tokens[start:stop] for text in self.texts for start, stop in text.spans)
        return commonest(answers, self.target.vocab_size, size)

    @torch.inference_mode()
    def root_mean_square(self) -> Tensor:
        """As of a `FeatureStore`."""
        some = self.texts[:: max(1, len(self.texts) // SOME)]
        read = [self._read(torch.tensor([text.tokens], device=self.model.device))[1][0] for text in some]
        return torch.cat(read).float().square().mean(0).sqrt()

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and what a draft reads: (B, T) -> (B, T, D), (B, T, R)."""
        if not self.layers:
            return (self.model.read(tokens),) * 2
        features, layers = self.model.read_layers(tokens, self.layers)
        return features, layers.flatten(2)

    @torch.no_grad()  # not inference_mode: autograd keeps the features
    def fill(self, batch: Batch) -> Batch:
        """The batch with features, what the draft reads, and the target's likeliest tokens wherever a pass counts."""
        self.model.to(batch.tokens.device)
        parts = batch.parts()
        texts = [batch.tokens[part].tolist() for part in parts]
        lengths = np.array(list(map(len, texts)))
        width = self.target.hidden_size
        features = self.model.ends.embedding.new_zeros(*batch.tokens.shape, width)
        inputs = features.new_zeros(*batch.tokens.shape, len(self.layers) * width) if self.layers else features
        for group in buckets(np.argsort(-lengths, kind="stable").tolist(), lengths, int(lengths.sum())):
            both = self._read(pad([texts[i] for (i,) in group], batch.tokens.device))
            for (i,), row, read in zip(group, *both, strict=True):
                features[parts[i]], inputs[parts[i]] = row[: lengths[i]], read[: lengths[i]]
        known = (batch.counts[:, :-1] > 0).nonzero() + torch.tensor([0, 1], device=batch.counts.device)
        greedy = batch.greedy.clone()
        for row, slot in (some.unbind(1) for some in known.split(ROWS)):
            greedy[row, slot] = self.model.ends.logits(features[row, slot]).max(-1).indices
        return batch._replace(features=features, inputs=inputs, greedy=greedy)
