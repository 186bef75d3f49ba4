"""Templates that take for ever, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import (
    InvalidRequestError,
    QueueFullError,
    ShuttingDownError,
    UnavailableError,
)
from src.core.settings import CHECKOUT
from src.text import template_forms, template_pool, template_renderer
from src.text.chat_template import ChatTemplate
from src.text.template_pool import Budget, TemplateBoundsError, TemplatePool
from src.text.template_process import Answer, Kind, Request
from src.text.template_renderer import MEMORY_BYTES, EndedError, Renderer

pytestmark = pytest.mark.timeout(120)

GREETING = "Hello {{ name }}!"
NAME = {"name": "Köln"}
USER = {"role": "user", "content": "hello"}
# Of a variable, so that nothing is computed beforehand.
DIGITS = "{% set x = ('f' * (6000000 * n)) | int(0, 16) %}"
ENDLESS = (
    "{% macro more(n) %}{% if n %}{{ more(n - 1) }}{{ more(n - 1) }}{% endif %}{% endmacro %}"
    "{{ more(90) }}"
)
# What would take minutes or gigabytes, in one operation or in many.
HOSTILE = {
    "a division": DIGITS + "{{ x // (('f' * (3000000 * n)) | int(0, 16)) }}",
    "a remainder": DIGITS + "{{ x % (('e' * (3000000 * n)) | int(0, 16)) }}",
    "a product": DIGITS + "{% for i in range(99999) %}{% set y = x * x * x * x %}{% endfor %}",
    "a power": "{% set x = 7 ** (99999999 * n) %}",
    "a power at compilation": "{% set x = 7 ** 99999999 %}",
    "a shown number": "{{ 10 ** (4000000 * n) }}",
    "sums of strings": (
        "{% set a = namespace(s='x' * n) %}{% for i in range(60) %}"
        "{% set a.s = a.s ~ a.s %}{% endfor %}"
    ),
    "sums of lists": (
        "{% set a = namespace(l=[n]) %}"
        "{% for i in range(60) %}{% set a.l = a.l + a.l %}{% endfor %}"
    ),
    "center": "{{ 'x' | center(1000000000000 * n) }}",
    "ljust": "{{ 'x'.ljust(1000000000000 * n) }}",
    "zfill": "{{ 'x'.zfill(1000000000000 * n) }}",
    "a wide number": "{{ '%1000000000000d' % n }}",
    "a wide format": "{{ '{:>1000000000000}'.format(n) }}",
    "a wide format by filter": "{{ '%1000000000000d' | format(n) }}",
    "repetition": "{{ 'x' * (1000000000000 * n) }}",
    "repetition at compilation": "{{ 'x' * 1000000000000 }}",
    "replacements": (
        "{% set a = namespace(s='x' * n) %}{% for i in range(60) %}"
        "{% set a.s = a.s.replace('x', 'xx') %}{% endfor %}"
    ),
    "joins": "{% for i in range(99999) %}"
    "{{ ((['x' * 9999] * (9999 * n)) | join) | length }}{% endfor %}",
    "searches": "{{ ('a' * 9000000 * n).count('a' * 4000000 + 'b' + 'a' * 4000000) }}" * 200,
    "sorting": "{% for i in range(99999) %}{{ range(99999) | sort | length }}{% endfor %}",
    "a loop of loops": "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4,
    "batches": "{{ range(99999) | batch(1000000000000) | list | length }}" * 99,
    "indents": "{{ ('x\n' * 999999) | indent(99999999) | length }}",
    "words": "{{ lipsum(n=99999999, max=200) | length }}",
    "JSON": "{{ [[[[range(99999) | list] * 9] * 9] * 9] | tojson | length }}",
    "a macro": ENDLESS,
    "much text": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplatePool]:
    yield from opened(monkeypatch, TemplatePool())


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplatePool]:
    yield from opened(monkeypatch, TemplatePool(of_clients=True))


def opened(monkeypatch: pytest.MonkeyPatch, pool: TemplatePool) -> Iterator[TemplatePool]:
    """With both processes up."""
    monkeypatch.setattr(template_pool, "MAX_SECONDS", 0.5)
    assert pool.render(GREETING, NAME) == "Hello Köln!"
    yield pool
    pool.close()


def children() -> list[int]:
    """Processes of ours that render, zombies included."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, parent = status.read_text().rpartition(")")[0], status.read_text().split()[3]
            if int(parent) == os.getpid() and "python" in name:
                found.append(int(status.parent.name))
    return found


