"""What pid 1 of a session does: it takes orders from the host, hands cells to the program and watches over it.

It owns the program's clock, its memory and its end, and believes nothing that comes back but its form.
"""

import os
import secrets
import select
import signal
from contextlib import suppress
from typing import Final

from agentrl.sandboxes import kernel, processes, program, wire
from agentrl.sandboxes.cells import Running
from agentrl.sandboxes.inheritance import Alone, Aside, Channel, Inheritance, Kin
from agentrl.sandboxes.line import Line
from agentrl.sandboxes.patience import LINGER_S, OwnClock

POLL_MS: Final = 20
"""How often a busy program is looked at [milliseconds]."""
_WAKE_S: Final = 0.002
_SETTLE_S: Final = 3.0
_STARTUP_S: Final = 20.0


class Overseer:
    """The state of one session: starting, idle, running a cell, or copying itself."""

    def __init__(
        self,
        channel: Channel,
        start: Inheritance,
        proc: int,
        aside: Aside | None = None,
        *,
        kin: Kin | None = None,
        line: Line | None = None,
    ) -> None:
        self._channel = channel
        self._aside = aside
        self._kin = kin or Alone()
        self.seen: set[object] = set()
        """Statuses of the cells so far, and ``poisoned`` where the program did not keep to the form."""
        self._start = start
        self._proc = proc
        self._orders = wire.Frames(wire.MAX_ORDER)
        self._line = line or Line()
        self._phase = "starting"
        self._patience = 0.0
        self._clock = OwnClock()
        self._announced = False
        self._waiting: wire.Message | None = None
        self._cell: Running | None = None
        self._snapshot = 0
        self._stamp = 0.0
        self._spare: Line | None = None
        self._pristine = True
        self._alone = True
        self._lost = self._frozen = False
        self._pid = self._pidfd = -1

    def serve(self) -> None:
        """Wait for the host, the program and the clock."""
        self.spawn()
        while True:
            poll = select.poll()
            self.register(poll)
            if self._aside is not None:
                self._aside.register(poll)
            ready = dict(poll.poll(None if self.idle else POLL_MS))
            if self._aside is not None:
                self._aside.move(ready)
            self.move(ready)

    @property
    def idle(self) -> bool:
        """Whether neither the program nor the clock has anything to say before the host does."""
        return self._phase == "idle"

    def register(self, poll: select.poll) -> None:
        """Add what to wait for."""
        poll.register(self._channel, select.POLLIN)
        self._line.register(poll)
        poll.register(self._pidfd, select.POLLIN)

    def move(self, ready: dict[int, int]) -> None:
        """Do what has become possible."""
        pidfd = self._pidfd
        if self._channel.fileno() in ready and not self._hear_host():
            self._kin.leave(self)
            return
        if self._line.is_in(ready):
            self._hear_program()
        if pidfd in ready and pidfd == self._pidfd and processes.has_ended(self._pid):
            self._program_ended()
        if not self.idle:
            self._watch()

    def rest(self) -> frozenset[int]:
        """Stop every process of the session until its next order, and give which they are."""
        others = self._kin.spared(self)
        processes.stop_all()
        self._frozen = True
        return frozenset(processes.living(others))

    def wake(self) -> None:
        """See whether the program was killed while it rested, before it gets an order."""
        if processes.has_ended(self._pid):
            self._program_ended()

    def adopt(self, pid: int, *, pristine: bool) -> None:
        """Go on with a stopped copy of another session's program, instead of a program of its own."""
        self._announced = True
        self._adopt(pid)
        self._pristine, self._frozen = pristine, True
        self._enter("idle")

    def end(self) -> None:
        """Kill the session's processes and let go of its descriptors."""
        if not processes.end_all(self._kin.spared(self)):
            raise OSError("processes of the program can't be killed")
        self.close()

    def _spared(self) -> frozenset[int]:
        """Give the processes that are not of the running program: its stopped copy, and the other sessions'."""
        return self._kin.spared(self) | ({self._snapshot} if self._snapshot else frozenset())

    def close(self) -> None:
        """Let go of the program; whoever calls ends it."""
        for line in (self._line, self._spare):
            if line is not None:
                line.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)

    def spawn(self) -> None:
        """Start a fresh program."""
        self._enter("starting", _STARTUP_S)
        start = program.Start(channel=self._line.there, proc=self._proc, given=self._start)
        pid = kernel.clone(0)
        if pid == 0:
            program.main(start)
        if self._aside is not None:
            self._aside.part()
        self._adopt(pid)
        self._pristine, self._frozen = True, False

    def _adopt(self, pid: int) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pid, self._pidfd = pid, processes.end_notice(pid)

    def _enter(self, phase: str, seconds: float = 0.0) -> None:
        self._phase, self._patience = phase, seconds
        self._clock.start()

    def _hear_host(self) -> bool:
        """Take orders; whether the host is still there."""
        data = self._channel.recv(1 << 18)
        if not data:
            return False
        for order in self._orders.feed(data):
            if order["t"] == "kill":
                if self._cell is not None:
                    self._stop(wire.text(order, "reason", 100) or "killed")
            else:
                self._waiting = order
                self._begin()
        return True

    def _begin(self) -> None:
        """Start the waiting order, if there is one and the program is idle, and wake what was stopped."""
        if self._waiting is None or self._phase != "idle":
            return
        frozen, self._frozen = self._frozen, False
        if frozen and processes.has_signals(self._pid):
            # What an alarm does, or ends, is not the coming cell's doing: that waits until it is over.
            self._enter("waking", _SETTLE_S)
            self._line.send({"t": "wake"})
        else:
            self._give(self._waiting)
        if frozen:
            # After the order, so that the program wakes once and finds it.
            processes.continue_all(self._spared())

    def _give(self, order: wire.Message) -> None:
        """Give the program an order, after it has made a copy of itself where one is wanted."""
        if order["t"] == "fork":
            self._waiting = None
            self._enter("forking", _SETTLE_S)
            if not self._kin.ask_fork(self, self._line):
                self._lose()
            return
        if order["transaction"] and not self._pristine and not self._snapshot and self._alone:
            self._copy()
            return
        if not order["transaction"]:
            self._drop_snapshot()
        self._waiting = None
        self._enter("running")
        self._cell = cell = Running(order=order, token=secrets.token_hex(8))
        cell.cpu_before, cell.clock_before = processes.usage(self._spared()).cpu_s, processes.cpu_clock(self._pid)
        self._line.send({**order, "seed": order["seed"] if self._pristine else None, "token": cell.token})
        if self._line.cut:
            self._cell, self._waiting = None, order  # the cell before shut the channel: a fresh program gets this one
            self._lose()

    def _copy(self) -> None:
        """Have the program copy itself; the copy gets a channel of its own, out of the next cell's reach."""
        self._enter("copying", _SETTLE_S)
        spare = Line()
        heard = self._line.hand_over({"t": "snapshot"}, [spare.there])
        self._drop_snapshot()  # meanwhile: to end one takes as long as to make one
        self._spare = spare
        if not heard:
            self._copied(0)

    def _hear_program(self) -> None:
        line = self._line
        line.push()
        for data in line.chunks():
            if self._cell is not None and self._cell.poisoned:
                continue
            try:
                for claim in line.claims(data):
                    self._weigh(claim)
                    if self._line is not line:  # the rest was said by a program that has ended
                        break
            except wire.WireError:
                self._poison()
            if self._line is not line:
                return
        if line.cut:
            self._poison()

    def _poison(self) -> None:
        """Stop listening to a program that does not keep to the form: only its end or the clock can end the cell."""
        self._line.forget()
        self.seen.add("poisoned")
        if self._cell is not None:
            self._cell.poisoned, self._cell.claim = True, None
        else:
            self._lose()

    def _weigh(self, claim: wire.Message) -> None:
        kind = claim.get("t")
        if kind == "up" and self._phase == "starting":
            self._enter("idle")
            if not self._announced:
                self._announced = True
                self._channel.sendall(wire.pack({"t": "up"}))
            self._begin()
        elif kind == "awake" and self._phase == "waking":
            self._enter("idle")
            self._begin()
        elif kind == "snapshot" and self._phase == "copying":
            self._copied(wire.number(claim, "pid") or 0)
        elif kind == "fork" and self._phase == "forking":
            self._forked(wire.number(claim, "pid") or 0, wire.text(claim, "why", 200) or "the program refused")
        elif kind == "done" and self._cell is not None and claim.get("token") == self._cell.token:
            self._done(self._cell, claim)
        elif kind == "read" and self._cell is not None and self._cell.order["t"] == "read":
            answer = {"data": wire.text(claim, "data", wire.MAX_CLAIM), "errno": wire.number(claim, "errno")}
            self._answer({**self._cell.measure(self._pid, self._spared()), "status": "ok", "state": "kept", **answer})
            self._settle()
        else:
            raise wire.WireError("out of turn")

    def _copied(self, pid: int) -> None:
        if pid not in self._spared() | {self._pid} and processes.wait_until_stopped(pid):
            self._snapshot, self._stamp = pid, processes.cpu_clock(pid)
        self._alone = self._snapshot != 0
        self._settle()

    def _forked(self, pid: int, why: str) -> None:
        refused: str | None = why
        if pid not in self._spared() | {self._pid} and processes.wait_until_stopped(pid):
            refused = self._kin.fork(self, pid, pristine=self._pristine)
        self._channel.sendall(wire.pack({"t": "done", "refused": refused}))
        self._settle()

    def _settle(self) -> None:
        """Stop the program and what the cell left running, unless an order comes at once: handlers run at any time."""
        self._enter("idle")
        if self._waiting is None and not select.select([self._channel], [], [], LINGER_S)[0]:
            processes.stop_all()
            self._frozen = True
        self._begin()

    def _drop_snapshot(self) -> None:
        if self._snapshot:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._snapshot, signal.SIGKILL)
                os.waitpid(self._snapshot, 0)
            self._snapshot = 0
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _done(self, cell: Running, claim: wire.Message) -> None:
        checked = cell.check(claim)
        if cell.order["final"]:
            cell.claim = checked  # believed when the exit status agrees
            return
        if checked["status"] == "memory":
            # As the watchdog does, a moment later: the state must not depend on which of the two limits came first.
            cell.claim = checked
            self._stop("memory")
            return
        state = "lost" if self._lost else "kept"
        self._lost, self._pristine, self._alone = False, False, True
        self._answer({**cell.measure(self._pid, self._spared()), **checked, "state": state})
        if cell.order["transaction"]:
            self._copy()
        else:
            self._settle()

    def _answer(self, answer: wire.Message) -> None:
        self._cell = None
        self.seen.add("filtered" if answer["signal"] == signal.SIGSYS else answer["status"])
        blank = {"value": None, "exc_type": None, "traceback": None, "exit_code": None}
        self._channel.sendall(wire.pack({**blank, **answer}))

    def _watch(self) -> None:
        cell = self._cell
        if self._announced and self._clock.has_news():
            self._channel.sendall(wire.pack({"t": "waiting"}))
        if cell is None:
            if self._clock.has_passed(self._patience, self._spared()):
                self._lose()
            return
        processes.reap_orphans({self._pid, self._snapshot} | self._kin.spared(self))
        if reason := cell.overrun(self._clock, self._start.limits.memory_bytes, self._spared()):
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        if self._cell is not None and self._cell.reason is None:
            self._cell.reason, self._cell.poisoned = reason, True
            os.kill(self._pid, signal.SIGKILL)
            self._program_ended()

    def _program_ended(self) -> None:
        cell = self._cell
        # What it said before it ended still counts, so look once more.
        self._hear_program()
        status, spent = processes.ended(self._pid)
        if self._phase == "starting":
            raise OSError(f"the program process ended with status {status} before it was confined")
        if cell is None or cell is not self._cell:
            forking = self._phase == "forking"
            self._lost = self._recover(lost=self._phase not in ("idle", "waking")) == "lost"
            if forking:
                self._refuse()
            self._begin()
            return
        cell.rss = max(cell.rss, int(spent))
        ended = cell.measure(self._pid, self._spared())
        outcome = cell.outcome(status)
        state = self._recover(lost=self._lost or not cell.order["transaction"], final=bool(cell.order["final"]))
        if not cell.order["final"]:
            ended["cpu"] = max(processes.usage(self._kin.spared(self)).cpu_s - cell.cpu_before, 0.0)
        self._answer({**ended, **outcome, "state": state})

    def _recover(self, *, lost: bool, final: bool = False) -> str:
        """Give the session an interpreter again: the copy from before the cell, or a fresh one."""
        keep = 0 if lost else self._snapshot
        others = self._kin.spared(self)
        if not processes.end_all(others | {keep}):
            raise OSError("processes of the program can't be killed")
        # Whoever else woke it has run it.
        slept = keep > 0 and processes.cpu_clock(keep) - self._stamp < _WAKE_S
        line = self._spare if slept and processes.is_stopped(keep) else None
        if line is not None:
            self._snapshot, self._spare = 0, None
        self._drop_snapshot()
        self._line.close()
        self._line, self._cell, self._lost = line or Line(), None, False
        if line is not None:
            self._adopt(keep)
            self._frozen, self._alone = True, True
            self._enter("idle")
            return "rolled_back"
        state = "rolled_back" if self._pristine and not lost else "lost"
        if not final:
            self.spawn()
        return state

    def _lose(self) -> None:
        """Start over with a program that does not even answer between cells; the next result says so."""
        if self._phase == "starting":
            raise OSError("the program process did not start")
        forking = self._phase == "forking"
        self._recover(lost=True)
        self._lost = True
        if forking:
            self._refuse()

    def _refuse(self) -> None:
        # The program that was to be copied has ended, and the one in its place is only starting.
        self._channel.sendall(wire.pack({"t": "done", "refused": "the program ended instead; its variables are lost"}))
