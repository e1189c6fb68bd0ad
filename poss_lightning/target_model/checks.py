"""What is checked when a target is loaded: features, logits, a tree's mask; and whether decoding can be exact."""

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from poss_lightning.target_model.by_position import ByPosition
from poss_lightning.target_model.grouped_attention import GROUPED
from poss_lightning.target_model.loading import reason
from poss_lightning.target_model.masks import causal_ancestors, layer_windows

if TYPE_CHECKING:
    from poss_lightning.target_model.tree_kernel import TreeKernel

    Reader = ByPosition | TreeKernel
    from poss_lightning.target_model.cache import TreeCache
    from poss_lightning.target_model.model import Target

#        r a b c d   the tree that a target must get right: r(a(c) b(d))
TREE = ((1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 1, 0, 0), (1, 1, 0, 1, 0), (1, 0, 1, 0, 1))
PATHS = ((0, 1, 3), (0, 2, 4))
READS_MASKS = (GROUPED, "sdpa", "eager")  # other attention takes no tree's mask
OWN_LOGITS = (
    "its logits are not head(feature), scaled or softly capped as its config says (a bias or a step of its own stands "
    "between), so a draft could not share its head"
)
TEXT = 24  # tokens before the trees, more than a tail
BITS_TREE, BITS_PATH = 63, (0, 2, 5, 12, 26, 54)  # whose bits are tried: node i is below (i - 1) // 2

logger = logging.getLogger(__name__)


@torch.inference_mode()
def check_target(target: "Target") -> None:
    """Raise NotImplementedError if logits, inner layers or features under a mask are not the model's."""
    if (attention := target.config._attn_implementation) not in READS_MASKS:
        raise NotImplementedError(f"it attends by {attention}: load it with attn_implementation='sdpa'")
    tokens = torch.arange(8, device=target.device)[None] % target.spec.vocab_size
    with reason("transformers itself cannot read 8 tokens with it"), target.without_defaults() as model:
        output = model.base_model(tokens, use_cache=False, output_hidden_states=True)
        logits = model(tokens, use_cache=False).logits.to(target.device)
    expected = output.last_hidden_state.to(target.device)
    features, inner = target.text_layers(tokens, layers := tuple(range(1, target.config.num_hidden_layers)))
    if not features.isfinite().all():
        raise NotImplementedError(f"its features are not finite in {target.dtype_name}: choose a different dtype")
    _check_near(target, features, expected, "its features")
    with reason(OWN_LOGITS):
        ours = target.embed_head.logits(expected)
    with reason("its layers and its features differ in width"):
        states = torch.stack([state.to(target.device) for state in output.hidden_states]).float()  # (L + 1, 1, 8, D)
    if any((states - inner[:, :, i - 1]).flatten(1).norm(dim=1).argmin() != i for i in layers):
        raise NotImplementedError("the outputs of its decoder layers are not its hidden states")
    if logits.shape != ours.shape or not torch.allclose(logits.float(), ours.float(), rtol=1e-3, atol=1e-3):
        raise NotImplementedError(OWN_LOGITS)
    _check_trees(target)


@torch.inference_mode()
def find_by_position(target: "Target", asked: bool | None) -> "Reader | None":
    """Return how a target attends by position, if a trial gives plain decoding's bits; else None, and log why.

    Args:
        asked: True for an error in place of None, False for None without a trial; None tries it on a CPU alone.

    Raises:
        NotImplementedError: it was asked for, and cannot be.
    """
    if asked is False or (asked is None and target.device.type != "cpu"):
        return None
    try:
        if (attention := target.config._attn_implementation) != GROUPED or target.spans_devices:
            raise NotImplementedError(f"attention is by {attention}, on {target.device.type}")
        target.by_position = _reader(target)
        _check_trees(target)
        _check_bits(target)
    except NotImplementedError as error:
        target.by_position = None
        if asked:
            raise NotImplementedError(f"exact is true, but {error}") from error
        logger.info("drafted text of %s may differ where rounding breaks a tie: %s", target.spec.name, error)
    return target.by_position


