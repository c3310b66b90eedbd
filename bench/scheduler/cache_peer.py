"""The peer for `bench.scheduler.cache`: a plain radix cache with one Python object for each token.

It is the design that one writes first. Tokens are named tuples, compared by their keys one after the other.
Segments and pages are tuples. Page offsets are sums of the tokens' KV lengths. Victims come from a heap of (time,
counter, node, version). There are no compact arrays, no coalescing and no page states; the free list is a Python
list."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple


class PeerToken(NamedTuple):
    token_id: int

    def cache_key(self) -> tuple[int, int]:
        return (0, self.token_id)

    def kv_length(self) -> int:
        return 1


class PeerNode:
    __slots__ = ("accessed", "children", "locks", "pages", "parent", "tokens", "version")

    def __init__(self, parent: PeerNode | None, tokens: tuple[PeerToken, ...], pages: tuple[int, ...]) -> None:
        self.parent, self.tokens, self.pages = parent, tokens, pages
        self.children: dict[tuple[int, int], PeerNode] = {}
        self.locks = self.accessed = self.version = 0


class PeerCache:
    def __init__(self, n_pages: int) -> None:
        self.free = list(range(n_pages - 1, 0, -1))
        self.root = PeerNode(None, (), ())
        self.heap: list[tuple[int, int, PeerNode, int]] = []
        self.count = itertools.count(1)

    def allocate(self, n: int) -> list[int]:
        return [self.free.pop() for _ in range(n)]

    def match(self, tokens: list[PeerToken]) -> tuple[PeerNode, list[int], int]:
        node, at = self.root, 0
        pages: list[int] = []
        while at < len(tokens):
            child = node.children.get(tokens[at].cache_key())
            if child is None:
                break
            child = self._common(child, tokens, at)
            pages.extend(child.pages)
            at += len(child.tokens)
            node = child
        now, touched = next(self.count), node
        while touched.parent is not None:
            touched.accessed = now
            self._offer(touched)
            touched = touched.parent
        return node, pages, at

    def insert(
        self, tokens: list[PeerToken], pages: list[int], node: PeerNode | None = None, at: int = 0
    ) -> PeerNode:
        node = node or self.root
        while at < len(tokens):
            child = node.children.get(tokens[at].cache_key())
            if child is None:
                leaf = PeerNode(node, tuple(tokens[at:]), tuple(pages[at:]))
                assert sum(token.kv_length() for token in leaf.tokens) == len(leaf.pages)
                leaf.accessed = next(self.count)
                node.children[tokens[at].cache_key()] = leaf
                self._offer(leaf)
                return leaf
            node = self._common(child, tokens, at)
            at += len(node.tokens)
        return node

    def evict(self, needed: int) -> int:
        freed = 0
        while freed < needed and self.heap:
            _, _, node, version = heapq.heappop(self.heap)
            if version != node.version or node.children or node.locks or node.parent is None:
                continue
            self.free.extend(reversed(node.pages))
            freed += len(node.pages)
            parent = node.parent
            del parent.children[node.tokens[0].cache_key()]
            node.parent = None
            self._offer(parent)
        return freed

    def _common(self, child: PeerNode, tokens: list[PeerToken], at: int) -> PeerNode:
        """The part of `child` that the tokens share. Splits `child` if they share only a part."""
        n = 0
        for i, token in enumerate(child.tokens):
            if at + i >= len(tokens) or tokens[at + i].cache_key() != token.cache_key():
                break
            n += 1
        if n == len(child.tokens):
            return child
        assert child.parent is not None
        kv = sum(token.kv_length() for token in child.tokens[:n])
        upper = PeerNode(child.parent, child.tokens[:n], child.pages[:kv])
        upper.locks, upper.accessed = child.locks, child.accessed
        child.parent.children[upper.tokens[0].cache_key()] = upper
        child.tokens, child.pages, child.parent = child.tokens[n:], child.pages[kv:], upper
        upper.children[child.tokens[0].cache_key()] = child
        self._offer(child)
        return upper

    def _offer(self, node: PeerNode) -> None:
        if not node.children and not node.locks and node.parent is not None:
            node.version += 1
            heapq.heappush(self.heap, (node.accessed, next(self.count), node, node.version))
