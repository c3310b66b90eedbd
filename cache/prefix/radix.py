"""A radix tree over tokens whose nodes own KV pages: the prefix cache for page size 1.

Each node stores the array of tokens on its edge and the pages of their KV, so a match takes one array comparison
per node. Each namespace has its own tree; a root exists only while it has children.

Invariants (verified by `check`):

R1  a node below a root has a non-empty segment, as many pages as codes, and never begins inside an image
R2  a lock on a node also locks all its ancestors, so all descendants of an unlocked node are unlocked;
    nobody locks a root itself, so it has exactly the locks of its children, detached ones among them
R3  `evictable_page_count` is the number of pages in unlocked nodes (inner nodes become leaves during eviction)
R4  every unlocked leaf is in the eviction heap
R5  flushed and detached subtrees contain only locked nodes; the last unlock frees them

Splitting and coalescing change the shape of the tree, not its content. A match splits the node in which it ends.
When the last lock on a node is released, the node is joined with its only child, so the tree stays flat. A child
that was not used with the node since stays apart and keeps its own access time, so eviction takes it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import ArrayLike

from petiole.cache.exceptions import (
    ConservationError,
    MisalignedError,
    PageSizeError,
    StaleNodeError,
    UnlockWithoutLockError,
)
from petiole.cache.namespace import DEFAULT_NAMESPACE, CacheNamespace
from petiole.cache.pages.page_pool import PagePool, Pages
from petiole.cache.prefix.accounting import CountingCache
from petiole.cache.prefix.interface import NO_PAGES, InsertResult, MatchResult, Peek
from petiole.cache.prefix.tree import (
    TreeNode,
    check_node,
    compact,
    is_exclusive,
    join,
    joins,
    path_pages,
    path_to_root,
    split,
    subtree,
    unwritable,
    walk,
)
from petiole.cache.tokens import TokensLike, as_tokens, boundary, kept_tokens


class RadixPrefixCache(CountingCache[TreeNode, TreeNode | None]):
    """Prefix cache for page size 1. `max_cached_pages` limits its size (None: no limit, 0: caches nothing)."""

    def __init__(self, page_table: PagePool, max_cached_pages: int | None = None) -> None:
        if page_table.page_size != 1:
            raise PageSizeError(f"the radix cache needs page_size 1, got {page_table.page_size}")
        super().__init__(page_table, max_cached_pages, lambda node: node.last_access_time)

    def reset(self) -> None:
        super().reset()
        self._trees: dict[CacheNamespace, TreeNode] = {}
        self._detached: set[TreeNode] = set()  # tops of subtrees that are locked but no longer matchable
        self._nodes = 0

    @property
    def node_count(self) -> int:
        return self._nodes

    # ------------------------------------------------------------ lookup

    def peek(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> Peek:
        root = self._trees.get(namespace or DEFAULT_NAMESPACE)
        if root is None:
            return Peek(0, 0)
        node, inside, kv, _ = walk(root, as_tokens(tokens).codes, 0)
        reclaimable, length = 0, inside
        while node.parent is not None:
            reclaimable += 0 if node.lock_ref else length
            node = node.parent
            length = len(node.physical_pages)
        return Peek(kv, reclaimable)

    def find(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> Pages:
        root = self._trees.get(namespace or DEFAULT_NAMESPACE)
        if root is None:
            return NO_PAGES
        node, _, kv, _ = walk(root, as_tokens(tokens).codes, 0)
        return path_pages(node)[:kv] if kv else NO_PAGES

    def match_prefix(self, tokens: TokensLike, namespace: CacheNamespace | None = None) -> MatchResult[TreeNode]:
        tokens = as_tokens(tokens)
        root = self._trees.get(namespace or DEFAULT_NAMESPACE)
        if root is None:
            self.stats.record_lookup(0, tokens.kv_length, 0)
            return MatchResult(NO_PAGES, 0, 0, None)
        node, inside, kv, depth = walk(root, tokens.codes, 0)
        self.stats.record_lookup(kv, tokens.kv_length, depth)
        if kv == 0:
            return MatchResult(NO_PAGES, 0, 0, None)
        node = self._land(node, inside)
        self._touch(node)
        return MatchResult(path_pages(node), kv, tokens.token_index(kv), node)

    # ------------------------------------------------------------ insertion

    def insert(
        self,
        tokens: TokensLike,
        pages: ArrayLike,
        namespace: CacheNamespace | None = None,
        from_node: TreeNode | None = None,
        from_token_idx: int = 0,
        from_page_idx: int = 0,
        move_lock: bool = False,
    ) -> InsertResult[TreeNode]:
        tokens, given = kept_tokens(tokens), np.asarray(pages, dtype=np.int64)
        codes = tokens.codes
        if given.shape != codes.shape:
            raise MisalignedError(f"{len(codes)} KV positions need as many pages, got {given.size}")
        if from_node is not None or from_page_idx or from_token_idx:
            if from_node is None or tokens.token_index(from_page_idx) != from_token_idx:
                raise MisalignedError(f"token {from_token_idx} of {tokens} does not begin at page {from_page_idx}")
            if self._attached_end(from_node) != from_page_idx:
                raise StaleNodeError(f"from_node is not in the tree or does not end at page {from_page_idx}")
            start, inside = from_node, from_node.total_kv_length
        else:
            ns = namespace or DEFAULT_NAMESPACE
            start, inside = self._trees.get(ns) or TreeNode(None, namespace=ns), 0
        node, inside, kv, _ = walk(start, codes, from_page_idx, inside)
        behind = node if node.parent is not None else None  # a root has no pages to protect
        end = boundary(codes, kv + self._make_room(len(codes) - kv, behind))
        if end > kv:
            segment, own = compact(codes[kv:end]), unwritable(given[kv:end])
            leaf = TreeNode(self._land(node, inside), segment, own, tokens.images)
            result = InsertResult(leaf, end - kv, kv, end)
            self._touch(leaf)
            self._grow(leaf, self._between(from_node, leaf) if move_lock else ())
            if not move_lock:
                self._heap.push(leaf)
            return result
        if kv == 0:
            return InsertResult(None, 0, 0, 0)
        node = self._land(node, inside)
        result = InsertResult(node, 0, kv, kv)
        self._touch(node)
        if move_lock:
            self._pin(node, from_node)
        return result

    def _grow(self, leaf: TreeNode, held: Collection[TreeNode]) -> None:
        """Add a leaf to the tree, take over its pages, and lock nodes of its path. Registers the root of a new
        namespace."""
        parent, code, pages = leaf.parent, leaf.first_code, leaf.physical_pages
        assert parent is not None
        self.page_table.adopt_pages(pages)  # from here on nothing fails: nobody would own the pages
        if parent.namespace is not None:
            self._trees.setdefault(parent.namespace, parent)
        parent.children[code] = leaf
        self._nodes += 1
        self._cached += len(pages)
        self._reclaimable += len(pages)
        self.stats.inserted_pages += len(pages)
        for node in held:
            if node.lock_ref == 0:
                self._reclaimable -= len(node.physical_pages)
            node.lock_ref += 1

    @staticmethod
    def _between(above: TreeNode | None, node: TreeNode) -> list[TreeNode]:
        """The node and its ancestors below `above`."""
        path = path_to_root(node)
        return path if above is None else path[: path.index(above)]

    # ------------------------------------------------------------ locks

    def is_attached(self, node: TreeNode) -> bool:
        return self._attached_end(node) >= 0

    def pages_of(self, node: TreeNode) -> Pages:
        return path_pages(node)

    def _attached_end(self, node: TreeNode) -> int:
        """The position at which a node ends, or -1 if a match cannot reach it."""
        end = 0
        while (parent := node.parent) is not None:
            if parent.children.get(node.first_code) is not node:
                return -1
            end += len(node.codes)
            node = parent
        return end if node.namespace is not None and self._trees.get(node.namespace) is node else -1

    def lock(self, node: TreeNode | None) -> None:
        if node is None:
            return
        if node.parent is None and node.namespace is None:
            raise StaleNodeError("cannot lock a node that has left the tree: lock what you keep")
        self._pin(node)

    def unlock(self, node: TreeNode | None) -> None:
        if node is None:
            return
        if node.lock_ref <= 0:
            raise UnlockWithoutLockError(f"{node} is not locked")
        self._unpin(node)
        detached = [top for top in path_to_root(node) if top in self._detached] if self._detached else []
        for top in detached:
            self._free_unlocked(top)
        if not detached:
            self._coalesce(node)

    def _pin(self, node: TreeNode | None, above: TreeNode | None = None) -> None:
        while node is not above:
            assert node is not None
            if node.lock_ref == 0:
                self._reclaimable -= len(node.physical_pages)
            node.lock_ref += 1
            node = node.parent

    def _unpin(self, node: TreeNode | None) -> None:
        current = node
        while current is not None:
            current.lock_ref -= 1
            if current.lock_ref == 0:
                self._reclaimable += len(current.physical_pages)
            current = current.parent
        if node is not None and node.lock_ref == 0 and not node.children and node.codes.size:
            self._heap.push(node)

    # ------------------------------------------------------------ eviction

    def _take_oldest(self, needed_pages: int) -> tuple[Pages, int]:
        """Trim leaves from their tails until `needed_pages` are removed; more only to keep an image whole."""
        evicted: list[Pages] = []
        missing = needed_pages
        while missing > 0:
            leaf = self._heap.pop()
            assert leaf is not None, "R4: evictable pages, but no evictable leaf"
            if leaf.children or leaf.lock_ref or leaf.parent is None:
                continue
            pages = leaf.physical_pages
            keep = boundary(leaf.codes, len(pages) - missing) if missing < len(pages) else 0
            evicted.append(pages[keep:])
            missing -= len(pages) - keep
            if keep:
                self._trim(leaf, keep)
            else:
                self._drop_leaf(leaf)
        return evicted[0] if len(evicted) == 1 else np.concatenate(evicted), len(evicted)

    def _trim(self, leaf: TreeNode, keep: int) -> None:
        dropped = len(leaf.physical_pages) - keep
        leaf.codes, leaf.physical_pages = compact(leaf.codes[:keep]), compact(leaf.physical_pages[:keep])
        self._cached -= dropped
        self._reclaimable -= dropped
        self._heap.push(leaf)

    def _drop_leaf(self, leaf: TreeNode) -> None:
        """Remove an unlocked leaf from the tree. The caller frees its pages."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        assert leaf.lock_ref == 0
        del parent.children[leaf.first_code]
        leaf.parent = None
        self._nodes -= 1
        self._cached -= len(leaf.physical_pages)
        self._reclaimable -= len(leaf.physical_pages)
        self._tidy(parent)

    def _tidy(self, parent: TreeNode) -> None:
        """After a node has lost a child: remove an empty root, queue a leaf for eviction or join an only child."""
        if parent.parent is None:
            if (
                not parent.children
                and parent.namespace is not None
                and self._trees.get(parent.namespace) is parent
            ):
                self._check_root(parent)  # from here on no match can reach it
                del self._trees[parent.namespace]
        elif parent.lock_ref == 0:
            if not parent.children:
                self._heap.push(parent)
            elif len(parent.children) == 1:
                self._coalesce(parent)

    # ------------------------------------------------------------ withdrawal and flush

    def withdraw(
        self, node: TreeNode, keep_kv: int, pages: Pages, batch_idx: int
    ) -> tuple[TreeNode | None, int] | None:
        path, end = self._path_from(node, keep_kv)
        own = self._own_part(path, pages)
        first = len(pages) - sum(n.total_kv_length for n in own)
        if own and not is_exclusive(own, pages[first:]):
            self._detach(own[-1])
            return None
        keeper = path[-1].parent if path else node
        assert keeper is not None
        if keeper.parent is not None:
            self._pin(keeper)
        self._unpin(node)
        for leaf in own:
            self._heap.discard(leaf)
            self._drop_leaf(leaf)
        self.page_table.disown_pages(pages[first:], batch_idx)
        self.stats.inserted_pages -= len(pages) - first
        if len(own) < len(path):
            self._coalesce(path[len(own)])
        return (keeper if keeper.parent is not None else None), end

    def _path_from(self, node: TreeNode, keep_kv: int) -> tuple[list[TreeNode], int]:
        """The nodes from `keep_kv` to the end of `node`, deepest first, and where the topmost begins. Splits the
        node in which `keep_kv` lies."""
        path: list[TreeNode] = []
        start = self._attached_end(node)
        while node.parent is not None and start > keep_kv:
            start -= len(node.physical_pages)
            if start < keep_kv and (cut := boundary(node.codes, keep_kv - start)):
                self._land(node, cut)
                start += cut
            path.append(node)
            node = node.parent
        return path, start

    @staticmethod
    def _own_part(path: list[TreeNode], pages: Pages) -> list[TreeNode]:
        """The nodes of the path up to the topmost with the row's own pages. Other sequences inserted the nodes
        above that one."""
        topmost, end = 0, len(pages)
        for k, node in enumerate(path, 1):
            end -= node.total_kv_length
            if np.array_equal(node.physical_pages, pages[end : end + node.total_kv_length]):
                topmost = k
        return path[:topmost]

    def flush(self) -> int:
        before = self._cached
        roots = list(self._trees.values())
        self._trees.clear()
        for root in roots:
            self._detached.add(root)
            self._free_unlocked(root)
        return before - self._cached

    def _detach(self, top: TreeNode) -> None:
        """Make a locked subtree unmatchable. It keeps its locks on its ancestors."""
        parent = top.parent
        assert parent is not None
        del parent.children[top.first_code]
        self._detached.add(top)
        self._tidy(parent)
        self._free_unlocked(top)

    def _free_unlocked(self, top: TreeNode) -> None:
        """Free the unlocked nodes of a detached subtree, and drop the subtree once its top is unlocked."""
        for node in reversed(subtree(top)):
            if node.lock_ref == 0 and node.codes.size:
                self._heap.discard(node)
                self.page_table.release_pages(node.physical_pages)
                self._nodes -= 1
                self._cached -= len(node.physical_pages)
                self._reclaimable -= len(node.physical_pages)
                if node is not top and node.parent is not None:
                    del node.parent.children[node.first_code]
                    node.parent = None
        if top.lock_ref == 0:
            self._detached.discard(top)
            parent, top.parent = top.parent, None
            if parent is not None:
                self._tidy(parent)

    # ------------------------------------------------------------ shape of the tree

    def _land(self, node: TreeNode, inside: int) -> TreeNode:
        """The node that ends where a walk ended. Splits the node if the walk ended inside it."""
        if inside == len(node.codes):
            return node
        upper = split(node, inside)
        self.stats.splits += 1
        self._nodes += 1
        return upper

    def _coalesce(self, node: TreeNode) -> None:
        """Join the node and each of its ancestors, while unlocked, with an only child last used with it."""
        while node.parent is not None and node.lock_ref == 0:
            chain = [node]
            while (up := chain[-1].parent) is not None and not up.lock_ref and joins(up, chain[-1]):
                chain.append(up)
            chain.reverse()
            while chain[-1].children and joins(chain[-1], below := next(iter(chain[-1].children.values()))):
                chain.append(below)
            if len(chain) > 1:
                join(chain)
                self._nodes -= len(chain) - 1
                self.stats.coalesced += len(chain) - 1
            node = chain[-1].parent  # type: ignore[assignment]

    def _touch(self, node: TreeNode | None) -> None:
        """Mark a node and its ancestors as most recently used."""
        now = self._tick()
        while node is not None:
            node.last_access_time = now
            node = node.parent

    # ------------------------------------------------------------ conservation

    def keep_only(self, nodes: Iterable[TreeNode]) -> None:
        held = Counter(one for node in nodes for one in path_to_root(node))
        self.reset()
        for node, locks in held.items():
            node.children, node.lock_ref = {}, locks
        for node in held:
            if node.parent is not None:
                node.parent.children[node.first_code] = node
                self._nodes += 1
                self._cached += node.total_kv_length
            elif node.namespace is not None:
                self._trees[node.namespace] = node

    def nodes(self) -> list[TreeNode]:
        """All nodes except roots, including detached ones."""
        tops = [*self._trees.values(), *self._detached]
        return [node for top in tops for node in subtree(top) if node.codes.size]

    def owned_pages(self) -> Pages:
        return np.concatenate([NO_PAGES, *(node.physical_pages for node in self.nodes())])

    def check(self) -> None:
        nodes = self.nodes()
        unlocked = [node for node in nodes if node.lock_ref == 0]
        self._agree(
            {
                "node count": (self._nodes, len(nodes)),
                "cached pages": (self._cached, sum(node.total_kv_length for node in nodes)),
                "reclaimable pages (R3)": (self._reclaimable, sum(node.total_kv_length for node in unlocked)),
            }
        )
        for node in nodes:
            check_node(node)
        for node in unlocked:
            if not node.children and node not in self._heap:
                raise ConservationError(f"evictable leaf {node} is not in the eviction heap (R4)")
            if not self.is_attached(node):
                raise ConservationError(f"{node} is detached, yet nobody holds it (R5)")
        for root in {*self._trees.values(), *(path_to_root(top)[-1] for top in self._detached)}:
            if root.namespace is not None:
                self._check_root(root)
        for namespace, root in self._trees.items():
            if root.namespace != namespace or root.parent is not None or not root.children:
                raise ConservationError(f"the root of {namespace} is empty or misplaced")

    def check_locks(self, nodes: Iterable[TreeNode]) -> None:
        held = Counter(one for node in nodes for one in path_to_root(node))
        self._agree({f"locks of {node}": (node.lock_ref, held[node]) for node in self.nodes()})

    def _check_root(self, root: TreeNode) -> None:
        below = [*root.children.values(), *(top for top in self._detached if top.parent is root)]
        locks = sum(node.lock_ref for node in below)
        self._agree({f"locks of the root of {root.namespace} (R2)": (root.lock_ref, locks)})
