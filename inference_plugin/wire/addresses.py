"""The runtime directory: where replicas of a job leave their sockets and cards, and how stale ones are told apart.

    <runtime>/<job>/<replica>.card     what the replica's front wrote last (msgpack ReplicaCard)
    <runtime>/<job>/<replica>.f        the front's socket
    <runtime>/<job>/<replica>.<rank>   each worker's socket
    <runtime>/<job>/registry-*.r       where a trainer's manager hears of replicas of this host
    <runtime>/<job>/<engine>-*.problem why a living process of an engine runs without the plug-in

A second `bind` on one `ipc://` path silently takes the path over, so a replica's id is never used twice.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import AuthError, ProtocolError
from inference_plugin.wire.listening import listens_on
from inference_plugin.wire.messages import ReplicaCard

__all__ = [
    "boot_id",
    "discover",
    "ipc_address",
    "job_name",
    "listen_address",
    "local_registries",
    "new_registry_address",
    "new_replica_id",
    "note_problem",
    "problems",
    "registry_address",
    "process_is_alive",
    "remove_card",
    "remove_replica",
    "runtime_dir",
    "stale_replicas",
    "write_card",
]

MAX_IPC_PATH_BYTES = 107
"""Length of sockaddr_un.sun_path on Linux, without its terminating zero."""

_OWNER = re.compile(r"([a-z]+-(\d+)-[0-9a-f]+)(\.|$)")
"""How the files of a replica and of a trainer's crew are called: whose they are, with the pid in it."""


def job_name() -> str:
    """`WEIGHTWIRE_JOB`, or "default". Replicas and trainers of one job find each other, those of another never."""
    name = os.environ.get("WEIGHTWIRE_JOB", "default")
    if not name or len(name) > 40 or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
        raise AuthError(f"WEIGHTWIRE_JOB={name!r}: use up to 40 letters, digits, '.', '_' or '-'", phase="start")
    return name


def runtime_dir(job: str | None = None) -> Path:
    """The job's directory, made with mode 0700 if it isn't there.

    It lies in `WEIGHTWIRE_RUNTIME_DIR`, else `XDG_RUNTIME_DIR/weightwire`, else `/tmp/weightwire-<uid>`. Raises
    `AuthError` if somebody else owns it.
    """
    if base := os.environ.get("WEIGHTWIRE_RUNTIME_DIR"):
        root = Path(base)
    elif (xdg := os.environ.get("XDG_RUNTIME_DIR")) and os.access(xdg, os.W_OK):
        root = Path(xdg) / "weightwire"
    else:
        root = Path(f"/tmp/weightwire-{os.getuid()}")
    path = root / (job or job_name())
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    for directory in (root, path):
        status = directory.stat()
        if status.st_uid != os.getuid():
            raise AuthError(
                f"{directory} belongs to user {status.st_uid}, not to {os.getuid()}",
                hint="set WEIGHTWIRE_RUNTIME_DIR to a directory of your own",
                phase="start",
            )
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o700)
    return path


def new_replica_id(engine: str) -> str:
    """A short id that no other replica has or had: engine, pid, 48 random bits."""
    return f"{engine}-{os.getpid()}-{secrets.token_hex(6)}"


def ipc_address(replica: str, endpoint: str, job: str | None = None) -> str:
    """`ipc://` address of a replica's endpoint ("f" or a rank). Raises `AuthError` when the path is too long to bind."""
    path = str(runtime_dir(job) / f"{replica}.{endpoint}")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise AuthError(
            f"{path} has more than {MAX_IPC_PATH_BYTES} bytes, too long for a socket",
            hint="set WEIGHTWIRE_RUNTIME_DIR to a shorter directory",
            phase="start",
        )
    return f"ipc://{path}"


def listen_address(replica: str, endpoint: str) -> str:
    """Where an engine's endpoint ("f" or a rank) listens: its `ipc://` address, or what `WEIGHTWIRE_LISTEN` says."""
    listen = listens_on()
    return ipc_address(replica, endpoint) if listen == "ipc" else listen


