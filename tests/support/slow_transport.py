"""A transport as a plug-in, `WEIGHTWIRE_PLUGINS=tests.support.slow_transport:plugin`: `shm`, whose check takes `CHECK_S`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from inference_plugin.plugins import hookimpl
from inference_plugin.transports.base import Staging, Transport
from inference_plugin.transports.shm import TRANSPORT, ShmReceiver, ShmStaging
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest

__all__ = ["CHECK_S", "plugin"]

CHECK_S = 1.3


class SlowStaging(ShmStaging):
    def check(self, *arguments: Any) -> int:
        threading.Event().wait(CHECK_S)
        return super().check(*arguments)


class SlowReceiver(ShmReceiver):
    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        staging = super().open(manifest, description, needs)
        staging.__class__ = SlowStaging
        return staging


class SlowPlugin:
    @hookimpl
    def weightwire_transports(self) -> Sequence[Transport]:
        return [dataclasses.replace(TRANSPORT, name="slow", preference=200, receiver=SlowReceiver)]


plugin = SlowPlugin()
