"""One client asks for vectors, scores and labels by the thousand, another one reads a stream.

The longest wait between two pieces of the stream is compared with that beside an idle server of the
same minute: the machine may have other things to do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from src.bench.soak.exchange import post
from tests.attack.servers import DEMO, environment, wait_idle
from tests.http.processes import ServerProcess
from tests.support.classifiers import make_classifier

pytestmark = pytest.mark.timeout(400)

# Seconds for which an attack is repeated, and the longest that a stream, or a probe, may stand
# still; on a machine that is busy, three times as long as beside an idle server.
SECONDS = 4.0
BOUND = 0.5
# A machine that is busy at just this moment may be asked again.
TRIES = 3
LABELS = 2000
QUESTION = [{"role": "user", "content": "Tell me a story about a fox."}]


class Attack(NamedTuple):
    """What is sent on each of ``connections`` at once; ``reads`` bytes of its answer are read."""

    path: str
    fields: dict[str, Any]
    statuses: tuple[int, ...] = (200, 400, 413, 429, 503)
    connections: int = 1
    reads: int = 2**40


SHORT = [f"fox {number}" for number in range(2048)]
MIB = 2**20
# On the bundled model, which generates too.
ON_TEXT = {
    "short texts": Attack("/v1/embeddings", {"input": SHORT}),
    "one huge text": Attack("/v1/embeddings", {"input": "a b " * MIB}),
    "one huge text that is cut": Attack(
        "/v1/embeddings", {"input": "a b " * MIB, "truncate_prompt_tokens": -1}
    ),
    "tokens of many texts": Attack("/pooling", {"input": SHORT, "task": "token_embed"}),
    "slow readers of vectors": Attack("/v1/embeddings", {"input": SHORT}, connections=24, reads=1),
    "slow readers of numbers": Attack(
        "/pooling", {"input": SHORT[:500], "task": "token_embed"}, connections=24, reads=1
    ),
    "many anonymous calls": Attack("/v1/embeddings", {"input": SHORT[:32]}, connections=200),
    "a huge prediction": Attack(
        "/v1/completions",
        {
            "prompt": "a",
            "max_tokens": 8,
            "prediction": {"type": "content", "content": "a b " * (2 * MIB)},
        },
    ),
    "a huge name": Attack("/v1/embeddings", {"input": "a", "prompt_name": "n" * 4 * MIB}),
    "deep lists": Attack("/v1/embeddings", {"input": [[[["a"]] * 1000]] * 100}),
}
# On a classifier of many labels, beside a client who reads one label of one text over and over.
ON_LABELS = {
    "labels of short texts": Attack("/classify", {"input": SHORT}),
    "labels of texts": Attack("/predict", {"inputs": [[text] for text in SHORT]}),
    "labels by pooling": Attack("/pooling", {"input": SHORT}),
    "slow readers of labels": Attack("/classify", {"input": SHORT[:300]}, connections=24, reads=1),
}
# On a reranker.
ON_RANKS = {
    "a huge query": Attack(
        "/rerank", {"query": "a " * MIB, "texts": ["b"] * 2047, "truncate": True}
    ),
    "huge documents": Attack(
        "/rerank", {"query": "b", "documents": ["a " * (MIB // 8)] * 8, "max_tokens_per_doc": 9}
    ),
    "many documents": Attack("/rerank", {"query": "fox", "documents": SHORT}),
    "many pairs": Attack("/score", {"text_1": SHORT, "text_2": SHORT}),
}


@pytest.fixture(scope="module")
def text_server() -> Iterator[ServerProcess]:
    with ServerProcess.hypercorn(environment(DEMO)) as process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def label_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = make_classifier(tmp_path_factory.mktemp("attack") / "labels", "bert", labels=LABELS)
    with ServerProcess.hypercorn(environment(path)) as process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = make_classifier(tmp_path_factory.mktemp("attack") / "ranks", "bert", labels=1)
    with ServerProcess.hypercorn(environment(path)) as process:
        process.wait_ready()
        yield process


class Watch:
    """Notes the seconds between one thing that comes and the next, in `waits`."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self._last = 0.0

    def begin(self) -> None:
        self._last = time.monotonic()

    def came(self) -> None:
        now = time.monotonic()
        self.waits.append(now - self._last)
        self._last = now


