"""Bytes that a process moved over TCP, as the kernel counted them. Ray and TransferQueue have no counter of their own."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path

PIDFD_GETFD = 438
INFO_BYTES = 256
BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in `struct tcp_info` (linux/tcp.h); `tcpi_bytes_received` follows it."""


def tcp_bytes(pid: int) -> dict[str, int]:
    """Bytes sent and received so far by each TCP connection that the process has open."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    counted: dict[str, int] = {}
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if not (target := str(link.readlink())).startswith("socket:"):
                    continue
            except OSError:  # it was closed just now
                continue
            if (fd := libc.syscall(PIDFD_GETFD, pidfd, int(link.name), 0)) < 0:
                continue
            with socket.socket(fileno=fd) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
                    counted[target] = sum(struct.unpack_from("QQ", info, BYTES_ACKED))
    finally:
        os.close(pidfd)
    return counted


def grown(before: dict[str, int], after: dict[str, int]) -> int:
    """Bytes between two counts. Connections that were closed meanwhile are not in it."""
    return sum(after.values()) - sum(nbytes for name, nbytes in before.items() if name in after)
