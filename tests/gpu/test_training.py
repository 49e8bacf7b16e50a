"""Training steps as one CUDA graph, and gradients through two: weights change as in eager steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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
    """Convolutions that Inductor lays out channels-last, with ops between them that depend on strides."""

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
SGD_MOMENTUM: Callable[..., Optimizer] = partial(SGD, lr=0.02, momentum=0.9, weight_decay=1e-4)
ADAMW: Callable[..., Optimizer] = partial(AdamW, lr=1e-3)


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


def two_copies(name: str, optimizer: Callable[..., Optimizer]) -> tuple[tuple[Any, Any], tuple[Any, Any], list[Batch]]:
    """A model with its optimizer, a copy of both, and batches."""
    make, inputs, targets = MODELS[name]
    torch.manual_seed(0)
    model = make().cuda().train()
    ours = model, optimizer(model.parameters())
    batches = [(on_gpu(*inputs) * scale, on_gpu(*targets)) for scale in (1.0, 0.5)]
    return ours, copy.deepcopy(ours), batches


def close(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=1e-5)


def assert_close(ours: nn.Module, theirs: nn.Module, start: nn.Module, tolerance: float = 0.02) -> None:
    """Training has changed each tensor by about the same, in norm: rounding errors grow from step to step."""
    before = start.state_dict()
    for name, expected in theirs.state_dict().items():
        change = (expected - before[name]).double().norm()
        error = (ours.state_dict()[name] - expected).double().norm()
        assert error <= tolerance * change + 1e-6, f"{name}: off by {error / change.clamp(min=1e-30):.1e} of its change"


def assert_captured(step: TrainStep, kernels: str, graphs: int = 1) -> None:
    assert len(step.reports) == graphs
    for report in step.reports:
        assert report.mode == "cuda graph", report.refusals
        assert report.level == ("aten" if kernels == "eager" else "inductor"), report.refusals


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """No TF32 in convolutions, so that fused kernels and eager ops compute about the same."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


CASES: list[tuple[str, Callable[..., Optimizer], dict[str, Any]]] = [
    *(
        (name, optimizer, {"kernels": kernels})
        for name, optimizer in (("mlp", ADAMW), ("conv net", SGD_MOMENTUM), ("encoder", SGD_MOMENTUM))
        for kernels in ("eager", "inductor")
    ),
    ("mlp", partial(Adam, lr=1e-3, amsgrad=True), {"kernels": "eager", "policy": "sequential"}),
    ("mlp", partial(AdamW, lr=1e-3, fused=True), {"kernels": "eager", "policy": "sequential"}),
    ("mlp", partial(AdamW, lr=1e-3, capturable=True), {"kernels": "eager", "policy": "sequential"}),
    ("mlp", partial(RMSprop, lr=1e-3, centered=True, momentum=0.5), {"kernels": "eager", "policy": "sequential"}),
    ("mlp", partial(Adagrad, lr=1e-2), {"kernels": "eager", "policy": "sequential"}),
    *(
        ("conv net", SGD_MOMENTUM, {"kernels": "eager", "policy": policy, "streams": 4, "memory_budget": 100.0})
        for policy in ("critical_path", "path_cover")
    ),
]


def name_of(value: Any) -> str:
    match value:
        case partial():
            value = {"": value.func.__name__, **value.keywords}
        case str():
            return value
    return " ".join(map(str, value.values()))


@pytest.mark.parametrize(("name", "optimizer", "options"), CASES, ids=name_of)
def test_captured_steps_train_as_eager_steps_do(
    name: str, optimizer: Callable[..., Optimizer], options: dict[str, Any]
) -> None:
    ours, theirs, batches = two_copies(name, optimizer)
    start = copy.deepcopy(ours[0])
    step, plain = autostream.train_step(*ours, mse, **options), eager(*theirs)
    for number in range(STEPS):
        batch = batches[number % 2]
        close(step(*batch), plain(*batch))
    assert_close(ours[0], theirs[0], start)
    assert_captured(step, options["kernels"])
    assert [parameter.grad for parameter in ours[0].parameters()] == [None] * len(list(ours[0].parameters()))


