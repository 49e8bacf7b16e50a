"""Generation: a decode step is one graph that writes the cache where it lies, for any number of tokens."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autostream
from autostream.cli.zoo import import_without_compiled_ops
from autostream.explaining import reports_of
from autostream.ir import Role
from autostream.reporting.report import Report
from tests.semantics import same

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*past_key_values. is deprecated:FutureWarning"),  # from transformers 5.24
]

QUICK: dict[str, Any] = {"policy": "sequential", "kernels": "eager"}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
STATIC: dict[str, Any] = {**GREEDY, "cache_implementation": "static"}


def scheduled(model: nn.Module) -> list[Report]:
    return [report for report in reports_of(model) if report.mode != "plain"]


def reasons(model: nn.Module) -> list[str]:
    return [refusal.reason for report in reports_of(model) if report.mode == "plain" for refusal in report.refusals]


# Objects that keep tensors from call to call


class Cache:
    """Rows, as many of which are in use as ``length`` says; made in its first use unless it has a size."""

    def __init__(self, size: int = 0) -> None:
        self.rows: Tensor | None = None
        self.length = torch.tensor([0])
        torch._dynamo.mark_static_address(self.length)
        if size:
            self.rows = torch.zeros(size, 4)
            torch._dynamo.mark_static_address(self.rows)


class Sums(nn.Module):
    """Adds a row to the cache, and returns the sum of all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        if cache.rows is None:
            cache.rows = torch.zeros(8, 4)
        cache.rows.index_copy_(0, cache.length, self.linear(x))
        cache.length.add_(1)
        return cache.rows.sum(0), cache


@pytest.fixture
def models() -> Iterator[tuple[Sums, Sums]]:
    torch.manual_seed(0)
    model = Sums()
    with torch.no_grad():
        yield autostream.optimize_(copy.deepcopy(model), **QUICK), model


def check(models: tuple[nn.Module, nn.Module], caches: tuple[Cache, Cache], calls: int = 4) -> None:
    """Both models do the same to their caches in so many calls."""
    for at in range(calls):
        x = torch.full((1, 4), float(at + 1))
        (ours, returned), (theirs, _) = (model(x, cache) for model, cache in zip(models, caches, strict=True))
        same(ours, theirs)
        assert returned is caches[0]
        assert caches[0].rows is not None
        assert caches[1].rows is not None
        same((caches[0].rows, caches[0].length), (caches[1].rows, caches[1].length))


def test_tensors_that_an_object_keeps_are_written_where_they_lie(models: tuple[Sums, Sums]) -> None:
    caches = Cache(8), Cache(8)
    rows = caches[0].rows
    check(models, caches)
    assert caches[0].rows is rows
    (report,) = scheduled(models[0])
    roles = [storage.role for storage in report.graph.storages.values()]  # type: ignore[union-attr]
    assert (roles.count(Role.INPUT), roles.count(Role.BUFFER)) == (1, 2)


def test_other_objects_and_other_tensors_in_them_are_those_that_are_used(models: tuple[Sums, Sums]) -> None:
    caches, others = (Cache(8), Cache(8)), (Cache(8), Cache(8))
    for pair in (caches, others, caches):
        check(models, pair, calls=2)
    for cache in caches:
        cache.rows, cache.length = torch.ones(8, 4), torch.tensor([5])
    check(models, caches, calls=3)
    assert len(scheduled(models[0])) == 1


def test_tensors_made_in_the_first_use_stay_where_they_are_later(models: tuple[Sums, Sums]) -> None:
    for _ in range(2):
        check(models, (Cache(), Cache()))
    decode, first = scheduled(models[0])
    for report, inputs in ((decode, 1), (first, 1)):
        roles = [storage.role for storage in report.graph.storages.values()]  # type: ignore[union-attr]
        assert roles.count(Role.INPUT) == inputs


