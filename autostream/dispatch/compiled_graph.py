"""A graph of tensors that is compiled once for each signature, i.e. for each set of shapes, dtypes, aliases, ….

graph, flat tensors ──▶ signature ──▶ ScheduledProgram, made in the first call with that signature
                            └── no schedule: the graph runs op by op

Graphs that Dynamo captures, AOTAutograd's forward and backward of them, and the sections of a program all run this way.
Only tensors are checked here. Guards on Python state belong to the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from autostream.dispatch.admission import Admission
from autostream.dispatch.optimized_callable import SharingCallable
from autostream.dispatch.paranoid import compared
from autostream.dispatch.scheduled_program import Label, ModelContext, NoSchedule, ScheduledProgram
from autostream.errors import GroupError, OptionError, TraceError, first_line
from autostream.frontend.aten import GraphInput, program_of
from autostream.frontend.eager_only import unusual_memory
from autostream.frontend.inputs import aliases_of, described
from autostream.frontend.settings import numerics, watch_numerics
from autostream.ir import Decision, Role
from autostream.options import Options, paranoid
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.graphs_by_address import LatestRun
from autostream.runtime.input_buffers import BufferTable
from autostream.runtime.layouts import metadata_check
from autostream.runtime.static_inputs import ordinary
from autostream.utils.locks import lock_of, preparing
from autostream.utils.stopwatch import Stopwatch
from autostream.utils.storages import storage_of

InputNames = Sequence[tuple[Role, str]]
"""The role and the name of each input of a graph."""


class CompiledGraph(SharingCallable):
    """A graph that runs with a schedule of its own for each signature.

    Args:
        module: takes flat tensors and numbers, and returns a tuple of tensors; numbers are part of the signature.
        names: of its inputs; the model's own tensors among them keep their addresses from call to call.
        model: the model's name.
        context: what its schedules share with those of the model's other graphs.
        may_cut: whether a program that does not fit into one CUDA graph may be cut into sections.
        half: ``"forward"`` or ``"backward"`` if gradients are recorded. A forward has a memory pool of its own.

    Example:
        >>> from autostream.runtime.input_buffers import BufferTable
        >>> class Twice(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x + x,)
        >>> graph = torch.fx.symbolic_trace(Twice())
        >>> context = ModelContext(Options(), GraphPools(), BufferTable())
        >>> compiled = CompiledGraph(graph, [(Role.INPUT, "0")], "Twice", context)
        >>> compiled(torch.ones(2))[0], compiled.reports[0].mode
        (tensor([2., 2.]), 'one stream')
    """

    def __init__(
        self,
        module: GraphModule,
        names: InputNames,
        model: str,
        context: ModelContext,
        *,
        may_cut: bool = True,
        half: str = "",
    ) -> None:
        self._module, self._names, self._model, self.half = module, list(names), model, half
        if half == "forward":
            context = replace(context, pools=GraphPools())
        if half:  # batches are copied in: one graph per input buffer would be two captures each
            context = replace(context, input_buffers=BufferTable())
        cut = partial(section, context, model) if may_cut else None
        self._context = replace(context, make_section=cut)
        self._paranoid = paranoid()
        self._admission = Admission["CompiledSignature"](context.options.max_signatures)
        self._refused: dict[str, Report] = {}
        self._latest: CompiledSignature | None = None
        self._lock = lock_of(self)

    def __call__(self, *values: Any) -> Sequence[Any]:
        """Run the graph with these tensors and numbers."""
        latest = self._latest
        run = None if latest is None or self._paranoid else latest.replay(values)
        signature = self.signature(values) if run is None else latest
        if signature is None:
            return self.run_eagerly(*values)
        if signature.is_stale(values):  # weights that were constant-folded into its kernels have changed
            self._drop(signature)
            return self(*values)
        run = run or partial(signature, values)
        try:
            if self._paranoid:
                outputs: Sequence[Any] = compared(self._module, run, _tensors(values), values, {}, self._model)
                return outputs
            return run()
        except NoSchedule as reason:
            lost = signature.is_lost
            if not lost:
                self._note(str(reason))
        except torch.OutOfMemoryError as error:
            if self._context.options.strict:
                raise
            again = signature.scheduled is not None and signature.scheduled.repeatable
            self._fail(signature, TOO_LITTLE.format(first_line(error)))
            if not again:  # it may have written some of its arguments
                raise
            lost = False
        if lost:  # the memory that it holds may be the memory that is missing
            self._drop(signature)
            return self(*values)
        return self.run_eagerly(*values)

    def is_of(self, module: GraphModule, names: InputNames) -> bool:
        """Whether it has the same code and inputs as this graph."""
        has_attributes = any(node.op == "get_attr" for node in module.graph.nodes)
        return not has_attributes and list(names) == self._names and self._module.code == module.code

    def share_outputs(self, values: Sequence[Any], indices: frozenset[int], *, aliased: bool = False) -> frozenset[int]:
        """See :class:`SharingCallable`. No other model's graphs may be in its memory pool."""
        signature = self.signature(values)
        scheduled = None if signature is None else signature.scheduled
        return frozenset() if scheduled is None else scheduled.share_outputs(indices, aliased=aliased)

    def run_eagerly(self, *values: Any) -> Sequence[Any]:
        """Run the graph op by op."""
        outputs: Sequence[Any] = self._module.forward(*values)
        return outputs

    def signature(self, values: Sequence[Any], *, admitted: bool = False) -> CompiledSignature | None:
        """The compiled signature of these inputs, compiled now if need be; ``None`` if they run eagerly.

        Args:
            values: the graph's inputs.
            admitted: whether to compile it even if that does not look worth it.
        """
        latest = self._latest
        if latest is not None and latest.fits(values):
            return None if latest.scheduled is None else latest
        if unusual := next(filter(None, map(unusual_memory, _tensors(values))), ""):
            self._note(f"a tensor {unusual}")
            return None
        key = self._key(values)
        admission = self._admission
        with self._lock:
            signature = admission.entries.get(key)
            if signature is not None:
                admission.hit(key)
            elif not admitted and (reason := admission.refusal(key)):
                admission.miss(key)
                self._note(reason)
                return None
        if signature is None:
            with preparing, self._lock:  # in this order: who captures a call holds the former, and comes here
                signature = admission.entries.get(key)  # another thread may have compiled it meanwhile
                if signature is None:
                    signature = self._compile(values)
                    admission.add(key, signature)
        self._latest = signature
        return None if signature.scheduled is None else signature

    @property
    def refusal(self) -> str:
        """Why the latest signature has no schedule."""
        return next((refusal.reason for report in self.reports for refusal in report.refusals), "")

    @property
    def signatures(self) -> Sequence[CompiledSignature]:
        """All signatures that it has seen and compiled, or tried to."""
        return [*self._admission.entries.values()]

    @property
    def reports(self) -> tuple[Report, ...]:
        """A report for each signature, the most recently used first, then one for each reason to run eagerly."""
        compiled = [signature.report for signature in reversed(self._admission.entries.values())]
        return tuple(replace(report, half=self.half) for report in (*compiled, *self.refused))

    @property
    def refused(self) -> tuple[Report, ...]:
        """A report for each reason why a call was not compiled."""
        return tuple(self._refused.values())

    def _key(self, values: Sequence[Any]) -> Hashable:
        tensors = _tensors(values)
        numbers = tuple(value for value in values if not isinstance(value, Tensor))
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        return numbers, kinds, aliases_of(tensors), numerics()

    def _compile(self, values: Sequence[Any]) -> CompiledSignature:
        stopwatch = Stopwatch()
        named = zip(self._names, values, strict=True)
        inputs = [(*name, ordinary(value)) for name, value in named if isinstance(value, Tensor)]
        label = Label(self._model, described([tensor for role, _, tensor in inputs if role is Role.INPUT]))
        try:
            with stopwatch("trace"):
                module, returned = _of_tensors(self._module, values)
                program, constants = program_of(module, inputs)
            return CompiledSignature(program, inputs, constants, returned, label, self._context, stopwatch, values)
        except (GroupError, OptionError):
            raise
        except Exception as error:
            if self._context.options.strict:
                raise
            reason = str(error) if isinstance(error, TraceError) else f"it cannot be scheduled: {first_line(error)}"
            self._context.warn(f"{self._model} runs plainly: {reason}")
            return CompiledSignature.refused(label, reason, values)

    def _drop(self, signature: CompiledSignature) -> None:
        """Release a schedule and its CUDA graphs; the next call with this signature compiles it again."""
        with self._lock:
            self._latest = None
            for key in [key for key, other in self._admission.entries.items() if other is signature]:
                self._admission.drop(key)
            signature.give_up("it has been replaced")

    def _fail(self, signature: CompiledSignature, reason: str) -> None:
        self._context.warn(f"{self._model} runs plainly: {reason}")
        signature.give_up(reason)

    def _note(self, reason: str) -> None:
        if reason not in self._refused:
            self._context.warn(f"{self._model}: some calls run plainly: {reason}")
            refusal = Decision("", "plain", reason)
            self._refused[reason] = Report(self._model, "some calls", "plain", refusals=(refusal,), versions=versions())