def process_of(pool: TemplatePool) -> int:
    """The process of the thread that this runs on."""

    def pid() -> int:
        # Where the last rendering took long, on a busy machine, its process is replaced.
        for _ in range(1000):
            if (renderer := pool._workers[0].renderer) is not None:
                return renderer.pid
            time.sleep(0.01)
        raise AssertionError("no process renders")

    return int(pool.submit(pid).result())


def cpu_seconds(pid: int) -> float:
    """What a process has used, with the quarter of a second of its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "(" in (stat := Path(f"/proc/{pid}/stat").read_text()) and ") Z" not in stat
    return False


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def victim() -> Iterator[TemplatePool]:
    with contextlib.closing(TemplatePool()) as pool:
        yield pool


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_a_template_does_ends_in_time(victim: TemplatePool, kind: str) -> None:
    victim.render(GREETING, NAME)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(InvalidRequestError) as caught:
        victim.render(HOSTILE[kind], {"n": 1}, Budget(0.3))
    assert caught.value.param == "messages"
    assert "chat template" in caught.value.message
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # That of one process, with its start.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    # Of the largest child so far, which may have been another test's; or this process's own, as
    # which each child begins.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after.ru_maxrss <= max(before.ru_maxrss, own, (MEMORY_BYTES + 128 * 2**20) // 1024)
    assert victim.render(GREETING, NAME) == "Hello Köln!"


def test_memory_is_bounded_and_given_back(pool: TemplatePool) -> None:
    pid = process_of(pool)
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    limit, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    assert size < limit == hard <= size + MEMORY_BYTES
    # A rendering that takes more than a little is the last one of its process.
    wide = "{{ '\U0001f600' * (9000000 * n) }}{{ 'x' * 7000000 }}"
    assert len(pool.render(wide, {"n": 1}, Budget(5.0))) == 16_000_000
    assert pool.render(GREETING, NAME) == "Hello Köln!"
    assert process_of(pool) != pid
    assert not is_alive(pid)


def test_a_long_answer_is_refused_by_its_length(pool: TemplatePool) -> None:
    """Its pieces are one text, so it takes no memory, for which its process would end."""
    pid = process_of(pool)
    pieces = "{% for i in range(1024) %}{{ piece }}{% endfor %}"
    values = {"piece": "x" * 2**14, **NAME}
    with pytest.raises(InvalidRequestError, match="longer than 16777216 characters"):
        pool.render(pieces + "{{ name }}", values, Budget(60.0))
    assert pool.render(GREETING, NAME) == "Hello Köln!"
    assert process_of(pool) == pid
    # One character less is none too many.
    assert len(pool.render(pieces, values, Budget(60.0))) == 2**24


def test_values_of_all_kinds_arrive_as_they_are(pool: TemplatePool) -> None:
    values: dict[str, Any] = {"a": [1, -(2**70), 1.5, True, None, "\ud800", {"z": {}, "b": []}]}
    assert json.loads(pool.render("{{ v | tojson(ensure_ascii=true) }}", {"v": values})) == values
    assert pool.render("{{ v }}", {"v": "\ud800 \x00 \U0001f600"}) == "\ud800 \x00 \U0001f600"


def test_short_conversations_go_on_beside_a_long_one(pool: TemplatePool) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        assert go_on.wait(60)

    waiting = [pool.submit(long, is_short=False) for _ in range(8)]
    assert begun.wait(30)
    assert pool.render(GREETING, NAME) == "Hello Köln!"
    assert [future.running() for future in waiting] == [True] + 7 * [False]
    go_on.set()
    for future in waiting:
        future.result(30)


def test_long_is_what_has_much_text_or_many_messages(pool: TemplatePool) -> None:
    seen: list[bool] = []

    class Pool(TemplatePool):
        def submit(self, run: Any, *, is_short: bool = True, **more: Any) -> Any:
            seen.append(is_short)
            return pool.submit(run, is_short=is_short, **more)

        def render(self, *arguments: Any) -> str:
            return pool.render(*arguments)

    template = ChatTemplate("{{ messages | length }}", pool=Pool())
    text = [{"type": "text", "text": "x" * 200_000}]
    for messages in (
        [USER],
        [USER] * 512,
        [USER] * 513,
        [{"role": "user", "content": "x" * 300_000}],
        [{"role": "user", "content": text}],
        [{"role": "user", "content": text * 2}],
    ):
        assert template.render(messages) == str(len(messages))
    assert seen == [True, True, False, False, True, False]


def test_new_templates_of_clients_do_not_keep_known_ones_waiting(
    clients: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_forms, "PROBE_SECONDS", 0.4)
    template = ChatTemplate(GREETING, pool=clients)
    assert template.render([USER], name="you") == "Hello you!"
    hostile = [ChatTemplate(f"{i}{ENDLESS}", pool=clients).submit([USER]) for i in range(3)]
    wait_for(lambda: hostile[0].running())
    for _ in range(20):
        assert template.render([USER], name="you") == "Hello you!"
    assert not hostile[-1].done()
    for future in hostile:
        with pytest.raises(InvalidRequestError):
            future.result()


def test_a_clients_template_that_was_out_of_bounds_is_not_tried_again_at_once(
    clients: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        with pytest.raises(TemplateBoundsError) as caught:
            clients.render(ENDLESS, {})
        return caught.value.message

    assert "takes more than 0.5 s" in refused()
    begun = time.monotonic()
    assert {refused() for _ in range(20)} == {
        "messages: the model's chat template was out of bounds less than 60 s ago and is not tried "
        "again"
    }
    # Each of them would take half a second.
    assert time.monotonic() - begun < 5
    assert clients.render(GREETING, NAME) == "Hello Köln!"
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert "takes more than 0.5 s" in refused()


@pytest.mark.parametrize("is_short", [True, False])
def test_owners_take_turns(pool: TemplatePool, is_short: bool) -> None:
    order: list[str] = []
    begun, go_on = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        begun.release()
        assert go_on.wait(60)

    # Both threads are busy, or the one that takes what is long.
    held = [pool.submit(hold, is_short=light) for light in (False, True)]
    for _ in held:
        assert begun.acquire(timeout=30)

    def flood(owner: str, count: int) -> list[Any]:
        return [
            pool.submit(partial(order.append, owner), is_short=is_short, owner=owner)
            for _ in range(count)
        ]

    waiting = [*flood("loud", 50), *flood("quiet", 2), *flood("other", 1), *flood("loud", 1)]
    go_on.set()
    for future in (*held, *waiting):
        future.result(30)
    # Two threads may swap what they begin at the same time.
    assert order.index("quiet") <= 3
    assert order.index("other") <= 4
    assert len(order) - order[::-1].index("quiet") <= 7
    assert order.count("loud") == 51


def test_one_owner_leaves_room_to_others(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_pool, "MAX_WAITING", 8)
    go_on = threading.Event()
    submit = partial(pool.submit, go_on.wait, is_short=False)
    waiting = [submit()] + [submit(owner="loud") for _ in range(4)]
    with pytest.raises(QueueFullError, match="4 conversations of this key wait"):
        submit(owner="loud")
    waiting += [submit(owner="quiet"), submit(owner="quiet")]
    waiting.append(submit(owner="other"))
    with pytest.raises(QueueFullError, match="1 conversations of this key wait"):
        submit(owner="other")
    go_on.set()
    for future in waiting:
        future.result(30)


def test_what_one_owner_has_a_template_do_shuts_it_to_nobody_else(clients: TemplatePool) -> None:
    source = "{% if messages[0].content == 'x' %}" + ENDLESS + "{% endif %}fine"
    template = ChatTemplate(source, pool=clients)
    with pytest.raises(TemplateBoundsError, match="takes more than"):
        template.submit([{**USER, "content": "x"}], "loud").result(30)
    assert template.submit([USER], "quiet").result(30) == "fine"
    with pytest.raises(TemplateBoundsError, match="is not tried again"):
        template.submit([USER], "loud").result(30)


def test_a_thread_that_cannot_start_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TemplatePool()
    with monkeypatch.context() as broken:

        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        broken.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            pool.submit(lambda: None)
    assert pool.submit(lambda: "done").result(30) == "done"
    pool.close()


def test_a_conversation_that_is_too_much_does_not_shut_the_template(pool: TemplatePool) -> None:
    source = "{% if n > 1 %}" + ENDLESS + "{% endif %}{{ n }}"
    for _ in range(2):
        with pytest.raises(TemplateBoundsError, match=r"takes more than 0.5 s"):
            pool.render(source, {"n": 2})
        assert pool.render(source, {"n": 1}) == "1"


def test_renderings_share_a_budget_of_cpu_time(pool: TemplatePool) -> None:
    budget = Budget(10.0)
    work = "{% for i in range(1000) %}{{ range(n) | sort | length }}{% endfor %}"
    pool.render(work, {"n": 100}, budget)
    assert 0 < 10.0 - budget.seconds < 2
    budget.seconds = 0.2
    with pytest.raises(TemplateBoundsError, match=r"takes more than 0.2 s"):
        pool.render(work, {"n": 99999}, budget)
    assert budget.seconds == 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_dies_while_it_renders(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Once may be anything; a second time it is the template's doing."""
    monkeypatch.setattr(template_pool, "MAX_SECONDS", 5.0)
    work = "{% for i in range(40) %}{% set x = range(99999) | sort %}{% endfor %}done"
    future = pool.submit(lambda: pool.render(work, {}))
    killed = [0]

    def kills_another() -> bool:
        renderer = pool._workers[0].renderer
        if renderer is None or renderer.pid in killed or cpu_seconds(renderer.pid) < 0.3:
            return False
        killed.append(renderer.pid)
        renderer.kill()
        return True

    for _ in range(times):
        wait_for(kills_another)
    if times == 1:
        assert future.result() == "done"
    else:
        with pytest.raises(TemplateBoundsError, match="ends the process that renders it"):
            future.result()
    assert pool.render(GREETING, NAME) == "Hello Köln!"


