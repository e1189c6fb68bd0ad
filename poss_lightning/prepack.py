"""Products with frozen weights on a CPU: faster by a layout that oneDNN makes once, and, if asked, `steady`.

CPUs multiply one row, or few, in another order than many. A steady product gives a row the same bits whatever the
number of other rows, from a number of rows on: trials choose the layout and this number.

The layout takes as much memory again: the user's model, `generate` and files keep the weight itself. `linear` is the
naive twin.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from poss_lightning.machine import best_seconds

Product = Callable[[Tensor], Tensor]  # (..., K) -> (..., N)
TREE, STEP = 16, 1  # layouts, by the number of rows that oneDNN is told
SMALLEST = 2**18  # entries of a float32 weight: to call oneDNN takes 30 µs, ten times as long as `linear`
QUICK_ROWS = 6  # AVX-512 reads weights for so many up to a third faster than for one or two
COLD = 2**26  # bytes of weights that lie in no cache
TRIED_ROWS, MANY_ROWS = (1, 2, 3, 6, 15, 16, 31, 33, 37, 64), 128
TRIED_COLUMNS = 4096  # of a product: more of them, as an LM head has, are more of the same work
SIBLINGS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers that read the same input

logger = logging.getLogger(__name__)


class Prepacked:
    """Multiplies by a frozen weight, without gradients: x (..., K) -> x @ weight.T + bias (..., N).

    Args:
        weight: (N, K) on a CPU.
        bias: (N,)
        layout: the number of rows that it is best for.

    Raises:
        AttributeError, RuntimeError: this torch or this CPU cannot, in the weight's dtype.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, layout: int = TREE):
        self.bias = bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), layout)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class Steady:
    """Multiplies by a frozen weight on a CPU so that the bits of a row do not depend on the other rows.

    Arguments are those of `Prepacked`; without `pack`, as memory is short, it multiplies by the weight itself.

    Attributes:
        rows: the fewest for which this holds; or more, if it takes less time.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True):
        layouts = (TREE, STEP) if pack and can_prepack(weight.dtype) else (None,)
        shape = min(len(weight), TRIED_COLUMNS), weight.shape[1]
        threads = torch.get_num_threads()
        self.layout, fewest = steadiest(*shape, weight.dtype, bias is not None, layouts, threads)
        self.rows = quickest(fewest, weight.dtype, self.layout, threads) if _pays(weight) else fewest
        self.product = _multiply(weight, bias, self.layout)

    def __call__(self, x: Tensor) -> Tensor:
        if (count := x.shape[:-1].numel()) <= MANY_ROWS:
            return self.product(x)
        parts = x.flatten(0, -2).chunk(-(-count // MANY_ROWS))
        return torch.cat([self.product(part) for part in parts]).unflatten(0, x.shape[:-1])


class Siblings:
    """Layers that read the same input, by one product when the first of them is called."""

    def __init__(self, layers: list[nn.Linear]):
        self.sizes = [layer.out_features for layer in layers]
        self.read, self.outputs = None, ()

    def output(self, number: int, product: Product, x: Tensor) -> Tensor:
        """Return the output of one of the layers, by the first one's product; the last one's call forgets the input."""
        if x is not self.read:
            self.read, self.outputs = x, product(x).split(self.sizes, dim=-1)
        output = self.outputs[number]
        if number == len(self.sizes) - 1:
            self.read, self.outputs = None, ()
        return output


class Switch:
    """Whether a module decodes now: then its products are `Steady`; else they are as fast as they can be."""

    def __init__(self):
        self.is_on, self.rows = False, 1  # from so many rows on all products are steady

    def steady(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True) -> Steady:
        """Make a product for decoding."""
        product = Steady(weight, bias, pack)
        self.rows = max(self.rows, product.rows)
        return product

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let it decode in the block."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def between(self, on: Product, off: Product) -> Product:
        """Return a function that is one of two, by the switch."""
        return lambda x: on(x) if self.is_on else off(x)


def product_with(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Choose how to multiply by a frozen weight (N, K): `Prepacked` where that can be and pays, else `linear`."""
    packs = weight.device.type == "cpu" and _pays(weight) and can_prepack(weight.dtype)
    return _multiply(weight, bias, TREE if packs else None)


def prepack(module: nn.Module) -> None:
    """Let every `nn.Linear` within `module` multiply by `product_with`; parameters and their names stay."""
    for layer in _linears(module):
        _set_product(layer, product_with(layer.weight, layer.bias))