def registry_address() -> str | None:
    """`WEIGHTWIRE_REGISTRY`: the `tcp://HOST:PORT` where the trainer's manager takes replicas of other hosts; or None.
    Raises `AuthError` for anything else."""
    address = os.environ.get("WEIGHTWIRE_REGISTRY")
    if address and not re.fullmatch(r"tcp://[^\s:*]+:\d+|tcp://\[[0-9a-fA-F:.]+\]:\d+", address):
        raise AuthError(
            f"WEIGHTWIRE_REGISTRY={address!r} is no address to register at",
            hint="the same on all hosts, tcp://HOST:PORT with an address of the trainer's host: tcp://10.0.0.1:7777",
            phase="start",
        )
    return address or None


def new_registry_address() -> str:
    """Where a manager of this process hears of replicas of this host: they find it in the runtime directory."""
    return ipc_address(new_replica_id("registry"), "r")


def local_registries() -> dict[str, int]:
    """Addresses of the job's living managers of this host, with the process behind each."""
    return {
        f"ipc://{path}": int(owner[2])
        for path in sorted(runtime_dir().glob("registry-*.r"))
        if (owner := _OWNER.match(path.name)) and process_is_alive(int(owner[2]))
    }


def write_card(card: ReplicaCard) -> None:
    """Publishes a card; a reader sees the old one or the new one, never half of one."""
    path = _card_path(card.replica, card.job)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.msgpack.encode(card))
    temporary.replace(path)


def discover(job: str | None = None) -> list[ReplicaCard]:
    """Cards of all living replicas of the job, by id. Leftovers of dead ones are removed."""
    for card in stale_replicas(job):
        remove_replica(card.replica, card.job)
    cards = sorted(_cards(job), key=lambda card: card.replica)
    _remove_orphans({card.replica for card in cards}, job)
    return cards


def stale_replicas(job: str | None = None) -> list[ReplicaCard]:
    """Cards whose process is gone (killed, or from before a reboot); of another pid namespace that can't be told."""
    return [card for card in _cards(job) if _is_stale(card)]


def remove_card(card: ReplicaCard) -> None:
    """From now on nobody finds the replica; its sockets stay."""
    _card_path(card.replica, card.job).unlink(missing_ok=True)


def remove_replica(replica: str, job: str | None = None) -> None:
    """Removes a replica's card and sockets; nothing happens if they are gone already."""
    # The card last: whoever dies in the middle leaves what the next reader needs to finish.
    for path in sorted(runtime_dir(job).glob(f"{replica}.*"), key=lambda path: path.suffix == ".card"):
        path.unlink(missing_ok=True)


def note_problem(engine: str, text: str) -> None:
    """Leaves word that this process runs without the plug-in, for engines that swallow a plug-in's errors."""
    (runtime_dir() / f"{new_replica_id(engine)}.problem").write_text(text)


def problems(job: str | None = None) -> list[str]:
    """What living processes noted, with their names."""
    return [
        f"{path.stem}: {path.read_text()}"
        for path in sorted(runtime_dir(job).glob("*.problem"))
        if (owner := _OWNER.match(path.name)) and process_is_alive(int(owner[2]))
    ]


def process_is_alive(pid: int) -> bool:
    """Whether a process of this host runs: neither gone nor a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in ("Z", "X")


@functools.cache
def boot_id() -> str:
    """This host's boot and this process's pid namespace: where a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _is_stale(card: ReplicaCard) -> bool:
    if card.boot_id == boot_id():
        return not process_is_alive(card.pid)
    return card.boot_id.partition("/")[0] != boot_id().partition("/")[0]


def _remove_orphans(replicas: set[str], job: str | None) -> None:
    """Removes what dead processes left and no card tells of: sockets (of an engine killed while it started, of a
    trainer) and problems."""
    for path in runtime_dir(job).iterdir():
        owner = _OWNER.match(path.name)
        leftover = path.is_socket() or path.suffix == ".problem" or path.name.startswith("collective-")
        if owner and owner[1] not in replicas and leftover and not process_is_alive(int(owner[2])):
            path.unlink(missing_ok=True)


def _card_path(replica: str, job: str | None) -> Path:
    return runtime_dir(job) / f"{replica}.card"


def _cards(job: str | None) -> Iterator[ReplicaCard]:
    for path in runtime_dir(job).glob("*.card"):
        try:
            yield decode_as(path.read_bytes(), ReplicaCard)
        except FileNotFoundError:
            continue
        except ProtocolError as error:
            raise error.at(phase="discover", side="trainer") from None
