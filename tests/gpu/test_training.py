"""Training steps captured as one CUDA graph: what only a GPU can show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import autostream
from autostream.fusion import inductor
from autostream.training import TrainStep
from autostream.utils.kernels import Kernel
from autostream.utils.storages import share_bytes, storage_of
from tests.steps import program_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty"),  # Inductor's own
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable"),  # said of the eager step
]

STEPS = 20
Batch = tuple[Tensor, Tensor]


def on_gpu(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))


def conv_net() -> nn.Module:
    """Two branches with norms that learn statistics."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            self.left = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            self.right = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16))
            self.head = nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(torch.cat([self.left(x), self.right(x)], 1).mean((2, 3)))  # type: ignore[no-any-return]

    return Branches()


def wide_conv_net() -> nn.Module:
    """Convolutions that Inductor lays out channels-last, and between them what looks at strides."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.Hardswish())
            self.deep = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1, groups=128), nn.Conv2d(128, 128, 1))
            self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(128, 128, 3, stride=2, padding=1))
            self.head = nn.Linear(128, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = F.max_pool2d(x + self.deep(x), 3, 2, 1)
            x = x + F.scaled_dot_product_attention(x, x, x)
            return self.head(self.normed(x).view(len(x), 128, -1).mean(2))  # type: ignore[no-any-return]

    return Wide()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": (mlp, (32, 64), (32, 8)),
    "conv net": (conv_net, (8, 3, 16, 16), (8, 8)),
    "encoder": (encoder, (4, 16, 64), (4, 16, 8)),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": partial(SGD, lr=0.02, momentum=0.9, weight_decay=1e-4),
    "adamw": partial(AdamW, lr=1e-3),
}
OTHERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(Adam, lr=1e-3, amsgrad=True),
    "fused": partial(AdamW, lr=1e-3, fused=True),
    "capturable": partial(AdamW, lr=1e-3, capturable=True),
    "rmsprop": partial(RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": partial(Adagrad, lr=1e-2),
}


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def eager(model: nn.Module, optimizer: Optimizer, loss_fn: Callable[..., Tensor] = mse) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def twins(name: str, optimizer: Callable[..., Optimizer]) -> tuple[tuple[Any, Any], tuple[Any, Any], list[Batch]]:
    """A model with its optimizer, a copy of both, and batches."""
    make, inputs, targets = MODELS[name]
    torch.manual_seed(0)
    model = make().cuda().train()
    ours = model, optimizer(model.parameters())
    batches = [(on_gpu(*inputs) * scale, on_gpu(*targets)) for scale in (1.0, 0.5)]
    return ours, copy.deepcopy(ours), batches


def assert_close(ours: nn.Module, theirs: nn.Module, start: nn.Module, tolerance: float = 0.02) -> None:
    """What training has added to each tensor is about the same, by norm: roundings are carried on from step to step."""
    before = start.state_dict()
    for name, expected in theirs.state_dict().items():
        change = (expected - before[name]).double().norm()
        error = (ours.state_dict()[name] - expected).double().norm()
        assert error <= tolerance * change + 1e-6, f"{name}: off by {error / change.clamp(min=1e-30):.1e} of its change"


def captured(step: TrainStep, kernels: str, graphs: int = 1) -> None:
    assert len(step.reports) == graphs
    for report in step.reports:
        assert report.mode == "cuda graph", report.refusals
        assert report.level == ("aten" if kernels == "eager" else "inductor"), report.refusals


CYCLED: dict[str, Callable[..., Optimizer]] = {
    "nesterov": partial(SGD, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": partial(AdamW, lr=1e-3),
    "rmsprop": partial(RMSprop, lr=1e-3, momentum=0.5),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF32, so that two ways to compute the same come to about the same."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def test_a_step_whose_loss_is_no_graph_has_those_of_its_model() -> None:
    """A hook on a parameter's gradient is called in each step."""
    ours, theirs, batches = twins("mlp", OPTIMIZERS["adamw"])
    start = copy.deepcopy(ours[0])
    for model, _ in (ours, theirs):
        model[0].weight.register_hook(lambda gradient: gradient * 2)
    step, plain = autostream.train_step(*ours, mse), eager(*theirs)
    for number in range(STEPS):
        batch = batches[number % 2]
        torch.testing.assert_close(step(*batch), plain(*batch), rtol=5e-3, atol=1e-5)
    assert_close(ours[0], theirs[0], start)
    for report in step.reports:
        assert report.mode == "forward and backward", report.refusals
        assert [part.mode for part in report.parts] == ["cuda graph"] * 2