TOO_LITTLE = (
    "there is too little memory to run it as scheduled ({}): free some, or lower memory_budget, and optimize it again"
)


def reports_of_graph(model: str, compiled: Sequence[CompiledGraph]) -> tuple[Report, ...]:
    """The reports of one of Dynamo's graphs: one for forward and backward so far together, else one per signature."""
    reports = tuple(report for graph in compiled for report in graph.reports)
    if not reports or not any(graph.half for graph in compiled):
        return reports
    return (Report(model, reports[0].signature, "forward and backward", versions=versions(), parts=reports),)


def eager_reason(options: Options, tensors: Iterable[Any]) -> str:
    """Why a call with these tensors runs eagerly although it could be captured; ``""`` if it does not.

    That concerns calls that record gradients. Over several GPUs the model keeps its own autograd nodes: one node for
    all would be on one GPU, and autograd warns of gradients that come from another. On a CPU eager calls are faster,
    so a schedule is only made if a policy or ``strict`` asks for one.
    """
    if not torch.is_grad_enabled():
        return ""
    inputs = _tensors(tensors)
    if not any(tensor.requires_grad for tensor in inputs):
        return ""
    gpus = sorted({str(tensor.device) for tensor in inputs if tensor.is_cuda})
    if len(gpus) > 1:
        return f"the model uses several devices ({', '.join(gpus)}), and gradients are recorded"
    asked = options.strict or options.policy != "auto"
    return "" if asked or gpus else _CPU_GRADIENTS


