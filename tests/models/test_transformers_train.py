"""Fused transformers models in what people train with: loops, copies, files, autocast, compile."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from own_classes import LoraLinear
from support import DEVICE
from transformers_cases import MODELS, tokens

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.memory import saved_tensors


def pair(name="llama", **options):
    torch.manual_seed(0)
    eager = MODELS[name].build(**options)
    fused = copy.deepcopy(eager)
    assert fuse(fused).swapped
    return eager, fused


def grads(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_close(ours, theirs, tol):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_torch_save, copy.copy])
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_copies_are_fused_and_can_be_undone(name, duplicate):
    eager, fused = pair(name)
    eager.eval()
    other, inputs = duplicate(fused.eval()), tokens()
    assert [type(m) for m in other.modules()] == [type(m) for m in fused.modules()]
    expected = grads(fused, inputs)
    assert all(map(torch.equal, grads(other, inputs), expected))
    with saved_tensors() as saved:
        loss = other(**inputs).loss
    with saved_tensors() as full:
        expected = eager(**inputs).loss
    assert saved.nbytes < full.nbytes
    torch.testing.assert_close(loss, expected)
    unfuse(other)
    assert [type(m) for m in other.modules()] == [type(m) for m in eager.modules()]
    torch.testing.assert_close(other(**inputs).loss, expected, rtol=0, atol=0)
    if duplicate is not copy.copy:
        assert type(fused) is type(eager)
        assert [type(m) for m in fused.modules()] != [type(m) for m in eager.modules()]


def test_a_file_opens_in_another_process(tmp_path):
    _, fused = pair()
    inputs = tokens()
    torch.save((fused.eval().cpu(), inputs["input_ids"].cpu()), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, ids = torch.load(sys.argv[1], weights_only=False)\n"
        "import fusedckpt\n"
        "mlp = model.model.layers[0].mlp\n"
        "print(type(mlp).__name__, model(input_ids=ids, labels=ids).loss.item())\n"
        "fusedckpt.unfuse(model)\n"
        "print(type(mlp).__name__, model(input_ids=ids, labels=ids).loss.item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model.pt"],
        capture_output=True,
        text=True,
        check=True,
        cwd=fusedckpt.__path__[0] + "/..",
    )
    first, second = (line.split() for line in done.stdout.splitlines())
    assert (first[0], second[0]) == ("FusedLlamaMLP", "LlamaMLP")
    loss = fused.to(DEVICE)(**inputs).loss.item()
    assert float(first[1]) == pytest.approx(loss, rel=1e-5)
    assert float(second[1]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "bert", "t5"])
def test_autocast(name):
    eager, fused = (model.eval() for model in pair(name))
    inputs = tokens()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        ours, theirs = grads(fused, inputs), grads(eager, inputs)
    truth = grads(eager, inputs)
    for a, b, t in zip(ours, theirs, truth, strict=True):
        assert a.dtype == b.dtype
        mine, eagers = ((x - t).double().square().mean().sqrt().item() for x in (a, b))
        # of few numbers: the contract's factor of two holds over many
        assert mine <= 3 * eagers + 1e-6


def test_averaged_model():
    eager, fused = pair()
    averaged = [torch.optim.swa_utils.AveragedModel(model) for model in (eager, fused)]
    for model, mean in zip((eager, fused), averaged, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        for _ in range(2):
            grads(model, tokens())
            optimizer.step()
            mean.update_parameters(model)
    assert type(averaged[1].module.model.layers[0].mlp).__name__ == "FusedLlamaMLP"
    pairs = zip(averaged[1].parameters(), averaged[0].parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_adapters_on_a_fused_model():
    """As PEFT puts them: a module in a linear's place, the rest frozen."""
    eager, fused = pair()
    for model in (eager, fused):
        torch.manual_seed(2)
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.mlp.up_proj = LoraLinear(layer.mlp.up_proj)
            layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
            layer.requires_grad_(True)
    inputs = tokens()
    assert_close(grads(fused, inputs), grads(eager, inputs), 1e-5)
    unfuse(fused)
    assert all(map(torch.equal, grads(fused, inputs), grads(eager, inputs)))


def test_frozen_backbone():
    eager, fused = pair()
    for model in (eager, fused):
        model.requires_grad_(False)
        model.model.layers[0].self_attn.q_proj.requires_grad_(True)
    inputs = tokens()
    found = grads(fused, inputs)
    assert len(found) == 2
    assert_close(found, grads(eager, inputs), 1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_gradient_checkpointing_on_top(name, use_reentrant):
    eager, fused = pair(name)
    inputs = MODELS[name].inputs()
    kept = []
    for model in (eager, fused):
        # dropout off, and yet in training, where layers are checkpointed
        for module in model.train().modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.config.attention_probs_dropout_prob = 0.0
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
    plain = grads(eager, inputs)
    for model in (eager, fused):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        with saved_tensors() as saved:
            loss = model(**inputs).loss
        kept.append(saved.nbytes)
        del loss
    assert kept[1] <= kept[0]
    assert_close(grads(fused, inputs), plain, 1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_layer_compiles_to_one_graph(name):
    eager, fused = (model.eval() for model in pair(name))
    torch._dynamo.reset()
    x = torch.randn(2, 6, 32, device=DEVICE)
    options = {}
    if name == "llama":
        positions = torch.arange(6, device=DEVICE)[None]
        options["position_embeddings"] = eager.model.rotary_emb(x, positions)
    found = []
    for model in (eager, fused):
        layer = model.model.layers[0] if name == "llama" else model.transformer.h[0]
        if model is fused:
            layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
        leaf = x.clone().requires_grad_(True)
        y = layer(leaf, **options)
        y = y if torch.is_tensor(y) else y[0]
        found.append([y, *torch.autograd.grad(y.sin().sum(), [leaf, *layer.parameters()])])
    assert_close(*reversed(found), 1e-4)


def test_a_model_compiles_without_more_breaks():
    eager, fused = (model.eval() for model in pair())
    inputs = tokens()
    torch._dynamo.reset()
    breaks = [torch._dynamo.explain(model)(**inputs).graph_break_count for model in (eager, fused)]
    torch._dynamo.reset()
    assert breaks[1] <= breaks[0]
