"""The nodes of the radix tree, and the operations that change its shape but not its content: split and join.

A node holds the segment of tokens on the edge from its parent, with one page per KV position. A root has a
namespace and no segment. A node with neither parent nor namespace has been removed from its tree.

    split(node, k)                          join(top .. bottom)

      parent                                  parent
        |                                       |
      prefix [0, k)   new, same locks         bottom [top + ... + bottom]
        |
      node [k, n)     keeps its identity      `bottom` keeps its identity
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from petiole.cache.exceptions import ConservationError
from petiole.cache.namespace import CacheNamespace
from petiole.cache.pages.page_pool import Pages
from petiole.cache.prefix.interface import NO_PAGES
from petiole.cache.tokens import CacheTokens, Codes, ImageIdentity, boundary

_NO_CODES: Codes = np.empty(0, dtype=np.int64)


class TreeNode:
    """One segment of a cached prefix: `codes` and `physical_pages` have the same length."""

    __slots__ = (
        "children",
        "codes",
        "images",
        "last_access_time",
        "lock_ref",
        "namespace",
        "parent",
        "physical_pages",
    )

    def __init__(
        self,
        parent: TreeNode | None,
        codes: Codes = _NO_CODES,
        physical_pages: Pages = NO_PAGES,
        images: tuple[ImageIdentity, ...] = (),
        namespace: CacheNamespace | None = None,
    ) -> None:
        self.children: dict[int, TreeNode] = {}
        self.parent = parent
        self.codes = codes
        self.physical_pages = physical_pages
        self.images = images
        self.lock_ref = 0
        self.last_access_time = 0
        self.namespace = namespace

    @property
    def tokens(self) -> CacheTokens:
        """The segment's tokens (`len()` counts tokens, not positions)."""
        return CacheTokens(self.codes, self.images)

    @property
    def total_kv_length(self) -> int:
        return len(self.physical_pages)

    @property
    def first_code(self) -> int:
        """The key of this node among its siblings."""
        return self.codes.item(0)

    def __repr__(self) -> str:
        return f"TreeNode(kv={self.total_kv_length}, children={len(self.children)}, lock_ref={self.lock_ref})"


def path_to_root(node: TreeNode) -> list[TreeNode]:
    """The node and its ancestors, root last."""
    path = [node]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    return path


def path_pages(node: TreeNode) -> Pages:
    """The pages of the prefix that ends with the node, root first."""
    pages = [n.physical_pages for n in reversed(path_to_root(node)[:-1])]
    return pages[0] if len(pages) == 1 else np.concatenate(pages)


def is_exclusive(path: list[TreeNode], pages: Pages) -> bool:
    """Whether a path (deepest node first) is locked once, has no branches and owns exactly these pages."""
    alone = all(node.lock_ref == 1 and len(node.children) <= (node is not path[0]) for node in path)
    return alone and np.array_equal(np.concatenate([n.physical_pages for n in reversed(path)]), pages)


def subtree(node: TreeNode) -> list[TreeNode]:
    """The node and its descendants, parents before children."""
    nodes = [node]
    for visited in nodes:
        nodes.extend(visited.children.values())
    return nodes


def walk(node: TreeNode, codes: Codes, kv: int, inside: int = 0) -> tuple[TreeNode, int, int, int]:
    """Follow `codes` from position `kv`. Returns (last node, offset in it, position reached, nodes walked)."""
    depth = 0
    n = len(codes)
    while kv < n and inside == len(node.codes):
        child = node.children.get(codes.item(kv))
        if child is None:
            break
        node = child
        inside = common_length(node.codes, codes, kv)
        kv += inside
        depth += 1
    return node, inside, kv, depth


def common_length(segment: Codes, codes: Codes, start: int) -> int:
    """The length of the common prefix of `segment` and `codes[start:]`."""
    n = min(len(segment), len(codes) - start)
    differs = segment[:n] != codes[start : start + n]
    first = int(differs.argmax())
    return first if differs[first] else n


def compact(array: NDArray[np.int64]) -> NDArray[np.int64]:
    """A copy if the array is a view of more than twice its size (to free the base), else the array itself."""
    base = array.base
    return array.copy() if isinstance(base, np.ndarray) and base.size > 2 * array.size else array


def unwritable(array: NDArray[np.int64]) -> NDArray[np.int64]:
    """A copy if the array is writable, else the array itself (compacted), which a node may then share."""
    return array.copy() if array.flags.writeable else compact(array)


def split(node: TreeNode, at: int) -> TreeNode:
    """Split a node at offset `at`. Returns the new upper node. Locks on the node cover both parts."""
    parent = node.parent
    assert parent is not None
    assert 0 < at < len(node.codes)
    upper = TreeNode(parent, compact(node.codes[:at]), compact(node.physical_pages[:at]), node.images)
    codes, pages = compact(node.codes[at:]), compact(node.physical_pages[at:])
    upper.lock_ref = node.lock_ref
    upper.last_access_time = node.last_access_time
    parent.children[upper.first_code] = upper
    node.codes, node.physical_pages = codes, pages
    node.parent = upper
    upper.children[node.first_code] = node
    return upper


def joins(node: TreeNode, child: TreeNode) -> bool:
    """Whether a node and a child of it may become one: no other child, and the same last access."""
    return node.codes.size > 0 and len(node.children) == 1 and node.last_access_time == child.last_access_time


def join(chain: list[TreeNode]) -> None:
    """Merge a chain of nodes that `joins` (top first) into its bottom node; the others are removed."""
    top, bottom = chain[0], chain[-1]
    parent = top.parent
    assert parent is not None
    codes = np.concatenate([node.codes for node in chain])
    pages = np.concatenate([node.physical_pages for node in chain])
    parent.children[top.first_code] = bottom
    bottom.codes, bottom.physical_pages = codes, pages
    bottom.images = tuple({image.serial: image for node in chain for image in node.images}.values())
    bottom.parent = parent
    for node in chain[:-1]:
        node.parent = None
        node.children = {}


def check_node(node: TreeNode) -> None:
    """Check R1 and R2 of `cache.prefix.radix` for one node below a root. Raises ConservationError."""
    if len(node.codes) != len(node.physical_pages) or boundary(node.codes, 0) != 0:
        raise ConservationError(f"{node} has {len(node.codes)} codes or begins inside an image (R1)")
    for code, child in node.children.items():
        if child.parent is not node or child.first_code != code:
            raise ConservationError(f"{node} and its child {child} disagree (R1)")
    below = sum(child.lock_ref for child in node.children.values())
    if node.lock_ref < below or node.parent is None or node.parent.lock_ref < node.lock_ref:
        raise ConservationError(f"locks of {node} do not cover its children's or are not covered (R2)")
