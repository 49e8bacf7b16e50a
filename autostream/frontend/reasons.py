"""Why Dynamo cannot capture a call, or captures the next one anew, and what to write instead, in plain words."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from itertools import chain, count
from typing import Any, cast

from torch import fx

from autostream.analysis.source import user_line
from autostream.errors import first_line
from autostream.frontend.guards import FailedGuard
from autostream.frontend.tree import Structure


def failed_guard(failed: FailedGuard) -> str:
    """Why this guard fails in one call after the other, with the user's line, and what to write instead.

    Example:
        >>> failed_guard(FailedGuard("len(L['f'].losses) == 4", "losses", "net.py:9"))
        'losses has another length now: return what the call adds to it, and add that after the call (net.py:9)'
    """
    words = next((words for pattern, words in _GUARDS.items() if re.fullmatch(pattern, failed.code)), "")
    return _with_line(words.format(failed.name) if failed.name and words else failed.code, failed.line)


def _with_line(reason: str, line: str) -> str:
    return f"{reason} ({line})" if line else reason


def changed_number(function: Callable[..., Any], call: Structure, other: Structure) -> str:
    """The first argument that is or holds another number in another call of a function; ``""`` if none does.

    Args:
        function: is called.
        call: the structure of its positional and keyword arguments.
        other: those of another call.

    Example:
        >>> from autostream.frontend.tree import flatten
        >>> _, first = flatten(((5,), {"power": 1}))
        >>> _, second = flatten(((5,), {"power": 2}))
        >>> changed_number(lambda x, power: x**power, first, second)
        'power'
    """
    given, others = _arguments(function, call), _arguments(function, other)
    return next((name for name, each in given.items() if name in others and _differs(each, others[name])), "")


def _arguments(function: Callable[..., Any], call: Structure) -> dict[str, Structure]:
    """The structures of arguments, by the names of the function's parameters, or by their places."""
    args, kwargs = cast(tuple[Structure, Structure], call.children)
    try:
        parameters = [*signature(function).parameters.values()]
    except (TypeError, ValueError):  # it is none of Python's
        parameters = []
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    places = (f"argument {at}" for at in count(len(names) + 1))
    return {
        **dict(zip(chain(names, places), args.children or (), strict=False)),
        **dict(zip(kwargs.context, kwargs.children or (), strict=True)),
    }


def _differs(one: Structure, other: Structure) -> bool:
    """Whether there is another number in one structure than in the other."""
    if one.kind is not other.kind or one.children is None or other.children is None:
        return one.kind in (int, float) and other.kind in (int, float) and one != other
    return any(map(_differs, one.children, other.children))


def reason_of(error: BaseException) -> str:
    """Why Dynamo has raised this error, in one line, with the user's line where it is known."""
    stack = _in_text(getattr(error, "real_stack", None))
    message = first_line(error).removeprefix("Unsupported: ").removeprefix("UserError: ")
    return _with_line(_in_words(f"{error}\n{stack}") or message, user_line(stack))


