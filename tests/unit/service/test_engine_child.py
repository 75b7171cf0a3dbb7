"""A supervised process: restarted, given up, signalled and ended. The processes are real and small."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.errors import StartFailed
from service.processes import supervisor as module
from service.processes.supervisor import STARTS, Child
from tests.support.waiting import WAIT_SECONDS, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(module, "MOST_DELAY_SECONDS", 0.002)


class ScriptedChild:
    """A scripted child process, with the messages that it sent and the process ids that ended."""

    def __init__(self, tmp_path: Path, *plan: str, start_seconds: float = WAIT_SECONDS) -> None:
        self.plan = tmp_path / "plan.txt"
        self.plan.write_text("\n".join(plan))
        self.messages: list[str] = []
        self.ended: list[int] = []
        environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
        command = ["tests.support.obedient", str(self.plan)]
        self.child = Child(
            "thing", command, environment, start_seconds, on_ready=self.messages.append, on_end=self.ended.append
        )

    def starts(self) -> list[str]:
        return self.plan.with_suffix(".starts").read_text().splitlines()


@asynccontextmanager
async def supervised(script: ScriptedChild) -> AsyncIterator[Child]:
    keeper = asyncio.create_task(script.child.keep())
    try:
        yield script.child
    finally:
        await script.child.end(WAIT_SECONDS)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def test_the_message_of_a_process_is_received_and_the_process_is_ended(tmp_path: Path) -> None:
    script = ScriptedChild(tmp_path, "say hello and stay")
    async with supervised(script) as child:
        await asyncio.wait_for(child.ready.wait(), WAIT_SECONDS)
        assert script.messages == ["hello"]
        assert child.process is not None
        pid = child.process.pid
        assert not script.ended
    assert script.ended == [pid]
    assert not Path(f"/proc/{pid}").exists()


async def test_a_process_that_ends_is_restarted_with_the_again_flag(tmp_path: Path) -> None:
    script = ScriptedChild(tmp_path, "say first", "crash", "refuse no room", "say second and stay")
    async with supervised(script):
        await until(lambda: script.messages == ["first", "second"])
    assert script.starts() == ["", "--again", "--again", "--again"]
    assert len(script.ended) == 4


async def test_a_process_that_refuses_to_start_is_given_up_with_its_reason(tmp_path: Path) -> None:
    script = ScriptedChild(tmp_path, "refuse the snapshot is damaged")
    with pytest.raises(StartFailed, match="the snapshot is damaged"):
        await asyncio.wait_for(script.child.keep(), WAIT_SECONDS)
    assert len(script.starts()) == 1


async def test_a_process_that_crashes_at_startup_is_started_a_limited_number_of_times(tmp_path: Path) -> None:
    script = ScriptedChild(tmp_path, "crash")
    with pytest.raises(StartFailed, match="thing ended 3 times"):
        await asyncio.wait_for(script.child.keep(), WAIT_SECONDS)
    assert len(script.starts()) == STARTS


async def test_a_crash_at_the_first_start_is_retried(tmp_path: Path) -> None:
    script = ScriptedChild(tmp_path, "crash", "say up and stay")
    async with supervised(script):
        await until(lambda: script.messages == ["up"])
    assert script.starts() == ["", ""]


async def test_a_killed_process_is_replaced_and_a_late_kill_does_not_reach_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    script = ScriptedChild(tmp_path, "say up and stay")
    async with supervised(script) as child:
        await asyncio.wait_for(child.ready.wait(), WAIT_SECONDS)
        old = child.process
        child.kill(old)
        await until(lambda: len(script.messages) == 2)
        child.kill(old)  # a late kill of the old process does not reach the new one
        child.send_signal(0)
        assert child.process is not old
        assert child.process is not None
        assert child.process.returncode is None
    assert "the thing ended; it is started again" in caplog.text


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = ScriptedChild(tmp_path, "say deaf and stay")
    async with supervised(script) as child:
        await asyncio.wait_for(child.ready.wait(), WAIT_SECONDS)
        await asyncio.wait_for(child.end(0.05), WAIT_SECONDS)
        assert child.process is not None
        assert child.process.returncode == -signal.SIGKILL


async def test_a_process_that_hangs_at_its_first_start_is_killed_and_reported(tmp_path: Path) -> None:
    script = ScriptedChild(tmp_path, "hang", start_seconds=0.5)
    with pytest.raises(StartFailed, match=r"not ready after 0\.5 s and was killed.*CARE_START_SECONDS"):
        await asyncio.wait_for(script.child.keep(), WAIT_SECONDS)
    assert script.child.process is not None
    assert script.child.process.returncode == -signal.SIGKILL


async def test_a_process_that_hangs_at_a_later_start_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.ERROR)
    script = ScriptedChild(tmp_path, "say first and stay", "hang", "say second and stay")
    async with supervised(script) as child:
        await until(lambda: script.messages == ["first"])
        monkeypatch.setattr(child, "start_seconds", 0.5)
        child.kill()
        await until(lambda: "was killed" in caplog.text)
        monkeypatch.setattr(child, "start_seconds", WAIT_SECONDS)
        await until(lambda: "second" in script.messages)


async def test_a_signal_that_comes_during_the_start_is_delivered_after_it(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # children inherit ignored signals
    script = ScriptedChild(tmp_path, "say first and stay", "say second and stay")
    async with supervised(script) as child:
        await until(lambda: child.process is not None)
        assert not child.ready.is_set()
        child.send_signal(signal.SIGHUP)  # kills this process
        await until(lambda: script.messages == ["first", "second"])
        assert len(script.ended) == 1
