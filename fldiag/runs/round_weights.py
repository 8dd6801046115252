"""One stored round, and how it is read from a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fldiag.errors import FldiagError
from fldiag.models.state_dict import fit
from fldiag.params import Layout
from fldiag.results import files
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.pool import Weights
from fldiag.runs.run import Run

Buffers = dict[str, Tensor]


@dataclass(frozen=True)
class Stored:
    """The weights of one round: ``received`` [P] by the clients, ``clients`` [K, P] after training in the order of
    ``ids``, ``aggregated`` [P]. ``buffers`` go with ``aggregated``, ``client_buffers`` [K, ...] with ``clients``,
    ``received_buffers`` with ``received`` (None: not known, so the received model cannot be evaluated).

    ``starts`` [K, P] and ``start_buffers``: what each client received, where that differs; ``received`` is then the last global
    model."""

    round: int
    aggregated: Tensor
    ids: tuple[int, ...] = ()
    clients: Tensor | None = None
    received: Tensor | None = None
    buffers: Buffers = field(default_factory=dict)
    client_buffers: Buffers = field(default_factory=dict)
    received_buffers: Buffers | None = None
    notes: tuple[str, ...] = ()
    starts: Tensor | None = None
    start_buffers: Buffers = field(default_factory=dict)

    def client(self, j: int) -> Weights:
        """Row j of the clients with its buffers."""
        assert self.clients is not None
        return self.clients[j], {n: b[j] for n, b in self.client_buffers.items()} or self.buffers

    def finite(self) -> Stored:
        """The round without the clients whose weights are not numbers; the same object where there are none of them."""
        assert self.clients is not None
        return self.of(torch.isfinite(self.clients).all(1).nonzero().flatten().tolist())

    def of(self, rows: list[int]) -> Stored:
        """The round with these rows of the clients alone."""
        if self.clients is None or len(rows) == len(self.clients):
            return self
        return replace(
            self,
            ids=tuple(self.ids[j] for j in rows),
            clients=self.clients[rows],
            client_buffers={n: b[rows] for n, b in self.client_buffers.items()},
            starts=None if self.starts is None else self.starts[rows],
            start_buffers={n: b[rows] for n, b in self.start_buffers.items()},
        )

    @property
    def complete(self) -> bool:
        """Whether received and trained weights are there and can be evaluated."""
        return (
            self.clients is not None
            and self.received is not None
            and self.received_buffers is not None
        )

    @property
    def start(self) -> Weights:
        """What the clients received, with its buffers."""
        assert self.received is not None and self.received_buffers is not None
        return self.received, self.received_buffers

    def start_of(self, j: int) -> Weights:
        """What row j of the clients received, with its buffers."""
        if self.starts is None:
            return self.start
        return self.starts[j], {**self.start[1], **{n: b[j] for n, b in self.start_buffers.items()}}

    @property
    def moved(self) -> Tensor:
        """How far each client moved from what it received, [K, P]."""
        assert self.clients is not None and self.received is not None
        return self.clients - (self.received if self.starts is None else self.starts)


class RoundReader:
    """Reads one round of a run into Stored; keeps the buffers of the round before, which are those received next."""

    def __init__(self, run: Run, module: nn.Module, device: str, dtype: torch.dtype):
        self.run, self.module, self.device, self.dtype = run, module, torch.device(device), dtype
        self.layout = Layout.of(module)
        self._before: tuple[int, Buffers] = (
            -1 if 0 in run.rounds else 0,
            dict(module.named_buffers()),
        )

    def __call__(self, r: int) -> Stored:
        c = self.run.checkpoint(r)
        aggregated, buffers = self._state(c)
        received_buffers = self._received(r)
        self._before = r, buffers
        if c.clients is None or c.received is None:
            note = (
                "no client weights in this round"
                if c.clients is None
                else "what the clients received is not there"
            )
            # round 0 is before the first
            return Stored(r, aggregated, buffers=buffers, notes=(note,) if r else ())
        size = self.layout.size
        starts = c.received[None] if c.starts is None else c.starts
        if any(rows.shape[1:] != (size,) for rows in (c.clients, c.received[None], starts)):
            return Stored(
                r,
                aggregated,
                buffers=buffers,
                notes=(
                    f"client weights of shape {list(c.clients.shape)} do not fit the model of {size} parameters",
                ),
            )
        notes = (
            ()
            if received_buffers is not None
            else (
                f"the buffers that clients received are those of round {r - 1}, which cannot be read",
            )
        )
        return Stored(
            r,
            aggregated,
            tuple(c.client_ids),
            self._place(c.clients),
            self._place(c.received),
            buffers,
            {n: self._place(b) for n, b in c.buffers.items()},
            received_buffers,
            notes,
            None if c.starts is None else self._place(c.starts),
            {n: self._place(b) for n, b in c.start_buffers.items()},
        )

    def _state(self, c: Checkpoint) -> Weights:
        state, _ = fit(c.state, self.module)
        buffers = {n: state.get(n, b) for n, b in self.module.named_buffers()}
        return self._place(self.layout.row(state)), {n: self._place(b) for n, b in buffers.items()}

    def _received(self, r: int) -> Buffers | None:
        if not self._before[1]:
            return {}
        if self._before[0] != r - 1:
            try:
                first = r == 1 and 0 not in self.run.rounds
                start = (
                    dict(self.module.named_buffers())
                    if first
                    else self._state(self.run.checkpoint(r - 1))[1]
                )
            except FldiagError:
                return None
            self._before = r - 1, start
        return {n: self._place(b) for n, b in self._before[1].items()}

    def _place(self, t: Tensor) -> Tensor:
        return t.to(self.device, self.dtype if t.is_floating_point() else t.dtype)


def first_readable(run: Run, rounds: Sequence[int], model: Any, data: Any) -> Checkpoint:
    """The first round that can be read, which says model and data. Raises the first complaint when none can."""
    complaint: FldiagError | None = None
    for r in rounds:
        try:
            return replace(run.checkpoint(r), model=model, data=data)
        except FldiagError as error:
            complaint = complaint or error
    assert complaint is not None
    raise complaint


def sha256(path: Path) -> str | None:
    return files.sha256(path) if path.is_file() else None


def ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1..3, 7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}..{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
