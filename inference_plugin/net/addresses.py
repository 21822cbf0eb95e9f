"""The runtime directory: where the replicas of a job leave their sockets and cards, and which of these are stale.

    <runtime>/<job>/<replica>.card     the replica's card, as its coordinator wrote it last (msgpack ReplicaCard)
    <runtime>/<job>/<replica>.f        the coordinator's socket
    <runtime>/<job>/<replica>.<rank>   each worker's socket
    <runtime>/<job>/registry-*.r       socket at which a trainer's manager takes registrations of this host
    <runtime>/<job>/pool-*.p           socket at which a controller's rollout pool takes workers of this host
    <runtime>/<job>/<replica>.counts   its commits so far (`records`)
    <runtime>/<job>/<engine>-*.problem why a living engine process runs without the plug-in
    <runtime>/<job>/<engine>-*.starting  what a living process is about to serve

A second `bind` of an `ipc://` path silently takes the path over, so a replica's id is never used twice.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from inference_plugin.net.held import hold, is_held, read_plain
from inference_plugin.net.listening import is_abandoned, lacks_room, listens_on, make_private
from inference_plugin.net.processes import has_ended, start_ticks
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import AuthError, ConfigError, ProtocolError
from inference_plugin.wire.messages import ReplicaCard

__all__ = [
    "boot_id", "checked_job", "discover", "here", "ipc_address", "is_published", "is_stale", "job_name", "job_path",
    "listen_address", "local_pools", "local_registries", "new_registry_address", "new_replica_id", "owner_of",
    "registry_address", "remove_card", "remove_replica", "replace_file", "runtime_dir", "stale_replicas",
    "unreadable_cards", "write_card",
]  # fmt: skip

logger = logging.getLogger(__name__)

MAX_IPC_PATH_BYTES = 107
"""Length of sockaddr_un.sun_path on Linux, without its terminating zero."""

_OWNER = re.compile(r"([a-z]+-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]+)(\.|$)")
"""Names of files of a replica or of trainer ranks begin with the owner's `new_replica_id`, which has its process in it."""


_LEFTOVERS = (".problem", ".starting", ".counts", ".tmp")
"""Files that no longer mean anything once their process has ended and no card leads to them."""


def job_name() -> str:
    """`WEIGHTWIRE_JOB`, or "default". Replicas and trainers of one job find each other, those of another never."""
    return checked_job(os.environ.get("WEIGHTWIRE_JOB", "default"), "WEIGHTWIRE_JOB")


def checked_job(name: str, given_as: str) -> str:
    """The name of a job, which is also that of its directory. Raises `AuthError` if it can't be one."""
    if not name or len(name) > 40 or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
        raise AuthError(f"{given_as}={name!r}: use up to 40 letters, digits, '.', '_' or '-'", phase="start")
    return name


def job_path(job: str | None = None) -> Path:
    """Where the job's directory is, or will be made."""
    if base := os.environ.get("WEIGHTWIRE_RUNTIME_DIR"):
        root = Path(base).absolute()
    elif (xdg := os.environ.get("XDG_RUNTIME_DIR")) and os.access(xdg, os.W_OK):
        root = Path(xdg) / "weightwire"
    else:
        root = Path(f"/tmp/weightwire-{os.getuid()}")
    return root / (job or job_name())


def runtime_dir(job: str | None = None) -> Path:
    """The job's directory, made with mode 0700 if it isn't there.

    It lies in `WEIGHTWIRE_RUNTIME_DIR`, else `XDG_RUNTIME_DIR/weightwire`, else `/tmp/weightwire-<uid>`; where others may write
    there, that directory gets the sticky bit, so that they can't exchange the job's. Raises `AuthError` if somebody else owns
    it, `ConfigError` if it can't be made.
    """
    path = job_path(job)
    for directory in (path.parent, path):
        make_private(directory)
    with contextlib.suppress(FileNotFoundError):  # it was removed just now; its next user reports that
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o700)
        _keep_in_place(path.parent)
    return path


