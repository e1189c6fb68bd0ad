"""A training as one of its processes sees it: the numbers from which its memory and its time follow."""

from dataclasses import dataclass

from poss_lightning.draft.specialists import DraftConfig

STRATEGIES = ("one", "ddp", "fsdp2", "zero1", "zero2", "zero3")
PRECISIONS = ("bf16-mixed", "32-true")
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training as one of its processes sees it.

    Args:
        config: of the draft.
        tied: whether the target's head is its embedding.
        tokens: of a batch of one process.
        conversation: tokens of the longest conversation; None for all of the batch. It matters on a CPU alone.
        answers: share of the slots that count.
        strategy: one of `STRATEGIES`; "one" is a single process.
        processes: how many share the work.
        offload: ZeRO keeps the optimizer's part on the CPU, stage 3 its weights too.
        precision: one of `PRECISIONS`.
        device: cpu or cuda.
        chunk: slots whose (chunk, V) matrices exist at once.
        accumulate: batches of a step; they are kept until it is known whether the whole step is finite.
        optimizer: one of `OPTIMIZERS`.

    Raises:
        ValueError: a value out of its range; the message names it.
    """

    config: DraftConfig
    tied: bool
    tokens: int
    conversation: int | None = None
    answers: float = 1.0
    strategy: str = "one"
    processes: int = 1
    offload: bool = False
    precision: str = "bf16-mixed"
    device: str = "cuda"
    chunk: int = 128
    accumulate: int = 1
    optimizer: str = "adamw"

    def __post_init__(self):
        for name, least in (("tokens", 2), ("processes", 1), ("chunk", 1), ("accumulate", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        choices = {"strategy": STRATEGIES, "precision": PRECISIONS, "device": ("cpu", "cuda"), "optimizer": OPTIMIZERS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {' or '.join(known)}")
        if not 0 < self.answers <= 1:
            raise ValueError(f"answers is {self.answers}; it must be a share above 0, 1 at most")
        if self.strategy == "one" and self.processes > 1:
            raise ValueError(
                f"processes is {self.processes} with strategy one: name the strategy by which they share the work"
            )
        if self.offload and not self.zero:
            raise ValueError(f"offload is true with strategy {self.strategy}; only zero1, zero2 and zero3 can")
        if self.optimizer == "muon" and self.strategy not in ("one", "ddp"):
            raise ValueError(f"optimizer is muon with strategy {self.strategy}; only one and ddp have whole matrices")

    @property
    def zero(self) -> bool:
        return self.strategy.startswith("zero")

    @property
    def item(self) -> int:
        """Bytes of a number that a layer, or the target's embedding and head, computes with."""
        return 2 if self.precision == "bf16-mixed" else 4

    @property
    def slots(self) -> int:
        return self.tokens - 1

    @property
    def counting(self) -> int:
        return round(self.answers * self.slots)

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary_size or self.config.target.vocab_size
