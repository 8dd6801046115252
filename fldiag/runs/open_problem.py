"""From a run or checkpoint to the Problem that a diagnostic sees, and its parts: data, model, partition."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fldiag import data, losses, models, user_code
from fldiag.data import Dataset, partition, sources
from fldiag.data.packed import Packed
from fldiag.data.public import deal
from fldiag.errors import FldiagError, unknown
from fldiag.models import pretrained
from fldiag.problem.data import arguments, as_slice, describe, is_split, same
from fldiag.problem.loss import is_probabilities
from fldiag.problem.problem import Problem
from fldiag.problem.weights import copy_module, unwrap_model
from fldiag.runs import base
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.given import dataset_of
from fldiag.runs.run import Run, file_beside
from fldiag.sections import FILES, DataSection, Normalise, PartitionSection


def open_problem(
    target: Run | Checkpoint,
    *,
    slice: str = "train",
    samples: int | None = None,
    client: int | None = None,
    round: int | None = None,
    root: str | None = None,
    download: bool = False,
    normalise: Normalise | None = None,
    name: str | None = None,
    loss: str | Callable[..., Any] | None = None,
    device: str = "auto",
    **options: Any,
) -> Problem:
    """The loss surface of stored weights on a slice.

    ``client``: the trained weights of that client instead of the aggregated ones (only if stored). ``slice``,
    ``samples``: see ``fldiag.data.take``. ``round``: of a run (default: the last). ``normalise``: of data that are given,
    see ``fldiag.data.load``. ``loss``: a name of ``losses.BY_NAME``, ``pkg.mod:function`` or a function (outputs, y) -> the mean;
    by default what training minimises on such labels, and of batches that are dicts the model's own. ``options``: further ones
    of ``Problem``.

    Raises FldiagError when model or data are not known and not given, do not fit, or are user code that only
    a file names: such code is never run.
    """
    stored = target.checkpoint(round) if isinstance(target, Run) else target
    checkpoint = replace(stored, data=load_examples(stored.data))
    check_code(checkpoint)
    examples: Any = checkpoint.data
    dataset: Dataset | None = None
    if examples is None or isinstance(examples, (str, Path, Dataset)) or is_split(examples):
        dataset = load_dataset(checkpoint, root, download, normalise)
        parts = load_partition(checkpoint, dataset) if slice.startswith("client") else None
        file = file_beside(checkpoint.path, "test_partition.npz")
        tests = None if file is None else partition.load_parts(file)
        examples = data.take(dataset, slice, parts, samples, tests)
        usual = losses.criterion(dataset.regression, dataset.dense)
    elif (slice, samples, normalise) != ("train", None, None):
        raise FldiagError(
            "slice, samples and normalise are for a data set, and the examples themselves were given",
            "leave them out, and give the examples as the model sees them",
            usage=True,
        )
    else:
        examples = as_slice(examples)
        y = examples.batch(0, min(examples.n, 256))[1]
        usual = losses.model_loss
        if isinstance(y, Tensor):
            usual = losses.criterion(y.is_floating_point() and not is_probabilities(y))
    criterion = usual if loss is None else _criterion(loss)
    label, (params, buffers) = checkpoint.label, _weights(checkpoint, client)
    labels: dict[str, Any] = {"moment": "aggregated", "scope": "global"}
    if client is not None:
        label = f"{label} client {client}"
        labels = {"moment": "trained", "scope": "client", "client": client}
    if checkpoint.manifest:
        labels["method"] = str(checkpoint.config["method"].get("name"))
        labels |= {"round": checkpoint.round, "seed": checkpoint.manifest["seed"]}
    problem = Problem(
        build_module(checkpoint, dataset),
        criterion,
        examples,
        params,
        buffers,
        name=name or label,
        device=device,
        labels=labels,
        **options,
    )
    problem.checkpoint = stored
    problem.run = target if isinstance(target, Run) else None
    remarks = list(problem.remarks)
    if loss is None and dataset is None:
        remarks.append(f"the loss is {losses.name_of(criterion)}")
    problem.remarks = [f"{stored.path.name}: {text}" for text in remarks]
    problem.remarks += [] if dataset is None else data.remarks(dataset)
    return problem


def check_code(c: Checkpoint) -> None:
    """Raises FldiagError, before anything is read, for code that only the file names as the model (or in its options) or the
    data of these weights, without consent. The other keys of its config are not used here."""
    config = c.config
    tree = {"model": config.get("model", {}), "data": {"name": config.get("data", {}).get("name")}}
    user_code.check({k: v for k, v in tree.items() if getattr(c, k) is None}, c.allow_code, c.path)


def _criterion(loss: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(loss):
        return loss
    if ":" in loss:
        function: Callable[..., Tensor] = user_code.load_user(loss, {loss}, "loss")
        return function
    if loss not in losses.BY_NAME:
        raise unknown("loss", loss, losses.BY_NAME)
    return losses.BY_NAME[loss]


def load_examples(source: Any) -> Any:
    """The examples that a user's loader returns where ``source`` names one; all other sources, and loaders of a data set, as
    they are."""
    if not isinstance(source, str) or ":" not in source or source.startswith(FILES):
        return source
    content = sources.call_loader(source, {source})
    return source if isinstance(content, Dataset) or is_split(content) else content


def load_dataset(
    c: Checkpoint, root: str | None, download: bool, normalise: Normalise | None = None
) -> Dataset:
    """The data set that comes with the checkpoint, else the one that it names, which must be the one of its training."""
    source, spec = c.data, c.config.get("data", {})
    if isinstance(source, (str, Path)):
        section = DataSection(name=str(source), root=root, normalise=normalise)
        return data.load(section, download=download, allow_code={section.name})
    if normalise is not None:
        raise FldiagError(
            f"normalise = {normalise!r} is for data that are given by name, and these are not",
            "leave it out, or give the data: --data npz:PATH",
            usage=True,
        )
    if source is not None:
        return source if isinstance(source, Dataset) else dataset_of(source)
    if "name" not in spec:
        raise FldiagError(
            f"{c.path} does not say which data it belongs to",
            "give them: --data digits | npz:PATH | csv:PATH | pkg.mod:loader",
            usage=True,
        )
    values = {key: spec[key] for key in DataSection.model_fields if key in spec}
    if "origin" in c.manifest and spec["name"] == "npz:data.npz":
        values["name"] = f"npz:{file_beside(c.path, 'data.npz') or c.path.parent / 'data.npz'}"
    folder = spec.get("root")
    root = root or (folder if isinstance(folder, str) and Path(folder).is_dir() else None)
    section = DataSection(**{**values, "root": root})
    dataset = data.load(section, download=download, allow_code=c.allow_code)
    fingerprint = c.manifest.get("provenance", {}).get("data")
    if fingerprint and dataset.fingerprint() != fingerprint:
        raise FldiagError(
            f"the data set {section.name!r} found here is not the one {c.path} was trained on (fingerprint "
            f"{dataset.fingerprint()}, not {fingerprint})",
            f"point to the same data, or accept it: --data {section.name}",
        )
    return dataset


def build_module(c: Checkpoint, dataset: Dataset | None) -> nn.Module:
    """The model of the checkpoint, with the frozen weights beneath it; rows of several tensors it takes as these."""
    return with_packed_inputs(base.restore(_built(c, dataset), c), dataset)


def check_merging(module: nn.Module) -> None:
    """Raises FldiagError for a module whose eval() rewrites its weights."""
    probe = copy_module(module).train()
    before = {n: t.clone() for n, t in probe.state_dict().items()}
    after = probe.eval().state_dict()
    if not same({n: after.get(n, t) for n, t in before.items()}, before):
        raise FldiagError(
            "eval() of the model rewrites its weights (adapters that merge), so that it is not what the stored weights say",
            "give the model with adapters that do not merge",
        )


def with_packed_inputs(module: nn.Module, dataset: Dataset | None) -> nn.Module:
    """The module, or where the data set's rows hold several tensors a copy of it that takes such rows and returns one tensor."""
    if dataset is None or dataset.packed is None:
        return module
    reader = copy.deepcopy(unwrap_model(module))
    reader.register_forward_pre_hook(_Unpack(dataset.packed), with_kwargs=True, prepend=True)
    reader.register_forward_hook(_only_logits)
    return reader


