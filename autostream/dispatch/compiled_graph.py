"""A graph of tensors, scheduled anew for each kind of tensors that it is called with.

graph, flat tensors ──▶ signature ──▶ ScheduledProgram, made in the first call that has it
                            └── no schedule: the graph itself, op by op

So run the graphs that Dynamo captures, those that AOTAutograd makes of them, and the sections of a program. Nothing of
Python is looked at here: that is guarded where the graph was captured.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from autostream.dispatch.admission import Admission
from autostream.dispatch.optimized_callable import OptimizedCallable
from autostream.dispatch.paranoid import compared
from autostream.dispatch.scheduled_program import Label, ModelContext, NoSchedule, ScheduledProgram
from autostream.errors import OptionError, TraceError, first_line
from autostream.frontend.aten import Given, program_of
from autostream.frontend.eager_only import unusual_memory
from autostream.frontend.settings import numerics, watch_numerics
from autostream.frontend.signature import aliases_of, described
from autostream.ir import Decision, Role
from autostream.options import Options, paranoid
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.runtime.addresses import metadata_check
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.graphs_by_address import LatestRun
from autostream.runtime.input_buffers import BufferTable
from autostream.utils.locks import preparing
from autostream.utils.stopwatch import Stopwatch
from autostream.utils.storages import storage_of

log = logging.getLogger(__name__)

InputNames = Sequence[tuple[Role, str]]
"""For each input of a graph, whose it is, and its name."""


class CompiledGraph(OptimizedCallable):
    """Runs a graph by a schedule for tensors like those that it is given.

    Args:
        module: takes flat tensors, and numbers that are the same for one signature; returns a tuple of tensors.
        names: of its inputs; those that are not inputs of the model stay where they are from call to call.
        model: the model's name.
        context: what its schedules share with those of the model's other graphs.
        may_cut: whether what a CUDA graph cannot hold may be cut into sections.
        half: of a call that records gradients, which one it is. A forward computes where no other graph does.

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
        if half:  # batches are copied in: a capture for each place of theirs is two here
            context = replace(context, slots=BufferTable())
        cut = partial(section, context, model) if may_cut else None
        self._context = replace(context, make_section=cut)
        self._paranoid = paranoid()
        self._admission = Admission["CompiledSignature"](context.options.max_signatures)
        self._refused: dict[str, Report] = {}
        self._latest: CompiledSignature | None = None
        self._lock = threading.RLock()

    def __call__(self, *values: Any) -> Sequence[Any]:
        """What the graph returns for these tensors and numbers."""
        latest = self._latest
        run = None if latest is None or self._paranoid else latest.replay(values)
        ready = self.ready(values) if run is None else latest
        if ready is None:
            return self.plain(*values)
        if ready.is_stale(values):  # weights that its kernels hold on to have changed
            self._drop(ready)
            return self(*values)
        run = run or partial(ready, values)
        try:
            if self._paranoid:
                outputs: Sequence[Any] = compared(self._module, run, _tensors(values), values, {}, self._model)
                return outputs
            return run()
        except NoSchedule as reason:
            lost = ready.is_lost
            if not lost:
                self._note(str(reason))
        except torch.OutOfMemoryError as error:
            if self._context.options.strict:
                raise
            again = ready.scheduled is not None and ready.scheduled.repeatable
            self._fail(ready, _TOO_LITTLE.format(first_line(error)))
            if not again:  # it may have written some of its arguments
                raise
            lost = False
        if lost:  # what it holds may be what there is no memory for
            self._drop(ready)
            return self(*values)
        return self.plain(*values)

    def is_of(self, module: GraphModule, names: InputNames) -> bool:
        """Whether it runs this graph, whose inputs are these."""
        own = self._module
        apart = any(node.op == "get_attr" for node in module.graph.nodes)
        return not apart and list(names) == self._names and own.code == module.code

    def share_outputs(self, values: Sequence[Any], places: frozenset[int]) -> frozenset[int]:
        """Hand out outputs at these places where a captured graph computes them: they are the caller's for one call.

        Returns:
            Those for which that is done. Nobody else's graphs may be in its pool.
        """
        ready = self.ready(values)
        return frozenset() if ready is None or ready.scheduled is None else ready.scheduled.share_outputs(places)

    def plain(self, *values: Any) -> Sequence[Any]:
        """What the graph returns, op by op."""
        outputs: Sequence[Any] = self._module.forward(*values)
        return outputs

    def ready(self, values: Sequence[Any], *, admitted: bool = False) -> CompiledSignature | None:
        """What is scheduled for tensors like these; made now where there is none yet, and it may be worth it.

        Args:
            values: that the graph takes.
            admitted: whether the caller knows that it is worth it.
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
            ready = admission.entries.get(key)
            if ready is None:
                if not admitted and (reason := admission.refusal(key)):
                    admission.unserved(key)
                    self._note(reason)
                    return None
                ready = self._made(values)
                admission.add(key, ready)
            else:
                admission.served(key)
        self._latest = ready
        return None if ready.scheduled is None else ready

    @property
    def refusal(self) -> str:
        """Why the latest signature has no schedule."""
        return next((refusal.reason for report in self.reports for refusal in report.refusals), "")

    @property
    def made(self) -> Sequence[CompiledSignature]:
        """What there is for each signature."""
        return [*self._admission.entries.values()]

    @property
    def reports(self) -> tuple[Report, ...]:
        """What is known of each signature."""
        made = [ready.report for ready in reversed(self._admission.entries.values())]
        return tuple(replace(report, half=self.half) for report in (*made, *self.refused))

    @property
    def refused(self) -> tuple[Report, ...]:
        """Why some calls had no schedule."""
        return tuple(self._refused.values())

    def _key(self, values: Sequence[Any]) -> Hashable:
        tensors = _tensors(values)
        numbers = tuple(value for value in values if not isinstance(value, Tensor))
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        return numbers, kinds, aliases_of(tensors), numerics()

    def _made(self, values: Sequence[Any]) -> CompiledSignature:
        stopwatch = Stopwatch()
        given = [(*own, value) for own, value in zip(self._names, values, strict=True) if isinstance(value, Tensor)]
        label = Label(self._model, described([tensor for role, _, tensor in given if role is Role.INPUT]))
        try:
            with preparing:
                with stopwatch("trace"):
                    module, returned = _of_tensors(self._module, values)
                    program, constants = program_of(module, given)
                return CompiledSignature(program, given, constants, returned, label, self._context, stopwatch, values)
        except OptionError:
            raise
        except Exception as error:
            if self._context.options.strict:
                raise
            reason = str(error) if isinstance(error, TraceError) else f"it cannot be scheduled: {first_line(error)}"
            log.warning("%s runs plainly: %s", self._model, reason)
            return CompiledSignature.refused(label, reason, values)

    def _drop(self, ready: CompiledSignature) -> None:
        """Let go of a schedule, and of its graphs; the next call like it makes another."""
        with self._lock:
            self._latest = None
            for key in [key for key, other in self._admission.entries.items() if other is ready]:
                self._admission.drop(key)
            ready.give_up("it has been replaced")

    def _fail(self, ready: CompiledSignature, reason: str) -> None:
        log.warning("%s runs plainly: %s", self._model, reason)
        ready.give_up(reason)

    def _note(self, reason: str) -> None:
        if reason not in self._refused:
            log.warning("%s: some calls run plainly: %s", self._model, reason)
            refusal = Decision("", "plain", reason)
            self._refused[reason] = Report(self._model, "some calls", "plain", refusals=(refusal,), versions=versions())


_TOO_LITTLE = (
    "there is too little memory to run it as scheduled ({}): free some, or lower memory_budget, and optimize it again"
)


def reports_of_graph(model: str, made: Sequence[CompiledGraph]) -> tuple[Report, ...]:
    """What is known of a graph of Dynamo's, from what was made of it: one report where gradients are recorded."""
    if any(compiled.half for compiled in made):
        return (report_of_halves(model, made),)
    return tuple(report for compiled in made for report in compiled.reports)


