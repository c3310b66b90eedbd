"""A toy engine for the cache's tests: it computes KV that can be compared.

The KV of a position is a fingerprint of everything up to it, written into a slot of a toy memory; logits are a
function of all fingerprints that a sequence reads back through its row.  So a page that was shared wrongly,
freed too early or written twice changes a number.
"""

from collections.abc import Iterable, Sequence

from petiole.cache import (
    CacheNamespace,
    CacheToken,
    CacheTokens,
    ImageToken,
    KVAllocation,
    KVCacheManager,
    PageTable,
    TextToken,
    build_prefix_cache,
)

PAGE_SIZES = {"radix": 1, "block": 16, "off": 4}


def texts(*ids: int) -> list[CacheToken]:
    return [TextToken(i) for i in ids]


def fingerprints(tokens: Iterable[CacheToken], namespace: CacheNamespace | None = None) -> list[int]:
    """One number for each KV position: what its KV depends on."""
    value, found = hash(namespace or CacheNamespace()), []
    for token in tokens:
        if isinstance(token, ImageToken):  # its positions see the whole image
            value = hash((value, token.cache_key()))
            found += [hash((value, i)) for i in range(token.kv_length())]
        else:
            value = hash((value, token.cache_key()))
            found.append(value)
    return found


class ToySequence:
    """A started sequence, and how far its KV has been computed."""

    def __init__(
        self,
        engine: "ToyEngine",
        tokens: Sequence[CacheToken],
        namespace: CacheNamespace | None,
        chunk: int | None,
    ) -> None:
        self.engine, self.namespace = engine, namespace
        self.typed = list(tokens)
        self.tokens = CacheTokens.from_tokens(tokens)
        allocation = engine.manager.start(self.tokens, namespace, first_chunk=chunk)
        if allocation is None:
            raise MemoryError("no room")
        self.kv: KVAllocation = allocation
        self.computed = allocation.reused
        self.shared = 0  # the most that `share` was called with

    @property
    def fingerprints(self) -> list[int]:
        return fingerprints(self.typed, self.namespace)

    def slots(self, start: int, end: int) -> list[int]:
        table, size = self.engine.table, self.engine.table.page_size
        pages = table.get_pages(self.kv.row, 0, table.page_count(self.kv.row)).tolist()
        return [pages[position // size] * size + position % size for position in range(start, end)]

    def launch(self, end: int | None = None) -> None:
        """Compute positions up to `end`, publishing them first, as an engine does at launch."""
        end = self.tokens.kv_length if end is None else end
        self.kv.publish(self.tokens, end)
        self.compute(end)

    def compute(self, end: int) -> None:
        wanted = self.fingerprints
        for position, slot in enumerate(self.slots(self.computed, end), self.computed):
            self.engine.memory[slot] = wanted[position]
        self.computed = max(self.computed, end)

    def append(self, token: CacheToken) -> bool:
        """One decode step: the new token's KV is computed too."""
        if not self.kv.reserve(self.tokens.kv_length + token.kv_length()):
            return False
        self.typed.append(token)
        self.tokens.append(token)
        self.compute(self.tokens.kv_length)
        return True

    def logits(self) -> int:
        return hash(tuple(self.engine.memory[slot] for slot in self.slots(0, self.computed)))

    def expected_logits(self) -> int:
        return hash(tuple(self.fingerprints[: self.computed]))

    def finish(self) -> None:
        self.kv.finish(self.tokens, self.computed)


class ToyEngine:
    def __init__(self, kind: str, n_pages: int = 100, rows: int = 10, cap: int | None = None) -> None:
        self.table = PageTable(n_pages, PAGE_SIZES[kind], rows)
        self.cache = build_prefix_cache(kind, self.table, cap)  # type: ignore[arg-type]
        self.manager = KVCacheManager(self.table, self.cache)
        self.memory: dict[int, int] = {}

    def start(
        self, tokens: Sequence[CacheToken], namespace: CacheNamespace | None = None, chunk: int | None = None
    ) -> ToySequence:
        return ToySequence(self, tokens, namespace, chunk)

    def run(self, tokens: Sequence[CacheToken], namespace: CacheNamespace | None = None) -> int:
        """A whole request without decoding; its logits."""
        sequence = self.start(tokens, namespace)
        sequence.launch()
        logits = sequence.logits()
        sequence.finish()
        self.manager.check()
        return logits
