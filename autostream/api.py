"""``optimize``, and the module that it returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from autostream.dispatch.dispatcher import Dispatcher
from autostream.dispatch.padding import PaddingDispatcher
from autostream.errors import TargetError, shown
from autostream.frontend.buckets import Bucket
from autostream.frontend.modules import module_of
from autostream.fusion.inductor import check_level, check_settings
from autostream.options import Options
from autostream.reporting import notebook


def optimize(
    model: Callable[..., Any],
    example_inputs: Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Mapping[str, Mapping[int, Bucket]] | None = None,
    **options: Any,
) -> OptimizedModule:
    """Make a model that computes the same, its independent ops side by side on device streams where that is faster.

    A schedule is made for each signature (structure, shapes, dtypes, devices, train or eval, …) that the model is
    called with, and only kept where it was measured to be faster than running one op after another. Where the model
    cannot be traced, it runs as it is. :func:`autostream.explain` tells what was done and why.

    Args:
        model: a module, or a function of tensors; modules that the function refers to by name become submodules.
        example_inputs: the positional arguments to prepare for now, without gradients; a single tensor stands for
            itself. Without them, preparation happens in the first call.
        example_kwargs: the keyword arguments to prepare for.
        dynamic: by the name of an argument, its dimensions that may be padded, each with a
            :class:`~autostream.Bucket`, as in ``{"tokens": {1: Bucket("length", 512)}}``. Calls of all lengths
            up to a bucket's size share its schedule, and outputs are cut back. Whoever writes it says that this is
            safe: nothing may depend on what was filled up. It is tried once for each bucket; calls that cannot be
            padded run at their own shape, and the report says why.
        **options: see :class:`~autostream.options.Options`.

    Returns:
        A module with the parameters, buffers and submodules of ``model``, shared with it.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed.
        TargetError: ``model`` is neither a module nor a function, the example inputs are no sequence, they lie on
            another device than the model, or the model itself fails at them.
        TraceError: with ``strict=True``, the model cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        >>> fast = optimize(model)
        >>> x = torch.ones(1, 4)
        >>> with torch.no_grad():
        ...     torch.equal(fast(x), model(x))
        True
        >>> padded = optimize(model, dynamic={"input": {0: Bucket("batch", 8)}})
        >>> with torch.no_grad():
        ...     padded(torch.ones(5, 4)).shape, padded(torch.ones(7, 4)).shape
        (torch.Size([5, 4]), torch.Size([7, 4]))
        >>> [report.signature for report in padded.reports]
        ['8x4:float32 on cpu, eval, no gradients']
    """
    if isinstance(model, type) or not callable(model):
        hint = ": make one" if isinstance(model, type) and issubclass(model, nn.Module) else ""
        raise TargetError(f"optimize takes a torch.nn.Module or a function of tensors, not {shown(model)}{hint}")
    args, kwargs = _examples(example_inputs, example_kwargs)
    module, chosen = module_of(model), Options.parse(options)
    dispatcher = Dispatcher(module, chosen) if dynamic is None else PaddingDispatcher(module, chosen, dynamic)
    optimized = OptimizedModule(dispatcher)
    if example_inputs is not None or example_kwargs is not None:
        optimized._autostream.prepare(*args, **kwargs)
    return optimized


def _examples(inputs: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from what the caller gave.

    Raises:
        TargetError: it is something else.
    """
    if not isinstance(inputs, (Tensor, list, tuple, type(None))):
        hint = ": use example_kwargs for keyword arguments" if isinstance(inputs, Mapping) else ""
        raise TargetError(f"example_inputs must be a tensor, a list or a tuple, not a {type(inputs).__name__}{hint}")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise TargetError(f"example_kwargs must be a dict, not a {type(kwargs).__name__}")
    if unnamed := [key for key in kwargs or () if not isinstance(key, str)]:
        raise TargetError(f"example_kwargs must have names for keys, not {shown(unnamed[0])}")
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ()), dict(kwargs or {})


