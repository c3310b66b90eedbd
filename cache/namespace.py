"""The inputs besides the tokens that determine the value of a KV entry.

Two requests may share KV only if these are equal too: the adapter, an image that every position attends to (for
models with bidirectional prefix attention), and a salt that isolates a tenant's prompts. Properties of the whole
process (weights, dtype, RoPE) are not included: when they change, the caches are flushed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """A reuse domain. `None` means "none"; 0 is an ordinary value.

    `lora_id` identifies the adapter by content (a number or a fingerprint), `image_hash` is a 128-bit digest,
    `salt` is an arbitrary value of the tenant's.
    """

    lora_id: int | str | None = None
    image_hash: int | None = None
    salt: int | str | None = None


DEFAULT_NAMESPACE = CacheNamespace()
