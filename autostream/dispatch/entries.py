"""What runs the calls of one signature, made from the first of them.

    call ──capture──▶ one graph ──▶ CapturedCall, with a backward if gradients are recorded
              ├── graph breaks ──▶ SplitCall: torch.compile, each graph a CompiledGraph
              └── no graph at all ──▶ EagerCall: the model itself

The dispatcher keeps these entries, and says which one runs a call. On a CPU the first call of an entry is timed beside
the model itself, which takes its place as an EagerCall where that is not slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from autostream.dispatch.captured_call import CapturedCall
from autostream.dispatch.compiled_graph import CompiledGraph, InputNames
from autostream.dispatch.eager_call import EagerCall
from autostream.dispatch.requirements import check_requirements
from autostream.dispatch.scheduled_program import ModelContext
from autostream.dispatch.split_call import SplitCall
from autostream.errors import FastPathError, GroupError, OptionError, TargetError, TraceError, first_line
from autostream.frontend.aten import drop_weak_references, mode_of
from autostream.frontend.autograd import differentiable
from autostream.frontend.capture import capture
from autostream.frontend.eager_only import unusual_model
from autostream.frontend.inputs import names_of
from autostream.frontend.modules import name_of
from autostream.frontend.tensor_parallel import groups_of, in_local_tensors, returns_distributed
from autostream.options import Options
from autostream.tuning.agreement import everywhere
from autostream.tuning.beside_model import beside_model, is_contested, without_trial
from autostream.utils.locks import preparing

Entry = CapturedCall | SplitCall | EagerCall
"""Runs the calls of one signature, if its guards hold."""


def new_entry(
    model: nn.Module,
    context: ModelContext,
    label: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Iterable[CompiledGraph],
) -> Entry | str:
    """Capture a call: what runs it and calls like it, or the reason why only a later one can be captured.

    Args:
        model: the module that is called.
        context: of the model.
        label: describes such calls in reports.
        args: positional arguments.
        kwargs: keyword arguments.
        known: compiled graphs of the model. The same graph under other guards, such as those of inference mode, is one.

    Raises:
        GroupError: the processes of a group would not launch the same collectives.
        OptionError: the options require what these tensors do not allow.
        TargetError: the model cannot be called so.
        TraceError: with ``strict=True``, the model cannot be captured.
    """
    options = context.options
    tensors = (*model.parameters(), *model.buffers(), *args)
    check_requirements(options, [tensor for tensor in tensors if isinstance(tensor, Tensor)])
    if any(map(is_lazy, model.parameters())):
        return _LAZY
    if reason := unusual_model(model):
        return _refused(model, context, label, TraceError(reason))
    compiled_graph, groups = partial(_compiled_graph, model, context), groups_of(model.parameters())
    try:  # in all processes: one without a graph would communicate by itself
        captured = everywhere(groups, "the capture of a call", partial(capture, model, args, kwargs), TraceError)
    except TraceError as error:
        if options.strict or isinstance(error, FastPathError) or groups:
            return _refused(model, context, label, error)
        return SplitCall(model, label, str(error), compiled_graph)
    except Exception as error:
        return _refused(model, context, label, error)
    if captured is None:
        return EagerCall(label, "it computes nothing with tensors")
    try:
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in captured.tensors)
        if recorded or returns_distributed(captured.module):
            names = names_of(captured, model)
            halves: list[CompiledGraph] = []
            run = differentiable(captured.module, captured.tensors, names, partial(compiled_graph, halves))
            return CapturedCall(captured, run, label, halves=halves)
        flat = in_local_tensors(captured)
        names = names_of(flat, model)
        same = (graph for graph in known if graph.is_of(flat.module, names))
        compiled = next(same, None) or compiled_graph([], flat.module, names)
        signature = compiled.signature(flat.tensors, admitted=True)
    except Exception as error:
        return _refused(model, context, label, error)
    finally:
        drop_weak_references(mode_of(captured.module))
    if signature is None:
        return EagerCall(label, compiled.refusal)
    return CapturedCall(flat, compiled, label, signature)


def model_instead(
    entry: Entry,
    model: nn.Module,
    options: Options,
    again: Callable[[tuple[Any, ...], dict[str, Any]], object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> EagerCall | None:
    """After the first call of an entry on a CPU: what takes its place, if the model itself is not slower.

    Args:
        entry: has run the call; it is compared once.
        model: the live model.
        options: how it is scheduled.
        again: runs a call once more as the entry does.
        args: the positional arguments of the call.
        kwargs: the keyword arguments.
    """
    if isinstance(entry, EagerCall) or entry.was_called:
        return None
    entry.was_called = True
    report = entry.reports(name_of(model))[0]
    if not is_contested(options, report):
        return None
    trial = entry.undone(model, args, kwargs) if isinstance(entry, CapturedCall) else None
    if trial is None:
        decision = without_trial(report)
    else:
        with preparing, trial as restore:
            decision = beside_model(partial(model, *args, **kwargs), partial(again, args, kwargs), restore)
    entry.beside_model = decision
    return EagerCall(entry.label, decision.reason, report) if decision.choice == "plain" else None


def _refused(model: nn.Module, context: ModelContext, label: str, error: Exception) -> EagerCall:
    if context.options.strict or isinstance(error, OptionError | TargetError | GroupError):
        raise error
    reason = str(error) if isinstance(error, TraceError) else f"it cannot be scheduled: {first_line(error)}"
    return EagerCall(label, reason, warning=f"{name_of(model)} runs plainly: {reason}")


def _compiled_graph(
    model: nn.Module,
    context: ModelContext,
    graphs: list[CompiledGraph],
    module: GraphModule,
    names: InputNames,
    *,
    half: str = "",
) -> CompiledGraph:
    """A compiled graph of the model, which is appended to a list."""
    compiled = CompiledGraph(module, names, name_of(model), context, half=half)
    graphs.append(compiled)
    return compiled


_LAZY = "it has parameters that its first call makes"