def test_tensors_made_in_inference_mode_are_written_where_they_lie_too(models: tuple[Sums, Sums]) -> None:
    """They cannot be written outside of inference mode, where schedules are made."""
    with torch.inference_mode():
        check(models, (Cache(), Cache()))
    assert len(scheduled(models[0])) == 2
    assert not reasons(models[0])


def test_an_object_that_is_gone_takes_its_tensors_along(models: tuple[Sums, Sums]) -> None:
    cache = Cache(8)
    for _ in range(3):
        models[0](torch.ones(1, 4), cache)
    assert cache.rows is not None
    rows = weakref.ref(cache.rows)
    del cache
    gc.collect()
    assert rows() is None
    check(models, (Cache(8), Cache(8)))


class Growing:
    """A cache that says, as those of transformers do, that no two calls are alike."""

    is_compileable = False

    def __init__(self) -> None:
        self.rows, self.length = torch.zeros(8, 4), torch.tensor([0])


def test_a_growing_cache_is_left_alone_and_that_is_said_once(
    models: tuple[Sums, Sums], caplog: pytest.LogCaptureFixture
) -> None:
    check(models, (Growing(), Growing()))  # type: ignore[arg-type]
    (reason,) = reasons(models[0])
    assert reason.startswith("Growing grows from call to call: use a static cache (cache_implementation=")
    assert caplog.text.count("grows from call to call") == 1


# transformers


def decoder(name: str) -> Any:
    import transformers

    sizes = {"vocab_size": 64, "max_position_embeddings": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    if name == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    if name == "Gemma":
        windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
        two = {**heads, "num_hidden_layers": 2, "head_dim": 8}
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **two, **windows))
    if name == "Mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **experts))
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=64)
    config.bos_token_id = config.eos_token_id = None
    return transformers.GPT2LMHeadModel(config)


def t5() -> tuple[Any, dict[str, Tensor]]:
    import transformers

    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config), {"inputs": tokens(5)}


def whisper() -> tuple[Any, dict[str, Tensor]]:
    import transformers

    names = ("encoder_attention_heads", "decoder_attention_heads", "encoder_layers", "decoder_layers")
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=16,
        max_target_positions=64, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=63,
        decoder_start_token_id=2, begin_suppress_tokens=None, suppress_tokens=None, **dict.fromkeys(names, 1),
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {"input_features": torch.randn(1, 8, 32)}


def tokens(count: int) -> Tensor:
    return torch.randint(3, 60, (1, count), generator=torch.Generator().manual_seed(count))


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Tensor]]]] = {
    **{name: lambda name=name: (decoder(name), {"inputs": tokens(5)}) for name in ("GPT-2", "Llama", "Mixtral")},  # type: ignore[misc]
    "T5": t5,
    "Whisper": whisper,
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    import_without_compiled_ops("torchvision")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, torch.no_grad) for name in MODELS), ("GPT-2", torch.inference_mode)]
)
def test_tokens_are_those_of_the_model_from_one_graph_for_all_steps(name: str, mode: Any) -> None:
    model, inputs = MODELS[name]()
    model.eval()
    given = {**STATIC, **inputs, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 9}
    expected = model.generate(**given)
    autostream.optimize_(model, **QUICK)
    with mode():
        found = model.generate(**given)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits)
    assert len(scheduled(model)) == 2, "the first tokens, and every other one"
    assert not reasons(model)
    decode = scheduled(model)[0].graph
    assert decode is not None
    roles = [storage.role for storage in decode.storages.values()]
    assert roles.count(Role.INPUT) <= 3, "tokens, positions, and the mask"


def test_a_sliding_window_has_one_graph_until_it_is_full_and_one_from_then_on() -> None:
    """Its cache counts tokens in Python; another layer has all of them."""
    model = decoder("Gemma").eval()
    given = {**STATIC, "max_new_tokens": 12}
    expected = [model.generate(tokens(5), **given), model.generate(tokens(5), **{**given, "max_new_tokens": 20})]
    autostream.optimize_(model, **QUICK)
    assert torch.equal(model.generate(tokens(5), **given), expected[0])
    assert len(scheduled(model)) == 3, "the first tokens, and every other one before and after"
    assert torch.equal(model.generate(tokens(5), **{**given, "max_new_tokens": 20}), expected[1])
    assert not reasons(model)


