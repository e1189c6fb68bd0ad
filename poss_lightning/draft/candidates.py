"""A head that reads less: a product of low rank finds candidates, and only their rows of the head are read.

    logits of h     low = (W U) (P h), of (V, r) and (r, D); at the M tokens where low is largest, W_v h instead

U and P have the least E |W h - W U P h|² of their rank. With second moments E[h hᵀ] = L Lᵀ and the first r eigenvectors
Q of (W L)ᵀ (W L), they are U = L Q and P = Qᵀ L⁻¹. A plain SVD of W, which knows nothing of h, finds little. The rest
of the vocabulary keeps `low`, for the norm of the distribution. Decoding stays lossless, as a draft only proposes.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from poss_lightning.prepack import product_with

RIDGE = 1e-6  # of the mean variance, added to each: moments of few vectors are singular


class CandidateHead:
    """Multiplies by a head about as `linear` does: (..., D) -> (..., V), exactly at the candidates of each vector.

    Args:
        head: (V, D)
        up: U, (D, r)
        down: P, (r, D)
        rows: M, candidates of a vector.
    """

    def __init__(self, head: Tensor, up: Tensor, down: Tensor, rows: int):
        self.head, self.down, self.rows = head, down, min(rows, len(head))
        self.low_rank = product_with((head.float() @ up.float()).to(head.dtype))

    def __call__(self, x: Tensor) -> Tensor:
        low = self.low_rank(linear(x, self.down))  # (..., V)
        found = low.topk(self.rows, dim=-1).indices  # (..., M)
        rows = self.head.index_select(0, found.flatten()).view(*found.shape, -1)  # (..., M, D)
        return low.scatter(-1, found, (rows @ x[..., None])[..., 0])


def low_rank(head: Tensor, moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (D, r) and P (r, D) of a head (V, D), for vectors with second moments (D, D)."""
    head, moments = head.double(), moments.double()
    root = torch.linalg.cholesky(moments + RIDGE * moments.diagonal().mean() * torch.eye(len(moments)))  # L
    directions = torch.linalg.eigh(root.T @ (head.T @ head) @ root).eigenvectors[:, -rank:]  # Q, the largest last
    down = torch.linalg.solve_triangular(root.T, directions, upper=True).T  # Qᵀ L⁻¹
    return (root @ directions).float(), down.float()