class _Unpack:
    """Calls a module with the tensors of its rows, as a ``Problem`` calls it with these."""

    def __init__(self, packed: Packed):
        self.packed = packed

    def __call__(
        self, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        return arguments(inspect.signature(module.forward), self.packed.inputs(args[0], dtype))


def _only_logits(module: nn.Module, args: Any, output: Any) -> Tensor:
    return logits_of(output)


def logits_of(output: Any) -> Tensor:
    """A model's outputs, or the entry ``logits`` among them. Raises FldiagError where there is neither."""
    logits = output.get("logits") if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor):
        raise FldiagError(
            f"the model returns {describe(output)}, and diagnostics of a run need one tensor [n, outputs]",
            "let forward return it, or a dict that has it as 'logits'",
        )
    return logits


def _built(c: Checkpoint, dataset: Dataset | None) -> nn.Module:
    if isinstance(c.model, nn.Module):
        return c.model
    if c.model is not None:
        shape, classes = (dataset.shape, dataset.classes) if dataset is not None else _shapes(c)
        return models.build(str(c.model), shape, classes, allow_code={str(c.model)})
    if not c.manifest and (c.path.parent / pretrained.CONFIG).is_file():
        return pretrained.build(c.path.parent)
    spec = dict(c.config.get("model", {}))
    if "name" not in spec:
        raise FldiagError(
            f"{c.path} holds weights but does not say which model they belong to",
            "give it: --model NAME (fldiag list models) or --model pkg.mod:factory, such as --model own_loop:net for a function "
            "net() in own_loop.py; in Python: fldiag.load(PATH, model=net)",
            usage=True,
        )
    return models.build(
        str(spec.pop("name")),
        *_shapes(c),
        spec,
        seed=c.manifest["seed"],
        most=sum(t.numel() for t in c.state.values()),
        allow_code=c.allow_code,
    )


