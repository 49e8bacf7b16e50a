"""What no graph of a step does: it runs as it is written, and the reason has the user's line and what to write."""

from __future__ import annotations

import itertools
import logging
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import autostream
from autostream import OptionError, TargetError, TraceError

QUICK: dict[str, Any] = {"policy": "sequential", "kernels": "eager"}
Update = Callable[[Tensor], Any]
BUFFER = [torch.full((4, 3), float(at), dtype=torch.double) for at in range(5)]
ROWS, GENERATOR, RANDOM = np.ones((5, 3)), torch.Generator(), np.random.default_rng(0)


# What is done with the loss of a model; "other" is an optimizer that is not in the list


def branches(loss: Tensor, other: Optimizer) -> Tensor | None:
    if loss.item() > 3:
        return loss * 2
    return None


def branches_on_a_tensor(loss: Tensor, other: Optimizer) -> Tensor | None:
    if not torch.isfinite(loss):
        return loss * 0
    return None


def prints(loss: Tensor, other: Optimizer) -> None:
    print(loss)


def prints_a_text(loss: Tensor, other: Optimizer) -> None:
    print(f"loss {loss}")


def logs(loss: Tensor, other: Optimizer) -> None:
    logging.getLogger("steps").info("loss %s", loss)


def converts(loss: Tensor, other: Optimizer) -> None:
    loss.detach().numpy()


def steps_another(loss: Tensor, other: Optimizer) -> None:
    other.step()


def clears_another(loss: Tensor, other: Optimizer) -> None:
    other.zero_grad()


def scales_another(loss: Tensor, other: Optimizer) -> None:
    SCALER.scale(loss)
    SCALER.step(other)
    SCALER.update()


def scales_in_its_own_way(loss: Tensor, other: Optimizer) -> None:
    OWN.scale(loss)


def schedules(loss: Tensor, other: Optimizer) -> None:
    torch.optim.lr_scheduler.StepLR(other, 1)


def saves(loss: Tensor, other: Optimizer) -> None:
    open("/dev/null").close()


def asks_a_distribution(loss: Tensor, other: Optimizer) -> Tensor:
    return -torch.distributions.Normal(loss, 1.0, validate_args=True).log_prob(loss + 1)


def counts_in_a_namespace(loss: Tensor, other: Optimizer) -> None:
    STATE.calls += 1


def writes_at_a_scalar(loss: Tensor, other: Optimizer) -> None:
    MEMORY[POINTER] = loss.detach()


def loads(loss: Tensor, other: Optimizer) -> None:
    TARGET.load_state_dict(SOURCE.state_dict())


# Where the batch comes from


def samples(x: Tensor) -> Tensor:
    return torch.cat(random.sample(BUFFER, 2))


def samples_an_index(x: Tensor) -> Tensor:
    return BUFFER[random.randint(0, 4)]


def samples_with_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(ROWS[np.random.randint(0, 5, size=4)])


def samples_with_a_generator(x: Tensor) -> Tensor:
    return torch.from_numpy(ROWS[RANDOM.integers(0, 5, size=4)])


def draws(x: Tensor) -> Tensor:
    return x + torch.randn(4, 3, generator=GENERATOR, dtype=torch.double)


def takes_the_next(x: Tensor) -> Tensor:
    return next(BATCH)


def makes_a_leaf(x: Tensor) -> Tensor:
    return x + torch.zeros_like(x, requires_grad=True)


class Own(torch.amp.GradScaler):
    """A scaler of the user's."""


SCALER, OWN = torch.amp.GradScaler("cpu"), Own("cpu")
STATE, BATCH = SimpleNamespace(calls=0), itertools.repeat(BUFFER[1])
MEMORY, POINTER = torch.zeros(9), torch.zeros((), dtype=torch.long)
TARGET, SOURCE = nn.Linear(3, 1), nn.Linear(3, 1)
ANOTHER = "another optimizer: write the step with @autostream.step(optimizers=[...]), and list each ("
DRAW = "draw before the call, and pass what is drawn"
REASONS: dict[Callable[..., Any], str] = {
    branches: "Python branches on a number .*use torch.where.*if loss.item() > 3:",
    branches_on_a_tensor: "Python branches on a number .*use torch.where.*if not torch.isfinite(loss):",
    prints: "it prints or logs: return what it says.*print(loss)",
    prints_a_text: "it prints or logs: return what it says.*print(f",
    logs: "it prints or logs: return what it says.*logging.getLogger",
    converts: "it calls numpy() of a tensor: return the tensor.*loss.detach().numpy()",
    steps_another: f"{ANOTHER}.*other.step()",
    scales_another: f"{ANOTHER}.*SCALER.step(other)",
    scales_in_its_own_way: "a scaler that is none of PyTorch's.*OWN.scale(loss)",
    schedules: "it steps a learning-rate scheduler: do that between steps.*StepLR(other, 1)",
    asks_a_distribution: "make it without validate_args=True .*distributions.Normal(",
    loads: "state_dict(): write the tensors in place, .*torch._foreach_copy_(list(target.*TARGET.load_state_dict",
    clears_another: f"{ANOTHER}.*other.zero_grad()",
    counts_in_a_namespace: "SimpleNamespace.*: do that before or after the call.*STATE.calls += 1",
    writes_at_a_scalar: "or indexes with it: use .* an index of shape (1,).*MEMORY[POINTER] = loss",
    saves: "it calls open, which cannot be captured.*open(",
}
BATCHES: dict[Callable[[Tensor], Tensor], str] = {
    samples: f"random numbers from a generator of Python's: {DRAW}.*random.sample",
    samples_an_index: "Python branches on a number .*or indexes with it.*random.randint",
    samples_with_numpy: f"it calls NumPy: {DRAW}.*np.random",
    samples_with_a_generator: f"it calls NumPy: {DRAW}.*RANDOM.integers",
    draws: f"it draws from a torch.Generator: .*{DRAW}.*generator=GENERATOR",
    takes_the_next: ": do that before or after the call.*next(BATCH)",
    makes_a_leaf: "with requires_grad=True: make it without, and call its requires_grad_() .*zeros_like(x",
}


