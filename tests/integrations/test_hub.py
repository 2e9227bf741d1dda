"""The folder of layers for Hugging Face's `kernels`, loaded by the real library."""

import functools
import operator
import re
import subprocess
import sys

import pytest
import torch
from little_llama import LAYERS
from little_llama import build as little_llama
from support import DEVICE, randn, saved_bytes

from fusedckpt.integrations import hub

NAMES = ("RMSNorm", "RMSNormMLP", "RMSNormMLPLayout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hub.build(tmp_path_factory.mktemp("hub") / "layers", [DEVICE.type])


def test_files_import_nothing_by_the_name_of_the_library(folder):
    files = [*folder.rglob("*.py")]
    assert len(files) > 50
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) fusedckpt", text, re.MULTILINE), path
        assert not re.search(r"\bfusedckpt::|ops\.fusedckpt\b|_fusedckpt_(?!layers)", text), path


def test_the_folder_runs_where_the_library_is_not_installed(folder):
    """Every file is there, and none reads the package."""
    variant = folder / "build" / f"torch-{DEVICE.type}"
    program = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("layers_of_a_hub", r"{variant}/__init__.py")
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
norm = torch.nn.Module()
norm.weight, norm.eps = torch.nn.Parameter(torch.ones(8)), 1e-6
x = torch.randn(3, 8, requires_grad=True)
y = module.layers.RMSNorm.forward(norm, x)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
y.sum().backward()
assert x.grad is not None
assert "fusedckpt" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)


def test_bad_folders_and_backends_are_refused(folder):
    with pytest.raises(ValueError, match="expected an empty folder"):
        hub.build(folder)
    with pytest.raises(ValueError, match="backends"):
        hub.build(folder / "other", ["vulkan"])
    assert not (folder / "other").exists()


def the_library():
    """Return Hugging Face's `kernels`, not the folder of this name in a checkout."""
    kernels = pytest.importorskip("kernels")
    if not hasattr(kernels, "kernelize"):
        pytest.skip("Hugging Face's kernels is not installed")
    return kernels


def step(model):
    """Return the loss and the gradients of one step, by name."""
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


def assert_equal_steps(ours, eager, renamed=lambda name: name):
    loss, grads = step(ours)
    truth, expected = step(eager)
    torch.testing.assert_close(loss, truth)
    assert {renamed(name) for name in grads} == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[renamed(name)], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("modes", [["TRAINING"], ["TRAINING", "TORCH_COMPILE"]])
def test_kernelize_trains_a_model_with_its_norms(folder, modes):
    kernels = the_library()
    repository = kernels.LocalLayerRepository(folder, layer_name="RMSNorm")
    mode = functools.reduce(operator.or_, [kernels.Mode[name] for name in modes])
    ours, eager = little_llama().to(DEVICE), little_llama().to(DEVICE)
    with kernels.use_kernel_mapping({"RMSNorm": {DEVICE.type: {mode: repository}}}):
        kernels.kernelize(ours, mode=mode, device=DEVICE.type)
    forwards = [m.forward for name, m in ours.named_modules() if name.endswith("norm")]
    assert len(forwards) == 2 * LAYERS + 1
    assert {f.__module__ for f in forwards} == {f"{hub.ID}_{DEVICE.type}.layers"}
    assert_equal_steps(ours, eager)


def test_a_norm_and_its_mlp_become_one_layer(folder, monkeypatch, request, tmp_path):
    """By transformers' own mapping, from a checkpoint, whose names stay."""
    kernels = the_library()
    from transformers import LlamaForCausalLM, conversion_mapping, monkey_patching
    from transformers.integrations import hub_kernels
    from transformers.utils.kernel_config import KernelConfig

    # transformers asks every module for its names: these import all image processors, and those
    # torchvision
    for name, module in [*sys.modules.items()]:
        if name.startswith("transformers.") and getattr(module, "__file__", "") is None:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    request.addfinalizer(monkey_patching.clear_patch_mapping)
    fusion = getattr(hub_kernels, "register_kernel_replacements_and_fusions", None)
    if fusion is None:
        pytest.skip("this release of transformers makes no layer of several")
    eager = little_llama().to(DEVICE)
    eager.save_pretrained(tmp_path)
    parts = ("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp")
    config = KernelConfig({parts: f"{folder}:RMSNormMLP"}, use_local_kernel=True)
    fusion(LlamaForCausalLM, eager.config, config)
    ours = LlamaForCausalLM.from_pretrained(tmp_path).to(DEVICE).train()
    repository = kernels.LocalLayerRepository(folder, layer_name="RMSNormMLP")
    mapping = {"RMSNormMLP": {DEVICE.type: {kernels.Mode.TRAINING: repository}}}
    with kernels.use_kernel_mapping(mapping):
        kernels.kernelize(ours, mode=kernels.Mode.TRAINING, device=DEVICE.type)
    names = [type(layer.mlp).__name__ for layer in ours.model.layers]
    assert names == ["Identity"] * LAYERS
    x = randn(5, 32).requires_grad_()
    assert saved_bytes(ours.model.layers[0].post_attention_layernorm, [x]) == x.nbytes
    assert_equal_steps(
        ours,
        eager,
        lambda name: re.sub(r"post_attention_layernorm\.(gate|up|down)_proj", r"mlp.\1_proj", name),
    )