_CPU_GRADIENTS = (
    "gradients are recorded on a CPU, where nothing is captured, so that a schedule of forward and backward takes the "
    "host longer than the model does: choose a policy to have one all the same"
)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def section(
    context: ModelContext, model: str, module: GraphModule, bound: frozenset[int], *, alone: bool = False, of: int = 1
) -> CompiledGraph:
    """Compile a section of a program, which is not cut again.

    Args:
        context: of the model.
        model: its name.
        module: the section.
        bound: the positions of its inputs whose addresses stay the same.
        alone: whether it has a memory pool of its own, so that later sections may read its results there.
        of: how many sections share the seconds of tuning.
    """
    options = replace(context.options, tuning_seconds=context.options.tuning_seconds / of)
    context = replace(context, options=options)
    if alone:
        context = replace(context, pools=GraphPools())
    count = len(module.graph.find_nodes(op="placeholder"))
    names = [(Role.BUFFER if at in bound else Role.INPUT, str(at)) for at in range(count)]
    return CompiledGraph(module, names, model, context, may_cut=False)


@dataclass(frozen=True)
class Constant:
    """A returned value that is no tensor: a size, or ``None``."""

    value: Any


Returned = Sequence[int | Constant]
"""For each value that a graph returns, its index among the returned tensors, or the constant."""


