"""A Weightwire plug-in for tests of small models: `WEIGHTWIRE_PLUGINS=tests.support.returning_plugin:plugin`.

An installation gives freed memory back after modules of `RETURN_BYTES` were made; by default after more than these models have.
"""

from __future__ import annotations

from inference_plugin.install import policies

__all__ = ["RETURN_BYTES", "plugin"]

RETURN_BYTES = 32 << 20


class ReturningPlugin:
    pass


policies.RETURN_BYTES = RETURN_BYTES
plugin = ReturningPlugin()
