"""fuse on real transformers models of tiny random configurations: the same, and less is kept."""

import copy
from collections import Counter

import pytest
import torch
from transformers_cases import MODELS

from fusedckpt import fuse, unfuse
from fusedckpt.fusing.accuracy import Errors, allowed
from fusedckpt.memory import saved_tensors


@pytest.fixture(params=MODELS, scope="module")
def case(request):
    return MODELS[request.param]


def built(case, dtype=torch.float32):
    torch.manual_seed(0)
    return case.build().to(dtype).eval()


def cast(inputs, dtype):
    return {
        k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def results(model, inputs):
    """Loss, first output, and every parameter's gradient."""
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    out = model(**cast(inputs, dtype))
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out[1].detach(), **grads}


def worst_ratio(fused, eager, batches):
    """Hold loss, logits and gradients to the contract; return the worst error beside eager's."""
    truth_model = copy.deepcopy(eager).double()
    sums: dict[str, Errors] = {}
    for inputs in batches:
        ours, theirs = results(fused, inputs), results(eager, inputs)
        truth = results(truth_model, inputs)
        assert ours.keys() == theirs.keys() == truth.keys()
        for name, t in truth.items():
            sums.setdefault(name, Errors(theirs[name].dtype)).add(ours[name], theirs[name], t)
    worst = 0.0
    for name, errors in sums.items():
        assert errors.problem() is None, f"{name}: {errors.problem()}"
        mine, eagers, scale = errors.rms()
        # below the floor a ratio is noise
        worst = max(worst, mine / eagers if eagers > allowed(0, scale, errors.dtype) else 0.0)
    return worst


def test_report(case):
    report = fuse(built(case))
    attention = {name for name, kind in report.kinds.items() if kind == "attention"}
    others = {name: made for name, made in report.swapped.items() if name not in attention}
    assert Counter(others.values()) == case.swapped
    assert len(attention) >= 2
    assert report.left.keys() == case.left.keys()
    for name, reason in case.left.items():
        assert reason in report.left[name]
    assert report.saved.keys() == others.keys()
    assert all(after <= before for before, after in report.saved.values())
    # all but those that call layer_norm keep less than they did
    layer_norms = "nn.LayerNorm -> LayerNorm", "NemotronLayerNorm1P -> layer_norm (offset 1)"
    for name, (before, after) in report.saved.items():
        if report.swapped[name] not in layer_norms:
            assert after <= before * 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_loss_logits_and_gradients(case, dtype):
    eager = built(case, dtype)
    fused = copy.deepcopy(eager)
    assert fuse(fused).swapped
    worst_ratio(fused, eager, [case.inputs() for _ in range(case.batches)])


def test_less_is_kept(case):
    eager, inputs, kept = built(case), case.inputs(), []
    fused = copy.deepcopy(eager)
    fuse(fused)
    for model in (eager, fused):
        tensors = [value for value in inputs.values() if torch.is_tensor(value)]
        with saved_tensors(exclude=tensors) as saved:
            loss = model(**inputs).loss
        kept.append(saved.nbytes)
        del loss
    assert kept[1] < kept[0]


def test_saved_and_loaded_again(case, tmp_path):
    fused, inputs = built(case), case.inputs()
    untouched = copy.deepcopy(fused)
    fuse(fused)
    fused.save_pretrained(tmp_path)
    loaded = type(fused).from_pretrained(tmp_path).to(fused.device).eval()
    assert [type(m) for m in loaded.modules()] == [type(m) for m in untouched.modules()]
    before, after = fused.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() == untouched.state_dict().keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    fuse(loaded, verify=False)
    assert torch.equal(loaded(**inputs).loss, fused(**inputs).loss)


def test_generates_the_same(case):
    if not case.generates:
        pytest.skip("it has no generate")
    eager, inputs = built(case), case.inputs()
    fused = copy.deepcopy(eager)
    fuse(fused)
    inputs.pop("labels", None)
    texts = [
        model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        for model in (eager, fused)
    ]
    assert texts[0].shape[1] >= 6
    assert torch.equal(*texts)


def test_unfuse_restores_it(case):
    model, inputs = built(case), case.inputs()
    before, expected = [type(m) for m in model.modules()], model(**inputs).loss
    attributes = [set(m.__dict__) for m in model.modules()]
    assert fuse(model).swapped
    assert [type(m) for m in model.modules()] != before
    unfuse(model)
    assert [type(m) for m in model.modules()] == before
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert torch.equal(model(**inputs).loss, expected)
