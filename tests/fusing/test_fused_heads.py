"""A causal model's loss without logits: what is taken, what is refused by name, what stays."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn
from zoo import OwnLinear

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.fusing.swap import original_of

transformers: Any = pytest.importorskip("transformers")
B, T, V = 2, 7, 30
LABELS = torch.arange(B * T, device=DEVICE).view(B, T) * 3 % V


class WordsForCausalLM(transformers.LlamaForCausalLM):
    """A model with a change between its output embedding and its loss."""

    change = staticmethod(lambda model, logits: logits)

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = F.dropout(self.model(input_ids).last_hidden_state, 0.2, self.training)
        logits = self.change(self, self.lm_head(hidden))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=V, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def words(change=None, **options) -> tuple[Any, Any, fusedckpt.FuseReport]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=V,
        use_cache=False,
    )
    eager = WordsForCausalLM(config).to(DEVICE).train()
    if change is not None:
        eager.change = change
    fused = copy.deepcopy(eager)
    return eager, fused, fuse(fused, only="lm_head", head=True, **options)


def step(model, **more):
    torch.manual_seed(1)
    model.zero_grad()
    out = model(input_ids=LABELS, labels=LABELS, **more)
    out[0].backward()
    return [out[0].detach(), *(p.grad for p in model.parameters())]


TAKEN = {
    "identity": lambda model, logits: logits,
    "cast": lambda model, logits: logits.float().contiguous(),
    "scale": lambda model, logits: logits * 0.0625,
    "quotient": lambda model, logits: logits / 3,
    "softcap": lambda model, logits: 30.0 * torch.tanh(logits / 30.0),
    "scale, softcap": lambda model, logits: 3.0 * torch.tanh(logits * 2 / 3.0),
    "scaled softcap": lambda model, logits: 0.5 * (3.0 * torch.tanh(logits / 3.0)),
    "in place": lambda model, logits: logits.clone().div_(3.0),
}


@pytest.mark.parametrize("change", TAKEN)
def test_a_scale_and_a_softcap_are_read_in_the_first_step(change):
    eager, fused, report = words(TAKEN[change])
    assert report.swapped == {"lm_head": "Linear -> loss without logits"}
    for _ in range(2):
        torch.testing.assert_close(step(fused), step(eager))
        assert fused(input_ids=LABELS, labels=LABELS).logits is None
    assert report.fallbacks == {}


def head_twice(model, logits):
    return logits + 0 * model.lm_head(model.model.embed_tokens.weight[:T]).mean()


def own_loss(model, logits):
    model.own = F.cross_entropy(logits.view(-1, V), LABELS.view(-1))
    return logits


REFUSED = {
    "shift": lambda model, logits: logits + 1.0,
    "negative": lambda model, logits: -logits,
    "clamp": lambda model, logits: logits.clamp(-50, 50),
    "row moved": lambda model, logits: logits.roll(1, 1),
    "rows selected": lambda model, logits: logits[:, :-1].contiguous(),
    "head twice": head_twice,
    "own loss": own_loss,
    "no logits": lambda model, logits: logits.softmax(-1).log(),
}


@pytest.mark.parametrize("change", REFUSED)
def test_other_changes_are_named_and_run_as_before(change):
    eager, fused, report = words(REFUSED[change])
    labels = LABELS[:, 1:].contiguous() if change == "rows selected" else None
    more = {} if labels is None else {"shift_labels": labels}
    expected = step(eager, **more)
    with pytest.warns(UserWarning, match=r"fuse\(head=True\): WordsForCausalLM "):
        found = step(fused, **more)
    # dropout draws the same numbers
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(step(fused, **more), expected, rtol=0, atol=0)
    assert report.fallbacks["lm_head"].key == "logits"
    assert fused(input_ids=LABELS, labels=LABELS, **more).logits.shape[-1] == V


def test_a_change_after_the_first_step_is_named():
    eager, fused, report = words()
    step(fused)
    for model in (eager, fused):
        model.change = lambda model, logits: logits + 1.0
    with pytest.warns(UserWarning, match="than in its first step"):
        found = step(fused)
    torch.testing.assert_close(found, step(eager), rtol=0, atol=0)
    assert "lm_head" in report.fallbacks


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there it ends all use of the GPU")
def test_errors_of_the_caller_are_the_models_own():
    _, fused, _ = words()
    with pytest.raises(IndexError):
        fused(input_ids=LABELS + V, labels=LABELS)
    assert fused(input_ids=LABELS, labels=LABELS).logits is None


def test_evaluation_has_logits_unless_asked():
    eager, fused, _ = words()
    for model in (eager, fused):
        model.eval()
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            found = fused(input_ids=LABELS, labels=LABELS).logits
            assert torch.equal(found, eager(input_ids=LABELS, labels=LABELS).logits)


@pytest.mark.parametrize("grad", [False, True])
def test_evaluation_without_logits(grad):
    torch.manual_seed(0)
    eager, fused, _ = words(TAKEN["softcap"])
    unfuse(fused)
    fuse(fused, only="lm_head", head="always")
    for model in (eager, fused):
        model.eval()
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            out, expected = (m(input_ids=LABELS, labels=LABELS) for m in (fused, eager))
            assert out.logits is None
            torch.testing.assert_close(out.loss, expected.loss)
    # without labels there are logits
    assert torch.equal(fused(input_ids=LABELS).logits, eager(input_ids=LABELS).logits)


def test_outputs_as_tuples():
    eager, fused, _ = words()
    eager, fused = (unfused(model) for model in (eager, fused))
    assert len(fused) == len(eager)
    assert fused[1] is None


def unfused(model):
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(model.config).to(DEVICE).train()
    if original_of(model) is not None:
        fuse(llama, only="lm_head", head=True)
    return llama(input_ids=LABELS, labels=LABELS, return_dict=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_and_half_precision(dtype):
    eager, fused, _ = words(TAKEN["softcap"])
    for model in (eager, fused):
        model.to(dtype)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == torch.float32):
        found, expected = (model(input_ids=LABELS, labels=LABELS) for model in (fused, eager))
    assert found.logits is None
    assert found.loss.dtype == expected.loss.dtype == torch.float32


def test_hooks_and_compiled_models_run_as_before():
    eager, fused, report = words()
    seen = []
    handle = fused.lm_head.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    torch.testing.assert_close(step(fused), step(eager), rtol=0, atol=0)
    assert seen == [(B, T, V)]
    assert report.fallbacks["lm_head"].key == "hook"
    handle.remove()
    compiled = torch.compile(fused, backend="eager")
    assert compiled(input_ids=LABELS, labels=LABELS).logits.shape[-1] == V


def test_another_loss_that_the_user_sets():
    eager, fused, _ = words()

    def loss(logits, labels, **kwargs):
        return logits.square().mean()

    for model in (eager, fused):
        model.loss_function = loss
    torch.testing.assert_close(step(fused), step(eager), rtol=0, atol=0)


def test_classes_copies_and_the_way_back():
    _, fused, _ = words()
    assert type(fused).__name__ == "WordsForCausalLM"
    assert isinstance(fused, WordsForCausalLM)
    assert fuse(fused, head=True).already == {"lm_head": "Linear -> loss without logits"}
    for model in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert model(input_ids=LABELS, labels=LABELS).logits is None
    unfuse(fused)
    assert type(fused) is WordsForCausalLM
    assert type(fused.lm_head) is nn.Linear
    assert fused(input_ids=LABELS, labels=LABELS).logits is not None


def test_models_without_an_output_embedding_are_refused():
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    for model in (nn.Linear(4, 4), transformers.ViTForImageClassification(config)):
        before = [type(module) for module in model.modules()]
        with pytest.raises(
            ValueError, match=r"fuse: head=True needs .* fusedckpt\.LinearCrossEntropy"
        ):
            fuse(model, head=True)
        assert [type(module) for module in model.modules()] == before
    with pytest.raises(ValueError, match="fuse: head must be True, False or"):
        fuse(nn.Linear(4, 4), head="eval")


def test_models_that_are_left():
    config = transformers.T5Config(d_model=16, d_ff=24, d_kv=8, num_layers=1, num_heads=2)
    t5 = transformers.T5ForConditionalGeneration(config)
    assert fuse(t5, head=True).left["lm_head"].key == "head loss"
    _, fused, _ = words()
    unfuse(fused)
    fused.loss_function = lambda *args, **kwargs: None
    assert fuse(fused, head=True).left["lm_head"].key == "head loss"
    assert "lm_head" not in fuse(fused, head=True, skip="lm_head").kinds


def test_output_embeddings_that_are_left():
    _, model, _ = words()
    unfuse(model)
    model.lm_head.__class__ = OwnLinear
    assert fuse(model, head=True, linear=False).left["lm_head"].key == "head class"
    model.lm_head.__class__ = nn.Linear
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to_sparse())
    assert fuse(model, head=True, linear=False).left["lm_head"].key == "head weight"


def test_a_class_that_is_patched_after_fuse(monkeypatch):
    eager, fused, report = words()
    torch.testing.assert_close(step(fused), step(eager))
    before = WordsForCausalLM.forward

    def twice(self, *args, **kwargs):
        return (before(self, *args, **kwargs).loss * 2,)

    with monkeypatch.context() as patch:
        patch.setattr(WordsForCausalLM, "forward", twice)
        torch.testing.assert_close(step(fused), step(eager))
    linear = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: linear(self, x) * 1.5)
    torch.testing.assert_close(step(fused), step(eager))
    assert report.fallbacks["lm_head"].key == "changed"
