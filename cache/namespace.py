"""What, besides the tokens, decides the value of a KV entry.

Two requests may share KV only if these agree as well as their tokens: the adapter, an image that every
position may look at (for models whose prefix attends in both directions), and a salt by which a tenant can
keep its prompts apart from everybody else's.  What is fixed for the whole process (weights, dtype, RoPE)
needs no place here: when it changes, the caches are flushed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """One reuse domain.  `None` means "none", and 0 is an ordinary value.

    `lora_id` names the adapter by content (a number or a fingerprint), `image_hash` is a 128-bit digest,
    `salt` anything that a tenant wants to be alone with.
    """

    lora_id: int | str | None = None
    image_hash: int | None = None
    salt: int | str | None = None


DEFAULT_NAMESPACE = CacheNamespace()
