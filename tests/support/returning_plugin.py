"""A Weightwire plug-in for tests of small models: `WEIGHTWIRE_PLUGINS=tests.support.returning_plugin:plugin`.

While an installation makes modules anew, it gives freed memory back when the process has grown by `RETURN_BYTES`; by default, by
more.
"""

from __future__ import annotations

from inference_plugin.install import policies

__all__ = ["RETURN_BYTES", "plugin"]

RETURN_BYTES = 32 << 20


class ReturningPlugin:
    pass


policies.RETURN_BYTES = RETURN_BYTES
plugin = ReturningPlugin()