@pytest.mark.parametrize(
    ("optimizer", "kernels"),
    [
        (partial(SGD, lr=0.02, momentum=0.9, nesterov=True), "eager"),
        (partial(SGD, lr=0.02, momentum=0.9, nesterov=True), "inductor"),
        (ADAMW, "eager"),
        (ADAMW, "inductor"),
        (partial(RMSprop, lr=1e-3, momentum=0.5), "eager"),
    ],
    ids=name_of,
)
def test_rates_and_momenta_change_without_another_capture(optimizer: Callable[..., Optimizer], kernels: str) -> None:
    """In a cycle; then the rate is zero, and then not."""
    ours, theirs, batches = two_copies("mlp", optimizer)
    start = copy.deepcopy(ours[0])
    # At ten times its rate RMSprop diverges, and other rounding errors lead elsewhere.
    peak = 2 * ours[1].param_groups[0]["lr"]
    cycles = [torch.optim.lr_scheduler.OneCycleLR(its, peak, total_steps=STEPS + 1) for _, its in (ours, theirs)]
    step, plain = autostream.train_step(*ours, mse, kernels=kernels), eager(*theirs)
    for number in range(STEPS):
        batch = batches[number % 2]
        close(step(*batch), plain(*batch))
        for cycle in cycles:
            cycle.step()
    assert_close(ours[0], theirs[0], start)

    for rate in (0.0, 0.01):
        before = copy.deepcopy(ours[0].state_dict())
        ours[1].param_groups[0]["lr"] = rate
        step(*batches[0])
        changed = [not torch.equal(value, before[name]) for name, value in ours[0].state_dict().items()]
        assert any(changed) == (rate > 0)
    assert_captured(step, kernels)


def test_states_are_saved_and_loaded_between_steps() -> None:
    ours, theirs, batches = two_copies("conv net", ADAMW)
    start = copy.deepcopy(ours[0])
    step, plain = autostream.train_step(*ours, mse, kernels="eager"), eager(*theirs)
    for number in range(3 * STEPS // 2):
        close(step(*batches[number % 2]), plain(*batches[number % 2]))
        if number in (5, 11):
            for model, its in (ours, theirs):
                model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
                its.load_state_dict(copy.deepcopy(its.state_dict()))
    assert_close(ours[0], theirs[0], start)
    assert_captured(step, "eager")
    for mine, other in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert list(ours[1].state[mine]) == list(theirs[1].state[other])


def test_dropout_uses_the_random_numbers_of_an_eager_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8), nn.Dropout(0.1)).cuda()
    ours = model, SGD(model.parameters(), lr=0.02, momentum=0.9)
    theirs = copy.deepcopy(ours)
    step, plain = autostream.train_step(*ours, mse, kernels="eager"), eager(*theirs)
    batch = on_gpu(32, 64), on_gpu(32, 8)
    for seed in range(6):
        torch.cuda.manual_seed(seed)
        loss, generator = step(*batch), torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        torch.testing.assert_close(loss, plain(*batch), rtol=1e-4, atol=1e-6)
        assert torch.equal(generator, torch.cuda.get_rng_state())
    assert_captured(step, "eager")


def test_losses_stay_valid_on_alternating_streams() -> None:
    ours, theirs, batches = two_copies("mlp", ADAMW)
    step, plain = autostream.train_step(*ours, mse), eager(*theirs)
    expected = [plain(*batches[number % 2]) for number in range(10)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    losses = []
    for number in range(10):
        ours[1].param_groups[0]["lr"] = 1e-3  # assigned anew, as schedulers do
        with torch.cuda.stream(streams[number % 2]):
            losses.append(step(*batches[number % 2]))
    torch.cuda.synchronize()
    close(losses, expected)


# PyTorch warns in any backward whose first op on a new thread is a product, also in an eager step.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
def test_a_step_whose_loss_is_on_the_cpu_is_not_captured() -> None:
    ours, theirs, batches = two_copies("mlp", SGD_MOMENTUM)

    def on_cpu(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).cpu(), y.cpu())

    step, plain = autostream.train_step(*ours, on_cpu, kernels="eager"), eager(*theirs, on_cpu)
    for _ in range(4):
        close(step(*batches[0]), plain(*batches[0]))
    (report,) = step.reports
    assert report.mode != "cuda graph"
    assert report.refusals


