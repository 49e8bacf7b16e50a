"""``optimize``, and ``OptimizedModule``, which it returns."""

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
    """Optimize a model: it computes the same, with independent ops side by side on device streams where that is faster.

    The model is scheduled once for each signature (structure, shapes, dtypes, devices, train or eval, …) that it is
    called with. Several streams are only used if they were measured to be faster than one. A model that cannot be
    traced runs eagerly. :func:`autostream.explain` reports what was done and why.

    Args:
        model: a module, or a function of tensors; modules that the function refers to by name become submodules.
        example_inputs: the positional arguments to compile for now, without gradients; a tensor alone is the only one.
            Without them, the first call compiles.
        example_kwargs: the keyword arguments to compile for.
        dynamic: for arguments by name, the dimensions that may be padded, each with a
            :class:`~autostream.Bucket`, as in ``{"tokens": {1: Bucket("length", 512)}}``. Calls of all lengths
            up to a bucket's size share its schedule, and outputs are cut back. By passing it, you promise that
            this is safe: nothing may depend on the padding. It is tried once for each bucket; calls that cannot be
            padded run at their own shape, and the report says why.
        **options: see :class:`~autostream.options.Options`.

    Returns:
        A module with the parameters, buffers and submodules of ``model``, shared with it.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed.
        TargetError: ``model`` is neither a module nor a function, the example inputs are no sequence or are on
            another device than the model, or the model itself fails with them.
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
    """Positional and keyword arguments from the example inputs.

    Raises:
        TargetError: they have another type.
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
    """A model with its schedules, one for each signature that it was called with.

    It has the model's parameters, buffers and submodules under the same names, so ``state_dict``, ``parameters``,
    ``to``, ``train`` and ``load_state_dict`` act on the model. Other attributes are looked up in the model.

    Unless the model has attributes of these names, ``prepare(*args, **kwargs)``, ``static_inputs(*args, **kwargs)``,
    ``lowered(*args, **kwargs)`` and ``reports`` are those of :class:`~autostream.dispatch.dispatcher.Dispatcher`.

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
    """The only attribute of this class: any other name could be one of the model's."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        check_settings(dispatcher.options.inductor_options)
        check_level(dispatcher.options.kernels)
        super().__init__()
        attributes = self.__dict__
        attributes |= {name: getattr(dispatcher.model, name) for name in _SHARED}  # Dynamo reads the dictionary itself
        attributes["_compiled_call_impl"] = None
        attributes["_autostream"] = dispatcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call hooks and :meth:`forward`, as modules do.

        Not inherited: tracing in another thread patches ``nn.Module.__call__``, and must not see this call.
        """
        if (
            torch.is_grad_enabled()  # backward hooks are not needed otherwise
            or self._compiled_call_impl
            or self._forward_hooks
            or self._forward_pre_hooks
            or nn_module._global_forward_hooks
            or nn_module._global_forward_pre_hooks
            or torch.compiler.is_dynamo_compiling()
        ):
            return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
        return self._autostream(*args, **kwargs)  # the same in fewer frames

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if torch.compiler.is_dynamo_compiling():
            return self._autostream.model(*args, **kwargs)
        return self._autostream(*args, **kwargs)

    # The rest delegates to the model.

    def train(self, mode: bool = True) -> OptimizedModule:
        """Set the model's mode."""
        self._autostream.model.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OptimizedModule:
        self._autostream.model._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._autostream.forget()  # CUDA graphs hold the memory that the state was moved from
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> OptimizedModule:
        """Apply a function to the model and its submodules."""
        self._autostream.model.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._autostream.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self._autostream.model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._autostream.model._load_from_state_dict(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        return self._autostream.model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the model, except special methods: ``copy.copy`` would copy the model alone."""
        if "_autostream" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        dispatcher, model = self._autostream, self._autostream.model
        delegated = name in _DISPATCHER and (isinstance(model, OptimizedModule) or not hasattr(model, name))
        return getattr(dispatcher if delegated else model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, unless each module has one of its own, such as hooks."""
        if name in self.__dict__ or "_autostream" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._autostream.model, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the model."""
        delattr(self._autostream.model, name)

    def __dir__(self) -> list[str]:
        """All names that can be looked up."""
        names = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*names, *dir(self._autostream.model), *_DISPATCHER})

    def __repr__(self) -> str:
        """The model's, in parentheses."""
        return f"{type(self).__name__}({self._autostream.model!r})"

    def _repr_html_(self) -> str:
        """The summaries of all reports, for notebooks."""
        return notebook.render(self._autostream.reports) or f"<pre>{escape(repr(self))}</pre>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the model and the options, without schedules."""
        hooks = {name: value for name, value in self.__dict__.items() if "_hook" in name}
        return OptimizedModule, (copy.copy(self._autostream),), hooks


_DISPATCHER = ("prepare", "static_inputs", "lowered", "reports")

_SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _of_the_model(name: str) -> property:
    """An attribute that is read from the model each time: deleting a part of an ``nn.Sequential`` replaces it."""

    def get(self: OptimizedModule) -> Any:
        return getattr(self._autostream.model, name)

    def put(self: OptimizedModule, value: Any) -> None:
        if "_autostream" in self.__dict__:  # nn.Module.__init__ sets it before there is a model
            setattr(self._autostream.model, name, value)

    return property(get, put)


for _name in ("training", *_SHARED):
    setattr(OptimizedModule, _name, _of_the_model(_name))
