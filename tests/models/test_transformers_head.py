"""Losses without logits in causal language models of transformers, as they are trained."""

from __future__ import annotations

import copy

import pytest
import torch
from support import DEVICE
from transformers_cases import MODELS, VOCAB, decoder, tokens, transformers

import fusedckpt
from fusedckpt.fusing.accuracy import Errors
from fusedckpt.layers import head as head_layer

# test_transformers.py compares what is swapped of these models
pytestmark = pytest.mark.usefixtures("unverified")

OTHERS = ("bert", "roberta", "vit", "clip", "t5", "t5_gated", "whisper")
CAUSAL = {name: model for name, model in MODELS.items() if name not in OTHERS}
CAUSAL["granite"] = decoder("Granite", {}, logits_scaling=3.0, embedding_multiplier=2.0)
CAUSAL["cohere"] = decoder("Cohere", {}, logit_scale=0.25)
# no other tensor has as many numbers as the logits
LENGTH, CLASSES = 13, 74


def build(name, **more):
    torch.manual_seed(0)
    eager = CAUSAL[name].build(use_cache=False, vocab_size=CLASSES, **more).train()
    for module in eager.modules():
        for rate in {"p", "attention_dropout", "residual_dropout"} & vars(module).keys():
            setattr(module, rate, 0.0)
    ours = copy.deepcopy(eager)
    head = ours.get_output_embeddings()
    (name,) = [name for name, module in ours.named_modules() if module is head]
    assert fusedckpt.fuse(ours, only=name, head=True).kinds == {name: "head"}
    return eager, ours


def step(model, inputs, **more):
    out = model(**inputs, **more)
    return out, [out.loss, *torch.autograd.grad(out.loss, [*model.parameters()])]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(head_layer, "LOGIT_BYTES", 1)


def allocations(fn):
    """Return the sizes of all that a CPU allocates."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        found = fn()
    events = profiler.profiler.kineto_results.events()
    return found, {event.nbytes() for event in events if event.name() == "[memory]"}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a CPU's allocations")
@pytest.mark.parametrize("name", CAUSAL)
def test_loss_and_gradients_without_logits(name, small_chunks):
    assert len(CAUSAL) >= 20
    eager, ours = build(name)
    inputs = tokens(LENGTH)
    logits = 4 * inputs["input_ids"].numel() * CLASSES
    (_, theirs), made = allocations(lambda: step(eager, inputs))
    assert logits in made
    (out, mine), made = allocations(lambda: step(ours, inputs))
    assert logits not in made
    assert out.logits is None
    _, truth = step(eager.double(), inputs)
    assert abs(mine[0] - theirs[0]) < 1e-6
    errors = Errors(torch.float32)
    # the loss, one number, is compared above
    for numbers in zip(mine[1:], theirs[1:], truth[1:], strict=True):
        errors.add(*(number.detach() for number in numbers))
    assert errors.problem(slack=2.0) is None


def test_arguments_of_the_loss():
    """num_items_in_batch and shift_labels; an evaluation and a generation as before."""
    eager, ours = build("llama")
    inputs = tokens(LENGTH)
    for more in ({"num_items_in_batch": 7}, {"shift_labels": inputs["labels"].roll(-1, 1)}):
        expected, found = (step(model, inputs, **more)[1] for model in (eager, ours))
        torch.testing.assert_close(found, expected)
    for model in (eager, ours):
        model.eval()
    assert type(ours(**inputs).logits) is torch.Tensor
    assert torch.equal(ours(**inputs).logits, eager(**inputs).logits)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    first = {"input_ids": inputs["input_ids"]}
    assert torch.equal(ours.generate(**first, **options), eager.generate(**first, **options))


def test_experts_keep_their_auxiliary_loss():
    eager, ours = build("mixtral", output_router_logits=True)
    inputs = tokens(LENGTH)
    (theirs, expected), (mine, found) = (step(model, inputs) for model in (eager, ours))
    assert mine.aux_loss == theirs.aux_loss
    torch.testing.assert_close(found, expected)
    assert mine.logits is None


@pytest.mark.parametrize("targets", ["lm_head", "q_proj"])
def test_adapters(targets):
    """An adapter on the head reads its output: there the logits are real."""
    peft = pytest.importorskip("peft")
    eager, ours = build("llama")
    config = peft.LoraConfig(r=2, target_modules=[targets], init_lora_weights=False)
    found = []
    for model in (eager, ours):
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        loss = model(**tokens_of(1)).loss
        wanted = [p for p in model.parameters() if p.requires_grad]
        found.append([loss, *torch.autograd.grad(loss, wanted)])
    torch.testing.assert_close(found[1], found[0])


def tokens_of(seed):
    torch.manual_seed(seed)
    return tokens(LENGTH)


def hits(evaluation):
    return {"hits": float((evaluation.predictions.argmax(-1) == evaluation.label_ids).mean())}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the Trainer is told to use a CPU")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trainer(tmp_path, smoothing):
    """Loss and parameters after steps, metrics, and label smoothing, which reads real logits."""
    pytest.importorskip("accelerate")
    eager, ours = build("qwen2")
    data = [{"input_ids": torch.arange(5, 5 + LENGTH) * i % VOCAB} for i in range(1, 9)]
    data = [{**row, "labels": row["input_ids"]} for row in data]
    found = []
    for model in (eager, ours):
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            label_smoothing_factor=smoothing,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model,
            args=args,
            train_dataset=data,
            eval_dataset=data,
            compute_metrics=hits,
        )
        loss, metrics = trainer.train().training_loss, trainer.evaluate()
        numbers = loss, metrics["eval_loss"], metrics["eval_hits"]
        found.append([*numbers, *model.state_dict().values()])
    torch.testing.assert_close(found[1], found[0])
