"""The settings of one `SyncManager`: each is defined here, with what it may be."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from inference_plugin.transports.spread import FanOut
from inference_plugin.wire.config import Config, misspelt_variables
from inference_plugin.wire.errors import ConfigError
from inference_plugin.wire.groups import ADAPTER_PREFIX
from inference_plugin.wire.messages import InFlight, InstallPolicy, ReplicaCard
from inference_plugin.wire.messages.common import GROUP_NAME

if TYPE_CHECKING:
    from inference_plugin.transports.base import Transport

__all__ = ["CHOICES", "BestEffort", "CatchUpPolicy", "OnFailure", "Quorum", "Settings", "Stragglers", "check_choice"]

logger = logging.getLogger(__name__)

_choosing: ContextVar[Callable[..., Any] | None] = ContextVar("_choosing", default=None)
"""The user's function that chooses replicas right now."""


@dataclass(frozen=True)
class Quorum:
    """Commits as soon as `count` replicas are ready; aborts everywhere if fewer can be. The others keep their version
    until they are caught up, or until the next update. Raises `ValueError` for a count that is no int from 1 on."""

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"a quorum is a number of replicas from 1 on, not {self.count!r}")


@dataclass(frozen=True)
class BestEffort:
    """Commits the replicas that are ready `deadline_s` after the trainer has written. The others keep their version until
    they are caught up, or until the next update. Raises `ValueError` unless `deadline_s` is above 0."""

    deadline_s: float

    def __post_init__(self) -> None:
        seconds: Any = self.deadline_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"deadline_s is a number of seconds above 0, not {seconds!r}")


Stragglers: TypeAlias = Literal["report", "all"] | Quorum | BestEffort
"""Which replicas an update waits for before it commits. `report`: it waits for all replicas as long as the operation's time
allows, commits those that are ready, and reports the others; `all`: it commits only if all replicas are ready."""

OnFailure: TypeAlias = Literal["raise", "report"]
"""What an update does that some replicas took and others did not. `raise`: it raises if a replica that lives did not take the
version; lost replicas are only reported. `report`: all of them are only reported."""

CatchUpPolicy: TypeAlias = Literal["auto", "always", "never"]
"""Whether the last version's bytes are kept for replicas that come between updates. `auto`: if they lie in a shared segment
anyway; `always`: in a segment of their own if they do not, which costs one more copy and memory of the model's size."""

