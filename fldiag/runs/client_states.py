"""What the clients of a run carry from round to round, on disk: memory holds no more than ``HELD``, however many clients.

A segment, ``state/clients-00000012.safetensors``, holds states that came since the last one:

==============  =============================================================
``ids`` [K]     the clients
``sums`` [K]    a CRC-32 of every client's row, verified whenever it is read
``of/NAME``     [K, ...] the clients' states of that name
==============  =============================================================

Segments are written whole and never changed, and a client's state is its row in the newest one that has it. Which segments
count, ``run.json`` and its journal say (``state``), so a kill at any moment leaves the states of the last stored round. When more
than half of all rows are superseded, the living rows of the emptiest segments move into the next one: so the disk never holds
much more than two rows a client, and a segment moves no more than a few times the rows that are new.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fldiag.errors import FldiagError, first_line
from fldiag.runs.index import STATES

State = dict[str, Tensor]
#: Bytes of new states that wait in memory between stored rounds; when there are more, all go to the disk.
HELD = 256 * 2**20


class ClientStates(Mapping[int, State]):
    """The states of the clients that have trained: client -> name -> tensor, read when they are asked for.

    Args:
        folder: Of the run.
        listed: ``state`` of its run.json.
        verified: Says where a file of the run is after verifying it. Every row is verified again when it is read.

    Raises:
        FldiagError: A file is missing or is not the one that the run wrote; from what reads: a row is damaged.
    """

    def __init__(self, folder: Path, listed: Mapping[str, str], verified: Callable[[str], Path]):
        self._folder, self._number = folder, 0
        self._new: dict[int, State] = {}  # in memory, until ``flush``
        self._segment_of: dict[int, str] = {}  # client -> its segment
        self._living: dict[
            str, dict[int, int]
        ] = {}  # segment -> client -> row, of rows that none superseded
        self._sizes: dict[str, int] = {}  # segment -> rows
        for key, name in sorted(listed.items()):
            if (match := re.fullmatch(STATES, key)) is not None:
                self._number = int(match[1])
                with _opened(verified(name)) as file:
                    self._add(name, file.get_tensor("ids").tolist())

    def __len__(self) -> int:
        return len(self._segment_of.keys() | self._new.keys())

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._segment_of.keys() | self._new.keys()))

    def __getitem__(self, client: int) -> State:
        return (
            self._new[client]
            if client in self._new
            else self._read(self._segment_of[client], [client])[client]
        )

    @property
    def listed(self) -> dict[str, str]:
        """The segments that hold living rows, for ``state`` of run.json."""
        return {Path(name).stem: name for name in self._sizes}

    @property
    def waiting(self) -> int:
        """Bytes of the states that are not on disk yet."""
        return sum(tensor.nbytes for state in self._new.values() for tensor in state.values())

    def update(self, states: Mapping[int, State]) -> None:
        """The new states of some clients; in memory until ``flush``."""
        self._new.update(states)

    def flush(
        self, write_file: Callable[[str, Callable[[Any], Any]], None], drop: Callable[[str], None]
    ) -> None:
        """Write the new states as a segment. ``write_file`` writes a file of the run, ``drop`` unlists a superseded one."""
        if not self._new:
            return
        for i in self._new.keys() & self._segment_of.keys():
            del self._living[self._segment_of.pop(i)][i]
        worn, states = list(self._worn()), dict(self._new)
        for name in worn:
            states |= self._read(name, self._living[name])
        ids = sorted(states)
        rows = {
            f"of/{name}": torch.stack([states[i][name].detach().cpu() for i in ids])
            for name in states[ids[0]]
        }
        sums = [
            _sum(i, {name: values[j] for name, values in rows.items()}) for j, i in enumerate(ids)
        ]
        content = save({"ids": torch.tensor(ids), "sums": torch.tensor(sums), **rows})
        self._number += 1
        name = f"state/clients-{self._number:08d}.safetensors"
        write_file(name, lambda file: file.write(content))
        self._new.clear()
        self._add(name, ids)
        for name in worn:
            del self._living[name], self._sizes[name]
            drop(name)

    def _add(self, name: str, ids: list[int]) -> None:
        for i in ids:
            if i in self._segment_of:
                del self._living[self._segment_of[i]][i]
            self._segment_of[i] = name
        self._living[name] = {i: j for j, i in enumerate(ids)}
        self._sizes[name] = len(ids)

    def _worn(self) -> Iterator[str]:
        """Segments to be emptied: those without a living row, and the emptiest while half of all rows are superseded."""
        rows, living = sum(self._sizes.values()) + len(self._new), len(self)
        for name in sorted(
            self._sizes, key=lambda name: len(self._living[name]) / self._sizes[name]
        ):
            if self._living[name] and rows <= 2 * living:
                return
            rows -= self._sizes[name] - len(self._living[name])
            yield name

    def _read(self, name: str, clients: Iterable[int]) -> dict[int, State]:
        path, states = self._folder / name, {}
        with _opened(path) as file:
            names = [key for key in file.keys() if key.startswith("of/")]  # noqa: SIM118
            for i in clients:
                j = self._living[name][i]
                # Clones: a slice holds on to the whole file.
                states[i] = {key[3:]: file.get_slice(key)[j : j + 1][0].clone() for key in names}
                if int(file.get_slice("sums")[j : j + 1][0]) != _sum(i, states[i]):
                    raise FldiagError(
                        f"{path} is damaged: the checksum of client {i}'s state does not match",
                        "restore the file from a copy, or train again",
                    )
        return states


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A segment, for reading. Raises FldiagError for a file that is missing or is none."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, RuntimeError) as error:
        raise FldiagError(
            f"{path} cannot be read: {first_line(error)}",
            "restore the file from a copy, or train again",
        ) from None


def _sum(client: int, state: Mapping[str, Tensor]) -> int:
    """CRC-32 of a client's number and state."""
    checksum = zlib.crc32(client.to_bytes(8, "little"))
    for name in sorted(state):
        checksum = zlib.crc32(
            state[name].contiguous().reshape(-1).view(torch.uint8).numpy().data, checksum
        )
    return checksum