def test_a_copy_of_a_captured_step_is_captured_by_itself() -> None:
    ours, _, batches = twins("mlp", OPTIMIZERS["adamw"])
    step = autostream.train_step(*ours, mse, kernels="eager")
    for batch in batches:  # the first step makes the optimizer's state
        step(*batch)
    twin = copy.deepcopy(step)
    losses = [[each(*batches[0]) for _ in range(3)] for each in (step, twin)]
    torch.testing.assert_close(*losses, rtol=5e-3, atol=1e-5)
    for each in (step, twin):
        captured(each, "eager")


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
@pytest.mark.parametrize("optimizer", CYCLED)
def test_one_captured_step_takes_the_momentum_of_each_turn(optimizer: str, kernels: str) -> None:
    ours, theirs, batches = twins("mlp", CYCLED[optimizer])
    start = copy.deepcopy(ours[0])
    # At ten times its rate RMSprop diverges, and whoever rounds otherwise diverges elsewhere.
    peak = 2 * ours[1].param_groups[0]["lr"]
    cycles = [torch.optim.lr_scheduler.OneCycleLR(its, peak, total_steps=STEPS + 1) for _, its in (ours, theirs)]
    step, plain = autostream.train_step(*ours, mse, kernels=kernels), eager(*theirs)
    for number in range(STEPS):
        batch = batches[number % 2]
        torch.testing.assert_close(step(*batch), plain(*batch), rtol=5e-3, atol=1e-5)
        for cycle in cycles:
            cycle.step()
    assert_close(ours[0], theirs[0], start)
    captured(step, kernels)


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_train_as_eager_ones_do(name: str, optimizer: str, kernels: str) -> None:
    ours, theirs, batches = twins(name, OPTIMIZERS[optimizer])
    start = copy.deepcopy(ours[0])
    step, plain = autostream.train_step(*ours, mse, kernels=kernels), eager(*theirs)
    for number in range(STEPS):
        batch = batches[number % 2]
        torch.testing.assert_close(step(*batch), plain(*batch), rtol=5e-3, atol=1e-5)
    assert_close(ours[0], theirs[0], start)
    captured(step, kernels)
    assert [parameter.grad for parameter in ours[0].parameters()] == [None] * len(list(ours[0].parameters()))


@pytest.mark.parametrize("optimizer", OTHERS)
def test_so_do_those_of_other_optimizers(optimizer: str) -> None:
    ours, theirs, batches = twins("mlp", OTHERS[optimizer])
    start = copy.deepcopy(ours[0])
    step, plain = autostream.train_step(*ours, mse, kernels="eager", policy="sequential"), eager(*theirs)
    for number in range(STEPS):
        torch.testing.assert_close(step(*batches[number % 2]), plain(*batches[number % 2]), rtol=5e-3, atol=1e-5)
    assert_close(ours[0], theirs[0], start)
    captured(step, "eager")


@pytest.mark.parametrize("policy", ["critical_path", "path_cover"])
def test_over_several_streams(policy: str) -> None:
    ours, theirs, batches = twins("conv net", OPTIMIZERS["momentum"])
    start = copy.deepcopy(ours[0])
    options = {"kernels": "eager", "policy": policy, "streams": 4, "memory_budget": 100.0}
    step, plain = autostream.train_step(*ours, mse, **options), eager(*theirs)
    for number in range(STEPS):
        torch.testing.assert_close(step(*batches[number % 2]), plain(*batches[number % 2]), rtol=5e-3, atol=1e-5)
    assert_close(ours[0], theirs[0], start)
    captured(step, "eager")


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_changed_rate_takes_effect_without_another_capture(optimizer: str, kernels: str) -> None:
    (model, optimizer_of_it), _, batches = twins("mlp", OPTIMIZERS[optimizer])
    step = autostream.train_step(model, optimizer_of_it, mse, kernels=kernels)
    for _ in range(3):
        step(*batches[0])
    optimizer_of_it.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    step(*batches[0])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    optimizer_of_it.param_groups[0]["lr"] = 0.01
    step(*batches[0])
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    captured(step, kernels)