def pattern(words: str) -> str:
    """Words, with ``.*`` for what is between them."""
    return ".*".join(map(re.escape, words.split(".*")))


def made(compute: Callable[..., Any]) -> tuple[Update, nn.Linear, list[Optimizer]]:
    torch.manual_seed(0)
    model, other = nn.Linear(3, 1).double(), nn.Linear(1, 1)
    sgd: list[Optimizer] = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (model, other)]
    other.weight.grad = torch.ones(1, 1)
    is_of_a_batch = compute in BATCHES

    def update(x: Tensor) -> Tensor:
        loss: Tensor = model(compute(x) if is_of_a_batch else x).square().mean()
        if not is_of_a_batch:
            changed = compute(loss, sgd[1])
            loss = loss if changed is None else changed
        sgd[0].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        sgd[0].step()
        return loss

    return update, model, sgd


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("compute", [*REASONS, *BATCHES], ids=lambda compute: compute.__name__)
def test_the_reason_has_the_line_and_what_to_write_instead(compute: Any, caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for wrap in (lambda update, _: update, lambda update, sgd: autostream.step(optimizers=sgd[:1], **QUICK)(update)):
        random.seed(0)
        np.random.seed(0)
        GENERATOR.manual_seed(0)
        RANDOM.bit_generator.state = np.random.default_rng(0).bit_generator.state
        update, model, sgd = made(compute)
        step = wrap(update, sgd)
        with caplog.at_level(logging.WARNING, "autostream.dispatch.step_functions"):
            losses = [step(torch.ones(4, 3, dtype=torch.double)).detach() for _ in range(3)]
        results.append([*losses, *(parameter.detach() for parameter in model.parameters())])
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)
    (reason,) = [refusal.reason for report in step.reports for refusal in report.refusals]
    assert re.search(pattern({**REASONS, **BATCHES}[compute]), reason)
    assert re.search(r"\(tests/test_step_reasons\.py:\d+: ", reason)
    assert [report.mode for report in step.reports] == ["plain"]
    (logged,) = [record for record in caplog.records if record.name.startswith("autostream")]
    assert reason in logged.getMessage()
    update, _, sgd = made(compute)
    strict = autostream.step(optimizers=sgd[:1], strict=True, **QUICK)(update)
    strict(torch.ones(4, 3, dtype=torch.double))
    with pytest.raises(TraceError, match=re.escape(reason)):
        strict(torch.ones(4, 3, dtype=torch.double))


KEEP = "has another value now: keep it in a tensor, or pass as a flag what Python decides by it"
RETURN = "has another length now: return what the call adds to it, and add that after the call"
NUMBER = "a number in beta changes: pass it as a tensor"
CHANGES = {
    "an average": "kept.average is another tensor now: write it in place, as kept.average.lerp_() and "
    "kept.average.copy_() do",
    "a number": NUMBER,
    "a number by name": NUMBER,
    "a number in a list": NUMBER,
    "an index": f"kept.pointer {KEEP} (.*kept.buffer[kept.pointer] = loss",
    "a variable": f"scale {KEEP} (.*loss = loss * scale",
    "a text": f"kept.kind {KEEP} (.*kept.kind != ",
    "a global": f"COUNTS['calls'] {KEEP} (.*COUNTS[",
    "a list": f"losses {RETURN} (.*losses.append(loss",
    "a list in an object": f"kept.losses {RETURN} (.*kept.losses.append(loss",
}
COUNTS = {"calls": 0}