def reason_of_op(error: BaseException) -> str:
    """Why a captured graph has no ATen ops, in one line, with the user's line of the node that has raised the error."""
    message = first_line(error)
    nodes = [frame.f_locals.get("node") for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [user_line(node.stack_trace) for node in nodes if isinstance(node, fx.Node)]
    return _with_line(_in_words(message) or f"its graph has no ATen ops: {message}", "".join(lines[-1:]))


def reason_of_break(message: str, frames: Sequence[traceback.FrameSummary]) -> str:
    """Why there is a graph break, in one line, with the user's line where it is known, but without what to do.

    Args:
        message: Dynamo's.
        frames: of the user, where the break is.
    """
    stack = _in_text(frames)
    words = _in_words(f"{message}\n{stack}") or message.strip().partition("\n")[0]
    return _with_line(words.partition(": ")[0], user_line(stack))


def _in_words(text: str) -> str:
    """What a message of Dynamo's and the user's stack say, and what to do; ``""`` if that is not known."""
    found = ((re.search(pattern, text), words) for pattern, words in _WORDS.items())
    return next((words.format(*match.groups()) for match, words in found if match), "")


def _in_text(frames: Iterable[traceback.FrameSummary] | None) -> str:
    return "".join(traceback.format_list(frames or ()))


AS_A_TENSOR = "pass it as a tensor, or as a flag what Python decides by it"

ONE_CACHE = "fix max_length (or max_cache_len), or pass one StaticCache"
"""What to do with static caches of transformers, each size of which has a graph."""

EACH_OPTIMIZER = "write the step with @autostream.step(optimizers=[...]), and list each"
"""What to do with an optimizer of which a step, or a loss of ``train_step``, does not know."""

_GUARDS = {
    r".* is the object that was captured": "{0} is another tensor now: write it in place, as {0}.lerp_() and "
    "{0}.copy_() do",
    r"\S*\.max_cache_len == \d+": f"its cache has another size: {ONE_CACHE}",
    r"len\(.*\) == \d+": "{} has another length now: return what the call adds to it, and add that after the call",
    r".* == .*": "{} has another value now: keep it in a tensor, or pass as a flag what Python decides by it",
}
"""Patterns of guards, as Dynamo writes them, the first of which counts, and words with the name of what is guarded."""

_BEFORE = "draw before the call, and pass what is drawn as a tensor"
_CALLS = "it calls {}, which cannot be captured: call it before or after"
_RAISED = r"""(?m)raised exception {}\([(\[]*(?:ConstantVariable\(str: )?['"](.*)['"][)\],]*$"""

PYTHONS_NUMBERS = f"it draws random numbers from a generator of Python's: {_BEFORE}"

_WORDS = {
    r"""got TraceError\(['"](.*?)['"]\)""": "{}",  # by what stands in for the random numbers of DTensors
    _RAISED.format("TraceError"): "{}",  # by a function that takes the place of PyTorch's
    r", in (load_state_dict|state_dict)\n": "it calls {}(): write the tensors in place, as "
    "torch._foreach_copy_(list(target.parameters()), list(critic.parameters())) does",
    "tensor creation function with requires_grad=True": "it makes a tensor with requires_grad=True: make it without, "
    "and call its requires_grad_()",
    r"qualname: Optimizer\.zero_grad": f"it clears the gradients of another optimizer: {EACH_OPTIMIZER}",
    r"torch[/\\]distributions[/\\]": "a distribution checks its arguments, for which the host waits: make it "
    "without validate_args=True",
    r"torch[/\\]nn[/\\]parallel[/\\]distributed\.py": "it calls DistributedDataParallel, which averages gradients by "
    "hooks that a graph would not call: call its .module, and give data_parallel=process_group",
    "doesn't support `async_op=True": "it calls a collective with async_op=True: leave that out, as a schedule starts "
    "it early and waits for it late",
    _RAISED.format(r"(\w+)"): "it raises an exception, {}: {}",
    r"^generic_jump|Data-dependent branching|data-dependent expression|Indexing list with non-scalar": "Python "
    "branches on a number that the call computes, or indexes with it: use torch.where, torch.index_select or an index "
    "of shape (1,), or decide before the call, and pass a flag",
    r"context: builtin print |LoggingLogger|logging\.Logger method": "it prints or logs: return what it "
    "says, and print it after the call",
    r"Variable\(ScriptObject\)": "it uses an object of TorchScript's, such as the packed weights of a quantized layer, "
    "which no graph takes: optimize the parts of the model that have none",
    r"module: random, |qualname: Random\.": PYTHONS_NUMBERS,
    r"numpy function: |call_method UserDefinedObjectVariable\(Generator\)": f"it calls NumPy: {_BEFORE}",
    r"Tensor\.numpy\(\)": "it calls numpy() of a tensor: return the tensor, and convert it after the call",
    r"Variable\(Generator\)": "it draws from a torch.Generator: seed the default one with torch.manual_seed, or "
    + _BEFORE,
    r"optim.lr_scheduler\.py": "it steps a learning-rate scheduler: do that between steps",
    r"graph_break\(\)[\s\S]*optim.optimizer\.py": f"it steps another optimizer: {EACH_OPTIMIZER}",
    r"requires_grad_\(\) call|setattr\(\) on Tensor\.requires_grad": "it sets requires_grad: do that between calls",
    r"context: builtin (\w+)": _CALLS,
    r"qualname: ([\w.]+)": _CALLS,
    r"(?m)Explanation: (.+?)(?:\. |\.?$)": "{}: do that before or after the call",  # any other of Dynamo's
}
"""Patterns of Dynamo's messages, the first of which counts, and words with what they capture."""
