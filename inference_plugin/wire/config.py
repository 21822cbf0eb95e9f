"""Every setting in one place: defaults, limits, environment variables, and the documentation's text.

The variable of the field `lease_s` is `WEIGHTWIRE_LEASE_S`. Trainers read their settings when a `SyncManager` is made,
engines when they start; an argument overrides the environment. Values on which both sides must agree are not settings: they
travel in messages.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from inference_plugin.wire.codec import MAX_PAYLOAD_BYTES
from inference_plugin.wire.errors import ArgumentError, ConfigError
from inference_plugin.wire.host_memory import free_host_bytes

__all__ = [
    "OTHER_VARIABLES", "PIECE_BYTES", "Config", "Setting", "misspelt_variables", "settings", "unknown_variables",
    "variable_of", "written",
]  # fmt: skip

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Largest piece: large enough that the calls per piece cost little in comparison."""

DAY_S = 86400.0

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

OTHER_VARIABLES = {
    "WEIGHTWIRE_JOB": "default",
    "WEIGHTWIRE_RUNTIME_DIR": "$XDG_RUNTIME_DIR/weightwire, or /tmp/weightwire-<uid>",
    "WEIGHTWIRE_LISTEN": "ipc",
    "WEIGHTWIRE_REGISTRY": "",
    "WEIGHTWIRE_KEY": "",
    "WEIGHTWIRE_PLUGINS": "",
    "WEIGHTWIRE_DISABLE": "",
}
"""Variables of the whole process, which are not settings, with their defaults. Each is read when it is needed."""


def _meta(allowed: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(extra={"allowed": allowed}, **limits)


def _for(side: str, text: str) -> msgspec.Meta:
    return msgspec.Meta(extra={"side": side, "text": text})


Seconds = Annotated[float, _meta("seconds above 0, a day at most", gt=0, le=DAY_S)]
Size = Annotated[int, _meta("bytes from 4 MiB to 1 GiB, as 8388608 or '8MiB'", ge=PIECE_BYTES, le=MAX_PAYLOAD_BYTES)]
Threads = Annotated[int, _meta("whole numbers from 1 to 256", ge=1, le=256)]
Buffers = Annotated[int, _meta("whole numbers from 2 to 64", ge=2, le=64)]
Share = Annotated[float, _meta("numbers above 0, 1 at most", gt=0, le=1)]
Backend = Annotated[Literal["gloo", "nccl", "hccl"] | None, _meta("gloo, nccl, hccl")]
Interface = Annotated[str | None, _meta("names of network interfaces")]
Url = Annotated[
    Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9+.-]*://.+\Z", max_length=4096)] | None,
    _meta("URLs such as file:///mnt/weights or s3://bucket/folder"),
]
Directory = Annotated[str | None, _meta("names of directories")]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, checked. Raises `ConfigError`, naming field, variable, value and what is allowed.

    Sizes may be given as text with a unit ("64MiB"). `settings()` and docs/configuration.md describe each.
    """

    timeout_s: Annotated[
        Seconds, _for("trainer", "time limit of a whole update or verification, and of every wait in it")
    ] = 120.0
    lease_s: Annotated[
        Seconds,
        _for(
            "trainer",
            "a worker drops an unfinished update after this silence; the trainer renews the lease every third of it",
        ),
    ] = 30.0
    control_timeout_s: Annotated[
        Seconds,
        _for(
            "trainer",
            "limit of a small request, and of a sign of life during a long one; a process that gives neither fails its replica",
        ),
    ] = 10.0
    silence_s: Annotated[
        Seconds, _for("both", "a TCP peer or a registered replica counts as lost after this silence")
    ] = 10.0
    rank_timeout_s: Annotated[
        Seconds, _for("engine", "time limit of one operation on all ranks of a replica, such as an installation")
    ] = 300.0
    bucket_bytes: Annotated[
        Size,
        _for(
            "trainer",
            "size of a bucket of `zmq`, `delta`, `nixl` or `stream`, of an object of `store`, of a broadcast of `collective`, "
            "of a gathering of LoRA",
        ),
    ] = 8 << 20
    buffers: Annotated[
        Buffers,
        _for(
            "trainer",
            "number of buckets for each worker of `zmq`, `delta` and `stream`, for all together of `nixl`: in flight, "
            "packed, being packed; of objects of `store` that a rank writes at once, and a worker reads",
        ),
    ] = 2
    collective_backend: Annotated[
        Backend,
        _for("trainer", "backend of torch.distributed for `collective`; by default the one for the trainer's device"),
    ] = None
    collective_interface: Annotated[
        Interface,
        _for(
            "both",
            "network on which `collective` may leave the host: it authenticates and encrypts nothing, so name one that you "
            "trust; without it, loopback only",
        ),
    ] = None
    check_threads: Annotated[
        Threads, _for("engine", "most threads of a worker that compare digests; never more than it has cores")
    ] = 4
    background_share: Annotated[
        Share,
        _for(
            "engine",
            "share of the time that work beside decoding may take, all ranks of a replica on a CPU together, because both use "
            "the memory bandwidth",
        ),
    ] = 1 / 3
    store_url: Annotated[
        Url,
        _for(
            "both", "where `store` keeps its objects: a directory or a bucket that both sides see, as a URL of fsspec"
        ),
    ] = None
    profile_dir: Annotated[
        Directory, _for("both", "directory for a trace file of every update and process; none is made without it")
    ] = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            msgspec.structs.force_setattr(self, name, _checked(name, getattr(self, name)))

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Config:
        """The variables' values, and defaults elsewhere. An empty variable counts as unset. Raises `ConfigError`."""
        if not isinstance(environment, Mapping):
            raise ArgumentError(
                f"environment={environment!r:.300} is a {type(environment).__name__}",
                hint="Config(timeout_s=300) takes values",
            )
        said = {name: environment.get(variable_of(name)) for name in Config.__struct_fields__}
        return Config(**{name: _checked(name, text, of_environment=True) for name, text in said.items() if text})

    def but(self, **arguments: Any) -> Config:
        """A copy with the arguments that are not None. Raises `ConfigError`."""
        return msgspec.structs.replace(self, **{n: value for n, value in arguments.items() if value is not None})

    def warn_if_short_of_memory(self, nbytes: int) -> None:
        """Logs a warning if buckets of `nbytes` in all exceed the free memory."""
        if nbytes > (free_bytes := free_host_bytes()):
            logger.warning(
                "weightwire: %d buckets of bucket_bytes=%d (WEIGHTWIRE_BUCKET_BYTES) exceed the %d bytes of memory that "
                "are free",
                nbytes // self.bucket_bytes,
                self.bucket_bytes,
                free_bytes,
            )