class Distilled:
    """A trainer: its loss is a method, and its teacher learns statistics."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher, self.criterion = teacher, nn.SmoothL1Loss()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.criterion(model(x), wanted + y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_a_teacher_that_a_method_has_is_captured_with_its_statistics(kernels: str) -> None:
    """Another setting of the criterion is another graph, and so is another teacher."""
    ours, theirs, batches = twins("mlp", OPTIMIZERS["momentum"])
    start = copy.deepcopy(ours[0])
    teachers = [nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8)).cuda() for _ in range(2)]
    copies = copy.deepcopy(teachers)
    trainers = Distilled(teachers[0]), Distilled(copies[0])
    step = autostream.train_step(*ours, trainers[0].loss, kernels=kernels)
    plain = eager(*theirs, trainers[1].loss)
    for number in range(9):
        batch = batches[number % 2]
        torch.testing.assert_close(step(*batch), plain(*batch), rtol=5e-3, atol=1e-5)
        if number == 3:
            for trainer in trainers:
                trainer.criterion.beta = 0.1
        if number == 5:
            captured(step, kernels, graphs=2)
            trainers[0].teacher, trainers[1].teacher = teachers[1], copies[1]
    captured(step, kernels, graphs=3)
    assert_close(ours[0], theirs[0], start)
    for mine, other in zip(teachers, copies, strict=True):
        torch.testing.assert_close(dict(mine.state_dict()), dict(other.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_are_saved_and_loaded_between_steps(optimizer: str) -> None:
    ours, theirs, batches = twins("conv net", OPTIMIZERS[optimizer])
    start = copy.deepcopy(ours[0])
    step, plain = autostream.train_step(*ours, mse, kernels="eager"), eager(*theirs)
    for number in range(3 * STEPS // 2):
        torch.testing.assert_close(step(*batches[number % 2]), plain(*batches[number % 2]), rtol=5e-3, atol=1e-5)
        if number in (5, 11):
            for model, its in (ours, theirs):
                model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
                its.load_state_dict(copy.deepcopy(its.state_dict()))
    assert_close(ours[0], theirs[0], start)
    captured(step, "eager")
    for mine, other in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert list(ours[1].state[mine]) == list(theirs[1].state[other])


def test_dropout_draws_the_numbers_of_an_eager_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8), nn.Dropout(0.1)).cuda()
    ours = model, SGD(model.parameters(), lr=0.02, momentum=0.9)
    theirs = copy.deepcopy(ours)
    step, plain = autostream.train_step(*ours, mse, kernels="eager"), eager(*theirs)
    batch = on_gpu(32, 64), on_gpu(32, 8)
    for seed in range(6):
        torch.cuda.manual_seed(seed)
        found, generator = step(*batch), torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        torch.testing.assert_close(found, plain(*batch), rtol=1e-4, atol=1e-6)
        assert torch.equal(generator, torch.cuda.get_rng_state())
    captured(step, "eager")


def test_losses_stay_valid_and_streams_may_change() -> None:
    ours, theirs, batches = twins("mlp", OPTIMIZERS["adamw"])
    step, plain = autostream.train_step(*ours, mse), eager(*theirs)
    expected = [plain(*batches[number % 2]) for number in range(10)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    losses = []
    for number in range(10):
        ours[1].param_groups[0]["lr"] = 1e-3  # written anew, as schedulers do
        with torch.cuda.stream(streams[number % 2]):
            losses.append(step(*batches[number % 2]))
    torch.cuda.synchronize()
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=1e-5)


# PyTorch says so of any backward whose first op on a thread of its own is a product, the plain step's as well.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
def test_a_loss_on_the_cpu_is_no_part_of_a_graph() -> None:
    ours, theirs, batches = twins("mlp", OPTIMIZERS["momentum"])

    def on_cpu(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).cpu(), y.cpu())

    step, plain = autostream.train_step(*ours, on_cpu, kernels="eager"), eager(*theirs, on_cpu)
    for _ in range(4):
        torch.testing.assert_close(step(*batches[0]), plain(*batches[0]), rtol=5e-3, atol=1e-5)
    (report,) = step.reports
    assert report.mode != "cuda graph"
    assert report.refusals


def test_mixed_precision_inside_of_the_loss() -> None:
    ours, theirs, batches = twins("mlp", OPTIMIZERS["adamw"])

    def in_bfloat16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.mse_loss(model(x).float(), y)

    step, plain = autostream.train_step(*ours, in_bfloat16), eager(*theirs, in_bfloat16)
    for number in range(STEPS):
        torch.testing.assert_close(step(*batches[number % 2]), plain(*batches[number % 2]), rtol=2e-2, atol=1e-3)


# The model alone


def by_hand(model: Any, optimizer: Optimizer, batches: list[Batch], number: int) -> Tensor:
    """Two forwards before one backward, and gradients that add up over two backwards."""
    first, second, third = (F.mse_loss(model(x), y) for x, y in (batches[number % 2], *batches))
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    (first + second).backward()
    third.backward()
    optimizer.step()
    return torch.stack([first, second, third]).detach()


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_captured_each_for_itself(name: str, kernels: str) -> None:
    ours, theirs, batches = twins(name, OPTIMIZERS["momentum"])
    start = copy.deepcopy(ours[0])
    fast = autostream.optimize(ours[0], kernels=kernels)
    stream = torch.cuda.Stream()
    for number in range(STEPS):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream if number % 3 == 0 else torch.cuda.current_stream()):
            found = by_hand(fast, ours[1], batches, number)
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(found, by_hand(theirs[0], theirs[1], batches, number), rtol=5e-3, atol=1e-5)
    assert_close(ours[0], theirs[0], start)
    (report,) = fast.reports
    assert [part.mode for part in report.parts] == ["cuda graph"] * 2, [part.refusals for part in report.parts]


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_what_is_saved_stays_where_it_was_computed(kernels: str) -> None:
    """Unless another call comes before the backward: then it is copied, and other calls compute as ever."""
    ours, _, batches = twins("conv net", OPTIMIZERS["momentum"])
    fast = autostream.optimize(ours[0], kernels=kernels)
    given = {storage_of(x) for x, _ in batches} | {storage_of(x) for x in (*ours[0].parameters(), *ours[0].buffers())}
    places = list[set[int]]()

    def computed(prediction: Tensor) -> set[int]:
        """Where that lies which the forward has computed for the backward."""
        node: Any = prediction.grad_fn
        return {saved.data_ptr() for saved in node.saved_tensors if saved.numel() and storage_of(saved) not in given}

    for x, y in batches * 3:
        prediction = fast(x)
        places.append(computed(prediction))
        F.mse_loss(prediction, y).backward()
    ((entry,),) = fast._autostream._admission.entries.values()
    shared = entry._halves[0].signatures[0].scheduled.captured.shared
    kept = set.intersection(*places)
    assert shared
    prediction = fast(batches[0][0])
    assert len(kept) >= len(shared) - sum(not saved.numel() for saved in prediction.grad_fn.saved_tensors)
    first, _ = fast(batches[0][0]), fast(batches[1][0])
    assert kept.isdisjoint(computed(first))


def test_a_forward_is_kept_while_others_run() -> None:
    """Its backward comes last, behind other forwards and backwards that compute in the same memory."""
    ours, theirs, batches = twins("conv net", OPTIMIZERS["momentum"])
    fast = autostream.optimize(ours[0], kernels="eager")
    gradients = []
    for model in (fast, theirs[0]):
        early = model(batches[0][0])
        for x, y in batches * 3:
            F.mse_loss(model(x), y).backward()
        early.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=5e-3, atol=1e-4)


def test_convolutions_are_laid_out_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor is given says so, and training goes on as it does in eager mode."""
    laid_out: list[bool | None] = []
    layouts = inductor._layouts
    monkeypatch.setattr(inductor, "_layouts", lambda module: (laid_out.append(layouts(module)), laid_out[-1])[1])
    torch.manual_seed(0)
    model = wide_conv_net().cuda().train()
    start, plain = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs = (SGD(each.parameters(), lr=1e-3, momentum=0.9) for each in (model, plain))
    step, expected = autostream.train_step(model, ours, mse, kernels="inductor"), eager(plain, theirs)
    x, y = on_gpu(8, 3, 32, 32), on_gpu(8, 8)
    for number in range(STEPS):
        batch = x / (1 + number % 2), y
        torch.testing.assert_close(step(*batch), expected(*batch), rtol=0.02, atol=1e-3)
    captured(step, "inductor")
    assert laid_out == [True]
    assert_close(model, plain, start, tolerance=0.05)