def test_a_cache_of_the_users_serves_prompts_in_buckets() -> None:
    """Prompts are padded on the left to a few lengths; the mask says where."""
    from transformers import StaticCache

    model = decoder("Llama").eval()
    expected = copy.deepcopy(model)
    autostream.optimize_(model, **QUICK)
    cache = StaticCache(config=model.config, max_cache_len=32)
    cache.early_initialization(1, 2, 8, model.dtype, model.device)
    keys = cache.layers[0].keys
    for count in (3, 8, 11, 7):
        prompt = tokens(count)
        pads = (-count % 8, 0)
        mask = F.pad(torch.ones_like(prompt), pads)
        padded = {"inputs": F.pad(prompt, pads), "attention_mask": mask, "past_key_values": cache}
        found = model.generate(**padded, max_new_tokens=6, **GREEDY)[:, -6:]
        cache.reset()
        assert torch.equal(found, expected.generate(prompt, max_new_tokens=6, **GREEDY)[:, -6:])
    lengths = {report.signature.partition(":")[0] for report in scheduled(model)}
    assert lengths == {"1x8", "1x16", "1x1"}
    assert cache.layers[0].keys is keys


def test_a_cache_that_grows_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder("Llama").eval()
    expected = model.generate(tokens(5), max_new_tokens=6, **GREEDY)
    autostream.optimize_(model, **QUICK)
    assert torch.equal(model.generate(tokens(5), max_new_tokens=6, **GREEDY), expected)
    assert not scheduled(model)
    assert caplog.text.count("DynamicCache grows from call to call: use a static cache") == 1


def test_caches_of_many_sizes_are_left_alone_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder("Llama").eval()
    expected = copy.deepcopy(model)
    autostream.optimize_(model, **QUICK)
    for most in range(8, 26, 2):
        given = {**STATIC, "max_length": most}
        assert torch.equal(model.generate(tokens(5), **given), expected.generate(tokens(5), **given))
    for where in ("pad prompts to a few lengths, and for the cache,", "since its cache has another size:"):
        assert f"{where} fix max_length (or max_cache_len), or pass one StaticCache" in caplog.text
    assert caplog.text.count("runs plainly: one call after the other") == 2
    assert "max_cache_len ==" not in caplog.text, "each size would be another message"


def test_generate_of_a_wrapper_says_that_it_calls_the_model(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = whisper()  # its generate() calls that of a base class
    given = {**STATIC, **inputs, "max_new_tokens": 4}
    fast = autostream.optimize(model.eval(), **QUICK)
    for _ in range(2):
        assert torch.equal(fast.generate(**given), model.generate(**given))
    assert caplog.text.count("its generate() calls the model itself, past the wrapper: use autostream.optimize_(") == 1
    assert not scheduled(fast)


def test_beams_that_move_the_cache_are_followed() -> None:
    """They give its layers other tensors between two steps."""
    model = decoder("Llama").eval()
    given = {**STATIC, "max_new_tokens": 6, "num_beams": 3}
    expected = model.generate(tokens(5), **given)
    autostream.optimize_(model, **QUICK)
    assert torch.equal(model.generate(tokens(5), **given), expected)


def test_transformers_may_compile_the_calls_itself() -> None:
    from transformers import CompileConfig

    model = decoder("Llama").eval()
    expected = model.generate(tokens(5), max_new_tokens=6, **STATIC)
    autostream.optimize_(model, **QUICK)
    config = CompileConfig(backend="eager", mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True
    assert torch.equal(model.generate(tokens(5), max_new_tokens=6, compile_config=config, **STATIC), expected)
    assert len(scheduled(model)) == 1, "only the prompt's"
