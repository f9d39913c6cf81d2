"""The processes that work together, as the first one sees them: whom to tell, and in which order.

What computes together has to be begun in the same order everywhere, so orders are numbered. Knows
no parts and no transport. Made by `placement`; used by `backend` and `engines`.
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
"""For so long the first process may go on after another one failed: mostly it fails likewise, and
can say it better."""


class Member(Protocol):
    """The engine of another process (`host.Host`, elsewhere)."""

    def engine(self, call: str, method: str, *given: Any) -> Future[Any]:
        """Call a method of its engine, now; what it returns, and the engine's counters."""
        ...

    def withdraw(self, call: str) -> None:
        """Cancel a call of the engine: it comes to its end, with nothing."""
        ...


Tell = Callable[[int, str, str, tuple[Any, ...]], Sequence[Future[Any]]]
"""Has all others call a method of one of their parts when all orders of lower numbers are done."""


class Team:
    """This process and those that it takes along: none where it is one of those itself.

    Work of all is begun by one after the other, and not while weights are on their way to engines:
    the loops do one thing at a time, and nothing else calls.

    `on_failure` is told of what went wrong elsewhere while this process waits for it in vain.
    """

    def __init__(
        self,
        ranks: Ranks,
        members: Sequence[Member] = (),
        tell: Tell = lambda number, part, method, given: (),
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.ranks = ranks
        self.members = members
        self._tell = tell
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._next = 0

    @contextlib.contextmanager
    def together(self, part: str, method: str, *given: Any) -> Iterator[Together]:
        """The others call `method` of their `part`; the body begins what this process does."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            begun = Together(self._tell(number, part, method, given), self._on_failure)
            try:
                yield begun
            except BaseException as error:
                begun.failed(error)
                raise


class Together:
    """Work that all processes do at the same time."""

    def __init__(
        self, elsewhere: Sequence[Future[Any]], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._elsewhere = elsewhere
        self._on_failure = on_failure
        self._over = threading.Event()
        for future in elsewhere:
            future.add_done_callback(self._look)

    def _look(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            return

        def still_waiting() -> None:
            if not self._over.wait(GRACE_SECONDS):
                self._on_failure(error)

        threading.Thread(target=still_waiting, daemon=True).start()

    def failed(self, own: BaseException) -> None:
        """This process's part went wrong. Raises what went wrong elsewhere, where that is why."""
        self._over.set()
        if isinstance(own, SlipstreamError) or not isinstance(own, Exception):
            return
        done, _ = wait(self._elsewhere, GRACE_SECONDS, FIRST_EXCEPTION)
        for future in done:
            if isinstance(error := future.exception(), SlipstreamError):
                raise error from own

    def wait(self) -> None:
        """Until the others are done, too. Raises what one of them raised."""
        wait(self._elsewhere)
        self._over.set()
        for future in self._elsewhere:
            future.result()

    def joined(self, own: TrainFuture[T]) -> TrainFuture[T]:
        """This process's result, when all are done; its own failure comes first."""
        if not self._elsewhere:
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
