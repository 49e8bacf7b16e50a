"""``optimize`` and ``OptimizedModule``, which it returns; ``optimize_``, which schedules a model's own calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from html import escape
from inspect import getattr_static
from types import MethodType
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as nn_module

from autostream.dispatch.dispatcher import Dispatcher
from autostream.dispatch.optimized_method import OptimizedMethod
from autostream.dispatch.padding import PaddingDispatcher
from autostream.errors import TargetError, a_type, shown
from autostream.frontend.buckets import Bucket
from autostream.frontend.modules import is_method, module_of
from autostream.options import Options
from autostream.reporting import notebook

Dynamic = Mapping[str, Mapping[int, Bucket]]
"""For arguments by name, the dimensions that may be padded."""

Model = TypeVar("Model", bound=nn.Module)


@overload
def optimize(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic | None = None,
    **options: Any,
) -> OptimizedModule: ...


@overload
def optimize(
    model: Callable[..., Any],
    example_inputs: Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic | None = None,
    **options: Any,
) -> OptimizedModule | OptimizedMethod: ...


def optimize(
    model: Callable[..., Any],
    example_inputs: Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic | None = None,
    **options: Any,
) -> OptimizedModule | OptimizedMethod:
    """Optimize a model: it computes the same, with independent ops side by side on device streams where that is faster.

    The model is scheduled once for each signature (structure, shapes, dtypes, devices, train or eval, …) that it is
    called with. Several streams are only used if they were measured to be faster than one. A model that cannot be
    traced runs eagerly. :func:`autostream.explain` reports what was done and why.

    Args:
        model: a module, or a function of tensors; modules that the function refers to by name become submodules.
            A method of a module may take the method's place: ``model.forward = optimize(model.forward)``.
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
        A module with the parameters, buffers and submodules of ``model``, shared with it; for a method of a module, a
        function with its signature.

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
    dispatcher = _dispatcher(module_of(model), dynamic, options)
    if example_inputs is not None or example_kwargs is not None:
        dispatcher.prepare(*args, **kwargs)
    return OptimizedMethod(dispatcher) if is_method(model) else OptimizedModule(dispatcher)


def optimize_(model: Model, *, dynamic: Dynamic | None = None, **options: Any) -> Model:
    """Schedule the calls of a model itself, as :func:`optimize` does; it stays the same object of the same class.

    As with ``nn.Module.compile``, ``model(...)`` runs hooks and ``forward`` in a graph, and ``model.forward(...)`` runs
    as it is. Methods that call the model, such as ``generate`` of transformers, get the scheduled calls; so does code
    that has the model already, such as a trainer. A copy of the model, pickled or not, is not scheduled.

    Of a model that was optimized in place, what was compiled is dropped, and the new options hold.

    Args:
        model: a module.
        dynamic: see :func:`optimize`.
        **options: see :class:`~autostream.options.Options`.

    Returns:
        ``model``. :func:`autostream.explain` takes it; :func:`restore` undoes this.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed. The model has not changed.
        TargetError: it is no module, what ``optimize`` returned, or its calls cannot be scheduled in place.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> optimize_(model, streams=2) is model, type(model).__name__, len(model)
        (True, 'Sequential', 2)
        >>> restore(model) is model
        True
    """
    if reason := _obstacle(model):
        raise TargetError(f"optimize_ cannot schedule {shown(model)} in place: {reason}")
    method: Any = model._call_impl
    model._compiled_call_impl = OptimizedMethod(_dispatcher(module_of(method), dynamic, options))
    return model


def restore(model: Model) -> Model:
    """Let a model run as it did before :func:`optimize_`, and drop what was compiled; others do not change.

    Returns:
        ``model``.

    Raises:
        TargetError: it is no module, or what ``optimize`` returned.

    Example:
        >>> restore(optimize_(nn.ReLU()))
        ReLU()
    """
    if not isinstance(model, nn.Module) or isinstance(model, OptimizedModule):
        raise TargetError(f"restore takes a model that was given to optimize_, not {shown(model)}")
    if isinstance(model._compiled_call_impl, OptimizedMethod):
        del model._compiled_call_impl
    return model


def dispatcher_of(value: object) -> Dispatcher | None:
    """What runs the calls of an optimized module or method, or of a model that was optimized in place.

    Example:
        >>> dispatcher_of(nn.ReLU()) is None, dispatcher_of(optimize_(nn.ReLU())) is None
        (True, False)
    """
    if isinstance(value, OptimizedModule):
        return value._autostream
    if isinstance(value, nn.Module):
        value = value._compiled_call_impl
    return value.dispatcher if isinstance(value, OptimizedMethod) else None


def _dispatcher(module: nn.Module, dynamic: Dynamic | None, options: dict[str, Any]) -> Dispatcher:
    chosen = Options.parse(options)
    return Dispatcher(module, chosen) if dynamic is None else PaddingDispatcher(module, chosen, dynamic)