def _of_tensors(module: GraphModule, values: Sequence[Any]) -> tuple[GraphModule, Returned]:
    """The graph with numbers as constants that returns tensors only, and how to make its return values from these."""
    results: Any = module.graph.output_node().args[0]
    if any(map(_is_number, results)):
        results = [Constant(n) if _is_number(r) else r for r, n in zip(results, _outputs(module, values), strict=True)]
    tensors = [result for result in results if isinstance(result, fx.Node)]
    returned = [
        tensors.index(r) if isinstance(r, fx.Node) else r if isinstance(r, Constant) else Constant(r) for r in results
    ]
    if all(isinstance(value, Tensor) for value in values) and len(tensors) == len(results):
        return module, returned
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    for node, value in zip(module.graph.find_nodes(op="placeholder"), values, strict=True):
        copies[node] = graph.node_copy(node, copies.__getitem__) if isinstance(value, Tensor) else value
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(tuple(copies[result] for result in tensors))
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph), returned


def _is_number(result: Any) -> bool:
    """Whether an output of a graph is a number that it computes, such as a size."""
    value = result.meta.get("val", result.meta.get("example_value")) if isinstance(result, fx.Node) else None
    return value is not None and not isinstance(value, Tensor)


def _outputs(module: GraphModule, values: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a graph, computed on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        fakes = [mode.from_tensor(v, static_shapes=True) if isinstance(v, Tensor) else v for v in values]
        outputs: Sequence[Any] = fx.Interpreter(module).run(*fakes)
    return outputs


class CompiledSignature:
    """A graph scheduled for one signature, with the mapping of its inputs; or the reason why it has no schedule.

    Args:
        program: the graph for this signature.
        inputs: the role, name and value of each tensor input of the graph.
        constants: tensors that the program takes and the graph does not, by target.
        returned: how to make the graph's return values from the program's outputs.
        label: for reports.
        context: of the model.
        stopwatch: has the time that tracing took.
        values: all inputs of the graph.

    Attributes:
        scheduled: the schedule; ``None`` if there is none.
        fits: whether inputs have this signature; a fast check that may say no to some that have it.
    """

    scheduled: ScheduledProgram | None = None
    _refused: Report | None = None
    _inputs_fit: Callable[[Sequence[Any]], bool] | None = None

    def __init__(
        self,
        program: Any,
        inputs: Sequence[GraphInput],
        constants: dict[str, Tensor],
        returned: Returned,
        label: Label,
        context: ModelContext,
        stopwatch: Stopwatch,
        values: Sequence[Any],
    ) -> None:
        tensors = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
        by_name = {(role, target): at for (role, target, _), at in zip(inputs, tensors, strict=True)}
        self._sources = [by_name.get((p.role, p.target)) for p in program.placeholders]
        self._in_order = self._sources == [*range(len(values))]
        self._constants = [constants.get(p.target) for p in program.placeholders]
        returned_as_is = list(returned) == [*range(len(program.outputs))]
        self._returned = None if returned_as_is else list(returned)
        stays = [p.role is not Role.INPUT for p in program.placeholders]
        arguments = [*map(ordinary, self.arguments(values))]
        self.scheduled = ScheduledProgram(program, arguments, stays, label, context, stopwatch)
        # Aliases among the weights matter only if some are written.
        self._inputs = [at for (role, *_), at in zip(inputs, tensors, strict=True) if role is Role.INPUT]
        self.fits = same_signature_as(values, range(len(values)) if self.scheduled.writes else self._inputs)
        self._count = len(values)
        self._run: LatestRun | None = None
        replays = len(tensors) == len(values) and returned_as_is and not self.scheduled.writes
        model_inputs = [values[at] for at in self._inputs]
        self._inputs_fit = same_signature_as(model_inputs, range(len(model_inputs))) if replays else None

    @property
    def report(self) -> Report:
        """The schedule that was chosen, and why; or why there is none."""
        if self._refused is not None or self.scheduled is None:
            return cast(Report, self._refused)
        return self.scheduled.report

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """Run the graph with these inputs.

        Raises:
            NoSchedule: no CUDA graph reads tensors at these addresses, and none can be captured.
        """
        scheduled, returned = self.scheduled, self._returned
        if scheduled is None:
            raise NoSchedule("another thread has just dropped its schedule")
        outputs = scheduled(self.arguments(values))
        return outputs if returned is None else [r.value if isinstance(r, Constant) else outputs[r] for r in returned]

    def replay(self, values: Sequence[Any]) -> Callable[[], Sequence[Any]] | None:
        """The fast path: a replay of the latest CUDA graph, if its weights have not moved; else ``None``.

        That graph checks the layouts of the weights, so only the model's inputs are checked here.
        """
        scheduled, inputs_fit = self.scheduled, self._inputs_fit
        if scheduled is None or scheduled.latest is None or inputs_fit is None or len(values) != self._count:
            return None
        if not inputs_fit([values[at] for at in self._inputs]):
            return None
        arguments = self.arguments(values)
        run = self._run
        if run is None or not run.is_of(scheduled.latest, arguments):
            graph = scheduled.reading(arguments)
            run = None if graph is None else LatestRun(graph, arguments)
        elif not run.unmoved(arguments):
            run = None
        self._run = run
        if run is None:
            return None
        scheduled.count_replays(1)
        return partial(run.graph.launch, arguments)

    @property
    def is_direct(self) -> bool:
        """Whether the graph's return values are the program's outputs, in their order."""
        return self._returned is None

    def is_stale(self, values: Sequence[Any]) -> bool:
        """Whether weights have changed whose values are constants of the program."""
        scheduled = self.scheduled
        return scheduled is not None and bool(scheduled.frozen) and not scheduled.frozen(self.arguments(values))

    @property
    def is_lost(self) -> bool:
        """Whether all its CUDA graphs read weights that were freed, and none can be captured for the present ones."""
        return self.scheduled is not None and self.scheduled.is_lost

    @classmethod
    def refused(cls, label: Label, reason: str, values: Sequence[Any]) -> CompiledSignature:
        """A signature that cannot be scheduled."""
        signature = cls.__new__(cls)
        signature.scheduled, signature.fits = None, same_signature_as(values, ())
        refusal = Decision("", "plain", reason)
        report = Report(label.model, label.signature, "plain", refusals=(refusal,), versions=versions())
        signature._refused = report
        return signature

    def give_up(self, reason: str) -> None:
        """Run eagerly from now on."""
        report = replace(self.report, mode="plain", refusals=(Decision("", "plain", reason),))
        self.scheduled, self._refused, self._run = None, report, None

    def arguments(self, values: Sequence[Any]) -> list[Tensor]:
        """The program's arguments for these inputs of the graph."""
        if self._in_order:
            return [*values]
        sources = zip(self._sources, self._constants, strict=True)
        return [cast(Tensor, constant if at is None else values[at]) for at, constant in sources]


def same_signature_as(values: Sequence[Any], apart: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
    """A fast check whether other values have the same signature; always false if some are numbers.

    Args:
        values: the ones to compare with; they are not kept alive.
        apart: positions of tensors that must not share memory with each other.
    """
    tensors = _tensors(values)
    if len(tensors) < len(values) or not _are_apart(values, apart):
        return lambda others: False
    alike, same_numerics, count = metadata_check(tensors), watch_numerics(), len(tensors)
    return lambda others: len(others) == count and alike(others) and same_numerics() and _are_apart(others, apart)


def _are_apart(tensors: Sequence[Tensor], positions: Sequence[int]) -> bool:
    return len({storage_of(tensors[at]) for at in positions}) == len(positions)