def _reader(target: "Target") -> "Reader":
    if target.device.type == "cpu":
        spec = target.spec
        return ByPosition(target.dtype, spec.head_dim, spec.heads // spec.kv_heads, target.steady_rows)
    try:
        from poss_lightning.target_model.tree_kernel import TreeKernel
    except ImportError as error:
        raise NotImplementedError("Triton is not installed") from error
    if target.device.type != "cuda":
        raise NotImplementedError(f"there is no kernel for {target.device.type}")
    return TreeKernel()


def _check_trees(target: "Target") -> None:
    """Compare trees with their paths as separate texts; then with windows of 5, if the target has windows."""
    _check_tree(target, "")
    if any(target.windows.values()):
        usual = target.config.sliding_window, target.windows
        target.config.sliding_window = 5  # for transformers' masks
        target.windows = layer_windows(target.config, target.spec.context)
        try:
            _check_tree(target, " and windows")
        finally:
            target.config.sliding_window, target.windows = usual


def _check_tree(target: "Target", suffix: str) -> None:
    """Compare `TREE` after a text with each of its paths as a separate text."""
    tokens = torch.arange(TEXT + 5, device=target.device)[None] % target.spec.vocab_size
    text, nodes = tokens.split([TEXT, 5], dim=1)
    with reason("its attention does not take a tree's mask and cache"):  # keys of other sizes, a mask of 2 axes
        before, cache = _read(target, text, 5)
        tree, _ = target.forward_tree(nodes, torch.tensor([TREE], device=target.device) > 0, cache, exact=True)
    paths = torch.tensor(PATHS, device=target.device)
    plain = target.text_features(torch.cat([text.expand(2, -1), nodes[0, paths]], dim=1))  # (2, TEXT + 3, D)
    ours = torch.cat([before.expand(2, -1, -1), tree[0, paths]], dim=1)
    _check_near(target, ours, plain, f"its features behind a cache and a tree's mask{suffix}")


def _check_bits(target: "Target") -> None:
    """Raise NotImplementedError unless a path of a tree has the bits of plain steps."""
    ancestors = torch.eye(BITS_TREE, dtype=torch.bool, device=target.device)
    for node in range(1, BITS_TREE):
        ancestors[node] |= ancestors[(node - 1) // 2]
    tokens = (torch.arange(TEXT + BITS_TREE, device=target.device) * 7 % target.spec.vocab_size)[None]
    text, nodes = tokens.split([TEXT, BITS_TREE], dim=1)
    _, expected = target.verify(nodes, ancestors[None], _read(target, text, BITS_TREE)[1])  # (1, n, V)
    _, cache = _read(target, text, BITS_TREE)
    for node in BITS_PATH:
        _, logits = target.verify(nodes[:, node : node + 1], causal_ancestors(1, target.device), cache)
        cache.append([1])
        if not logits[0, 0].equal(expected[0, node]):
            raise NotImplementedError("the bits of a node depend on the other nodes of its tree")


def _read(target: "Target", text: Tensor, room: int) -> "tuple[Tensor, TreeCache]":
    """Read a text (1, T) into a cache with room for more: its features (1, T, D), and the cache."""
    cache = target.new_cache(1, text.shape[1] + room)
    features, _ = target.forward_tree(text, causal_ancestors(text.shape[1], target.device), cache)
    cache.append([text.shape[1]])
    return features, cache


def _check_near(target: "Target", ours: Tensor, plain: Tensor, what: str) -> None:
    distance = (ours.float() - plain.float()).norm() / plain.float().norm()
    if not distance <= (1e-3 if target.dtype == torch.float32 else 5e-2):
        raise NotImplementedError(f"{what} are not those of a plain forward (relative distance {distance:.1g})")
