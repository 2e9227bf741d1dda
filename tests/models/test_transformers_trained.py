"""Fused transformers models as they are trained: autocast, compiled, sharded, with dropout."""

import copy

import pytest
import torch
from support import DEVICE
from torch import nn
from transformers_cases import MODELS, VOCAB, tokens, transformers

from fusedckpt import fuse, reference, unfuse
from fusedckpt.blocks import reader
from fusedckpt.memory import saved_tensors

# test_transformers.py compares what is swapped of these models
pytestmark = pytest.mark.usefixtures("unverified")


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


@pytest.mark.parametrize("name", ["gemma", "gpt2", "t5"])
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


def test_a_layer_compiles_to_one_graph():
    eager, fused = (model.eval() for model in pair())
    torch._dynamo.reset()
    x = torch.randn(2, 6, 32, device=DEVICE)
    positions = torch.arange(6, device=DEVICE)[None]
    options = {"position_embeddings": eager.model.rotary_emb(x, positions)}
    found = []
    for model in (eager, fused):
        layer = model.model.layers[0]
        if model is fused:
            layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
        leaf = x.clone().requires_grad_(True)
        y = layer(leaf, **options)
        y = y if torch.is_tensor(y) else y[0]
        found.append([y, *torch.autograd.grad(y.sin().sum(), [leaf, *layer.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.fixture
def group(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("no torch.distributed")
    backend = "gloo" if DEVICE.type == "cpu" else "nccl"
    store = f"file://{tmp_path}/store"
    distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def shared(monkeypatch):
    """Count the MLPs that keep their norm's input."""
    seen = []
    saving = reader._saving
    monkeypatch.setattr(reader, "_saving", lambda *args: (seen.append(1), saving(*args))[1])
    return seen


@pytest.mark.parametrize("apart", [False, True], ids=["layers", "every module"])
def test_fully_sharded(group, apart, monkeypatch):
    """Here over one process: the same gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    eager, fused = pair()
    mesh = init_device_mesh(DEVICE.type, (1,))
    for layer in fused.model.layers:
        for part in (layer.post_attention_layernorm, layer.mlp) if apart else ():
            fully_shard(part, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(fused, mesh=mesh)
    seen, inputs = shared(monkeypatch), tokens()
    found, expected = (grads(model, inputs) for model in (fused, eager))
    found = [getattr(x, "full_tensor", lambda x=x: x)() for x in found]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # a norm sharded by itself has its weight only for as long as its own call
    assert len(seen) == (0 if apart else 2)
    if apart:
        with pytest.raises(ValueError, match="a FSDPFusedLlamaMLP after fuse"):
            unfuse(fused)


class Seeded(nn.Dropout):
    """It drops what a fused MLP does, with a seed for each call."""

    def forward(self, x):
        seed = torch.randint(2**63 - 1, (1,), device=x.device)[0]
        return reference.dropout(x, self.p, seed)


def built(name):
    """Return a model, a fused copy with its report, and one whose MLPs draw as that does."""
    torch.manual_seed(0)
    eager = MODELS[name].build(dropout_rate=0.1).train()
    fused, same = copy.deepcopy(eager), copy.deepcopy(eager)
    report = fuse(fused)
    assert list(report.swapped.values()).count(next(iter(MODELS[name].swapped))) == 12
    for module in same.modules():
        if type(module).__name__ in ("T5DenseActDense", "T5DenseGatedActDense"):
            module.dropout = Seeded(module.dropout.p)
    return eager, fused, report, same


def step(model, inputs):
    torch.manual_seed(4)
    with saved_tensors() as saved:
        found = grads(model, inputs)
    return found, saved.nbytes


@pytest.mark.parametrize("name", ["t5", "t5_gated"])
def test_t5_trains_fused(name):
    eager, fused, report, same = built(name)
    inputs = tokens()
    ours, kept = step(fused, inputs)
    # its decoder makes a cache, and attention with dropout saves its scores on a CPU
    assert {report.kinds[name] for name in report.fallbacks} == {"attention"}
    torch.testing.assert_close(ours, step(same, inputs)[0], rtol=1e-4, atol=1e-5)
    assert kept < 0.9 * step(eager, inputs)[1]
    assert all(map(torch.equal, step(fused, inputs)[0], ours))
    fused.gradient_checkpointing_enable({"use_reentrant": False})
    # what several layers read has its gradients summed in another order
    torch.testing.assert_close(step(fused, inputs)[0], ours, rtol=1e-5, atol=1e-6)
    fused.gradient_checkpointing_disable()
    for model in (fused, eager):
        model.load_state_dict(same.state_dict())
    torch.testing.assert_close(fused.eval()(**inputs).loss, eager.eval()(**inputs).loss)


D, F, LAYERS, TOKENS = 64, 172, 2, 32


@pytest.fixture
def llama():
    config = transformers.LlamaConfig(
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)


def kept(model):
    ids = torch.randint(VOCAB, (2, TOKENS // 2), device=DEVICE)
    with saved_tensors(exclude=[ids]) as saved:
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return saved.nbytes / TOKENS


def kept_by_attention(model):
    """What the attention layers keep besides what they read."""
    x = torch.randn(2, TOKENS // 2, D, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) * 1
    positions = model.model.rotary_emb(x, torch.arange(TOKENS // 2, device=DEVICE)[None])
    attention = model.model.layers[0].self_attn
    with saved_tensors(exclude=[x, *positions]) as saved:
        y = attention(hidden_states=x, position_embeddings=positions, attention_mask=None)
    assert y[0].requires_grad
    return LAYERS * saved.nbytes / TOKENS


@pytest.mark.parametrize(
    ("save", "share", "per_layer"),
    [
        # the two norms' inputs, then what the level adds
        ("inputs", 1 / 5, 2 * 2 * D),
        ("gate", 2 / 5, 2 * 2 * D + 2 * F),
        ("preact", 1 / 2, 2 * 2 * D + 4 * F),
    ],
)
def test_a_fraction_is_kept(llama, save, share, per_layer):
    eager = copy.deepcopy(llama)
    fuse(llama, save=save, attention=False)
    attention = kept_by_attention(llama)
    assert attention == kept_by_attention(eager)
    before, after = (kept(model) - attention for model in (eager, llama))
    assert after <= share * before
    # exactly: the layers, the last norm's two tensors, and what the head keeps in any case
    heads = 1 * 2 * D + 2 * D
    rest = after - LAYERS * per_layer - heads
    llama.model.layers = llama.model.layers[:1]
    one = kept(llama) - attention / LAYERS
    assert after - one == per_layer
    assert 0 < rest < 9 * VOCAB + D
