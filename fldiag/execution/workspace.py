"""Where one diagnostic is computed: it runs items on an executor and shows progress.

``fldiag.diagnose`` opens a ``Workspace`` around a diagnostic's function. The function asks for ``workspace()`` and maps a pure
function over items; called directly from Python, it has one of this process that shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fldiag.execution.pool import Pool, Serial
from fldiag.execution.pools import open_pool

#: Progress is shown as so many steps of a diagnostic.
STEPS = 10_000


class Workspace:
    """A context: leaving it ends the workers.

    Args:
        executor: see ``fldiag.execution.executor.parse_executor``.
        progress: called with (done, total, text).
    """

    def __init__(
        self,
        executor: Any = "serial",
        progress: Callable[[int, int, str], None] | None = None,
    ):
        self.executor, self.progress = executor, progress
        self.is_used = False  # whether anything was mapped
        self._span, self._text = (0.0, 1.0), ""
        self._pool: Pool | None = None
        self._shared: Any = None

    def map(
        self,
        function: Callable[..., Any],
        shared: Any,
        items: Sequence[Any],
        /,
        *,
        name: Callable[[Any], str] = str,
        **options: Any,
    ) -> Iterator[Any]:
        """``function(shared, item, **options)`` of every item, in their order, each as early as that allows.

        Args:
            function: pure, and found by its name in a module. An exception that it returns says what could not be computed.
            shared: what all items need; it goes to a worker once.
            items: small, and picklable.
            name: what an item is called in progress and messages.
            options: further arguments of the function.

        >>> list(workspace().map(divmod, 7, [2, 3]))
        [(3, 1), (2, 1)]
        """
        self.is_used = True
        units = [(function, item, options, name(item)) for item in items]
        results = self._pool_of(shared, len(units)).map(units) if units else iter(())
        for done, item in enumerate(items):
            with self.part(done, len(items), name(item)):
                value = next(results)
            self.show(done + 1, len(items), name(item))
            yield value

    @contextmanager
    def part(self, number: int, total: int, text: str) -> Iterator[None]:
        """Progress within the block is that of part ``number`` (from 0) of so many equal parts."""
        before = self._span, self._text
        first, last = self._span
        width = (last - first) / max(total, 1)
        self._span = (first + width * number, first + width * (number + 1))
        self._text = f"{before[1]}{text}, " if text else before[1]
        if text:
            self._show(0.0, f"{before[1]}{text}")
        try:
            yield
        finally:
            self._span, self._text = before

    def show(self, done: int, total: int, text: str) -> None:
        """Progress within the part at hand."""
        self._show(min(done / max(total, 1), 1.0), f"{self._text}{text}")

    def _show(self, fraction: float, text: str) -> None:
        if self.progress is not None:
            first, last = self._span
            self.progress(round(STEPS * (first + (last - first) * fraction)), STEPS, text)

    def _pool_of(self, shared: Any, count: int) -> Pool:
        """The pool of earlier items where these share the same; one item alone needs no other process."""
        if self._pool is not None and self._shared is shared:
            return self._pool
        self._close_pool()
        pool = open_pool(
            self.executor, _perform_item, shared, name=lambda unit: unit[3], most=count
        )
        # this process has nothing to start, and would keep alive what the items share
        if not isinstance(pool, Serial):
            self._pool, self._shared = pool, shared
        return pool

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = self._shared = None

    def __enter__(self) -> Workspace:
        self._token = _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)
        self._close_pool()


def _perform_item(shared: Any, unit: tuple[Callable[..., Any], Any, dict[str, Any], str]) -> Any:
    function, item, options, _ = unit
    return function(shared, item, **options)


_current: ContextVar[Workspace] = ContextVar("workspace", default=Workspace())  # noqa: B039


def workspace() -> Workspace:
    """The workspace of the diagnostic at hand; outside of any, one that computes in this process and shows nothing."""
    return _current.get()