def test_powers_that_adam_corrects_by_are_computed_once_for_each_parameter() -> None:
    """Not by every thread of an update, which takes float64 longer than the update takes."""
    model = mlp().cuda()
    batch = on_gpu(16, 64), on_gpu(16, 8)
    program = inductor.fuse(program_of(model, AdamW(model.parameters(), lr=1e-3), mse, batch)[0])
    launches = [node for node in program.module.graph.nodes if isinstance(node.target, Kernel)]
    powers = [node for node in launches if "libdevice.pow" in node.target.content]
    assert len(powers) == len(list(model.parameters()))
    for node in powers:
        written = [node.args[at].meta["val"] for at in node.target.written]
        assert {tensor.numel() for tensor in written} == {1}


def test_fused_gradients_of_convolutions_and_of_their_input_are_the_models() -> None:
    torch.manual_seed(0)
    model = wide_conv_net().cuda().train()
    plain = copy.deepcopy(model)
    fast = autostream.optimize(model, kernels="inductor")
    for number in range(3):
        x = on_gpu(8, 3, 32, 32) / (1 + number)
        seen = []
        for run, own in ((fast, model), (plain, plain)):
            run.zero_grad()
            given = x.clone().requires_grad_()
            output = run(given)
            output.square().sum().backward()
            named = [(name, parameter.grad) for name, parameter in own.named_parameters()]
            seen.append([("output", output), ("input", given.grad), *named])
        for (name, ours), (_, theirs) in zip(*seen, strict=True):
            # What is largest in a window may be another element by rounding alone, and its gradient go elsewhere.
            off = ((ours - theirs).norm() / theirs.norm()).item()
            assert off <= 0.1, f"{name} of call {number} is off by {off:.2f}"
    (report,) = fast.reports
    assert [part.level for part in report.parts] == ["inductor"] * 2, [part.refusals for part in report.parts]


