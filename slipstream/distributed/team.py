"""Collective calls: process 0 has all processes call the same method.

Collective work must start in the same order in every process, so the commands are numbered. This
module knows no parts and no transport. `placement` makes a `Team`; `backend` and `engines` use it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol, TypeVar

from slipstream.errors import SlipstreamError
from slipstream.training.fsdp2 import Ranks
from slipstream.training.protocol import TrainFuture

T = TypeVar("T")

GRACE_SECONDS = 10.0
"""Seconds between a failure in another process and its report here. Usually process 0 fails for the
same reason in this time, with a better message."""


class Member(Protocol):
    """The engine of another process (`host.Host` runs there)."""

    def engine(self, call: str, method: str, *args: Any) -> Future[Any]:
        """Start a method of the engine; `call` is a unique id. The future's result is the method's
        result and the engine's counters."""
        ...

    def withdraw(self, call: str) -> None:
        """Cancel a call of the engine. Its result is then None."""
        ...


Send = Callable[[int, str, str, tuple[Any, ...]], Sequence[Future[Any]]]
"""Has every other process call a method of one of its parts, after all commands of lower numbers.
Arguments: number, part, method, arguments of the method. Returns one future per process."""


class Team:
    """Process 0 and the processes that it commands. In the other processes a team has no members.

    Collective calls are started one at a time, and none while weights are being sent to engines:
    only the loops call, and they do one thing at a time.

    `on_failure` is called with another process's failure if this process still waits after
    `GRACE_SECONDS`.
    """

    def __init__(
        self,
        ranks: Ranks,
        members: Sequence[Member] = (),
        send: Send = lambda number, part, method, args: (),
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.ranks = ranks
        self.members = members
        self._send = send
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._next = 0

    @contextlib.contextmanager
    def collective(self, part: str, method: str, *args: Any) -> Iterator[CollectiveCall]:
        """Have the other processes call `method` of their `part`. The body starts this process's
        share of the work."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            call = CollectiveCall(self._send(number, part, method, args), self._on_failure)
            try:
                yield call
            except BaseException as error:
                call.failed(error)
                raise


class CollectiveCall:
    """One call that all processes make; `remote` are the futures of the other processes."""

    def __init__(
        self, remote: Sequence[Future[Any]], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._remote = remote
        self._on_failure = on_failure
        self._done = threading.Event()
        for future in remote:
            future.add_done_callback(self._check)

    def _check(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            return

        def report_if_still_waiting() -> None:
            if not self._done.wait(GRACE_SECONDS):
                self._on_failure(error)

        threading.Thread(target=report_if_still_waiting, daemon=True).start()

    def failed(self, own: BaseException) -> None:
        """Call this after this process failed with `own`. If another process's failure is the
        likely cause, raises that one."""
        self._done.set()
        if isinstance(own, SlipstreamError) or not isinstance(own, Exception):
            return
        done, _ = wait(self._remote, GRACE_SECONDS, FIRST_EXCEPTION)
        for future in done:
            if isinstance(error := future.exception(), SlipstreamError):
                raise error from own

    def wait(self) -> None:
        """Wait for the other processes. Raises the first of their failures."""
        wait(self._remote)
        self._done.set()
        for future in self._remote:
            future.result()

    def joined(self, own: TrainFuture[T]) -> TrainFuture[T]:
        """A future of this process's result that completes when all processes are done. This
        process's failure is reported before the failures of others."""
        if not self._remote:
            return own
        both: Future[T] = Future()

        def finish() -> None:
            try:
                both.set_result(self._result(own))
            except BaseException as error:
                both.set_exception(error)

        threading.Thread(target=finish, daemon=True).start()
        return TrainFuture(both)

    def _result(self, own: TrainFuture[T]) -> T:
        try:
            result = own.wait()
        except BaseException as error:
            self.failed(error)
            raise
        self.wait()
        return result