def test_one_that_died_idle_is_replaced_unnoticed(pool: TemplatePool) -> None:
    pid = process_of(pool)
    os.kill(pid, signal.SIGKILL)
    assert pool.render(GREETING, NAME) == "Hello Köln!"
    assert process_of(pool) != pid


def test_closing_ends_everything(pool: TemplatePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_pool, "MAX_SECONDS", 60.0)
    running = [pool.submit(lambda: pool.render(ENDLESS, {})) for _ in range(4)]
    wait_for(lambda: len(pool._workers) == 2 and sum(f.running() for f in running) == 2)
    pids = [w.renderer.pid for w in pool._workers if w.renderer is not None]
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 5
    for future in running:
        with pytest.raises(ShuttingDownError):
            future.result(5)
    assert not set(pids) & set(children())
    with pytest.raises(ShuttingDownError):
        pool.render(GREETING, NAME)
    pool.close()


def test_who_waits_no_more_is_not_served(pool: TemplatePool) -> None:
    go_on = threading.Event()
    first = pool.submit(go_on.wait, is_short=False)
    ran: list[int] = []
    waiting = [pool.submit(partial(ran.append, i), is_short=False) for i in range(3)]
    assert waiting[1].cancel()
    go_on.set()
    first.result(30)
    waiting[2].result(30)
    assert ran == [0, 2]