def report_of_halves(model: str, made: Sequence[CompiledGraph]) -> Report:
    """What is known of a graph that records gradients, from what was made of its forward and its backward so far."""
    parts = tuple(report for compiled in made for report in compiled.reports)
    signature = next((part.signature for part in parts), "not run yet")
    return Report(model, signature, "forward and backward", versions=versions(), parts=parts)


def eager_reason(options: Options, tensors: Iterable[Any]) -> str:
    """Why a call that these tensors go into is left to the model, if it records gradients; ``""`` where it is not.

    Over several GPUs the model keeps its own nodes of autograd: one for all would be of one GPU, and autograd
    warns of gradients that come from another. On a CPU its calls are quicker, unless somebody asks for a schedule.
    """
    if not torch.is_grad_enabled():
        return ""
    given = _tensors(tensors)
    if not any(tensor.requires_grad for tensor in given):
        return ""
    gpus = sorted({str(tensor.device) for tensor in given if tensor.is_cuda})
    if len(gpus) > 1:
        return f"the model uses several devices ({', '.join(gpus)}), and gradients are recorded"
    asked = options.strict or options.policy != "auto"
    return "" if asked or gpus else _BETTER_ALONE


_BETTER_ALONE = (
    "gradients are recorded on a CPU, where nothing is captured, so that a schedule of forward and backward takes the "
    "host longer than the model does: choose a policy to have one all the same"
)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def section(context: ModelContext, model: str, module: GraphModule, bound: frozenset[int]) -> CompiledGraph:
    """What runs a section of a program, which is not cut again."""
    count = len(module.graph.find_nodes(op="placeholder"))
    names = [(Role.BUFFER if at in bound else Role.INPUT, str(at)) for at in range(count)]
    return CompiledGraph(module, names, model, context, may_cut=False)


