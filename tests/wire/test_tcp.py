"""TCP: keys by file, what they keep out, and links that are cut."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from inference_plugin.net import curve
from inference_plugin.net.channel import Channel
from inference_plugin.net.listening import Listener, check_listen_address
from inference_plugin.wire import codec
from inference_plugin.wire.errors import AuthError, PeerLost
from inference_plugin.wire.messages import Describe, Done
from tests.support.rig import eventually


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "job.key"
    curve.make_key(path)
    monkeypatch.setenv(curve.VARIABLE, str(path))
    return path


class Server:
    """Answers every request with `Done`, in a thread, until it is closed; `only` requests if given."""

    def __init__(self, listen: str, only: int = -1) -> None:
        self.listener = Listener(zmq.REP, listen, max_bytes=1 << 20)
        self.address = self.listener.address
        self.answered = 0
        self._only = only
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set() and self.answered != self._only:
            if self.listener.socket.poll(50):
                self.listener.socket.send(codec.encode(Done(), codec.decode(self.listener.socket.recv()).seq))
                self.answered += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.listener.close()


@pytest.fixture
def server(key: Path) -> Iterator[Server]:
    one = Server("tcp://127.0.0.1:*")
    yield one
    one.close()


def test_a_key_is_a_new_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    made = curve.make_key(tmp_path / "job.key")
    assert stat.S_IMODE((tmp_path / "job.key").stat().st_mode) == 0o600
    assert made.secret.decode() in (tmp_path / "job.key").read_text() and made.secret.decode() not in repr(made)
    with pytest.raises(FileExistsError):
        curve.make_key(tmp_path / "job.key")


def test_a_key_is_read_as_it_was_made(key: Path) -> None:
    found = curve.job_key()
    assert found is not None and zmq.curve_public(found.secret) == found.public


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda path: path.unlink(), "can't be read"),
        (lambda path: path.chmod(0o640), "can be read by others"),
        (lambda path: path.write_text("secret\n"), "holds no key"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "can't be read"),
        (lambda path: path.write_text(path.read_text()[:-2] + "~\n"), "damaged"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_with_its_path(key: Path, spoil: object, text: str) -> None:
    spoil(key)  # type: ignore[operator]
    with pytest.raises(AuthError, match=text) as raised:
        curve.job_key()
    assert str(key) in str(raised.value) and curve.VARIABLE in str(raised.value)


def test_both_sides_with_the_key_talk(server: Server) -> None:
    with Channel(server.address) as channel:
        for _ in range(3):
            channel.request(Describe(), Done, timeout_s=60)


def test_version_6_addresses_work_with_a_key(key: Path) -> None:
    server = Server("tcp://[::1]:*")
    try:
        with Channel(server.address) as channel:
            channel.request(Describe(), Done, timeout_s=60)
    finally:
        server.close()


@pytest.mark.parametrize("client", ["no key", "another key"])
def test_a_client_without_the_servers_key_is_told_so_and_never_served(
    server: Server, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(curve.VARIABLE)
    if client == "another key":
        curve.make_key(tmp_path / "other.key")
        monkeypatch.setenv(curve.VARIABLE, str(tmp_path / "other.key"))
    with Channel(server.address, side="worker", rank=3) as channel, pytest.raises(AuthError, match="key") as raised:
        channel.request(Describe(), Done, timeout_s=60)
    assert (raised.value.side, raised.value.rank) == ("worker", 3)
    assert server.answered == 0


def test_a_refusal_that_comes_before_the_request_is_sent_is_told_as_one() -> None:
    """libzmq then gives the connection up, and a request finds nowhere to go."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\x00") + b"\x01" + bytes(31)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Channel(f"tcp://127.0.0.1:{server.getsockname()[1]}") as client,
    ):
        connection, _ = server.accept()
        connection.sendall(greeting)  # https://rfc.zeromq.org/spec/23: a server with a key

        def is_refused_when_it_sends() -> bool:
            try:
                client.send(Describe())
            except AuthError as error:
                return "hold different keys" in str(error)
            with pytest.raises(AuthError, match="hold different keys"):
                client.receive(Done, timeout_s=60)
            return False

        eventually(is_refused_when_it_sends, "a request that finds nowhere to go")
        connection.close()


