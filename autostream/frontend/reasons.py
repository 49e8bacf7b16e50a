"""Why Dynamo cannot capture a call: what is on the user's line, and what to write instead, in plain words."""

from __future__ import annotations

import re
import traceback

from autostream.analysis.source import user_line
from autostream.errors import first_line


def failed_guard(guard: str) -> str:
    """What to write instead where this guard, as Dynamo writes it, fails in one call after the other."""
    if found := re.fullmatch(r"\S*?(\w+)\W* is the object that was captured", guard):
        name = found[1]
        return f"{name} is another tensor now: write it in place, as {name}.lerp_() and {name}.copy_() do"
    if found := re.fullmatch(r"\S*?(\w+)\W* == -?[\d.]+", guard):
        name = "a variable of a closure" if found[1] == "cell_contents" else found[1]
        return f"{name} is another number now: pass it as a tensor, or as a flag what Python decides by it"
    return guard


def reason_of(error: BaseException) -> str:
    """Why Dynamo has raised this error, in one line, with the user's line where it is known."""
    stack = "".join(traceback.format_list(getattr(error, "real_stack", None) or ()))
    line, text = user_line(stack), f"{error}\n{stack}"
    reason = first_line(error).removeprefix("Unsupported: ").removeprefix("UserError: ")
    for pattern, words in _WORDS.items():
        if found := re.search(pattern, text):
            reason = words.format(*found.groups())
            break
    return f"{reason} ({line})" if line else reason


_BEFORE = "draw before the call, and pass what is drawn as a tensor"
_CALLS = "it calls {}, which cannot be captured: call it before or after"
_RAISED = r"""(?m)raised exception {}\([(\[]*(?:ConstantVariable\(str: )?['"](.*)['"][)\],]*$"""

PYTHONS_NUMBERS = f"it draws random numbers from a generator of Python's: {_BEFORE}"

_WORDS = {
    _RAISED.format("TraceError"): "{}",  # by a function that takes the place of PyTorch's
    r", in (load_state_dict|state_dict)\n": "it calls {}(): write the tensors in place, as "
    "torch._foreach_copy_(list(target.parameters()), list(critic.parameters())) does",
    "tensor creation function with requires_grad=True": "it makes a tensor with requires_grad=True: make it without, "
    "and call its requires_grad_()",
    r"qualname: Optimizer\.zero_grad": "it clears the gradients of an optimizer that is not in the list: add it to "
    "optimizers=[...]",
    r"torch[/\\]distributions[/\\]": "a distribution checks its arguments, for which the host waits: make it "
    "without validate_args=True",
    _RAISED.format(r"(\w+)"): "it raises an exception, {}: {}",
    r"Data-dependent branching|data-dependent expression|Indexing list with non-scalar": "Python branches on a number "
    "that the call computes, or indexes with it: use torch.where or torch.index_select, or decide before the call, and "
    "pass a flag",
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
    r"graph_break\(\)[\s\S]*optim.optimizer\.py": "it steps an optimizer that is not in the list: add it to "
    "optimizers=[...]",
    r"requires_grad_\(\) call|setattr\(\) on Tensor\.requires_grad": "it sets requires_grad: do that between calls",
    r"context: builtin (\w+)": _CALLS,
    r"qualname: ([\w.]+)": _CALLS,
}
"""Patterns of Dynamo's messages, the first of which counts, and words with what they capture."""