@dataclass(frozen=True)
class Constant:
    """What a graph returns that is no tensor: a size, or nothing."""

    value: Any


Returned = Sequence[int | Constant]
"""For each value that a graph returns, which of its tensors that is."""


def _of_tensors(module: GraphModule, values: Sequence[Any]) -> tuple[GraphModule, Returned]:
    """The graph with these numbers for constants, that returns tensors only; and how its values are found again."""
    results: Any = module.graph.output_node().args[0]
    if any(map(_is_number, results)):
        results = [Constant(n) if _is_number(r) else r for r, n in zip(results, _outputs(module, values), strict=True)]
    kept = [result for result in results if isinstance(result, fx.Node)]
    returned = [
        kept.index(r) if isinstance(r, fx.Node) else r if isinstance(r, Constant) else Constant(r) for r in results
    ]
    if all(isinstance(value, Tensor) for value in values) and len(kept) == len(results):
        return module, returned
    graph, known = fx.Graph(), dict[fx.Node, Any]()
    for node, value in zip(module.graph.find_nodes(op="placeholder"), values, strict=True):
        known[node] = graph.node_copy(node, known.__getitem__) if isinstance(value, Tensor) else value
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(tuple(known[result] for result in kept))
        elif node.op != "placeholder":
            known[node] = graph.node_copy(node, known.__getitem__)
    return fx.GraphModule(module, graph), returned


def _is_number(result: Any) -> bool:
    """Whether what a graph returns is a number that it computes, such as a size."""
    value = result.meta.get("val", result.meta.get("example_value")) if isinstance(result, fx.Node) else None
    return value is not None and not isinstance(value, Tensor)


