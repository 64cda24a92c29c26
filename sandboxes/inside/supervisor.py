"""Supervises one session from its pid 1: takes orders from the host, hands cells to the program, enforces the limits.

Pid 1 owns the program's clock, its memory and its end. It validates the form of what a program says and believes
nothing else of it.
"""

import os
import select
import signal
import time
from typing import Final

from agentrl.sandboxes.inside import kernel, processes, program, wire
from agentrl.sandboxes.inside.account import Account
from agentrl.sandboxes.inside.clock import LINGER_S, SessionClock
from agentrl.sandboxes.inside.interfaces import HostChannel, SessionManager, SessionSetup
from agentrl.sandboxes.inside.program_channel import ProgramChannel
from agentrl.sandboxes.inside.running_cell import RunningCell
from agentrl.sandboxes.inside.snapshot import Snapshot

POLL_MS: Final = 20
"""Interval of the checks of a busy program [milliseconds]."""
_REPLY_S: Final = 3.0
_STARTUP_S: Final = 20.0


class Supervisor:
    """The state machine of one session: starting, idle, waking, copying, forking, or running a cell."""

    def __init__(
        self, host: HostChannel, setup: SessionSetup, manager: SessionManager, *, channel: ProgramChannel | None = None
    ) -> None:
        """Take over the host's channel; :meth:`spawn` or :meth:`attach` gives the session its program.

        Args:
            host: Where orders come from.
            setup: Descriptors and settings of the session.
            manager: Of the sessions in its pid namespace.
            channel: To the program, where that runs already.
        """
        self._host = host
        self._manager = manager
        self.statuses: set[object] = set()
        """Statuses of the cells so far, and ``poisoned`` where the program broke the protocol."""
        self._setup = setup
        self._decoder = wire.Decoder(wire.MAX_ORDER)
        self._program = channel or ProgramChannel()
        self._phase, self._deadline_s, self._clock = "starting", 0.0, SessionClock()
        self._account = Account(setup.limits.memory_bytes)
        self._announced = False
        self._pending: RunningCell | None = None
        self._cell: RunningCell | None = None
        self._overdrawn: str | None = None
        self._snapshot = Snapshot()
        self._pristine = self._copyable = True
        self._lost = self._frozen = False

    @property
    def idle(self) -> bool:
        """Nothing can happen before the host sends an order: no cell runs and no reply is due."""
        return self._phase == "idle"

    def register(self, poll: select.poll) -> None:
        """Add the descriptors to wait for."""
        poll.register(self._host, select.POLLIN)
        self._program.register(poll)

    def handle(self, ready: dict[int, int]) -> None:
        """Handle the events that have come."""
        program = self._program
        if self._host.fileno() in ready and not self._read_orders():
            self._manager.end_session()
            return
        # Claims before the exit: a result that was written just before the program ended still counts.
        if self._program.is_ready(ready):
            self._read_claims()
        # What happened above may have replaced the program, and its descriptor may have got the old one's number.
        if program is self._program and program.has_ended(ready):
            self._program_ended()
        if not self.idle:
            self._watch()

    def suspend(self) -> frozenset[int]:
        """Stop every process of the session until its next order, and return which they are."""
        processes.signal_every(signal.SIGSTOP)
        self._frozen = True
        self._account.pause(self._excluded())
        return frozenset(processes.list_pids(self._manager.other_pids()))

    def resume(self) -> None:
        """Account for the session again, and recover where its program was killed while it was suspended."""
        self._account.resume(self._program.pid, self._excluded())
        if processes.has_ended(self._program.pid):
            self._program_ended()

    def attach(self, pid: int, *, pristine: bool) -> None:
        """Supervise a stopped copy of another session's program, instead of a program of its own."""
        self._announced = True
        self._program.track(pid)
        self._pristine, self._frozen = pristine, True
        self._enter("idle")

    def end(self) -> None:
        """Kill the session's processes and close its descriptors."""
        self._end_all_but(self._manager.other_pids())
        self.close()

    def close(self) -> None:
        """Close the session's descriptors; the caller ends its processes."""
        self._program.close()
        self._snapshot.close()

    def spawn(self) -> None:
        """Start a fresh program."""
        self._enter("starting", _STARTUP_S)
        # Until a fresh program is ready it runs nothing but our code.
        self._account.pause(self._excluded())
        pid = kernel.clone(0)
        if pid == 0:
            program.main(self._program.program_end, self._setup)
        self._setup.spawned()
        self._program.track(pid)
        self._pristine, self._frozen = True, False

    def _enter(self, phase: str, seconds: float = 0.0) -> None:
        self._phase, self._deadline_s = phase, seconds
        self._clock.start()

    def _excluded(self) -> frozenset[int]:
        """Return the processes that are not the running program's: its snapshot, and the other sessions'."""
        return self._manager.other_pids() | ({self._snapshot.pid} if self._snapshot.pid else frozenset())

    def _end_all_but(self, keep: frozenset[int]) -> None:
        if not processes.end_all(keep):
            raise OSError("processes of the program can't be killed")

    def _read_orders(self) -> bool:
        """Read orders of the host, and return whether the host is still there."""
        data = self._host.recv(1 << 18)
        if not data:
            return False
        for order in self._decoder.feed(data):
            if order["t"] == "kill":
                if self._cell is not None:
                    self._stop(wire.text(order, "reason", 100) or "killed")
            else:
                self._pending = RunningCell(order=order)
                self._start_order()
        # An order that came too late for its cell, such as a kill, kept the session from being stopped.
        if self.idle and not self._frozen:
            self._become_idle()
        return True

    def _start_order(self) -> None:
        """Start the pending order, if there is one and the program is idle, and continue what was stopped."""
        cell = self._pending
        if cell is None or self._phase != "idle":
            return
        if self._overdrawn is not None and cell.order["t"] == "run":
            self._pending, ended = None, {"status": self._overdrawn, "state": "lost" if self._lost else "rolled_back"}
            self._overdrawn, self._lost = None, False
            self._answer({**self._measure(cell), **ended})
            return
        frozen, self._frozen = self._frozen, False
        if frozen and processes.has_signals(self._program.pid):
            # What an alarm ends is not the next cell's doing: the cell begins when the handler has ended.
            self._enter("waking", _REPLY_S)
            self._program.send({"t": "wake"})
        else:
            self._dispatch(cell)
        if frozen:
            # After the order, so that the program wakes once and finds it.
            processes.continue_all(self._excluded())

    def _dispatch(self, cell: RunningCell) -> None:
        """Send the program an order, or first have it make the snapshot that the order needs."""
        order = cell.order
        if order["t"] == "fork":
            self._pending = None
            self._enter("forking", _REPLY_S)
            if not self._manager.request_fork(self._program):
                self._fork_made(0, "its program can't be sent the order to copy itself")
            return
        # A pristine program needs no snapshot, since a fresh one is the same; one with threads can't be copied.
        if order["transaction"] and not self._pristine and not self._snapshot.pid and self._copyable:
            self._take_snapshot()
            return
        if not order["transaction"]:
            self._snapshot.drop()
        self._enter("running")
        self._cell, self._pending, self._account.rss = cell, None, 0
        self._program.send({**order, "seed": order["seed"] if self._pristine else None, "token": cell.token})
        # The cell before shut the channel: a fresh program gets this one.
        if self._program.shut:
            self._cell, self._pending = None, cell
            self._restart()

    def _take_snapshot(self) -> None:
        self._enter("copying", _REPLY_S)
        if not self._snapshot.request(self._program):
            self._snapshot_made(0)

    def _read_claims(self) -> None:
        channel = self._program
        channel.flush()
        for data in channel.read():
            # Read on and drop it: a full channel would block the program, which could not even exit then.
            if self._cell is not None and self._cell.poisoned:
                continue
            try:
                for claim in channel.decode(data):
                    self._handle_claim(claim)
                    # A claim can end the program: the rest comes from a program that is gone.
                    if self._program is not channel:
                        break
            except wire.WireError:
                self._poison()
            if self._program is not channel:
                return
        if channel.shut:
            self._poison()

    def _poison(self) -> None:
        """Ignore a program that broke the protocol: only its exit or the clock can end the cell."""
        self._program.reset()
        self.statuses.add("poisoned")
        if self._cell is not None:
            self._cell.poisoned, self._cell.claim = True, None
        else:
            self._restart()

    def _handle_claim(self, claim: wire.Message) -> None:
        kind = claim.get("t")
        if kind == "up" and self._phase == "starting":
            self._enter("idle")
            self._account.resume(self._program.pid, self._excluded(), self._pending)
            if not self._announced:
                self._announced = True
                self._host.sendall(wire.pack({"t": "up"}))
            self._start_order()
        elif kind == "awake" and self._phase == "waking":
            self._enter("idle")
            self._start_order()
        elif kind == "snapshot" and self._phase == "copying":
            self._snapshot_made(wire.number(claim, "pid") or 0)
        elif kind == "fork" and self._phase == "forking":
            self._fork_made(wire.number(claim, "pid") or 0, wire.text(claim, "why", 200) or "the program refused")
        elif kind == "done" and self._cell is not None and claim.get("token") == self._cell.token:
            self._done(self._cell, claim)
        elif kind == "read" and self._cell is not None and self._cell.order["t"] == "read":
            answer = {"data": wire.text(claim, "data", wire.MAX_CLAIM), "errno": wire.number(claim, "errno")}
            self._answer({**self._measure(self._cell), "status": "ok", "state": "kept", **answer})
            self._become_idle()
        else:
            raise wire.WireError("out of turn")

    def _is_copy(self, pid: int) -> bool:
        # The number is the program's claim: it must be a child that has stopped, and none that has a role already.
        return pid not in self._excluded() | {self._program.pid} and processes.wait_until_stopped(pid)

    def _snapshot_made(self, pid: int) -> None:
        if self._is_copy(pid) and self._snapshot.keep(pid):
            self._account.settle(self._program.pid, self._excluded(), self._pending)
        self._copyable = self._snapshot.pid != 0
        self._become_idle()

    def _fork_made(self, pid: int, why: str) -> None:
        refused = self._manager.complete_fork(pid, pristine=self._pristine) if self._is_copy(pid) else why
        self._host.sendall(wire.pack({"t": "done", "refused": refused}))
        self._become_idle()

    def _become_idle(self) -> None:
        """Stop the program and what the cell left running, unless an order comes at once."""
        self._enter("idle")
        # Signal handlers and background processes would run at any time, and use CPU time that no cell accounts for.
        if self._pending is None and not select.select([self._host], [], [], LINGER_S)[0]:
            processes.signal_every(signal.SIGSTOP)
            self._frozen = True
        self._start_order()

    def _done(self, cell: RunningCell, claim: wire.Message) -> None:
        checked = cell.validate(claim)
        # The result of a one-shot program is believed when its exit status agrees.
        if cell.order["final"]:
            cell.claim = checked
            return
        if checked["status"] == "memory":
            # As the watchdog does, a moment later: the state must not depend on which of the two limits came first.
            cell.claim = checked
            self._stop("memory")
            return
        state = "lost" if self._lost else "kept"
        self._lost, self._pristine, self._copyable = False, False, True
        self._answer({**self._measure(cell), **checked, "state": state})
        # The next cell will probably be a transaction as well: its snapshot is made while the host thinks.
        if cell.order["transaction"]:
            self._take_snapshot()
        else:
            self._become_idle()

    def _measure(self, cell: RunningCell) -> wire.Message:
        used = self._account.measure(self._program.pid, self._excluded())
        return {"t": "done", "wall": time.monotonic() - cell.started, "signal": None, **used}

    def _answer(self, answer: wire.Message) -> None:
        self._cell = None
        self._account.settle(self._program.pid, self._excluded())
        self.statuses.add("filtered" if answer["signal"] == signal.SIGSYS else answer["status"])
        self._host.sendall(wire.pack({**wire.NOTHING, **answer}))

    def _watch(self) -> None:
        if self._announced and self._clock.heartbeat_due():
            self._host.sendall(wire.pack({"t": "waiting"}))
        processes.reap({self._program.pid, self._snapshot.pid} | self._manager.other_pids())
        # A fresh program has run nothing of the session yet, and what the next cell owes is charged once.
        cell, copying = self._cell or self._pending, self._phase in ("copying", "forking")
        charged = self._cell is not None or (self._phase != "starting" and self._overdrawn is None)
        if charged and (reason := self._account.overrun(cell, self._excluded(), copying=copying)):
            self._stop(reason)
        # Between cells a program only has to reply; one that does not is replaced.
        elif self._cell is None and self._clock.has_passed(self._deadline_s, self._excluded()):
            self._restart()

    def _stop(self, reason: str) -> None:
        if self._cell is None:
            self._overdrawn = reason
            self._recover_between_cells()
        elif self._cell.reason is None:
            self._cell.reason, self._cell.poisoned = reason, True
            os.kill(self._program.pid, signal.SIGKILL)
            self._program_ended()

    def _program_ended(self) -> None:
        cell = self._cell
        # What the program wrote before it ended still counts, so read once more.
        self._read_claims()
        status, max_rss = processes.take_status(self._program.pid)
        if self._phase == "starting":
            raise OSError(f"the program process ended with status {status} before it was confined")
        # It ended between cells, or those claims have ended its cell: nobody waits for an outcome.
        if cell is None or cell is not self._cell:
            self._recover_between_cells()
            return
        self._account.rss = max(self._account.rss, max_rss)
        ended = self._measure(cell)
        outcome = cell.outcome(status)
        state = self._recover(lost=self._lost or not cell.order["transaction"], final=bool(cell.order["final"]))
        # Now everything that the cell started has been reaped, and its CPU time is known.
        if not cell.order["final"]:
            ended["cpu"] = self._account.usage(self._manager.other_pids()).cpu_s
        self._answer({**ended, **outcome, "state": state})

    def _recover_between_cells(self) -> None:
        self._lost = self._recover(lost=self._lost or self._phase not in ("idle", "waking")) == "lost"
        self._start_order()

    def _recover(self, *, lost: bool, final: bool = False) -> str:
        """Continue with the snapshot or with a fresh program, and return the state of the variables."""
        keep = 0 if lost else self._snapshot.pid
        self._end_all_but(self._manager.other_pids() | {keep})
        channel = self._snapshot.take() if keep else None
        self._snapshot.drop()
        self._program.close()
        self._program, self._cell, self._lost = channel or ProgramChannel(), None, False
        if channel is not None:
            self._program.track(keep)
            self._frozen, self._copyable = True, True
            self._enter("idle")
            return "rolled_back"
        # The host waits for the answer to its fork order, which the program will not give any more.
        if self._phase == "forking":
            refused = "the program ended instead; its variables are lost"
            self._host.sendall(wire.pack({"t": "done", "refused": refused}))
        state = "rolled_back" if self._pristine and not lost else "lost"
        if final:
            self._enter("idle")  # nothing comes any more but the session's end
        else:
            self.spawn()
        return state

    def _restart(self) -> None:
        """Replace a program that does not even answer between cells; the next result says so."""
        if self._phase == "starting":
            raise OSError("the program process did not start")
        self._recover(lost=True)
        self._lost = True