@pytest.mark.parametrize("how", CHANGES)
def test_a_step_of_which_each_call_is_new_says_what_changes(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sgd, kept, losses, scale = torch.optim.SGD(model.parameters(), lr=0.1), nn.Module(), list[Tensor](), 0.0
    kept.average, kept.buffer, kept.pointer, kept.losses = torch.zeros(1, 3), torch.zeros(9), 0, list[Tensor]()  # type: ignore[assignment]

    @autostream.step(optimizers=[sgd], **QUICK)
    def update(x: Tensor, beta: float | list[float] = 0.5) -> Tensor:
        sgd.zero_grad()
        loss: Tensor = model(x).square().mean() * (beta[0] if isinstance(beta, list) else beta)
        if how == "a variable":
            loss = loss * scale
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        if how == "an average":
            kept.average = 0.9 * kept.average + 0.1 * model.weight.detach()
        if how == "an index":
            kept.buffer[kept.pointer] = loss.detach()
            kept.pointer += 1
        if how == "a text" and kept.kind != "none":
            loss = loss + 1
        if how == "a global":
            COUNTS["calls"] += 1
        if how == "a list":
            losses.append(loss.detach())
        if how == "a list in an object":
            kept.losses.append(loss.detach())
        return loss

    for at in range(8):
        beta, x, scale = 0.1 * at, torch.ones(4, 3), 1.0 + at
        kept.kind = f"kind {at}"  # type: ignore[assignment]
        args, kwargs = {
            "a number": ((x, beta), {}),
            "a number by name": ((x,), {"beta": beta}),
            "a number in a list": ((x, [beta]), {}),
        }.get(how, ((x,), {}))
        update(*args, **kwargs)
    (reason,) = {refusal.reason for report in update.reports for refusal in report.refusals}
    assert re.search(pattern(f"since {CHANGES[how]}"), reason)
    assert re.search(r"\(tests/test_step_reasons\.py:\d+: ", reason) or CHANGES[how] == NUMBER


def test_a_loss_that_steps_another_optimizer_says_which_step_takes_it() -> None:
    model, other = nn.Linear(3, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = model(x).square().mean()
        steps_another(value, other)
        return value

    step = autostream.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **QUICK)
    for _ in range(3):
        step(torch.ones(4, 3))
    (reason,) = {refusal.reason for report in step.reports for refusal in report.refusals}
    assert re.search(pattern(REASONS[steps_another]), reason)


def test_what_is_no_step_is_refused_by_name() -> None:
    weight = nn.Parameter(torch.ones(2))
    sgd, lbfgs = torch.optim.SGD([weight], lr=0.1), torch.optim.LBFGS([weight])
    step: Any = autostream.step

    def update(x: Tensor) -> Tensor:
        return x

    async def waits(x: Tensor) -> Tensor:
        return x

    def yields(x: Tensor) -> Any:
        yield x

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: step(update), r"write @autostream\.step\(optimizers=\[optimizer\]\)"),
        (lambda: step(), "step takes a list of optimizers"),
        (lambda: step(optimizers=sgd), "a list of optimizers"),
        (lambda: step(optimizers=[]), "a list of optimizers"),
        (lambda: step(optimizers=[3]), r"optimizers of torch\.optim, not 3"),
        (lambda: step(optimizers=[lbfgs]), "not LBFGS"),
        (lambda: step(optimizers=[sgd, sgd]), "each optimizer once"),
        (lambda: step(optimizers=[sgd], stream=2), "there is no option 'stream'"),
        (lambda: step(optimizers=[sgd])(3), "decorates a function"),
        (lambda: step(optimizers=[sgd])(waits), "no coroutine function, as .*waits is"),
        (lambda: step(optimizers=[sgd])(yields), "no generator function, as .*yields is"),
        (lambda: step(optimizers=[sgd])(step(optimizers=[sgd])(update)), r"StepFunction\(.*update\) is a step already"),
    ]
    for call, message in refused:
        with pytest.raises(OptionError if message.startswith("there is no option") else TargetError, match=message):
            call()


@pytest.mark.parametrize("around", ["all", "forward", "backward"])
def test_autocast_is_in_the_graph_wherever_it_is(around: str) -> None:
    def write() -> tuple[Update, nn.Module, torch.optim.SGD]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)

        def update(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=around != "backward"):
                loss: Tensor = model(x).float().square().mean()
                if around == "all":
                    sgd.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
            if around != "all":
                sgd.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=around == "backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
            return loss

        return update, model, sgd

    (update, ours, sgd), (eager, theirs, _) = write(), write()
    step = autostream.step(optimizers=[sgd], strict=True, **QUICK)(update)
    for _ in range(4):
        x = torch.randn(4, 3)
        torch.testing.assert_close(step(x), eager(x).detach(), rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-6)
    assert [report.mode for report in step.reports] == ["one stream"]


def test_a_step_that_calls_another_one_says_so(caplog: pytest.LogCaptureFixture) -> None:
    update, _, (sgd, _) = made(branches)
    inner = autostream.step(optimizers=[sgd], **QUICK)(update)

    @autostream.step(optimizers=[torch.optim.SGD([weight := nn.Parameter(torch.ones(3))])], **QUICK)
    def outer(x: Tensor) -> Tensor:
        (weight * x).sum().backward()
        return inner(x)  # type: ignore[no-any-return]

    for _ in range(3):
        outer(torch.ones(2, 3, dtype=torch.double))
    assert re.search(r"which cannot be captured: call it before or after \(.*return inner\(x\)", caplog.text)