def test_so_many_may_wait(pool: TemplatePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_pool, "MAX_WAITING", 2)
    go_on = threading.Event()
    waiting = [pool.submit(go_on.wait, is_short=False) for _ in range(3)]
    with pytest.raises(QueueFullError, match="2 conversations wait"):
        pool.submit(go_on.wait, is_short=False)
    go_on.set()
    for future in waiting:
        future.result(30)
    assert pool.render(GREETING, NAME) == "Hello Köln!"


@pytest.mark.parametrize("fault", ["no program", "no module"])
def test_a_process_that_cannot_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with monkeypatch.context() as broken:
        if fault == "no program":
            broken.setattr(sys, "executable", "/nowhere/python")
        else:
            broken.setattr(template_renderer, "_MODULE", "src.nowhere")
        pool = TemplatePool()
        for _ in range(2):
            with pytest.raises(UnavailableError, match="did not start") as caught:
                pool.render(GREETING, NAME)
            assert caught.value.retry_after > 0
    assert pool.render(GREETING, NAME) == "Hello Köln!"
    pool.close()


def test_a_process_knows_no_secret_and_may_do_nothing(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLIPSTREAM_API_KEYS", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("TZ", "UTC")
    with contextlib.closing(TemplatePool()) as fresh:
        fresh.render(GREETING, NAME)
        pid = process_of(fresh)
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"secret" not in environment
        assert b"TZ=UTC" in environment
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
            assert resource.prlimit(pid, kind) == (0, 0)
        # Keys of a terminal do not reach it.
        assert os.getsid(pid) != os.getsid(0)


@pytest.mark.parametrize(
    "content", [b"", b"t", b"x" + bytes(9), b"t\x00" + bytes(8) + b"\xff\xfe", b"\x00" * 40]
)
def test_what_is_no_answer_is_not_taken_for_one(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"short|Kind|utf-8"):
        Answer.decoded(content)


def test_a_process_that_speaks_otherwise_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(template_renderer, "WALL_SECONDS", 1.0)
    monkeypatch.setattr(template_renderer, "MAX_ANSWER_BYTES", 1000)
    long, short = (Answer(Kind.TEXT, "x" * count).encoded() for count in (2000, 10))
    answers = {
        "long": len(long).to_bytes(8, "little") + long,
        "more": 2 * (len(short).to_bytes(8, "little") + short),
        "garbled": (10).to_bytes(8, "little") + b"?" * 10,
        "silent": b"",
    }
    ready = Answer(Kind.READY, "").encoded()
    for name, answer in answers.items():
        frame = len(ready).to_bytes(8, "little") + ready
        module = tmp_path / f"speaks_{name}.py"
        module.write_text(
            f"import os, time\nos.write(0, {frame!r})\n"
            # It answers when it is asked, and not together with what it begins with.
            f"os.read(0, 1)\nos.write(0, {answer!r})\ntime.sleep(60)\n"
        )
        monkeypatch.setattr(template_renderer, "_MODULE", module.stem)
        monkeypatch.setattr(template_renderer, "CHECKOUT", tmp_path)
        renderer = Renderer()
        begun = time.monotonic()
        try:
            with pytest.raises(EndedError) as caught:
                renderer.ask(Request(b"key", "x", 1.0, {}))
            assert caught.value.is_late
            assert time.monotonic() - begun < 10
            assert not is_alive(renderer.pid)
        finally:
            renderer.close()


FORGETFUL = """
import os, signal, sys, threading, time
from src.text.chat_template import ChatTemplate
from src.text.template_pool import shared_pool

user = [{"role": "user", "content": "hello"}]
assert ChatTemplate("{{ messages[0].content }}").render(user) == "hello"
if sys.argv[1] == "rendering":
    endless = ChatTemplate("{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4)
    endless.submit(user)
    time.sleep(0.5)
print(shared_pool()._workers[0].renderer.pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
elif sys.argv[2] == "forks":
    if (child := os.fork()) == 0:
        again = ChatTemplate("{{ messages[0].content }}").render(user) == "hello"
        os._exit(0 if again else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ChatTemplate("{{ messages[0].content }}").render(user) == "hello"
"""


@pytest.mark.parametrize("state", ["idle", "rendering"])
@pytest.mark.parametrize("end", ["killed", "interrupted", "ends", "forks"])
def test_no_process_outlives_its_parent(state: str, end: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, state, end],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    expected = {"killed": -signal.SIGKILL, "interrupted": -signal.SIGINT}.get(end, 0)
    assert done.returncode == expected, done.stderr
    pid = int(done.stdout)
    wait_for(lambda: not is_alive(pid))
    if end in ("killed", "ends"):
        assert not done.stderr


def test_a_parent_without_standard_streams(tmp_path: Path) -> None:
    program = (
        "from src.text.chat_template import ChatTemplate\n"
        "messages = [{'role': 'user', 'content': 'a'}]\n"
        "text = ChatTemplate('{{ messages[0].content }}').render(messages)\n"
        f"open({str(tmp_path / 'rendered')!r}, 'w').write(text)\n"
    )
    command = f'exec "{sys.executable}" -c "$PROGRAM" <&- >&- 2>&-'
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PROGRAM": program}
    subprocess.run(["sh", "-c", command], env=environment, cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "rendered").read_text() == "a"
