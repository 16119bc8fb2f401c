"""Publications pushed to a receiver, which is a process of its own, and read by an engine beside it."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_engine import Llama
from test_engine_transport import ALONE

from ranks import Ranks
from stretto.sync import windows
from stretto.sync.layouts import fsdp_layout
from stretto.sync.parcels.calling import DIGEST, KEY, SESSION, Caller, Refused
from stretto.sync.parcels.manifest import digest_of
from stretto.sync.session import Source
from stretto.sync.transports import HttpTransport
from stretto.types import Version
from stretto.world import World

SECRET = "a key of this test"


class Started:
    """A receiver."""

    def __init__(self, directory: Path, *, port: int = 0, most_bytes: int | None = None):
        def limit() -> None:
            if most_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stretto.sync.receiver", "--directory", str(directory), "--port", str(port)],
            env=os.environ | {KEY: SECRET},
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", said)
        assert match, said
        self.port = int(match[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.directory.iterdir() if not entry.name.startswith(".stretto"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """Ask it to end."""
        self.process.terminate()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(autouse=True)
def _setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2**16)
    monkeypatch.setenv(KEY, SECRET)


@pytest.fixture(scope="module")
def llama(tiny_model: Path) -> Iterator[Llama]:
    made = Llama(tiny_model)
    yield made
    made.engine.close()


@pytest.fixture
def receiver(opened: list[Any], tmp_path: Path) -> Started:
    one = Started(tmp_path / "parcels")
    opened.append(one)
    return one


def pushing(llama: Llama, *urls: str, delta: bool = True, timeout_s: float = 30.0) -> HttpTransport:
    return HttpTransport(ALONE, llama.source(), llama.destination(), llama.options(delta, timeout_s), urls)


def test_parcels_reach_an_engine_beside_the_receiver_and_nothing_is_left(
    opened: list[Any], receiver: Started, llama: Llama
) -> None:
    transport = pushing(llama, receiver.url)
    opened.append(transport)
    sizes = []
    for step in range(3):
        sizes.append(transport.transfer(Version(1, step)))
        assert llama.wrong() == []
        llama.change(step)
    assert sizes[0] >= transport.full_bytes
    assert max(sizes[1:]) < transport.full_bytes / 10
    assert receiver.names() == ["1-0", "1-1", "1-2"]
    transport.close()
    assert receiver.names() == []
    receiver.close()
    assert receiver.process.returncode == 0
    assert list(receiver.directory.iterdir()) == []


def test_without_deltas_only_the_newest_parcel_stays(opened: list[Any], receiver: Started, llama: Llama) -> None:
    transport = pushing(llama, f"{receiver.url}/", delta=False)
    opened.append(transport)
    for step in range(2):
        assert transport.transfer(Version(1, step)) >= transport.full_bytes
        assert receiver.names() == [f"1-{step}"]


def test_a_receiver_that_was_started_anew_is_given_a_whole_parcel(
    opened: list[Any], receiver: Started, llama: Llama
) -> None:
    transport = pushing(llama, receiver.url)
    opened.append(transport)
    transport.transfer(Version(1, 0))
    receiver.kill()
    opened.append(Started(receiver.directory, port=receiver.port))
    llama.change(0)
    assert transport.transfer(Version(1, 1)) >= transport.full_bytes
    assert llama.wrong() == []
    assert receiver.names() == ["1-1"], "what the dead one left is gone"


def test_a_base_that_the_receiver_lost_is_made_up_for(opened: list[Any], receiver: Started, llama: Llama) -> None:
    transport = pushing(llama, receiver.url)
    opened.append(transport)
    transport.transfer(Version(1, 0))
    (receiver.directory / "1-0" / "parcel.json").unlink()
    llama.change(1)
    assert transport.transfer(Version(1, 1)) >= transport.full_bytes
    assert llama.wrong() == []


def test_a_receiver_killed_midway_is_named_and_the_old_version_serves_on(
    opened: list[Any], receiver: Started, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = pushing(llama, receiver.url)
    opened.append(transport)
    transport.transfer(Version(1, 0))
    before = llama.engine.tensors(0)
    shelf: Any = transport._shelf
    usual = shelf.put

    def put(name: str, file: str, body: bytes) -> None:
        if file != "window-00000.safetensors":
            receiver.kill()
        usual(name, file, body)

    monkeypatch.setattr(shelf, "put", put)
    llama.change(0)
    said = rf"the receiver at {receiver.url} is not to be reached .*; the engines serve the version before it on"
    with pytest.raises(RuntimeError, match=said):
        transport.transfer(Version(1, 1))
    assert not transport.touched
    assert all(torch.equal(one, before[name]) for name, one in llama.engine.tensors(0).items())
    monkeypatch.setattr(shelf, "put", usual)
    opened.append(Started(receiver.directory, port=receiver.port))
    assert transport.transfer(Version(1, 2)) >= transport.full_bytes
    assert llama.wrong() == []


def test_a_receiver_that_does_not_answer_is_told_of_at_the_deadline(llama: Llama) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"the receiver at {url} did not answer within 0.3 s"):
            pushing(llama, url, timeout_s=0.3)


def test_a_receiver_without_room_is_named_with_its_directory(opened: list[Any], tmp_path: Path, llama: Llama) -> None:
    receiver = Started(tmp_path / "small", most_bytes=50_000)
    opened.append(receiver)
    transport = pushing(llama, receiver.url)
    opened.append(transport)
    said = f"{receiver.url} answered 507: cannot write to {receiver.directory}: .*; the engines serve the version"
    with pytest.raises(RuntimeError, match=said):
        transport.transfer(Version(1, 0))
    assert not transport.touched


@pytest.mark.parametrize(
    ("key", "said"),
    [("another", r"answered 401: the receiver has another key \(STRETTO_RECEIVER_KEY\)"), ("", "there is no key: set")],
)
def test_who_has_not_the_key_is_refused_before_the_first_step(
    receiver: Started, llama: Llama, monkeypatch: pytest.MonkeyPatch, key: str, said: str
) -> None:
    monkeypatch.setenv(KEY, key)
    with pytest.raises(ValueError, match=said):
        pushing(llama, receiver.url)


def test_there_is_a_receiver_for_each_engine(receiver: Started, llama: Llama) -> None:
    with pytest.raises(ValueError, match=r"sync\.receivers has 2 addresses for 1 engines; name one for each"):
        pushing(llama, receiver.url, receiver.url)


def test_another_trainer_that_takes_the_receiver_over_is_told_of(
    opened: list[Any], receiver: Started, llama: Llama
) -> None:
    first = pushing(llama, receiver.url)
    opened.append(first)
    first.transfer(Version(1, 0))
    opened.append(pushing(llama, receiver.url))
    with pytest.raises(RuntimeError, match="answered 423: another trainer has taken over the receiver"):
        first.transfer(Version(1, 1))


def to_an_engine_each(world: World, directory: str, urls: list[str]) -> list[str]:
    """Each rank leads an engine with a receiver of its own; the first one writes."""
    multiprocessing.current_process()._config["daemon"] = False  # a daemon may have no children
    os.environ[KEY], windows.WINDOW_BYTES = SECRET, 2**16
    llama = Llama(Path(directory))
    rows = Source(fsdp_layout(llama.atoms, "float32", 2), lambda: llama.rows(world.rank))
    transport = HttpTransport(world, rows, llama.destination(2), llama.options(True), urls)
    found: list[str] = []
    for step in range(2):
        sent = transport.transfer(Version(1, step))
        found += llama.wrong()
        if world.first:
            assert (sent >= transport.full_bytes) == (step == 0)
        llama.change(step)
    transport.close()
    llama.engine.close()
    return found


def test_every_engine_has_its_receiver(opened: list[Any], pair: Ranks, tiny_model: Path, tmp_path: Path) -> None:
    receivers = [Started(tmp_path / str(index)) for index in range(2)]
    opened.extend(receivers)
    assert pair.run(to_an_engine_each, str(tiny_model), [one.url for one in receivers]) == [[], []]
    assert [one.names() for one in receivers] == [[], []]


@pytest.fixture
def caller(receiver: Started) -> Caller:
    """Somebody with the key, whose session is `me` and whose parcel `1-1` is begun."""
    made = Caller(receiver.url, SECRET, 10.0)
    made.call("POST", "/sessions/me")
    made.call("POST", "/parcels/1-1", b"[]", {SESSION: "me"})
    return made


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("PUT", "/parcels/1-1/window-0.safetensors", b"changed", 400, "window-0.safetensors changed on the way"),
        ("PUT", "/parcels/1-1/..%2Fout", b"body", 400, "is not the name of a parcel's file"),
        ("PUT", "/parcels/..%2F1-1/window-0.safetensors", b"body", 400, "is not the name of a parcel"),
        ("GET", "/parcels/1-1/answers/..%2Fkey", b"", 400, "is not the name of an answer"),
        ("GET", "/parcels/1-1/answers/verify-0.json", b"", 404, "answered 404"),
        ("POST", "/parcels/1-1", b"nonsense", 400, "Expecting value"),
        ("POST", "/parcels/1-1/finish", b"nonsense", 400, "the manifest of 1-1 is not a parcel's manifest"),
    ],
)
def test_a_malformed_call_is_refused_in_words(
    caller: Caller, method: str, path: str, body: bytes, status: int, said: str
) -> None:
    with pytest.raises(Refused, match=said) as caught:
        caller.call(method, path, body, {SESSION: "me", DIGEST: digest_of(b"body")})
    assert caught.value.status == status


def test_a_parcel_that_lacks_a_file_is_not_finished(caller: Caller, receiver: Started) -> None:
    entry = b'{"shape": [1], "dtype": "float32", "digest": "", "file": "window-0.safetensors", "parts": ["whole"]}'
    with pytest.raises(Refused, match="lacks window-0"):
        caller.call(
            "POST",
            "/parcels/1-1/finish",
            b'{"base": null, "copies": {}, "entries": {"a": ' + entry + b"}}",
            {SESSION: "me"},
        )
    assert receiver.names() == [".writing-1-1"]


def test_a_file_is_never_whole_in_the_receivers_memory(caller: Caller, receiver: Started) -> None:
    def peak() -> int:
        status = Path(f"/proc/{receiver.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024

    before, body = peak(), bytes(2**27)
    caller.call("PUT", "/parcels/1-1/window-0.safetensors", body, {SESSION: "me", DIGEST: digest_of(body)})
    assert (receiver.directory / ".writing-1-1" / "window-0.safetensors").stat().st_size == len(body)
    assert peak() - before < len(body) / 4


def test_two_receivers_do_not_share_a_directory(receiver: Started) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto.sync.receiver", "--directory", str(receiver.directory)],
        env=os.environ | {KEY: SECRET},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "is in use by another process" in done.stderr


def test_the_receiver_runs_where_there_is_no_torch() -> None:
    code = "import sys, stretto.sync.receiver.__main__\nprint([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_the_key_may_be_in_a_file(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "stretto.sync.receiver", "--directory", str(tmp_path / "parcels")]
    outside = {name: value for name, value in os.environ.items() if name != KEY}
    done = subprocess.run(words, env=outside, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"there is no key: set {KEY}" in done.stderr
    (tmp_path / "key").write_text(f"{SECRET}\n")
    with subprocess.Popen(
        [*words, "--key-file", str(tmp_path / "key")], env=outside, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[3]
        Caller(url, SECRET, 10.0).call("POST", "/sessions/me")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
