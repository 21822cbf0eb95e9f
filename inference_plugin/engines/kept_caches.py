"""Requests that keep their prefix cache over updates, because their user says so.

Keys and values that an older version of the weights computed serve no request that begins after a commit, unless both requests
name the same conversation: `cache_salt="weightwire-keep:ID"`, a field of requests on both engines. The next turn
of a conversation then finds what the turns before it computed, whichever version computed it; nobody else finds it.
"""

from __future__ import annotations

__all__ = ["KEEP", "keeps_cache"]

KEEP = "weightwire-keep:"


def keeps_cache(salt: object) -> bool:
    """Whether a request with this cache salt, or extra key, keeps what was cached under the same salt before an update."""
    return isinstance(salt, str) and salt.startswith(KEEP)
