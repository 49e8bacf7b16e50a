"""``optimize`` and the module that it returns."""

from __future__ import annotations

import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autostream.build import RECORDS_GRADIENTS, Pieces, Plain, Scheduled, Stale, Unsuitable, preparing
from autostream.errors import FastPathError, OptionError, TargetError, TraceError, first_line
from autostream.ir import Decision, Report
from autostream.options import Options, disabled
from autostream.pipeline import versions
from autostream.shortcut import Changed, Shortcut
from autostream.tracing.guards import exporting, unusual_call, unusual_tensor
from autostream.tracing.signature import Signature, signature_of
from autostream.tracing.state import ModelWatch, name_of
from autostream.tracing.tree import Structure, flatten, unflatten

log = logging.getLogger(__name__)

Entry = Scheduled | Pieces | Plain
"""What calls of one signature run."""


def optimize(
    model: Callable[..., Any],
    example_inputs: Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
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
        **options: see :class:`~autostream.options.Options`.

    Returns:
        A module with the parameters, buffers and submodules of ``model``, shared with it.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed.
        TargetError: ``model`` is neither a module nor a function, the example inputs are no sequence, or they lie on
            another device than the model.
        TraceError: with ``strict=True``, the model cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        >>> fast = optimize(model)
        >>> x = torch.ones(1, 4)
        >>> with torch.no_grad():
        ...     torch.equal(fast(x), model(x))
        True
    """
    if isinstance(model, type) or not callable(model):
        hint = ": make one" if isinstance(model, type) and issubclass(model, nn.Module) else ""
        raise TargetError(f"optimize takes a torch.nn.Module or a function of tensors, not {model!r}{hint}")
    args, kwargs = _examples(example_inputs, example_kwargs)
    module = model if isinstance(model, nn.Module) else _FunctionModule(model)
    optimized = OptimizedModule(module, Options.parse(options))
    if example_inputs is not None or example_kwargs is not None:
        optimized.prepare(*args, **kwargs)
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
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ()), dict(kwargs or {})


class OptimizedModule(nn.Module):
    """A model and its schedules, one for each signature that it was called with.

    It has its model's parameters, buffers and submodules for its own, under the same names, so ``state_dict``,
    ``parameters``, ``to``, ``train`` and ``load_state_dict`` act on the model. Other attributes are looked up there.

    Args:
        model: the module to run.
        options: how to schedule it.
        bound_inputs: of a piece that Dynamo made, the flat positions of inputs that stay where they are from call to
            call, as weights do. A piece is not split any further.
    """

    _entries: OrderedDict[Signature, Entry]
    _bypasses: dict[str, Report]
    _shortcut: Shortcut | None

    def __init__(self, model: nn.Module, options: Options, bound_inputs: frozenset[int] | None = None) -> None:
        super().__init__()
        own = self.__dict__
        own |= {name: getattr(model, name) for name in _SHARED}
        own["_options"] = options
        own["_bound_inputs"] = bound_inputs
        own["_lock"] = threading.RLock()
        own["_entries"] = OrderedDict()
        own["_bypasses"] = {}
        own["_shortcut"] = None
        own["_compiled_call_impl"] = None
        own["_watch"] = ModelWatch(model)
        own["_model"] = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call hooks and :meth:`forward`, as modules do.

        Not inherited: tracing patches the method of ``nn.Module`` for all threads, and must not see this call.
        """
        return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        if torch.compiler.is_dynamo_compiling() or disabled():
            return self._model(*args, **kwargs)
        shortcut = self._shortcut
        if shortcut is not None and not kwargs and shortcut.fits(args):
            try:
                return shortcut(args)
            except Changed:
                self.__dict__["_shortcut"] = None
        if exporting():
            return self._model(*args, **kwargs)
        try:
            return self._scheduled(args, kwargs)
        except _Plain as bypass:
            self._note(str(bypass))
        return self._model(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Do now, without gradients, what the first call with such arguments would do; leave everything as it is.

        Raises:
            TargetError: an input lies on another device than the model's state.
            TraceError: with ``strict=True``, the model cannot be traced.
        """
        with torch.no_grad():
            try:
                tensors, structure, signature, _ = self._signature(args, kwargs)
                prepared = isinstance(self._entry(tensors, structure, signature), Scheduled)
            except _Plain as bypass:
                self._note(str(bypass))
                prepared = False
        if not prepared:
            _check_devices(self._model, (args, kwargs))

    def static_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, with the tensors that a captured graph reads in place of those given.

        A call that is given these very tensors copies nothing in. Fill them before each call.

        Returns:
            ``(args, kwargs)``; the given tensors themselves where nothing is captured.
        """
        with torch.no_grad():
            tensors, structure, signature, _ = self._signature(args, kwargs)
            entry = self._entry(tensors, structure, signature)
        static = entry.static_inputs() if isinstance(entry, Scheduled) else None
        return unflatten(structure, static or tensors)

    @property
    def reports(self) -> tuple[Report, ...]:
        """What is known of each signature, the most recently used first, then calls that went to the plain model."""
        with self._lock:
            return (*(entry.report for entry in reversed(self._entries.values())), *self._bypasses.values())

    def _scheduled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.__dict__["_shortcut"] = None
        tensors, structure, signature, watch = self._signature(args, kwargs)
        if signature.records_gradients:
            raise self._refused(RECORDS_GRADIENTS)
        for _ in range(2):
            entry = self._entry(tensors, structure, signature)
            try:
                if not isinstance(entry, Scheduled):
                    return entry(*args, **kwargs)
                outputs = entry(tensors)
                if not kwargs and watch is self._watch:
                    self.__dict__["_shortcut"] = entry.shortcut(args, watch)
                return outputs
            except Stale:
                self._drop(entry)
            except Unsuitable as reason:
                raise self._refused(str(reason)) from None
            except Exception:
                if isinstance(entry, Plain):  # it was the model that failed, perhaps at this input only
                    self._drop(entry)
                raise
        raise self._refused("the model's state changes while it is called")

    def _signature(self, args: Any, kwargs: Any) -> tuple[list[Tensor], Structure, Signature, ModelWatch]:
        """The flat inputs of a call, its signature, and the watch on the modules that it was made for."""
        try:
            tensors, structure = flatten((args, kwargs))
        except TraceError as error:
            raise self._refused(str(error)) from None
        self._renew_watch()
        watch = self._watch
        hooked = "a submodule has forward hooks, which a graph would not call" if watch.hooked() else ""
        if reason := unusual_tensor(tensors) or unusual_call() or hooked:
            raise self._refused(reason)
        gradients = torch.is_grad_enabled() and any(t.requires_grad for t in chain(tensors, self._model.parameters()))
        return tensors, structure, signature_of(structure, tensors, watch.training(), gradients), watch

    def _renew_watch(self) -> None:
        if not self._watch.intact():
            self.__dict__["_watch"] = ModelWatch(self._model)
            self._forget()

    def _forget(self) -> None:
        # Without the lock: it is held while another thread prepares, and that may be waiting for this thread.
        self.__dict__["_entries"] = OrderedDict()
        self.__dict__["_shortcut"] = None

    def _drop(self, entry: Entry) -> None:
        self.__dict__["_shortcut"] = None
        with self._lock:
            for signature in [signature for signature, other in self._entries.items() if other is entry]:
                del self._entries[signature]

    def _entry(self, tensors: list[Tensor], structure: Structure, signature: Signature) -> Entry:
        with self._lock:
            entries = self._entries
            if signature not in entries:
                with preparing:
                    # Again, for a trace in another thread sets flags for all threads that are part of a signature.
                    training, gradients = self._watch.training(), signature.records_gradients
                    signature = signature_of(structure, tensors, training, gradients)
                    if signature not in entries:
                        entries[signature] = self._made(tensors, structure, signature)
                self._evict(entries)
            entries.move_to_end(signature)
            return entries[signature]

    def _evict(self, entries: OrderedDict[Signature, Entry]) -> None:
        while len(entries) > self._options.max_signatures:
            dropped, _ = entries.popitem(last=False)
            self.__dict__["_shortcut"] = None
            log.warning("%s: dropped the schedule for %s; see max_signatures", self._name, dropped)

    def _made(self, tensors: list[Tensor], structure: Structure, signature: Signature) -> Entry:
        try:
            if any(isinstance(module, OptimizedModule) for module in self._model.modules()):
                raise TraceError("a part of it is optimized already: optimize the whole alone")
            bound_inputs = self._bound_inputs or frozenset()
            entry = Scheduled(self._model, structure, tensors, signature, bound_inputs, self._options)
            log.info("%s, %s: %s", self._name, signature, entry.report.mode)
            return entry
        except Exception as error:
            of_a_piece = self._bound_inputs is not None
            if self._options.strict or (isinstance(error, OptionError) and not of_a_piece):
                raise
            splittable = isinstance(error, TraceError) and not isinstance(error, FastPathError)
            if splittable and not of_a_piece:
                log.warning("%s: %s; splitting it at graph breaks", self._name, error)
                return Pieces(self._model, signature, str(error), self._piece)
            reason = str(error) if isinstance(error, TraceError) else f"it cannot be scheduled: {first_line(error)}"
            log.warning("%s runs plainly: %s", self._name, reason)
            return Plain(self._model, signature, reason)

    def _piece(self, module: nn.Module, bound_inputs: frozenset[int]) -> OptimizedModule:
        return OptimizedModule(module, self._options, bound_inputs)

    def _refused(self, reason: str) -> Exception:
        return TraceError(reason) if self._options.strict else _Plain(reason)

    def _note(self, reason: str) -> None:
        """Remember, and say once, why a call went to the plain model."""
        if reason not in self._bypasses:
            log.warning("%s runs plainly: %s", self._name, reason)
            refusal = Decision("", "plain", reason)
            report = Report(self._name, "some calls", "plain", refusals=(refusal,), versions=versions())
            self.__dict__["_bypasses"] = {**self._bypasses, reason: report}

    @property
    def _name(self) -> str:
        return name_of(self._model)

    # What follows makes it a module like the one that it was made of.

    @property
    def training(self) -> bool:
        """The model's own flag."""
        return bool(self._model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:  # nn.Module.__init__ sets the flag before there is a model
            self._model.training = mode

    def train(self, mode: bool = True) -> OptimizedModule:
        """Set the model's mode."""
        self._model.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OptimizedModule:
        self._model._apply(fn, recurse)
        self._forget()  # graphs hold the memory that the state has just left
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> OptimizedModule:
        """Apply a function to the model and its submodules."""
        self._model.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self._model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._model._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the model, but not its special methods: a copy would be one of the model alone."""
        if "_model" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, unless it is one of the wrapper's own."""
        if name in self.__dict__ or "_model" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the model."""
        delattr(self._model, name)

    def __repr__(self) -> str:
        """The model's own, wrapped."""
        return f"{type(self).__name__}({self._model!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the model and the options; schedules are made anew."""
        hooks = {name: value for name, value in self.__dict__.items() if "_hook" in name}
        return OptimizedModule, (self._model, self._options, self._bound_inputs), hooks


_SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


class _Plain(Exception):  # noqa: N818 - a notice within this file, not an error
    """A call must go to the plain model; the message says why."""


class _FunctionModule(nn.Module):
    """A function as a module. The modules that it refers to, or that it is a method of, are its submodules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        # Not add_module, which refuses names of its own attributes.
        self._modules |= {k: value for k, value in _referred_to(function).items() if isinstance(value, nn.Module)}

    @property
    def training(self) -> bool:
        """A function has no mode of its own."""
        return any(module.training for module in self.children())

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def _get_name(self) -> str:
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _referred_to(function: Callable[..., Any]) -> dict[str, Any]:
    """What a Python function or method refers to by name; nothing for other callables."""
    if not inspect.isfunction(getattr(function, "__func__", function)):
        return {}
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable has no value yet
        return {}
    return {**variables.globals, **variables.nonlocals, "self": getattr(function, "__self__", None)}


def _check_devices(model: nn.Module, inputs: object) -> None:
    """Say so if a model could not be prepared and its inputs lie elsewhere than its state.

    Raises:
        TargetError: they do.
    """
    homes = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    try:
        tensors, _ = flatten(inputs)
    except TraceError:
        return
    for index, tensor in enumerate(tensors):
        if homes and tensor.device not in homes:
            home = min(map(str, homes))
            raise TargetError(f"example input {index} is on {tensor.device}, the model on {home}: use .to({home!r})")
