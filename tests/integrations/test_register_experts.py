"""transformers' experts by ours, as an implementation that a config names."""

import pytest
import torch
from recipes import recipe
from support import DEVICE, compare, randn, saved_bytes

from fusedckpt.integrations.transformers import register_experts

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")
D, F, E, K, T = 16, 24, 4, 2, 6


@pytest.fixture(autouse=True)
def registered():
    register_experts("ours")


def test_the_recipe_of_the_page():
    exec(recipe("register_experts()").partition("model = ")[0], {})
    assert "fusedckpt" in moe.ALL_EXPERTS_FUNCTIONS


def experts(family: str, implementation: str = "ours"):
    """Return the experts of a family, by an implementation of them."""
    sizes = {"hidden_size": D, "intermediate_size": F, "moe_intermediate_size": F}
    numbers = {"num_experts": E, "num_local_experts": E, "num_experts_per_tok": K}
    name = {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "gpt_oss": "GptOss"}[family]
    module = getattr(transformers.models, family)
    config = getattr(module, f"configuration_{family}")
    config = getattr(config, f"{name}Config")(**sizes, **numbers)
    config._experts_implementation = implementation
    torch.manual_seed(1)
    made = getattr(getattr(module, f"modeling_{family}"), f"{name}Experts")(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.to(DEVICE)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_values_and_gradients_are_those_of_transformers(family):
    index = torch.tensor([[0, 1], [3, 2], [1, 3], [0, 2], [2, 1], [3, 0]], device=DEVICE)
    ours, eager = experts(family), experts(family, "eager")
    names = [name for name, _ in ours.named_parameters()]

    def run(module):
        def forward(x, scores, *weights):
            weights = dict(zip(names, weights, strict=True))
            return torch.func.functional_call(module, weights, (x, index, scores))

        return forward

    weights = [p.detach() for p in ours.parameters()]
    compare(
        run(ours),
        run(eager),
        lambda: [randn(T, D), randn(T, K), *(w + 0.1 * randn(*w.shape) for w in weights)],
    )


def test_it_saves_its_input_the_routing_and_its_scores():
    index = torch.randint(E, (T, K), device=DEVICE)
    inputs = [randn(T, D).requires_grad_(), index, randn(T, K).requires_grad_()]
    assert saved_bytes(experts("qwen3_moe"), inputs) == 4 * T * D + (8 + 4) * T * K


def test_experts_that_gate_in_another_way_are_refused_by_name():
    module = experts("qwen3_moe")
    module.act_fn = torch.nn.Hardswish()
    with pytest.raises(ValueError, match=r"got Qwen3MoeExperts: .*grouped_mm"):
        module(randn(T, D), torch.zeros(T, K, dtype=torch.long, device=DEVICE), randn(T, K))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("", {}, "expected a name"),
        ("ours", {"save": "all"}, "save"),
        ("ours", {"chunks": 0}, "chunks"),
    ],
)
def test_bad_options_are_refused_when_it_is_registered(name, options, message):
    with pytest.raises(ValueError, match=message):
        register_experts(name, **options)
