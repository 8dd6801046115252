"""From a run or checkpoint to the Problem that a diagnostic sees, and its parts: data, model, partition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fldiag import data, losses, models, registry
from fldiag.data import Dataset, partition, sources
from fldiag.data.arrays import count_classes, unpack
from fldiag.data.given import dataset_of
from fldiag.errors import FldiagError, unknown
from fldiag.models import State, lora, pretrained
from fldiag.params import unwrap_model
from fldiag.problem.data import arguments, as_slice, describe, is_split, same
from fldiag.problem.module import copy_module
from fldiag.problem.problem import Problem
from fldiag.results.files import digest
from fldiag.runs.checkpoint import Checkpoint, pack, read_tensors
from fldiag.runs.run import Run
from fldiag.sections import DataSection

#: The file of the frozen weights.
BASE = "base.safetensors"


def open_problem(
    target: Run | Checkpoint,
    *,
    slice: str = "train",
    samples: int | None = None,
    client: int | None = None,
    root: str | None = None,
    download: bool = False,
    normalise: Any = None,
    loss: str | Callable[..., Any] | None = None,
    device: str = "auto",
    **options: Any,
) -> Problem:
    """The loss surface of stored weights on a slice.

    Args:
        target: The checkpoint; of a run its last.
        slice: See ``fldiag.data.take``.
        samples: Likewise.
        client: The trained weights of that client instead of the aggregated ones (only if stored).
        root: Folder of the data.
        download: Whether the data may be fetched.
        normalise: How data that are given are seen, see ``fldiag.data.load``.
        loss: A name of ``losses.BY_NAME``, ``pkg.mod:function`` or a function (outputs, y) -> the mean; by default what training
            minimises on such labels, and of batches that are dicts the model's own.
        device: See ``Problem``.
        options: Further ones of ``Problem``.

    Raises:
        FldiagError: Model or data are not known and not given, do not fit, or are user code that only a file names: such code is
            never run.
    """
    checkpoint = target.checkpoint() if isinstance(target, Run) else target
    content = load_data(checkpoint, root, download, normalise)
    if isinstance(content, Dataset):
        parts, tests = (load_parts(checkpoint, f"{n}.npz") for n in ("partition", "test_partition"))
        examples: Any = data.take(content, slice, parts, samples, tests)
        usual, remarks = losses.criterion(content.regression), data.remarks(content)
    elif (slice, samples) != ("train", None):
        what = "slice and samples are for a data set, and the examples themselves were given"
        raise FldiagError(what, "leave them out", usage=True)
    else:
        examples = as_slice(content)
        y = examples.batch(0, min(examples.n, 256))[1]
        is_tensor = isinstance(y, Tensor)
        is_number = is_tensor and y.is_floating_point() and not losses.is_probabilities(y)
        usual = losses.criterion(is_number) if is_tensor else losses.model_loss
        remarks = [] if loss else [f"{checkpoint.path.name}: the loss is {losses.name_of(usual)}"]
    label = checkpoint.label
    weights: tuple[Any, Any] = checkpoint.state, None
    labels: dict[str, Any] = {"moment": "aggregated", "scope": "global"}
    if client is not None:
        label, weights = f"{label} client {client}", _client(checkpoint, client)
        labels = {"moment": "trained", "scope": "client", "client": client}
    if checkpoint.manifest:
        method = str(checkpoint.config["method"].get("name"))
        labels |= {"method": method, "round": checkpoint.round, "seed": checkpoint.manifest["seed"]}
    problem = Problem(
        build_module(checkpoint, content),
        usual if loss is None else _criterion(loss),
        examples,
        *weights,
        name=label,
        device=device,
        labels=labels,
        **options,
    )
    problem.checkpoint, problem.remarks = checkpoint, remarks
    problem.run = target if isinstance(target, Run) else None
    return problem


def _criterion(loss: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(loss):
        return loss
    if loss in losses.BY_NAME:
        return losses.BY_NAME[loss]
    if ":" not in loss:
        raise unknown("loss", loss, losses.BY_NAME)
    registry.allow(loss)
    function: Callable[..., Tensor] = registry.load_user(loss, "loss")
    return function


# Data


def load_data(
    c: Checkpoint, root: str | None = None, download: bool = False, normalise: Any = None
) -> Any:
    """The data set that comes with the checkpoint, else the one that it names, which must be the one of its training. Other
    examples that come with it, or that the user's loader returns, are as they are."""
    source, spec = c.data, c.config.get("data", {})
    registry.allow(source)
    if isinstance(source, str) and registry.is_code(source):
        content = sources.call_loader(source)
        source = source if isinstance(content, Dataset) or is_split(content) else content
    is_named = isinstance(source, (str, Path))
    if is_named:
        spec = {"name": str(source), "normalise": normalise}
    elif normalise is not None:
        raise FldiagError(
            f"normalise = {normalise!r} is for data that are given by name, and these are not",
            "leave it out, or give the data: --data npz:PATH",
            usage=True,
        )
    elif source is not None:
        return dataset_of(source) if is_split(source) else source
    elif "name" not in spec:
        raise FldiagError(
            f"{c.path} does not say which data it belongs to",
            "give them: --data digits | npz:PATH | csv:PATH | pkg.mod:loader",
            usage=True,
        )
    elif file := c.beside("data.npz"):
        spec = {**spec, "name": f"npz:{file}"}
    section = DataSection(**{**spec, "root": root or spec.get("root")})
    dataset = data.load(section, download=download)
    fingerprint, trained = dataset.fingerprint(), c.manifest.get("provenance", {}).get("data")
    if trained and not is_named and fingerprint != trained:
        raise FldiagError(
            f"the data set {section.name!r} found here is not the one {c.path} was trained on (fingerprint "
            f"{fingerprint}, not {trained})",
            f"point to the same data, or accept it: --data {section.name}",
        )
    return dataset


