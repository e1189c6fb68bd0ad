"""Which rows of a batch are still decoded, and whose they are."""

import torch


class ActiveRows:
    """The prompt of each row of a batch, and which rows are active.

    Attributes:
        prompts: the number of each row's prompt.
        rows: the active rows.
        mask: (B,) 1 where a row is active; changed in place, so that captured graphs see it.
    """

    def __init__(self, batch: int, device: torch.device):
        self.mask = torch.ones(batch, dtype=torch.long, device=device)
        self.reset()

    def reset(self) -> None:
        """Make all rows active, each with the prompt of its number."""
        self.prompts = list(range(len(self.mask)))
        self.rows = list(self.prompts)
        self.mask.fill_(1)

    def update(self, unfinished: list[int], may_drop: bool) -> list[int] | None:
        """Keep only rows of unfinished prompts active; return them where the others, half or more, may be dropped."""
        rows = [row for row, prompt in enumerate(self.prompts) if prompt in unfinished]
        if may_drop and 2 * len(rows) <= len(self.prompts):
            return rows
        if rows != self.rows:
            self.mask.copy_(torch.tensor([int(row in rows) for row in range(len(self.prompts))]))
            self.rows = rows
        return None

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, all of them active."""
        self.mask = torch.ones_like(self.mask[: len(rows)])
        self.prompts = [self.prompts[row] for row in rows]
        self.rows = list(range(len(rows)))