def make_steady(module: nn.Module, pack: bool) -> Switch:
    """Let every `nn.Linear` within `module`, on a CPU, be `Steady` where the returned switch is on.

    Args:
        pack: whether there is memory for layouts; then siblings are one product.
    """
    switch = Switch()
    for parent in module.modules() if pack else ():
        for names in SIBLINGS:
            layers = [layer for layer in _linears(parent) if layer in [getattr(parent, name, None) for name in names]]
            if len(layers) == len(names) and len({(layer.in_features, layer.bias is None) for layer in layers}) == 1:
                siblings, steady = Siblings(layers), switch.steady(*_joint(layers))
                for number, layer in enumerate(layers):
                    products = (partial(siblings.output, number, each) for each in (steady, steady.product))
                    _set_steady(layer, switch, steady.layout, *products)
    for layer in _linears(module):
        steady = switch.steady(layer.weight, layer.bias, pack)
        _set_steady(layer, switch, steady.layout, steady, steady.product)
    return switch


def _set_product(layer: nn.Linear, product: Product) -> None:
    def forward(input: Tensor) -> Tensor:
        return linear(input, layer.weight, layer.bias) if torch.is_grad_enabled() else product(input)

    layer.forward = forward


def _set_steady(layer: nn.Linear, switch: Switch, layout: int | None, steady: Product, usual: Product) -> None:
    if layout != TREE or not _pays(layer.weight):
        usual = _multiply(layer.weight, layer.bias, None)
    _set_product(layer, switch.between(steady, usual))


def _joint(layers: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    return torch.cat([layer.weight.detach() for layer in layers]), bias


def _linears(module: nn.Module) -> list[nn.Linear]:
    """Return the plain linear layers; not those whose `forward` is set already, as accelerate's hooks do."""
    return [layer for layer in module.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]


def _pays(weight: Tensor) -> bool:
    return weight.dtype != torch.float32 or weight.numel() >= SMALLEST


def _multiply(weight: Tensor, bias: Tensor | None, layout: int | None) -> Product:
    return partial(linear, weight=weight, bias=bias) if layout is None else Prepacked(weight, bias, layout)


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


@cache
def steadiest(
    rows: int, columns: int, dtype: torch.dtype, biased: bool, layouts: tuple[int | None, ...], threads: int
) -> tuple[int | None, int]:
    """Choose the layout with which the fewest rows have the bits that they have among many; and from how many on.

    What is multiplied cancels, so a result is the error of its sum, which shows the order of the sum.
    """
    numbers, half = torch.Generator().manual_seed(0), columns // 2
    order = torch.randperm(2 * half, generator=numbers)
    weight = torch.randn(rows, half, generator=numbers).to(dtype).repeat(1, 2)[:, order]
    x = torch.randn(MANY_ROWS, half, generator=numbers).to(dtype)
    x = torch.cat([x, -x], dim=1)[:, order]
    weight, x = (pad(each, (0, columns % 2)).contiguous() for each in (weight, x))
    bias, fewest = torch.zeros(rows, dtype=dtype) if biased else None, {}
    with torch.no_grad():
        for layout in layouts:
            product = _multiply(weight, bias, layout)
            many = product(x)
            differ = [n for n in TRIED_ROWS if not product(x[:n]).equal(many[:n])]
            fewest[layout] = next(n for n in (*TRIED_ROWS, MANY_ROWS) if n > max(differ, default=0))
    best = min(fewest, key=lambda layout: fewest[layout])
    return best, fewest[best]


@cache
def quickest(fewest: int, dtype: torch.dtype, layout: int | None, threads: int) -> int:
    """Return `QUICK_ROWS` if they take less time here than `fewest` rows, which are fewer; else these."""
    if fewest >= QUICK_ROWS:
        return fewest
    with torch.no_grad():
        weight = torch.ones(1024, 1024, dtype=dtype)
        products = [_multiply(weight.clone(), None, layout) for _ in range(COLD // weight.nbytes)]

        def multiply(rows: int) -> None:
            x = torch.ones(rows, 1024, dtype=dtype)
            for product in products:
                product(x)

        seconds = best_seconds({rows: partial(multiply, rows) for rows in (fewest, QUICK_ROWS)})
    return min(seconds, key=lambda rows: seconds[rows])