def _outputs(module: GraphModule, values: Sequence[Any]) -> Sequence[Any]:
    """What a graph returns, computed without any tensor's elements."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        fakes = [mode.from_tensor(v, static_shapes=True) if isinstance(v, Tensor) else v for v in values]
        outputs: Sequence[Any] = fx.Interpreter(module).run(*fakes)
    return outputs


class CompiledSignature:
    """A schedule for one signature, and how it gets its arguments; or the reason why there is none."""

    scheduled: ScheduledProgram | None = None
    _refused: Report | None = None
    _inputs_fit: Callable[[Sequence[Any]], bool] | None = None

    def __init__(
        self,
        program: Any,
        given: Sequence[Given],
        constants: dict[str, Tensor],
        returned: Returned,
        label: Label,
        context: ModelContext,
        stopwatch: Stopwatch,
        values: Sequence[Any],
    ) -> None:
        tensors = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
        by_name = {(role, target): at for (role, target, _), at in zip(given, tensors, strict=True)}
        self.places = [by_name.get((p.role, p.target)) for p in program.placeholders]
        self._in_order = self.places == [*range(len(values))]
        self._constants = [constants.get(p.target) for p in program.placeholders]
        returned_as_is = list(returned) == [*range(len(program.outputs))]
        self._returned = None if returned_as_is else list(returned)
        stays = [p.role is not Role.INPUT for p in program.placeholders]
        self.scheduled = ScheduledProgram(program, self.arguments(values), stays, label, context, stopwatch)
        # Whether weights share memory makes a difference where some are written.
        inputs = [at for (role, *_), at in zip(given, tensors, strict=True) if role is Role.INPUT]
        self.fits = looks_alike_with(values, range(len(values)) if self.scheduled.writes else inputs)
        self._inputs, self._count = inputs, len(values)
        self._run: LatestRun | None = None
        replays = len(tensors) == len(values) and returned_as_is and not self.scheduled.writes
        self._inputs_fit = looks_alike_with([values[at] for at in inputs], range(len(inputs))) if replays else None

    @property
    def report(self) -> Report:
        """What was done, and why."""
        if self._refused is not None or self.scheduled is None:
            return cast(Report, self._refused)
        return self.scheduled.report

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """What the graph returns.

        Raises:
            NoSchedule: no graph reads the tensors where they lie, and none can be captured.
        """
        scheduled, returned = self.scheduled, self._returned
        if scheduled is None:
            raise NoSchedule("another thread has just dropped its schedule")
        outputs = scheduled(self.arguments(values))
        return outputs if returned is None else [r.value if isinstance(r, Constant) else outputs[r] for r in returned]

    def replay(self, values: Sequence[Any]) -> Callable[[], Sequence[Any]] | None:
        """What runs values like those before, whose weights lie where the latest graph reads them; else nothing.

        That graph knows how the weights are laid out, so only the others are looked at for it here.
        """
        scheduled, fit = self.scheduled, self._inputs_fit
        if scheduled is None or scheduled.latest is None or fit is None or len(values) != self._count:
            return None
        if not fit([values[at] for at in self._inputs]):
            return None
        arguments = self.arguments(values)
        run = self._run
        if run is None or not run.is_of(scheduled.latest, arguments):
            place = scheduled.reading(arguments)
            run = None if place is None else LatestRun(place, arguments)
        elif not run.unmoved(arguments):
            run = None
        self._run = run
        if run is None:
            return None
        scheduled.served(1)
        return partial(run.graph.launch, arguments)

    @property
    def is_direct(self) -> bool:
        """Whether the graph returns what the program does."""
        return self._returned is None

    def is_stale(self, values: Sequence[Any]) -> bool:
        """Whether the program holds on to values of weights that have changed."""
        scheduled = self.scheduled
        return scheduled is not None and bool(scheduled.frozen) and not scheduled.frozen(self.arguments(values))

    @property
    def is_lost(self) -> bool:
        """Whether its graphs read only what nobody has any more, and none could be captured for what is there now."""
        return self.scheduled is not None and self.scheduled.is_lost

    @classmethod
    def refused(cls, label: Label, reason: str, values: Sequence[Any]) -> CompiledSignature:
        """A signature that no schedule can be had for."""
        ready = cls.__new__(cls)
        ready.scheduled, ready.fits = None, looks_alike_with(values, ())
        refusal = Decision("", "plain", reason)
        report = Report(label.model, label.signature, "plain", refusals=(refusal,), versions=versions())
        ready._refused = report
        return ready

    def give_up(self, reason: str) -> None:
        """Run plainly from now on."""
        report = replace(self.report, mode="plain", refusals=(Decision("", "plain", reason),))
        self.scheduled, self._refused, self._run = None, report, None

    def arguments(self, values: Sequence[Any]) -> list[Tensor]:
        """The program's arguments, from what the graph takes."""
        if self._in_order:
            return [*values]
        own = zip(self.places, self._constants, strict=True)
        return [cast(Tensor, constant if at is None else values[at]) for at, constant in own]


def looks_alike_with(values: Sequence[Any], apart: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
    """A quick look at whether values are like these; where some are numbers, it says no.

    Args:
        values: to be looked at; none of them is kept.
        apart: which of them must not share memory with each other.
    """
    tensors = _tensors(values)
    if len(tensors) < len(values) or not _are_apart(values, apart):
        return lambda others: False
    alike, same_numerics, count = metadata_check(tensors), watch_numerics(), len(tensors)
    return lambda others: len(others) == count and alike(others) and same_numerics() and _are_apart(others, apart)


def _are_apart(tensors: Sequence[Tensor], places: Sequence[int]) -> bool:
    return len({storage_of(tensors[at]) for at in places}) == len(places)
