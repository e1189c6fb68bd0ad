"""Products with frozen weights on a CPU. oneDNN multiplies faster by a weight that it has laid out for itself once.

The weight stays as it is beside its layout, which takes as much memory again: the user's model, `generate` and files
have the weight. `linear` is the naive twin.
"""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Product = Callable[[Tensor], Tensor]  # (..., K) -> (..., N)
ROWS = 16  # of the products that the layout is best for: a tree's
SMALLEST = 2**18  # entries of a weight: to call oneDNN takes 30 µs, ten times as long as `linear`

logger = logging.getLogger(__name__)


class Prepacked:
    """Multiplies by a frozen weight: x (..., K) -> x @ weight.T + bias (..., N). With gradients it is `linear`.

    Args:
        weight: (N, K) on a CPU; never changed afterwards.
        bias: (N,)

    Raises:
        AttributeError, RuntimeError: this torch or this CPU cannot, in the weight's dtype.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight, self.bias = weight, bias
        self.layout = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.layout, self.bias, "none", [], "")


def product_with(weight: Tensor, bias: Tensor | None = None) -> Product:
    """How to multiply by a frozen weight (N, K): `Prepacked` where that can be and pays, else `linear`."""
    if weight.device.type == "cpu" and weight.numel() >= SMALLEST and can_prepack(weight.dtype):
        return Prepacked(weight, bias)
    return partial(linear, weight=weight, bias=bias)


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU multiply by prepacked weights of a dtype; if not, a line of the log says why."""
    try:
        with torch.no_grad():
            Prepacked(torch.ones(2, 2, dtype=dtype))(torch.ones(1, 2, dtype=dtype))
    except (AttributeError, RuntimeError) as error:
        logger.info("weights in %s are not prepacked: %s", dtype, str(error).splitlines()[0])
        return False
    return True


def prepack(module: nn.Module) -> None:
    """Let every `nn.Linear` within `module` multiply by `product_with`; parameters and their names stay."""
    for layer in module.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):  # as accelerate's hooks set it
            layer.forward = product_with(layer.weight, layer.bias)  # pyright: ignore[reportAttributeAccessIssue]
