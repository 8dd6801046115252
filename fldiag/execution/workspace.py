"""Where one diagnostic is computed: it runs items on an executor, shows progress, and keeps what is finished.

``fldiag.diagnose`` opens a ``Workspace`` around a diagnostic's function. The function asks for ``workspace()`` and maps a pure
function over items; called directly from Python, it has one of this process that shows and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from fldiag.execution.pool import Pool, Serial
from fldiag.execution.pools import open_pool

#: Progress is shown as so many steps of a diagnostic.
STEPS = 10_000


class Finished(Protocol):
    """Finished items by their names (``fldiag.results.finished_items.FinishedItems``)."""

    def __contains__(self, name: str) -> bool: ...

    def __getitem__(self, name: str) -> Any: ...

    def keep(self, name: str, value: Any) -> None: ...

    def replace(self, names: Sequence[str], name: str, value: Any) -> None: ...

    def names(self) -> list[str]: ...

    def save(self) -> None: ...


class Workspace:
    """A context: leaving it ends the workers; an exception, Ctrl-C above all, leaves what is finished on the disk.

    Args:
        executor: see ``fldiag.execution.executor.parse_executor``.
        progress: called with (done, total, text).
        finished: where finished items are kept; None keeps nothing.
    """

    def __init__(
        self,
        executor: Any = "serial",
        progress: Callable[[int, int, str], None] | None = None,
        finished: Finished | None = None,
    ):
        self.executor, self.progress, self.finished = executor, progress, finished
        self.is_used = False  # whether anything was mapped
        self._span, self._text = (0.0, 1.0), ""
        self._names: set[str] = set()
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
        kind: str = "",
        **options: Any,
    ) -> Iterator[Any]:
        """``function(shared, item, **options)`` of every item, in their order, each as early as that allows.

        Args:
            function: pure, and found by its name in a module. Its results are nests of dict, list, tuple, str, numbers, None,
                arrays and tensors; an exception that it returns says what could not be computed, and is not kept.
            shared: what all items need; it goes to a worker once.
            items: small, and picklable.
            name: what an item is called in progress and messages; with ``kind`` it tells items of a diagnostic apart.
            kind: by default the function's name.
            options: further arguments of the function.

        Returns:
            The results, read from what was kept where an item was finished before.

        Raises:
            ValueError: two items of a diagnostic have one name.

        >>> list(workspace().map(divmod, 7, [2, 3]))
        [(3, 1), (2, 1)]
        """
        self.is_used = True
        names = [f"{kind or function.__name__}: {name(item)}" for item in items]
        self._check_new(names)
        missing = [i for i, text in enumerate(names) if not self._is_finished(text)]
        units = [(function, items[i], options, name(items[i])) for i in missing]
        results = self._pool_of(shared, len(units)).map(units) if units else iter(())
        done = 0
        for item, text in zip(items, names, strict=True):
            if self._is_finished(text):
                assert self.finished is not None
                yield self.finished[text]
                continue
            with self.part(done, len(missing), name(item)):
                value = next(results)
            done += 1
            if self.finished is not None and not isinstance(value, Exception):
                self.finished.keep(text, value)
            self.show(done, len(missing), name(item))
            yield value

    def result(self, name: str, compute: Callable[[], Any]) -> Any:
        """``compute()``, or what it was when it was finished before. What it kept by itself is then no longer needed.

        An exception that ``compute`` returns is not kept, as in ``map``.
        """
        if self.finished is None:
            return compute()
        self._check_new([name])
        if name in self.finished:
            return self.finished[name]
        before = set(self._names)
        value = compute()
        if not isinstance(value, Exception):
            parts = [n for n in self.finished.names() if n in self._names - before]
            self.finished.replace(parts, name, value)
        return value

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

    def _check_new(self, names: Sequence[str]) -> None:
        if len(set(names)) < len(names) or not self._names.isdisjoint(names):
            raise ValueError("two items of one name: one's result would be read as the other's")
        if self.finished is not None:
            self._names.update(names)

    def _is_finished(self, name: str) -> bool:
        return self.finished is not None and name in self.finished

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

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        _current.reset(self._token)
        self._close_pool()
        if error is not None and self.finished is not None:
            self.finished.save()


def _perform_item(shared: Any, unit: tuple[Callable[..., Any], Any, dict[str, Any], str]) -> Any:
    function, item, options, _ = unit
    return function(shared, item, **options)


_current: ContextVar[Workspace] = ContextVar("workspace", default=Workspace())  # noqa: B039


def workspace() -> Workspace:
    """The workspace of the diagnostic at hand; outside of any, one that computes in this process, shows and keeps nothing."""
    return _current.get()
