"""Whose trained weights a checkpoint holds besides the global ones."""

from __future__ import annotations

from collections.abc import Iterable

from fldiag.config import Config

#: With ``checkpoint.clients = "auto"`` every stored round holds its clients while all of them together stay below this.
SMALL = 100_000_000


def stored_rounds(config: Config) -> int:
    """How many rounds stay stored: every ``checkpoint.every``-th and the last, or the last few."""
    return min(config.rounds, -(-config.rounds // config.checkpoint.every) + config.checkpoint.keep)


def every_round(config: Config, model_bytes: int) -> bool:
    """Whether all stored rounds hold clients' weights, rather than the last alone or none."""
    if config.checkpoint.clients != "auto":
        return config.checkpoint.clients != "none"
    return stored_rounds(config) * config.clients.per_round * model_bytes <= SMALL


def clients(config: Config, model_bytes: int, t: int, sampled: Iterable[int]) -> list[int]:
    """The clients whose trained weights the checkpoint of round t (from 1) holds.

    Args:
        config: what is trained.
        model_bytes: size of one client's weights.
        t: the round.
        sampled: the clients that train in it.
    """
    keep = config.checkpoint.clients
    if keep == "none" or (
        keep == "auto" and t < config.rounds and not every_round(config, model_bytes)
    ):
        return []
    if keep == "all":
        return list(range(config.clients.total))
    return sorted(keep) if isinstance(keep, tuple) else sorted(sampled)


def bytes_of_clients(config: Config, model_bytes: int) -> int:
    """What the clients' weights take on disk in the whole run; a file that holds any holds what they received, too."""
    with_clients = (
        stored_rounds(config)
        if every_round(config, model_bytes)
        else 1
        if config.checkpoint.clients == "auto"
        else 0
    )
    each = len(clients(config, model_bytes, config.rounds, range(config.clients.per_round)))
    return with_clients * (each + 1) * model_bytes if each else 0


def described(config: Config, model_bytes: int) -> str:
    """For the forecast and the start of a run: which rounds hold whose weights, and why."""
    keep, size = config.checkpoint.clients, bytes_of_clients(config, model_bytes) / 1e6
    if keep == "none":
        return "checkpoints hold no client's weights (checkpoint.clients = none)"
    whose = {
        "auto": "the sampled clients'",
        "sampled": "the sampled clients'",
        "all": "all clients'",
    }.get(str(keep), f"{len(keep)} clients'")
    if every_round(config, model_bytes):
        return (
            f"every stored round holds {whose} weights: {size:,.0f} MB in all (checkpoint.clients)"
        )
    return (
        f"the last round holds {whose} weights: {size:,.0f} MB; in every stored round they would take "
        f"{size * stored_rounds(config):,.0f} MB (checkpoint.clients = sampled)"
    )