def test_a_loss_may_use_autocast() -> None:
    ours, theirs, batches = two_copies("mlp", ADAMW)

    def in_bfloat16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.mse_loss(model(x).float(), y)

    step, plain = autostream.train_step(*ours, in_bfloat16), eager(*theirs, in_bfloat16)
    for number in range(STEPS):
        torch.testing.assert_close(step(*batches[number % 2]), plain(*batches[number % 2]), rtol=2e-2, atol=1e-3)


def test_convolutions_in_channels_last_train_as_in_eager() -> None:
    torch.manual_seed(0)
    model = wide_conv_net().cuda().train()
    start, plain = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs = (SGD(each.parameters(), lr=1e-3, momentum=0.9) for each in (model, plain))
    step, expected = autostream.train_step(model, ours, mse, kernels="inductor"), eager(plain, theirs)
    x, y = on_gpu(8, 3, 32, 32), on_gpu(8, 8)
    for number in range(STEPS):
        batch = x / (1 + number % 2), y
        torch.testing.assert_close(step(*batch), expected(*batch), rtol=0.02, atol=1e-3)
    assert_captured(step, "inductor")
    assert_close(model, plain, start, tolerance=0.05)


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_gradients_of_microbatches_are_added_in_place(kernels: str) -> None:
    model = mlp().cuda()
    start, plain = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs = (Adam(each.parameters(), lr=1e-3) for each in (model, plain))
    step, expected = autostream.train_step(model, ours, mse, kernels=kernels, microbatches=4), eager(plain, theirs)
    batch = on_gpu(64, 64), on_gpu(64, 8)
    for _ in range(STEPS):
        torch.testing.assert_close(step(*batch), expected(*batch), rtol=1e-3, atol=1e-4)
    assert_captured(step, kernels)
    assert_close(model, plain, start)
    graph = step.reports[0].graph
    assert graph is not None
    assert sum(op.target.startswith("aten.addmm_.") for op in graph.ops.values()) == 3 * 3


def test_powers_that_adam_corrects_by_are_computed_once_for_each_parameter() -> None:
    """Not in every thread of an update, where the float64 arithmetic would take longer than the update."""
    model = mlp().cuda()
    batch = on_gpu(16, 64), on_gpu(16, 8)
    program = inductor.fuse(program_of(model, AdamW(model.parameters(), lr=1e-3), mse, batch)[0])
    launches = [node for node in program.module.graph.nodes if isinstance(node.target, Kernel)]
    powers = [node for node in launches if "libdevice.pow" in node.target.content]
    assert sum(node.target.content.count("libdevice.pow") for node in powers) == 2 * len(list(model.parameters()))
    for node in powers:
        written = [node.args[at].meta["val"] for at in node.target.written]
        assert {tensor.numel() for tensor in written} == {1}


def test_weights_in_one_buffer_share_no_bytes() -> None:
    """As those of cuDNN's LSTM; so they are updated in the graph."""
    model = nn.LSTM(8, 8).cuda()
    assert len({weight.untyped_storage().data_ptr() for weight in model.parameters()}) == 1
    assert not share_bytes(model.parameters())


# The model alone


def by_hand(model: Any, optimizer: Optimizer, batches: list[Batch], number: int) -> Tensor:
    """Two forwards before one backward, and gradients that add up over two backwards."""
    first, second, third = (F.mse_loss(model(x), y) for x, y in (batches[number % 2], *batches))
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    (first + second).backward()  # type: ignore[no-untyped-call]
    third.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return torch.stack([first, second, third]).detach()


