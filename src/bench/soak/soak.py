"""Runs a load against a server for a given time, and reports failures."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from src.bench.soak.exchange import BrokenAnswer, connected, exchange, post
from src.bench.soak.questions import COMPLETIONS, answer_alone, make_questions
from src.bench.soak.server import SoakedServer
from src.bench.soak.traffic import FAULTS, Act, Traffic
from src.bench.soak.vitals import Vitals, leaks
from src.core.errors import SlipstreamError

# Number of questions: per second of load, minimum, maximum.
_QUESTIONS: Final = (4, 8, 40)
_READINGS: Final = 8
# Minimal seconds between two readings; each has to wait until the server is idle.
_LEAST_ROUND: Final = 1.0
_MAX_FAILURES: Final = 20
_LOG_BYTES: Final = 1_000_000
# Words that must not occur in the server's log.
_ALARMS: Final = ("Traceback", "ERROR", "CRITICAL")
_EXIT_SECONDS: Final = 30.0


class SoakReport(msgspec.Struct, kw_only=True):
    """The result of a soak test.

    Attributes
    ----------
    outcomes
        Kind of traffic -> how often each outcome occurred.
    readings
        Vitals of the idle server, in order. The first is taken after an eighth of the time, when
        lazily created objects exist.
    failures
        Descriptions of failures, up to a maximal number; empty for a sound server.
    """

    seconds: float = 0.0
    outcomes: dict[str, dict[str, int]] = {}
    readings: list[Vitals] = []
    failures: list[str] = []
    num_failures: int = 0

    def fail(self, what: str) -> None:
        """Record a failure."""
        self.num_failures += 1
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(what)


class Soak:
    """A load on one server.

    Parameters
    ----------
    seconds
        Duration of the load, without the questions before it and the shutdown after it.
    concurrency
        Number of concurrent clients, without bursts.
    patience
        Seconds after which a client's action counts as hanging.
    """

    def __init__(
        self, server: SoakedServer, *, seconds: float, concurrency: int, patience: float, seed: int
    ) -> None:
        self._server = server
        self._seconds = seconds
        self._concurrency = concurrency
        self._patience = patience
        self._seed = seed
        self._counts: dict[str, Counter[str]] = {}
        self.report = SoakReport()

    async def run(self, progress: Callable[[Vitals], None] | None = None) -> SoakReport:
        """Run the load; ``progress`` is called with every reading."""
        report = self.report
        try:
            traffic = await self._prepare()
            settled = self._server.settled
            tasks = (await asyncio.to_thread(settled, 0.0, 0)).tasks
            begun = time.monotonic()
            num_rounds = max(1, min(_READINGS, int(self._seconds / _LEAST_ROUND)))
            for _ in range(num_rounds):
                await self._round(traffic, time.monotonic() + self._seconds / num_rounds)
                now = time.monotonic() - begun
                reading = await asyncio.to_thread(settled, now, self._num_acts, tasks)
                report.readings.append(reading)
                if progress is not None:
                    progress(reading)
            report.seconds = time.monotonic() - begun
            for leak in leaks(report.readings):
                report.fail(leak)
            await self._end(traffic)
        # If the server is gone, the load ends and the report says why.
        except (SlipstreamError, BrokenAnswer) as error:
            report.fail(str(error))
        self._read_log()
        report.outcomes = {kind: dict(counts) for kind, counts in sorted(self._counts.items())}
        return report

    @property
    def _num_acts(self) -> int:
        return sum(counts.total() for counts in self._counts.values())

    async def _prepare(self) -> Traffic:
        server, port = self._server, self._server.process.port
        models = json.loads(await asyncio.to_thread(server.get, "/v1/models"))
        facts = json.loads(await asyncio.to_thread(server.get, "/tokenizer_info"))
        max_model_len = models["data"][0]["max_model_len"]
        each, least, most = _QUESTIONS
        count = max(least, min(most, round(each * self._seconds)))
        questions = make_questions(count, facts["vocab_size"], max_model_len, self._seed)
        scheduler = server.config.scheduler
        return Traffic(
            port,
            questions=questions,
            answers=await answer_alone(port, questions),
            vocab_size=facts["vocab_size"],
            max_model_len=max_model_len,
            capacity=scheduler.max_num_seqs + scheduler.max_waiting_requests,
            admin_headers=server.admin_headers,
            seed=self._seed,
            space_id=await self._space_id(port),
        )

    async def _space_id(self, port: int) -> int:
        """The id of the token for a single space, or of one that ends with a space."""
        body = json.dumps({"prompt": " ", "add_special_tokens": False}).encode()
        reply = await exchange(port, post("/tokenize", body))
        token_id: int = reply.json()["tokens"][-1]
        return token_id

    async def _round(self, traffic: Traffic, deadline: float) -> None:
        """Run clients until a deadline, with a burst in between; returns when all are done."""

        async def client() -> None:
            while time.monotonic() < deadline:
                name, act = traffic.draw()
                await self._act(name, act)

        await asyncio.gather(
            *(client() for _ in range(self._concurrency)), self._act("burst", traffic.burst)
        )

    async def _act(self, name: str, act: Act) -> None:
        counts = self._counts.setdefault(name, Counter())
        try:
            async with asyncio.timeout(self._patience):
                outcome = await act()
        except TimeoutError:
            counts["hang"] += 1
            self.report.fail(f"{name}: no end after {self._patience:g} s")
        except FAULTS as error:
            counts["wrong"] += 1
            self.report.fail(f"{name}: {type(error).__name__}: {error}")
        else:
            counts.update([outcome] if isinstance(outcome, str) else outcome)

    async def _end(self, traffic: Traffic) -> None:
        """Ask the server to end while streams run: it must exit with 0 and notify the streams."""
        fields = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        request = post(COMPLETIONS, json.dumps(fields).encode())
        port = self._server.process.port

        async def stream() -> None:
            async with connected(port) as (reader, writer):
                writer.write(request)
                while await reader.read(65536):
                    pass

        streams = [asyncio.create_task(stream()) for _ in range(min(8, traffic.capacity))]
        await asyncio.sleep(0.3)
        code = await asyncio.to_thread(self._server.process.end, _EXIT_SECONDS)
        if code != 0:
            self.report.fail(f"asked to end, the server ended with {code}")
        async with asyncio.timeout(self._patience):
            await asyncio.gather(*streams, return_exceptions=True)

    def _read_log(self) -> None:
        lines = self._server.process.log_tail(_LOG_BYTES).splitlines()
        alarms = [i for i, line in enumerate(lines) if any(alarm in line for alarm in _ALARMS)]
        if alarms:
            excerpt = "\n".join(lines[alarms[0] : alarms[0] + 30])
            self.report.fail(f"the server's log has {len(alarms)} alarms, the first:\n{excerpt}")
