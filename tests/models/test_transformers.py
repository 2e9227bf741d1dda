"""fuse on real transformers models of tiny random configurations: the same, and less is kept."""

import copy
import math
from collections import Counter

import pytest
import support
import torch
from transformers_cases import MODELS

from fusedckpt import fuse, unfuse
from fusedckpt.fusing.accuracy import FEWEST, Errors
from fusedckpt.memory import saved_tensors


def built(case, dtype=torch.float32):
    torch.manual_seed(0)
    return case.build().to(dtype).eval()


def cast(inputs, dtype):
    return {
        k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def results(model, inputs):
    """Return loss, first output, and every parameter's gradient."""
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    out = model(**cast(inputs, dtype))
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out[1].detach(), **grads}


def assert_near(fused, eager, case):
    """Hold logits and gradients to the error rule, and each loss, one number, to a bound.

    As many draws as give the smallest gradient enough elements, and at least two.
    """
    truth_model = copy.deepcopy(eager).double()
    sums: dict[str, Errors] = {}
    smallest = min(p.numel() for p in eager.parameters() if p.requires_grad)
    for _ in range(max(2, math.ceil(FEWEST / smallest))):
        inputs = case.inputs()
        ours, theirs = results(fused, inputs), results(eager, inputs)
        truth = results(truth_model, inputs)
        assert ours.keys() == theirs.keys() == truth.keys()
        # a loss in float32 was computed in the model's dtype
        losses = [found.pop("loss") for found in (ours, theirs, truth)]
        support.assert_near(*losses, dtype=eager.dtype)
        for name, t in truth.items():
            sums.setdefault(name, Errors(theirs[name].dtype)).add(ours[name], theirs[name], t)
    for name, errors in sums.items():
        assert errors.problem() is None, f"{name}: {errors.problem()}"


def check_report(report, case):
    attention = {name for name, kind in report.kinds.items() if kind == "attention"}
    others = {name: made for name, made in report.swapped.items() if name not in attention}
    assert Counter(others.values()) == case.swapped
    assert len(attention) >= 2
    assert report.left.keys() == case.left.keys()
    for name, reason in case.left.items():
        assert report.left[name].key == reason
    assert report.saved.keys() == others.keys()
    assert all(after <= before for before, after in report.saved.values())
    # all but those that call layer_norm keep less than they did
    layer_norms = "nn.LayerNorm -> LayerNorm", "NemotronLayerNorm1P -> layer_norm (offset 1)"
    for name, (before, after) in report.saved.items():
        if report.swapped[name] not in layer_norms:
            assert after <= before * 0.75


def kept(model, inputs):
    tensors = [value for value in inputs.values() if torch.is_tensor(value)]
    with saved_tensors(exclude=tensors) as saved:
        loss = model(**inputs).loss
    del loss
    return saved.nbytes


def generated(model, inputs):
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    return model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("name", MODELS)
def test_swapped_computes_the_same_and_undone(name):
    """Report, loss, logits, gradients, saved bytes and generation; unfuse restores the model."""
    case = MODELS[name]
    eager, inputs = built(case), case.inputs()
    fused = copy.deepcopy(eager)
    expected = fused(**inputs).loss
    attributes = [set(m.__dict__) for m in fused.modules()]
    report = fuse(fused)
    check_report(report, case)
    assert_near(fused, eager, case)
    # attention of a decoder makes a cache
    assert {report.kinds[name] for name in report.fallbacks} <= {"attention"}
    assert kept(fused, inputs) < kept(eager, inputs)
    if case.generates:
        texts = [generated(model, inputs) for model in (eager, fused)]
        assert texts[0].shape[1] >= 6
        assert torch.equal(*texts)
    unfuse(fused)
    assert [type(m) for m in fused.modules()] == [type(m) for m in eager.modules()]
    assert [set(m.__dict__) for m in fused.modules()] == attributes
    assert torch.equal(fused(**inputs).loss, expected)


HALF = ("llama", "gemma3", "phi3", "olmo2", "qwen3_moe", "glm4_moe", "gpt_oss", "gpt2", "apertus")
HALF += ("nemotron", "cohere2", "bert", "clip", "t5", "t5_gated", "whisper")


@pytest.mark.parametrize("name", HALF)
def test_in_bfloat16(name):
    eager = built(MODELS[name], torch.bfloat16)
    fused = copy.deepcopy(eager)
    assert fuse(fused, verify=False).swapped
    assert_near(fused, eager, MODELS[name])


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_saved_and_loaded_again(name, tmp_path):
    fused, inputs = built(MODELS[name]), MODELS[name].inputs()
    untouched = copy.deepcopy(fused)
    fuse(fused, verify=False)
    fused.save_pretrained(tmp_path)
    loaded = type(fused).from_pretrained(tmp_path).to(fused.device).eval()
    assert [type(m) for m in loaded.modules()] == [type(m) for m in untouched.modules()]
    before, after = fused.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() == untouched.state_dict().keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    fuse(loaded, verify=False)
    assert torch.equal(loaded(**inputs).loss, fused(**inputs).loss)