def _keep_in_place(root: Path) -> None:
    """Sees to it that nobody else can rename or remove what lies in a directory of our own."""
    mode = stat.S_IMODE(root.stat().st_mode)
    if mode & 0o022 and not mode & stat.S_ISVTX:
        try:
            root.chmod(mode | stat.S_ISVTX)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(
                f"others can write into {root} (mode {mode:04o}), and its sticky bit can't be set: {error.strerror}",
                hint=f"chmod 700 {root}, or set WEIGHTWIRE_RUNTIME_DIR to a directory of your own",
                phase="start",
            ) from error


def new_replica_id(engine: str) -> str:
    """A short id that no other replica has or had: engine, pid, start of the process, 48 random bits."""
    return f"{engine}-{os.getpid()}-{start_ticks()}-{secrets.token_hex(6)}"


def owner_of(path: Path) -> tuple[int, int] | None:
    """The process in the name of a file of the runtime directory: its pid and its start."""
    found = _OWNER.match(path.name)
    return (int(found["pid"]), int(found["started"])) if found else None


def ipc_address(replica: str, endpoint: str, job: str | None = None) -> str:
    """`ipc://` address of a replica's endpoint ("f" or a rank). Raises `AuthError` if the path is too long to bind."""
    try:
        directory = runtime_dir(job)
    except ConfigError as error:
        if not lacks_room(error):
            raise
        directory = job_path(job)  # whoever listens there waits for room, or says that there is none
    path = str(directory / f"{replica}.{endpoint}")
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
    found = re.fullmatch(r"tcp://([^\s:*]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address or "")
    if address and not (found and 0 < int(found[2]) < 1 << 16):
        raise AuthError(
            f"WEIGHTWIRE_REGISTRY={address!r} is no address to register at",
            hint="the same on all hosts, tcp://HOST:PORT with an address of the trainer's host: tcp://10.0.0.1:7777",
            phase="start",
        )
    return address or None


def new_registry_address() -> str:
    """Where a manager of this process takes registrations; replicas of this host find it in the runtime directory."""
    return ipc_address(new_replica_id("registry"), "r")


def local_registries() -> dict[str, tuple[int, int]]:
    """Addresses of the job's living managers of this host, with the process behind each: pid and start, or zeros for a process
    of another pid namespace."""
    return _living("registry-*.r")


def local_pools() -> dict[str, tuple[int, int]]:
    """Addresses of the job's living rollout pools of this host, with the process behind each, as of `local_registries`."""
    return _living("pool-*.p")


def replace_file(path: Path, content: bytes, *, has_one_writer: bool = True, held: bool = False) -> None:
    """Writes a file of the runtime directory; a reader sees what was there before or all of `content`, never a part of it.
    `held`: this process holds the file (`hold`) from before it is there. Raises OSError where there is no room."""
    temporary = path.with_name(f"{path.name if has_one_writer else new_replica_id('file')}.tmp")
    try:
        for attempts_left in reversed(range(100)):
            temporary.write_bytes(content)
            if held:
                hold(temporary, path.suffix)
            try:
                temporary.replace(path)
                return
            except FileNotFoundError:
                # Somebody of another pid namespace looked at that moment, and took it for the leftover of a dead process.
                if not attempts_left:
                    raise
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_card(card: ReplicaCard) -> None:
    """Publishes a card, in the place of the one before."""
    replace_file(_card_path(card.replica, card.job), msgspec.msgpack.encode(card))


def is_published(card: ReplicaCard) -> bool:
    """Whether the replica's card exists, whatever its content."""
    return (job_path(card.job) / f"{card.replica}.card").exists()


def discover(job: str | None = None) -> list[ReplicaCard]:
    """Cards of all living replicas of the job, by id. Leftovers of dead ones are removed."""
    living = []
    for card in list(_cards(job)):
        if is_stale(card):
            remove_replica(card.replica, card.job)
        else:
            living.append(card)
    _remove_orphans({card.replica for card in living}, job)
    return sorted(living, key=lambda card: card.replica)


def unreadable_cards() -> list[str]:
    """What this process could not read as a card so far, each with the reason: a replica that nobody finds."""
    return [f"the card {path} can't be read: {why}" for path, why in sorted(_UNREADABLE)]


def stale_replicas(job: str | None = None) -> list[ReplicaCard]:
    """Cards whose process is gone: it was killed, or the host rebooted. A process of another pid namespace is judged by its
    socket: it is gone when nobody listens there any more."""
    return [card for card in _cards(job) if is_stale(card)]


def is_stale(card: ReplicaCard) -> bool:
    """Whether the card's process is gone; see `stale_replicas`."""
    if card.boot_id == boot_id():
        return has_ended(card.pid, card.start_ticks)
    if card.boot_id.partition("/")[0] != boot_id().partition("/")[0]:
        return True
    return card.address.startswith("ipc://") and is_abandoned(Path(card.address.removeprefix("ipc://")))


def remove_card(card: ReplicaCard) -> None:
    """Hides the replica from trainers; its sockets stay."""
    _card_path(card.replica, card.job).unlink(missing_ok=True)


def remove_replica(replica: str, job: str | None = None) -> None:
    """Removes a replica's card and sockets; nothing happens if they are gone already."""
    # The card goes last: if this process dies in between, the next reader of the card removes the rest.
    for path in sorted(runtime_dir(job).glob(f"{replica}.*"), key=lambda path: path.suffix == ".card"):
        path.unlink(missing_ok=True)


@functools.cache
def boot_id() -> str:
    """This host's boot and this process's pid namespace: within both, a pid means one process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def here() -> str:
    """Identifies this host and pid namespace, and the job by its runtime directory."""
    return f"{boot_id()} {runtime_dir()}"


def _remove_orphans(replicas: set[str], job: str | None) -> None:
    """Removes files of dead processes that no card leads to: problems, records, and sockets of trainers and of engines
    that were killed while they started or ended."""
    for path in runtime_dir(job).glob("*"):
        found = _OWNER.match(path.name)
        if found is None or found[1] in replicas or not has_ended(int(found["pid"]), int(found["started"])):
            continue
        # Its process may be of another pid namespace.
        is_note = path.is_file() and (path.suffix in _LEFTOVERS or path.name.startswith("collective-"))
        if (is_note and not is_held(path)) or (path.is_socket() and is_abandoned(path)):
            path.unlink(missing_ok=True)


def _living(pattern: str) -> dict[str, tuple[int, int]]:
    owners = [(path, owner) for path in sorted(runtime_dir().glob(pattern)) if (owner := owner_of(path))]
    here = {f"ipc://{path}": owner for path, owner in owners if not has_ended(*owner)}
    elsewhere = [path for path, _ in owners if f"ipc://{path}" not in here and path.is_socket()]
    return here | {f"ipc://{path}": (0, 0) for path in elsewhere if not is_abandoned(path)}


def _card_path(replica: str, job: str | None) -> Path:
    return runtime_dir(job) / f"{replica}.card"


_UNREADABLE: set[tuple[str, str]] = set()
"""Cards that this process has warned about, each with the reason."""


def _cards(job: str | None) -> Iterator[ReplicaCard]:
    for path in runtime_dir(job).glob("*.card"):
        try:
            yield decode_as(read_plain(path), ReplicaCard)
        except FileNotFoundError:
            continue
        except (ProtocolError, OSError) as error:  # damaged, or of another version: it costs this replica only
            if (told := (str(path), str(error))) not in _UNREADABLE:
                _UNREADABLE.add(told)
                logger.warning("weightwire: the card %s can't be read, its replica is left out: %s", path, error)