class OptimizedModule(nn.Module):
    """A model and its schedules, one for each signature that it was called with.

    It has its model's parameters, buffers and submodules for its own, under the same names, so ``state_dict``,
    ``parameters``, ``to``, ``train`` and ``load_state_dict`` act on the model. Other attributes are looked up there.

    What the model does not have under these names itself is autostream's: ``prepare(*args, **kwargs)``,
    ``static_inputs(*args, **kwargs)``, ``lowered(*args, **kwargs)`` and ``reports``, as
    :class:`~autostream.dispatch.dispatcher.Dispatcher` describes them.

    Args:
        dispatcher: runs the model's calls.

    Raises:
        OptionError: Inductor has no setting of such a name, or no kernels for this machine.

    Example:
        >>> fast = OptimizedModule(Dispatcher(nn.ReLU(), Options()))
        >>> fast.prepare(torch.ones(2))
        >>> [report.mode for report in fast.reports]
        ['one stream']
    """

    _autostream: Dispatcher
    """All that is ours: any other name could be one of the model's."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        check_settings(dispatcher.options.inductor_options)
        check_level(dispatcher.options.kernels)
        super().__init__()
        own = self.__dict__
        own |= {name: getattr(dispatcher.model, name) for name in _SHARED}  # for those who look into it, as Dynamo does
        own["_compiled_call_impl"] = None
        own["_autostream"] = dispatcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call hooks and :meth:`forward`, as modules do.

        Not inherited: tracing patches the method of ``nn.Module`` for all threads, and must not see this call.
        """
        if (
            torch.is_grad_enabled()  # hooks of the backward have nothing to do otherwise
            or self._compiled_call_impl
            or self._forward_hooks
            or self._forward_pre_hooks
            or nn_module._global_forward_hooks
            or nn_module._global_forward_pre_hooks
            or torch.compiler.is_dynamo_compiling()
        ):
            return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
        return self._autostream(*args, **kwargs)  # what the line above comes to, in fewer frames

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        if torch.compiler.is_dynamo_compiling():
            return self._autostream.model(*args, **kwargs)
        return self._autostream(*args, **kwargs)

    # What follows makes it a module like the one that it was made of.

    def train(self, mode: bool = True) -> OptimizedModule:
        """Set the model's mode."""
        self._autostream.model.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OptimizedModule:
        self._autostream.model._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._autostream.forget()  # graphs hold the memory that the state has just left
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> OptimizedModule:
        """Apply a function to the model and its submodules."""
        self._autostream.model.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self._autostream.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self._autostream.model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._autostream.model._load_from_state_dict(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        return self._autostream.model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the model, but not its special methods: a copy would be one of the model alone."""
        if "_autostream" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        dispatcher, model = self._autostream, self._autostream.model
        ours = name in _OURS and (isinstance(model, OptimizedModule) or not hasattr(model, name))
        return getattr(dispatcher if ours else model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, unless it is one that every module has for itself, such as its hooks."""
        if name in self.__dict__ or "_autostream" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._autostream.model, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the model."""
        delattr(self._autostream.model, name)

    def __dir__(self) -> list[str]:
        """All names that can be looked up."""
        own = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*own, *dir(self._autostream.model), *_OURS})

    def __repr__(self) -> str:
        """The model's own, wrapped."""
        return f"{type(self).__name__}({self._autostream.model!r})"

    def _repr_html_(self) -> str:
        """The summaries of all reports, for notebooks."""
        return notebook.render(self._autostream.reports) or f"<pre>{escape(repr(self))}</pre>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the model and the options; schedules are made anew."""
        hooks = {name: value for name, value in self.__dict__.items() if "_hook" in name}
        return OptimizedModule, (copy.copy(self._autostream),), hooks


_OURS = ("prepare", "static_inputs", "lowered", "reports")

_SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _of_the_model(name: str) -> property:
    """An attribute that is what the model has now: ``del`` of a part of an ``nn.Sequential`` gives it another."""

    def get(self: OptimizedModule) -> Any:
        return getattr(self._autostream.model, name)

    def put(self: OptimizedModule, value: Any) -> None:
        if "_autostream" in self.__dict__:  # nn.Module.__init__ sets it before there is a model
            setattr(self._autostream.model, name, value)

    return property(get, put)


for _name in ("training", *_SHARED):
    setattr(OptimizedModule, _name, _of_the_model(_name))