def _shapes(c: Checkpoint) -> tuple[tuple[int, ...] | None, int]:
    if c.manifest:
        return tuple(c.manifest["shape"]), c.manifest["classes"]
    examples = as_slice(c.data)
    x, y = examples.batch(0, examples.n)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return None, 0
    return tuple(x.shape[1:]), int(y.shape[1]) if y.is_floating_point() else int(y.max()) + 1


def _weights(c: Checkpoint, client: int | None) -> tuple[Any, Any]:
    """Weights and buffers; a state_dict holds all of them."""
    if client is None:
        return c.state, {}
    if c.clients is None or client not in c.client_ids:
        clients = ", ".join(map(str, c.client_ids)) or "none"
        raise FldiagError(
            f"{c.path} holds no trained weights of client {client} (it has: {clients})",
            "train with checkpoint.clients = 'sampled'",
            usage=True,
        )
    row = c.client_ids.index(client)
    return c.clients[row], {n: b[row] for n, b in c.buffers.items()}


def load_partition(c: Checkpoint, dataset: Dataset | None) -> Sequence[Any] | None:
    """The run's own partition file if the checkpoint lies in its run, else dealt again from the config."""
    if (file := file_beside(c.path, "partition.npz")) is not None:
        return partition.load_parts(file)
    # how another program dealt its data cannot be told from here
    if not c.manifest or "origin" in c.manifest or dataset is None:
        return None
    spec = PartitionSection.model_validate(c.config["partition"])
    return deal(dataset, spec, c.config["clients"]["total"], c.config.get("data", {}).get("public"))