@pytest.mark.parametrize(("name", "kernels"), [("mlp", "inductor"), ("conv net", "eager"), ("encoder", "inductor")])
def test_forward_and_backward_are_two_captured_graphs(name: str, kernels: str) -> None:
    """Forwards come before the backwards of others, on two streams."""
    ours, theirs, batches = two_copies(name, SGD_MOMENTUM)
    start = copy.deepcopy(ours[0])
    fast = autostream.optimize(ours[0], kernels=kernels)
    stream = torch.cuda.Stream()
    for number in range(STEPS):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream if number % 3 == 0 else torch.cuda.current_stream()):
            losses = by_hand(fast, ours[1], batches, number)
        torch.cuda.current_stream().wait_stream(stream)
        close(losses, by_hand(theirs[0], theirs[1], batches, number))
    assert_close(ours[0], theirs[0], start)
    (report,) = fast.reports
    assert [part.mode for part in report.parts] == ["cuda graph"] * 2, [part.refusals for part in report.parts]


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_saved_activations_are_copied_only_if_another_forward_comes_first(kernels: str) -> None:
    ours, _, batches = two_copies("conv net", SGD_MOMENTUM)
    fast = autostream.optimize(ours[0], kernels=kernels)
    given = {storage_of(x) for x, _ in batches} | {storage_of(x) for x in (*ours[0].parameters(), *ours[0].buffers())}
    addresses = list[set[int]]()

    def saved(prediction: Tensor) -> set[int]:
        """The addresses of what the forward has computed for the backward."""
        node: Any = prediction.grad_fn
        return {each.data_ptr() for each in node.saved_tensors if each.numel() and storage_of(each) not in given}

    occupied = list[Tensor]()
    for x, y in batches * 3:
        prediction = fast(x)
        addresses.append(saved(prediction))
        freed = [torch.empty_like(each, device="meta") for each in prediction.grad_fn.saved_tensors]  # type: ignore[union-attr]
        F.mse_loss(prediction, y).backward()
        occupied += [torch.empty_like(each, device="cuda") for each in freed]  # only the graph's memory is used again
    in_the_graph = set.intersection(*addresses)
    assert in_the_graph
    first, _ = fast(batches[0][0]), fast(batches[1][0])
    assert in_the_graph.isdisjoint(saved(first))


def test_a_backward_that_comes_after_other_forwards_and_backwards_has_its_own_activations() -> None:
    ours, theirs, batches = two_copies("conv net", SGD_MOMENTUM)
    fast = autostream.optimize(ours[0], kernels="eager")
    gradients = []
    for model in (fast, theirs[0]):
        early = model(batches[0][0])
        for x, y in batches * 3:
            F.mse_loss(model(x), y).backward()
        early.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=5e-3, atol=1e-4)


def test_gradients_of_convolutions_in_channels_last_and_of_their_input_are_those_of_eager() -> None:
    torch.manual_seed(0)
    model = wide_conv_net().cuda().train()
    plain = copy.deepcopy(model)
    fast = autostream.optimize(model, kernels="inductor")
    for number in range(3):
        x = on_gpu(8, 3, 32, 32) / (1 + number)
        seen = []
        for run, module in ((fast, model), (plain, plain)):
            run.zero_grad()
            given = x.clone().requires_grad_()
            output = run(given)
            output.square().sum().backward()
            named = [(name, parameter.grad) for name, parameter in module.named_parameters()]
            seen.append([("output", output), ("input", given.grad), *named])
        for (name, ours), (_, theirs) in zip(*seen, strict=True):
            # The largest element of a window may be another one by rounding alone, and its gradient goes elsewhere.
            error = ((ours - theirs).norm() / theirs.norm()).item()
            assert error <= 0.1, f"{name} of call {number} is off by {error:.2f}"
    (report,) = fast.reports
    assert [part.level for part in report.parts] == ["inductor"] * 2, [part.refusals for part in report.parts]