def load_dataset(c: Checkpoint, *source: Any) -> Dataset:
    """The same, as a data set."""
    content = load_data(c, *source)
    return content if isinstance(content, Dataset) else dataset_of(content)


def load_parts(c: Checkpoint, name: str) -> Sequence[Any] | None:
    """Of every client the examples, from a file of the run; None where it has none of that name."""
    file = c.beside(name)
    return None if file is None else partition.load_parts(file)


# Model and weights


def build_module(c: Checkpoint, content: Any) -> nn.Module:
    """The model of the checkpoint, with the frozen weights beneath it; rows of several tensors it takes as these."""
    return with_packed_inputs(with_base(_built(c, content), c), content)


def _built(c: Checkpoint, content: Any) -> nn.Module:
    if isinstance(c.model, nn.Module):
        return c.model
    registry.allow(c.model)
    if c.model is None and not c.manifest and (c.path.parent / pretrained.CONFIG).is_file():
        return pretrained.build(c.path.parent)
    spec = dict(c.config.get("model", {})) if c.model is None else {"name": str(c.model)}
    if "name" not in spec:
        raise FldiagError(
            f"{c.path} does not say which model its weights belong to",
            "give it: --model NAME (fldiag list models) or --model pkg.mod:factory, such as --model own_loop:net for a function "
            "net() in own_loop.py; in Python: fldiag.load(PATH, model=net)",
            usage=True,
        )
    most = sum(t.numel() for t in c.state.values()) if c.model is None else None
    name, seed = spec.pop("name"), c.manifest.get("seed", 0)
    return models.build(name, *_shapes(c, content), spec, seed=seed, most=most)


