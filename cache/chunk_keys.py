"""Keys of the chunks of a sequence by content, under which KV is kept outside of this process.

The key of a chunk is a hash of the key before it, and of the content of its positions. So equal keys mean that
everything up to the chunk's end is equal. The first one follows from the namespace.
"""

from __future__ import annotations

from hashlib import blake2b

from petiole.cache.namespace import CacheNamespace
from petiole.cache.tokens import CacheTokens

KEY_BYTES = 32


def extend_chunk_keys(
    keys: list[bytes], tokens: CacheTokens, namespace: CacheNamespace, size: int, kv_length: int
) -> None:
    """Append the keys of the further whole chunks of `size` positions up to `kv_length`. keys: those of the
    sequence's first chunks."""
    for n in range(len(keys), kv_length // size):
        before = keys[-1] if keys else _first(namespace)
        keys.append(_hash(before + tokens.content(n * size, (n + 1) * size)))


def _first(namespace: CacheNamespace) -> bytes:
    return _hash(repr((namespace.lora_id, namespace.image_hash, namespace.salt)).encode())


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()