class Victim(threading.Thread):
    """Does the same thing over and over; `waits` are the seconds in which nothing came."""

    def __init__(self, do: Callable[[Watch], None]) -> None:
        super().__init__(daemon=True)
        self.failure: BaseException | None = None
        self._do = do
        self._watch = Watch()
        self._ended = threading.Event()

    @property
    def waits(self) -> list[float]:
        return self._watch.waits

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                self._do(self._watch)
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Victim:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(120)
        assert self.failure is None, self.failure
        assert self.waits


@contextlib.contextmanager
def asked(
    server: ServerProcess, path: str, fields: dict[str, Any]
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(fields), {"content-type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.status == 200, answer.read()
            yield answer


def streamed(server: ServerProcess) -> Callable[[Watch], None]:
    """Reads a stream of text, whose pieces are the same every time."""
    fields = {"messages": QUESTION, "temperature": 0, "max_tokens": 60, "stream": True}
    texts: set[str] = set()

    def once(watch: Watch) -> None:
        text, begins, ends = "", True, False
        with asked(server, "/v1/chat/completions", fields) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                # How long it waits for its turn is the queue's matter: nobody here has a key.
                if begins:
                    watch.begin()
                else:
                    watch.came()
                begins = False
                if ends := line.startswith(b"data: [DONE]"):
                    break
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
        assert ends
        texts.add(text)
        assert len(texts) == 1, texts

    return once


def probed(server: ServerProcess) -> Callable[[Watch], None]:
    """Asks whether the server lives: what an encoder's loop must always have time for."""

    def once(watch: Watch) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        watch.begin()
        connection.request("GET", "/live")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        watch.came()
        connection.close()
        time.sleep(0.005)

    return once


def attacked(server: ServerProcess, attack: Attack, until: float) -> list[bytes]:
    """The attack over and over on one connection after another; how the answers begin."""
    request, answers = post(attack.path, json.dumps(attack.fields).encode()), []
    while (left := until - time.monotonic()) > 0:
        received = b""
        # It is left when its time is over, and may be ended before it was sent.
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.port), timeout=left) as connection,
        ):
            if attack.reads == 1:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request)
            count = 0
            while time.monotonic() < until and (piece := connection.recv(65536)):
                received += piece[: 12 - len(received)]
                count += len(piece)
                if count >= attack.reads:
                    # It holds its connection, and reads no further.
                    time.sleep(max(0.0, until - time.monotonic()))
        answers.append(received)
    return answers


def nobody_else_notices(
    server: ServerProcess, attack: Attack, victim: Callable[[Watch], None]
) -> None:
    for _ in range(TRIES):
        with Victim(victim) as idle:
            time.sleep(1.5)
        until, answers = time.monotonic() + SECONDS, []
        attackers = [
            threading.Thread(target=lambda: answers.extend(attacked(server, attack, until)))  # noqa: B023
            for _ in range(attack.connections)
        ]
        with Victim(victim) as beside:
            for each in attackers:
                each.start()
            for each in attackers:
                each.join(60)
        assert answers
        for answer in answers:
            assert not answer or int(answer[9:12]) in attack.statuses, answer
        longest, alone = max(beside.waits), max(idle.waits)
        if longest <= max(BOUND, 3 * alone):
            break
    else:
        pytest.fail(f"nothing came for {longest:.3f} s, {alone:.3f} s beside an idle server")
    assert "Traceback" not in server.output
    wait_idle(server)


@pytest.mark.parametrize("name", ON_TEXT)
def test_a_stream_goes_on(text_server: ServerProcess, name: str) -> None:
    nobody_else_notices(text_server, ON_TEXT[name], streamed(text_server))


@pytest.mark.parametrize("name", ON_LABELS)
def test_the_loop_goes_on_beside_labels(label_server: ServerProcess, name: str) -> None:
    nobody_else_notices(label_server, ON_LABELS[name], probed(label_server))


@pytest.mark.parametrize("name", ON_RANKS)
def test_the_loop_goes_on_beside_ranks(rank_server: ServerProcess, name: str) -> None:
    nobody_else_notices(rank_server, ON_RANKS[name], probed(rank_server))