def _shapes(c: Checkpoint, content: Any) -> tuple[tuple[int, ...] | None, int]:
    """The shape of an example and the number of classes, as the manifest has them, or of the examples."""
    if c.manifest.get("shape"):
        return tuple(c.manifest["shape"]), c.manifest["classes"]
    if isinstance(content, Dataset):
        return content.shape, content.classes
    examples = as_slice(content)
    x, y = examples.batch(0, examples.n)
    is_plain = isinstance(x, Tensor) and isinstance(y, Tensor)
    return (tuple(x.shape[1:]), count_classes(y)) if is_plain else (None, 0)


def _client(c: Checkpoint, client: int) -> tuple[Tensor, State]:
    """A client's weights [P] and buffers."""
    if c.clients is None or client not in c.client_ids:
        raise FldiagError(
            f"{c.path} holds no trained weights of client {client}, but of {c.client_ids}",
            "train with checkpoint.clients = 'sampled'",
            usage=True,
        )
    row = c.client_ids.index(client)
    return c.clients[row], {n: b[row] for n, b in c.buffers.items()}


# The frozen weights beneath adapters: once in a run, named by their hash in every checkpoint


def _frozen(module: nn.Module) -> State:
    """In single precision, whatever it trains in."""
    return {name: t.float() for name, t in lora.frozen_weights(module).items()}


def base_of(module: nn.Module) -> dict[str, Any]:
    """``base``: the name of the frozen weights, where there are any."""
    frozen = _frozen(module)
    return {"base": digest(frozen)[:32]} if frozen else {}


def keep_base(run: Run, module: nn.Module) -> None:
    """Write the frozen weights, if there are any, into the run."""
    if frozen := _frozen(module):
        run.put(BASE, pack({}, **frozen))


def with_base(module: nn.Module, c: Checkpoint) -> nn.Module:
    """A copy of the module with the frozen weights that the checkpoint names: those of its run, else its own. In a model without
    frozen weights those are frozen that the checkpoint does not hold.

    Raises FldiagError when they are neither.
    """
    name = c.manifest.get("provenance", {}).get("base")
    if name is None:
        return module
    module = copy.deepcopy(module)
    if not lora.frozen_weights(module):
        lora.freeze(module, [n for n, _ in module.named_parameters() if n not in c.state])
    if (file := c.beside(BASE)) is not None:
        lora.load_frozen(module, read_tensors(file))
    elif base_of(module) != {"base": name}:
        raise FldiagError(
            f"{c.path} holds adapters, and the frozen weights beneath them ({name}) are not here",
            f"keep the file in its run, which has {BASE}",
        )
    return module


# Modules


def check_merging(module: nn.Module) -> None:
    """Raises FldiagError for a module whose eval() rewrites its weights."""
    probe = copy_module(module).train()
    before = copy.deepcopy(probe.state_dict())
    if not same(before, {**before, **probe.eval().state_dict()}):
        raise FldiagError(
            "eval() of the model rewrites its weights (adapters that merge), so that it is not what the stored weights say",
            "give the model with adapters that do not merge",
        )


def with_packed_inputs(module: nn.Module, content: Any) -> nn.Module:
    """The module, or where the data set's rows hold several tensors a copy of it that takes such rows and returns one tensor."""
    packed = getattr(content, "packed", None)
    if packed is None:
        return module
    reader = copy.deepcopy(unwrap_model(module))
    reader.register_forward_pre_hook(partial(_unpack, packed), with_kwargs=True, prepend=True)
    reader.register_forward_hook(logits_of)
    return reader


def _unpack(layout: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    inputs = unpack(args[0], layout, next(module.parameters()).dtype)
    return arguments(module, inputs)


def logits_of(module: nn.Module, args: Any, output: Any) -> Tensor:
    """A forward hook: the one tensor that a module returned, or the entry ``logits``. Raises FldiagError for anything else."""
    logits = output.get("logits") if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor):
        raise FldiagError(
            f"the model returns {describe(output)}, and diagnostics of a run need one tensor [n, outputs]",
            "let forward return it, or a dict that has it as 'logits'",
        )
    return logits