class Setting(NamedTuple):
    """A field of `Config`, as the documentation and `weightwire config` show it."""

    field: str
    variable: str
    side: str
    default: str
    allowed: str
    text: str


def settings() -> list[Setting]:
    """All fields, in their order."""
    return [
        Setting(field.name, variable_of(field.name), default=written(field.default), **_told(field))
        for field in _fields().values()
    ]


def variable_of(field: str) -> str:
    """The field's environment variable."""
    return f"WEIGHTWIRE_{field.upper()}"


def written(value: Any) -> str:
    """A field's value as a person writes it."""
    if isinstance(value, int):
        unit = next(u for u in reversed(UNITS) if value % UNITS[u] == 0 and value >= UNITS[u])
        return f"{value // UNITS[unit]}{unit}"
    return f"{value:g}" if isinstance(value, float) else value or ""


def unknown_variables() -> list[str]:
    """Variables that begin with WEIGHTWIRE_ and are unknown, so probably misspelt."""
    known = _known_variables()
    return sorted(name for name in os.environ if name.startswith("WEIGHTWIRE_") and name not in known)


def misspelt_variables() -> list[str]:
    """A sentence for each of `unknown_variables`, with the known name that is most similar."""
    found = []
    for name in unknown_variables():
        near = difflib.get_close_matches(name, _known_variables(), 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        found.append(f"{name} is set, and no variable of weightwire has that name{meant}")
    return found


def _known_variables() -> list[str]:
    return [*OTHER_VARIABLES, *map(variable_of, Config.__struct_fields__)]


@functools.cache
def _fields() -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(Config)}


def _told(field: msgspec.structs.FieldInfo) -> dict[str, str]:
    """A field's annotations: side, text, what is allowed."""
    kind = msgspec.inspect.type_info(field.type)
    assert isinstance(kind, msgspec.inspect.Metadata) and kind.extra is not None
    return kind.extra


def _checked(name: str, value: Any, *, of_environment: bool = False) -> Any:
    field = _fields()[name]
    meant = os.fspath(value) if isinstance(value, os.PathLike) else value
    if (
        name.endswith("_bytes")
        and isinstance(value, str)
        and (found := re.fullmatch(r"([0-9]{1,18}) ?([KMG]iB|)", value))
    ):
        meant = int(found[1]) * UNITS[found[2]]
    try:
        return msgspec.convert(meant, field.type, strict=not of_environment)
    except (msgspec.ValidationError, UnicodeEncodeError):
        variable = variable_of(name)
        given = f"{variable}={value!r} (field {name})" if of_environment else f"{name}={value!r} (variable {variable})"
        raise ConfigError(f"{given}: {_told(field)['allowed']} are allowed") from None