@pytest.mark.parametrize("with_key", [True, False], ids=["with the key", "without any"])
def test_a_peer_that_ends_in_the_handshake_is_reached_where_it_starts_again(
    key: Path, with_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_key:
        monkeypatch.delenv(curve.VARIABLE)
    ending = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{ending.getsockname()[1]}"
    with Channel(address) as channel:
        channel.send(Describe())
        ending.accept()[0].close()
        ending.close()
        server = Server(address)
        try:
            channel.receive(Done, timeout_s=60)
        finally:
            server.close()


def test_a_client_that_knows_the_servers_public_key_only_is_not_served(server: Server) -> None:
    key = curve.job_key()
    assert key is not None
    context = zmq.Context()
    client = context.socket(zmq.REQ)
    client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
    client.curve_serverkey = key.public
    monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    client.connect(server.address)
    assert monitor.poll(60_000)
    client.disable_monitor()
    monitor.close(linger=0)
    context.destroy(linger=0)
    assert server.answered == 0


def test_a_client_with_a_key_takes_no_server_without_one(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(curve.VARIABLE)
    server = Server("tcp://127.0.0.1:*")
    try:
        monkeypatch.setenv(curve.VARIABLE, str(key))
        with Channel(server.address) as channel, pytest.raises(AuthError, match="key"):
            channel.request(Describe(), Done, timeout_s=60)
        assert server.answered == 0
    finally:
        server.close()


def test_a_peer_that_is_not_heard_of_is_lost_not_waited_for(server: Server) -> None:
    with Channel(server.address, side="worker", silence_s=4) as channel:
        channel.request(Describe(), Done, timeout_s=60)
        server.close()
        with pytest.raises(PeerLost, match="not been heard of"):
            channel.request(Describe(), Done, timeout_s=600)
    server.listener = Listener(zmq.REP, "tcp://127.0.0.1:*", max_bytes=1)  # for the fixture to close


def test_an_address_where_nobody_listens_is_a_lost_peer(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_SILENCE_S", "0.5")
    free = Listener(zmq.REP, "tcp://127.0.0.1:*", max_bytes=1)
    free.close()
    with Channel(free.address) as channel, pytest.raises(PeerLost):
        channel.request(Describe(), Done, timeout_s=600)


def test_a_request_that_a_broken_connection_swallowed_is_sent_again_at_once(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_plugin.net.channel.RESEND_S", 1e6)
    first = Listener(zmq.ROUTER, "tcp://127.0.0.1:*", max_bytes=1 << 20)
    with Channel(first.address) as channel:
        channel.send(Describe())
        assert first.socket.poll(60_000)  # it arrived; nobody will answer it
        first.close()
        second = Server(first.address, only=1)
        try:
            channel.receive(Done, timeout_s=600)
        finally:
            second.close()


@pytest.mark.parametrize("address", ["tcp://*:5555", "tcp://0.0.0.0:1", "tcp://[::]:1"])
def test_with_a_key_an_address_still_has_to_say_where_others_find_it(key: Path, address: str) -> None:
    with pytest.raises(AuthError, match="where others find it"):
        check_listen_address(address)


def test_with_a_key_other_hosts_may_be_listened_to(key: Path) -> None:
    check_listen_address("tcp://10.0.0.3:*")
    check_listen_address("tcp://eth0:*")


def test_an_address_that_is_not_of_this_host_is_an_error_with_the_address(key: Path) -> None:
    with pytest.raises(AuthError, match=r"192\.0\.2\.1"):
        Listener(zmq.REP, "tcp://192.0.2.1:*", max_bytes=1)
    assert os.environ[curve.VARIABLE]