SILENCE_SHARE = 0.25
"""Share of an operation's time that one silent process may take at most: the other replicas need the rest."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "install": get_args(InstallPolicy),
    "in_flight": get_args(InFlight),
    "fan_out": get_args(FanOut),
    "catch_up": get_args(CatchUpPolicy),
    "on_failure": get_args(OnFailure),
}

SWITCHES = {"check_finite": "True refuses NaN and infinity", "partial": "True where the group is a part of the model"}


@dataclass
class Settings:
    """What `SyncManager` documents, and `config`, the settings that environment variables may give. All ranks may change
    times and policies between two operations, in the same way."""

    group: str
    transports: Sequence[Transport]
    config: Config
    install: InstallPolicy = "auto"
    in_flight: InFlight = "keep"
    partial: bool = False
    stragglers: Stragglers = "report"
    fan_out: FanOut = "auto"
    catch_up: CatchUpPolicy = "auto"
    on_failure: OnFailure = "raise"
    check_finite: bool = False
    replicas: Callable[[ReplicaCard], bool] | str | None = None

    def __post_init__(self) -> None:
        for text in misspelt_variables():
            _warn_once(text)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises `ConfigError`, a ValueError, for a value that the setting does not allow, and for a setting that there isn't."""
        if name not in (names := (*type(self).__dataclass_fields__, "timeout_s")):
            if hasattr(type(self), name):  # pauses renew a lease as long as the one that they began with
                raise ConfigError(f"{name} can't be changed", hint=f"make the manager with it: SyncManager({name}=...)")
            raise ConfigError(f"a manager has no setting {name!r}", hint=f"its settings are {', '.join(names)}")
        if name == "config" and not isinstance(value, Config):
            value = config_of(value)
        if name in CHOICES:
            check_choice(name, value, CHOICES[name])
        if (
            name == "stragglers"
            and not isinstance(value, Quorum | BestEffort)
            and not is_choice(value, ("report", "all"))
        ):
            words = f"stragglers={value!r} is none of 'report', 'all', Quorum(n), BestEffort(seconds)"
            raise ConfigError(words, hint="give stragglers one of these")
        if name == "replicas" and not (value is None or callable(value) or isinstance(value, str)):
            raise ConfigError(
                f"replicas={value!r} is neither the name of a model nor a function of a replica's card",
                hint="such as replicas=lambda card: card.model.endswith('policy'); `weightwire status --json` shows the cards",
            )
        if name in SWITCHES and not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} is neither True nor False", hint=SWITCHES[name])
        if name == "group" and not (
            isinstance(value, str) and re.fullmatch(GROUP_NAME, value) and value != ADAPTER_PREFIX
        ):
            raise ConfigError(
                f"group={value!r} is no name of a group: it has 1 to 64 letters, digits, '.', '_' and '-', and begins with a "
                "letter or digit",
                hint="it becomes part of file names; an engine's LoRA adapter is the group 'lora.' and the adapter's name",
            )
        super().__setattr__(name, value)

    @property
    def timeout_s(self) -> float:
        return self.config.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.config = self.config.but(timeout_s=seconds)

    @property
    def lease_s(self) -> float:
        return self.config.lease_s

    def alike(self) -> dict[str, str]:
        """The settings that must be the same on every trainer rank, in words. Functions are not compared, nor are transports: of
        those that work on rank 0's host, rank 0 chooses."""
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("transports", "config")
        }
        return {name: "a function" if callable(value) else repr(value) for name, value in values.items()}

    def chosen(self, cards: Sequence[ReplicaCard]) -> list[ReplicaCard]:
        """The replicas among `cards` that the manager is for. Raises `ConfigError` if the user's function does."""
        chosen = self.replicas
        if chosen is None:
            return list(cards)
        if isinstance(chosen, str):
            return [card for card in cards if card.model == chosen]
        if _choosing.get() is chosen:
            raise ConfigError("it asked its manager, which asks it", hint="it is to decide by the card alone")
        token = _choosing.set(chosen)
        try:
            return [card for card in cards if chosen(card)]
        except Exception as error:
            hint = error.hint if isinstance(error, ConfigError) else "mend the function"
            raise ConfigError(f"replicas= raised {error!r} for a replica's card", hint=hint) from error
        finally:
            _choosing.reset(token)

    def offered(self) -> list[Transport]:
        """The transports for `install`, in order of preference; for "auto" also those that stream, for replicas that stand still
        and lack the memory for anything else. Raises `ConfigError` where there is none, and for streaming where the commit is
        to wait for other replicas."""
        streams = self.install == "streaming"
        waits = self.stragglers == "all" or isinstance(self.stragglers, Quorum)
        offered = [each for each in self.transports if each.streams == streams]
        if not offered:
            named = ", ".join(transport.name for transport in self.transports)
            raise ConfigError(
                f"install={self.install!r} does not go over transport {named!r}",
                hint="leave transport='auto': streaming has a transport of its own, and nothing else uses that",
            )
        if streams and waits:
            raise ConfigError(
                f"install='streaming' with stragglers={self.stragglers!r}: a replica that streams holds the new version before "
                "the others are ready",
                hint="use stragglers='report', or another way to install",
            )
        if self.install == "auto" and not waits:
            offered += [each for each in self.transports if each.streams]
        return offered

    def silence_s(self, timeout_s: float | None = None) -> float:
        """How long an operation of `timeout_s` (default: the manager's) waits for a sign of life of one process."""
        whole_s = self.timeout_s if timeout_s is None else timeout_s
        return min(self.config.control_timeout_s, SILENCE_SHARE * whole_s)


def config_of(config: Config | None) -> Config:
    """Raises `ConfigError` for anything but a `Config`, or None."""
    if config is not None and not isinstance(config, Config):
        raise ConfigError(
            f"config={config!r} is a {type(config).__name__}", hint="config=weightwire.Config(timeout_s=300)"
        )
    return Config.from_environment() if config is None else config


def is_choice(value: object, allowed: Sequence[Any]) -> bool:
    """Asks nothing else whether it is equal: a number may be True, and an array says it of each item."""
    return isinstance(value, str | int) and not isinstance(value, bool) and value in allowed


def check_choice(name: str, value: object, allowed: Sequence[Any]) -> None:
    """Raises `ConfigError`, a ValueError, for a value that is none of those that are `allowed`."""
    if not is_choice(value, allowed):
        words = ", ".join(map(repr, allowed))
        raise ConfigError(f"{name}={value!r} is none of {words}", hint=f"give {name} one of these")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("weightwire: %s", text)