def test_numbers_that_a_loss_keeps_are_those_of_the_plain_steps() -> None:
    """The model is captured, the loss is not, and each step adds one number, the first included."""
    kept, losses = list[float](), list[float]()

    def keeping(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        kept.append(loss.item())
        return loss

    model = mlp().cuda()
    step = autostream.train_step(model, SGD(model.parameters(), lr=0.1), keeping)
    for _ in range(STEPS):
        losses.append(step(on_gpu(16, 64), on_gpu(16, 8)).item())
    assert kept == losses
    assert any("kept.append" in refusal.reason for report in step.reports for refusal in report.refusals)


def test_weights_that_lie_beside_each_other_are_updated_in_the_graph() -> None:
    """As those of an LSTM do, in one buffer of cuDNN's."""
    model = nn.LSTM(8, 8).cuda()
    assert len({weight.untyped_storage().data_ptr() for weight in model.parameters()}) == 1
    assert not share_bytes(model.parameters())


def test_counters_that_are_one_tensor_count_every_parameter() -> None:
    """They stay where they are, on the host: moved to the GPU, each parameter would have one of its own."""
    ours, theirs, batches = twins("mlp", partial(Adam, lr=1e-3))
    start = copy.deepcopy(ours[0])
    step, plain = autostream.train_step(*ours, mse, kernels="eager", policy="sequential"), eager(*theirs)
    for number in range(6):
        if number == 1:
            for model, optimizer in (ours, theirs):
                counter = optimizer.state[model[0].weight]["step"]
                for state in optimizer.state.values():
                    state["step"] = counter
        torch.testing.assert_close(step(*batches[0]), plain(*batches[0]), rtol=5e-3, atol=1e-5)
    assert_close(ours[0], theirs[0], start)
    assert "share memory" in step.reports[-1].refusals[0].reason


@pytest.mark.filterwarnings("ignore:Error detected in MseLossBackward0")
def test_anomaly_detection_finds_what_a_captured_step_would_not() -> None:
    ours, _, (batch, _) = twins("mlp", partial(SGD, lr=1e-3))
    step = autostream.train_step(*ours, mse, kernels="eager", policy="sequential")
    for _ in range(3):
        step(*batch)
    before = copy.deepcopy(ours[0].state_dict())
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="MseLossBackward0' returned nan"):
        step(batch[0] * float("nan"), batch[1])
    assert all(torch.equal(value, before[name]) for name, value in ours[0].state_dict().items())
    step(*batch)
    assert "cuda graph" in [report.mode for report in step.reports]
