"""A pretended accelerator: tensors that say they lie on another device, hold their data on the CPU, and refuse to meet host tensors.

A machine without a GPU then fails where a GPU would: a tensor made on the host among the model's, a generator of the wrong
device, ``.numpy()`` without ``.cpu()``. The device is called ``lazy`` because autograd runs that one in the caller's thread.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fldiag.device

DEVICE = torch.device("lazy")
#: What tests try: the pretended one, and a GPU where there is one.
DEVICES = ("lazy", *(["cuda"] if torch.cuda.is_available() else []))
#: Operators that take tensors of two devices on a real accelerator as well.
ACROSS = {"aten::copy_", "aten::index", "aten::index_put_", "aten::index_put"}


class Accelerated(torch.Tensor):
    """A tensor of the pretended device. ``data_on_host``: what it holds."""

    @staticmethod
    def __new__(cls, host):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        tensor.data_on_host = host
        return tensor

    def __repr__(self):
        return f"Accelerated({self.data_on_host})"

    def untyped_storage(self):
        return self.data_on_host.untyped_storage()

    def data_ptr(self):
        return self.data_on_host.data_ptr()

    def tolist(self):
        return self.data_on_host.tolist()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return dispatch(operator, args, kwargs or {})


def host(value):
    return value.data_on_host if isinstance(value, Accelerated) else value


def dispatch(operator, args, kwargs):
    """The operator on the host's data; what comes out lies where an accelerator would have put it."""
    name = operator._schema.name
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    accelerated = [t for t in tensors if isinstance(t, Accelerated)]
    if accelerated and name not in ACROSS:
        for tensor in tensors:
            if not isinstance(tensor, Accelerated) and tensor.dim():
                raise RuntimeError(f"{name}: tensors of two devices")
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    on_accelerator = bool(accelerated) if device is None else torch.device(device).type == "lazy"
    if on_accelerator and kwargs.get("generator") is not None:
        raise RuntimeError(f"{name}: a generator of the host")
    wrappers = {id(t.data_on_host): t for t in accelerated}  # what is changed in place stays itself
    outputs = operator(*tree_map(host, args), **tree_map(host, kwargs))

    def place(value):
        if not isinstance(value, torch.Tensor) or not on_accelerator:
            return value
        return wrappers.get(id(value)) if id(value) in wrappers else Accelerated(value)

    return tree_map(place, outputs)


class Accelerator(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return dispatch(operator, args, kwargs or {})


def there(device, monkeypatch):
    """A context in which the device is there."""
    return accelerator(monkeypatch) if device == "lazy" else contextlib.nullcontext()


@contextlib.contextmanager
def accelerator(monkeypatch):
    """Within it, the device ``lazy`` is there, to torch and to fldiag."""
    original, autocast = fldiag.device.device_of, torch.autocast

    def device_of(name, dtype=None):
        return "lazy" if str(name) == "lazy" else original(name, dtype)

    for module in list(sys.modules.values()):
        if vars(module).get("device_of") is original:
            monkeypatch.setattr(module, "device_of", device_of)
    monkeypatch.setattr(
        torch,
        "autocast",
        lambda kind, *args, **kwargs: (
            contextlib.nullcontext() if kind == "lazy" else autocast(kind, *args, **kwargs)
        ),
    )
    # a tensor made of Python numbers is made on the host, and moved by an operator that the mode sees
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with Accelerator():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