def _obstacle(model: object) -> str:
    """Why calls of this cannot be scheduled in place, and what to do; or ``""``."""
    if isinstance(model, type):
        return "it is a class: make a module of it" if issubclass(model, nn.Module) else "it is no torch.nn.Module"
    if isinstance(model, OptimizedModule | OptimizedMethod):
        return "it is optimized already: give optimize_ the model that it was made from"
    if not isinstance(model, nn.Module):
        return f"it is no torch.nn.Module{': use optimize for functions' if callable(model) else ''}"
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        return "torch.compile has compiled it: give optimize_ the model that it was made from"
    if isinstance(model, torch.jit.ScriptModule):
        return "TorchScript cannot be captured: use the module that it was made from"
    kind: Any = type(model)
    if kind.__call__ is not nn.Module.__call__ and not isinstance(model, fx.GraphModule):  # graph modules call theirs
        return f"{kind.__name__} has a __call__ of its own: use optimize"
    if not isinstance(model._compiled_call_impl, OptimizedMethod | None):
        return "nn.Module.compile has compiled its calls, which this would replace: leave one of them out"
    return ""


def _examples(inputs: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from the example inputs.

    Raises:
        TargetError: they have another type.
    """
    if not isinstance(inputs, (Tensor, list, tuple, type(None))):
        hint = ": use example_kwargs for keyword arguments" if isinstance(inputs, Mapping) else ""
        raise TargetError(f"example_inputs must be a tensor, a list or a tuple, not {a_type(inputs)}{hint}")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise TargetError(f"example_kwargs must be a dict, not {a_type(kwargs)}")
    if unnamed := [key for key in kwargs or () if not isinstance(key, str)]:
        raise TargetError(f"example_kwargs must have names for keys, not {shown(unnamed[0])}")
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ()), dict(kwargs or {})


_PAST_THE_WRAPPER = "its generate() calls the model itself, past the wrapper: use autostream.optimize_(model) instead"


class OptimizedModule(nn.Module):
    """A model with its schedules, one for each signature that it was called with.

    It has the model's parameters, buffers and submodules under the same names, so ``state_dict``, ``parameters``,
    ``to``, ``train`` and ``load_state_dict`` act on the model. Other attributes are looked up in the model. Methods,
    such as ``generate`` of transformers, call the model itself: :func:`optimize_` schedules these calls.

    Unless the model has attributes of these names, ``prepare(*args, **kwargs)``, ``static_inputs(*args, **kwargs)``,
    ``lowered(*args, **kwargs)`` and ``reports`` are those of :class:`~autostream.dispatch.dispatcher.Dispatcher`.

    Special methods of containers and contexts, such as ``len(fast)`` and ``fast[0]``, are the model's, where it has
    them.

    Args:
        dispatcher: runs the model's calls.

    Example:
        >>> fast = OptimizedModule(Dispatcher(nn.ReLU(), Options()))
        >>> fast.prepare(torch.ones(2))
        >>> [report.mode for report in fast.reports]
        ['one stream']
    """

    _autostream: Dispatcher
    """The only attribute of this class: any other name could be one of the model's."""

    forward: Callable[..., Any]
    """Runs the model. It has the signature of the model's."""

    def __new__(cls, dispatcher: Dispatcher) -> OptimizedModule:
        """Make an instance of a subclass with what is looked up in the model's class, not in the model."""
        return super().__new__(_subclass(type(dispatcher.model)))

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()
        attributes = self.__dict__
        attributes |= {name: getattr(dispatcher.model, name) for name in _SHARED}  # Dynamo reads the dictionary itself
        attributes["_compiled_call_impl"] = None
        attributes["_autostream"] = dispatcher
        attributes["forward"] = OptimizedMethod(dispatcher)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call hooks and ``forward``, as modules do.

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
            or not isinstance(self.forward, OptimizedMethod)  # wrapped by the user, such as in autocast
        ):
            return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
        return self._autostream(*args, **kwargs)  # the same in fewer frames

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
        value = getattr(dispatcher if delegated else model, name)
        if name == "generate" and isinstance(value, MethodType) and not torch.compiler.is_dynamo_compiling():
            dispatcher.note(_PAST_THE_WRAPPER)
        return value

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


_SPECIAL = (
    *("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__contains__", "__bool__"),
    *("__enter__", "__exit__"),
)
"""Special methods that Python looks up in the class, and that the model may have."""


def _subclass(model: type[nn.Module]) -> type[OptimizedModule]:
    """``OptimizedModule`` with special methods that call the model's, and with a ``forward`` that has its signature."""
    members: dict[str, Any] = {name: _special(name) for name in _SPECIAL if hasattr(model, name)}
    described = {"__module__": OptimizedModule.__module__, "__doc__": OptimizedModule.__doc__}
    return type(OptimizedModule.__name__, (OptimizedModule,), {"forward": _forward_of(model), **members, **described})


def _forward_of(model: type[nn.Module]) -> Callable[..., Any]:
    """What ``torch.fx`` traces, and what ``Trainer`` reads the names of labels from: neither looks at the instance."""

    def forward(self: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
        return self._autostream.model.forward(*args, **kwargs)

    described = getattr_static(model, "forward")  # that of TorchScript's classes can only be read from an instance
    return wraps(described)(forward) if callable(described) else forward


def _special(name: str) -> Callable[..., Any]:
    def method(self: OptimizedModule, *args: Any) -> Any:
        return getattr(self._autostream.model, name)(*args)

    return method


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
