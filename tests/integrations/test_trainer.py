"""A callback for transformers' Trainer, and our checkpoint under its gradient checkpointing."""

import functools
import types
import warnings

import pytest
import torch
import torch.utils.checkpoint as stock
from little_llama import ARGUMENTS, LAYERS, VOCAB, build, history, trainer, transformers
from support import DEVICE, flops

import fusedckpt
from fusedckpt.checkpointing import entry
from fusedckpt.integrations.transformers import FuseCallback, use_checkpoint

pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the Trainer is told to use a CPU")
PLAN = {"policy": "all", "progress": False}


@pytest.fixture
def segments(monkeypatch):
    """Count the forwards that run in a checkpoint of ours."""
    seen = []
    made = entry.Segment
    monkeypatch.setattr(entry, "Segment", lambda *args: (seen.append(1), made(*args))[1])
    return seen


def fused(model):
    return [type(layer.mlp).__name__ == "FusedLlamaMLP" for layer in model.model.layers]


class Before(transformers.TrainerCallback):
    """Note which modules are fused when accelerate gets the model."""

    def __init__(self):
        self.seen = self.hooks = None

    def watch(self, trainer):
        prepare = trainer.accelerator.prepare

        def watched(*args, **kwargs):
            if args and isinstance(args[0], torch.nn.Module):
                self.seen = fused(args[0])
            return prepare(*args, **kwargs)

        trainer.accelerator.prepare = watched

    def on_train_begin(self, args, state, control, **kwargs):
        self.hooks = len(kwargs["model"]._forward_pre_hooks)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_it_fuses_before_accelerate_prepares(tmp_path, bf16):
    seen, before = [], Before()
    callbacks = [FuseCallback(log=seen.append), before]
    ours = trainer(tmp_path, model=build(), callbacks=callbacks, bf16=bf16)
    before.watch(ours)
    found = history(ours)
    assert before.seen == [True] * LAYERS
    # for the first batch alone, on which a copy runs and shows no more
    assert before.hooks == 1
    assert not ours.model._forward_pre_hooks
    assert [type(report) for report in seen] == [fusedckpt.FuseReport]
    assert len(seen[0].swapped) == 4 * LAYERS + 1
    theirs = history(trainer(tmp_path, model=build(), bf16=bf16))
    assert len(theirs) == 2
    assert theirs[0, 0] != theirs[1, 0]
    torch.testing.assert_close(found, theirs, rtol=1e-2 if bf16 else 1e-4, atol=0)


@pytest.mark.parametrize("later", ["model_init", "add_callback"])
def test_a_model_that_was_not_there_is_fused_when_training_begins(tmp_path, later):
    seen = []
    callback = FuseCallback(log=seen.append)
    if later == "model_init":
        ours = trainer(tmp_path, model_init=lambda: build(), callbacks=[callback])
    else:
        ours = trainer(tmp_path, model=build())
        ours.add_callback(callback)
    found = history(ours)
    assert fused(ours.model) == [True] * LAYERS
    assert [len(report.swapped) for report in seen[-1:]] == [4 * LAYERS + 1]
    torch.testing.assert_close(found, history(trainer(tmp_path, model=build())), rtol=1e-4, atol=0)


def test_plan_and_report_on_the_first_batch(tmp_path):
    seen = []
    callback = FuseCallback(plan=PLAN, report=True, log=seen.append)
    ours = trainer(tmp_path, model=build(dropout=0.1), callbacks=[callback])
    found = history(ours)
    assert [type(one).__name__ for one in seen] == ["FuseReport", "Plan", "MemoryReport"]
    report = seen[-1]
    # two texts of 8 tokens and their labels, and the count of tokens that the Trainer adds
    assert 2 * 2 * 8 * 8 <= report.input_bytes <= 2 * 2 * 8 * 8 + 8
    # the optimizer stepped, though the first micro-batch does not
    assert report.optimizer_bytes > 2 * report.parameter_bytes
    theirs = history(trainer(tmp_path, model=build(dropout=0.1)))
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=0)
    # the plan stays, and what it was made for is reported anew
    ours.train()
    assert [type(one).__name__ for one in seen[3:]] == ["MemoryReport"]


def test_what_several_processes_compile_is_not_planned(tmp_path):
    options = {"model": build(), "callbacks": [FuseCallback(report=True)]}
    ours = trainer(tmp_path, torch_compile=True, torch_compile_backend="eager", **options)
    two = types.SimpleNamespace(gradient_checkpointing=False, torch_compile=True, world_size=2)
    with pytest.raises(ValueError, match="need one process"):
        ours.callback_handler.on_train_begin(two, ours.state, ours.control)


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_arguments_of_either_name_are_read(tmp_path, name):
    """Of a release that has only the new name, and of one that has only the old one."""
    model = build()
    ours = trainer(tmp_path, model=model, callbacks=[FuseCallback(log=lambda found: None)])
    arguments = types.SimpleNamespace(**{name: True})
    (callback,) = (c for c in ours.callback_handler.callbacks if isinstance(c, FuseCallback))
    with pytest.warns(UserWarning, match="unchanged: use_checkpoint: no module has"):
        callback.on_train_begin(arguments, ours.state, ours.control, model=model)


def test_checkpoints_that_a_model_has_are_ours(tmp_path, segments):
    """No argument of the Trainer asks for them, as in LLaMA-Factory."""
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    history(trainer(tmp_path, model=model, callbacks=[FuseCallback(log=lambda found: None)]))
    assert len(segments) == 2 * 2 * LAYERS


def test_gradient_checkpointing_is_ours(tmp_path, segments):
    given = {"gradient_checkpointing": True}
    theirs = history(trainer(tmp_path, model=build(dropout=0.1), **given))
    assert not segments
    callbacks = [FuseCallback(log=lambda found: None)]
    ours = history(trainer(tmp_path, model=build(dropout=0.1), callbacks=callbacks, **given))
    assert len(segments) == 2 * 2 * LAYERS
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    segments.clear()
    callbacks = [FuseCallback(checkpoint=False, log=lambda found: None)]
    history(trainer(tmp_path, model=build(), callbacks=callbacks, **given))
    assert not segments


@pytest.mark.parametrize("every", [1, 2])
def test_a_reentrant_checkpoint_stays_with_one_warning(tmp_path, segments, every):
    kwargs = {"use_reentrant": True, "every_n_layers": every}
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    theirs = history(trainer(tmp_path, model=build(dropout=0.1), **given))
    callbacks = [FuseCallback(attention=False, log=lambda found: None)]
    ours = trainer(tmp_path, model=build(dropout=0.1), callbacks=callbacks, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = history(ours)
        ours.train()
    said = [str(one.message) for one in caught if "FuseCallback" in str(one.message)]
    assert len(said) == 1
    assert "use_reentrant=True" in said[0]
    assert fused(ours.model) == [True] * LAYERS
    assert not segments
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=0)


def by_itself(model):
    """Return a model whose gradient checkpointing is no flag of its modules."""
    model.gradient_checkpointing_enable = lambda **kwargs: None
    return model


def by_another(model):
    """Return a model that calls another function than torch's checkpoint with its defaults."""

    def run(function, *args, **kwargs):
        return stock.checkpoint(function, *args, use_reentrant=False, early_stop=False, **kwargs)

    def enable(**kwargs):
        model._set_gradient_checkpointing(True, functools.partial(run))

    model.activation_checkpointing_enable = enable
    return model


@pytest.mark.parametrize("make", [by_itself, by_another])
def test_a_checkpoint_that_cannot_be_ours_stays(tmp_path, segments, make):
    callbacks = [FuseCallback(attention=False, log=lambda found: None)]
    model = make(build())
    ours = trainer(tmp_path, model=model, callbacks=callbacks, gradient_checkpointing=True)
    with pytest.warns(UserWarning, match="FuseCallback: gradient checkpointing unchanged: "):
        found = history(ours)
    assert not segments
    torch.testing.assert_close(found, history(trainer(tmp_path, model=build())), rtol=1e-4, atol=0)


def step(model):
    ids = torch.randint(3, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_attention_is_not_run_again():
    """Each layer's forward runs once more, but for attention."""
    model, given = build().train(), {"save_regions": ["attention"]}
    expected = step(model)
    model.gradient_checkpointing_enable()
    counts = []
    for options in ({}, given):
        use_checkpoint(model, **options)
        with torch.profiler.profile() as events:
            found = step(model)
        names = [event.name for event in events.events()]
        counts.append(names.count("aten::scaled_dot_product_attention"))
        torch.testing.assert_close(found, expected)
    assert counts == [2 * LAYERS, LAYERS]
    assert FuseCallback(**given).save_regions == ("attention",)
    with pytest.raises(TypeError, match="save_regions must be strings"):
        use_checkpoint(model, [1])
    with pytest.raises(TypeError, match="use_checkpoint: model must be a module, got int"):
        use_checkpoint(3)


@pytest.mark.parametrize("every", [1, 2])
def test_use_checkpoint(segments, every):
    """Every layer's forward runs once more, but for its last GEMM."""
    plain = build().train()
    fusedckpt.fuse(plain, save="preact")
    expected, least = step(plain), flops(lambda: step(plain))
    model = build().train()
    fusedckpt.fuse(model, save="preact")
    model.activation_checkpointing_enable(every_n_layers=every)
    use_checkpoint(model)
    use_checkpoint(model)
    segments.clear()
    found = []
    total = flops(lambda: found.extend(step(model)))
    assert len(segments) == len(range(0, LAYERS, every))
    # 16 tokens through q, k, v and o, gate and up
    one = 2 * 16 * 32 * (32 + 16 + 16 + 32 + 48 + 48)
    assert total == least + len(segments) * one
    torch.testing.assert_close(found, expected)
    segments.clear()
    model.activation_checkpointing_disable()
    step(model)
    assert not segments


def test_what_cannot_be_ours_is_named():
    model = build().train()
    names = r"activation_checkpointing_enable.*older releases gradient_checkpointing_enable"
    with pytest.raises(ValueError, match=names):
        use_checkpoint(model)
    model.activation_checkpointing_enable({"use_reentrant": True})
    use_checkpoint(model)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        step(model)


def lora():
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules="all-linear")


def adapted():
    model, config = build(), lora()
    torch.manual_seed(1)
    return pytest.importorskip("peft").get_peft_model(model, config)


def test_lora_on_every_linear_with_gradient_checkpointing(tmp_path):
    options = {"gradient_checkpointing": True}
    theirs = history(trainer(tmp_path, model=adapted(), **options))
    model, logged = adapted(), []
    callbacks = [FuseCallback(log=logged.append)]
    ours = history(trainer(tmp_path, model=model, callbacks=callbacks, **options))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    assert not logged[0].left
    assert not logged[0].fallbacks


def test_sft_of_lora(tmp_path):
    trl, datasets, tokenizers = map(pytest.importorskip, ("trl", "datasets", "tokenizers"))
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<eos>": VOCAB - 1}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    processing = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="w0"
    )
    texts = [" ".join(f"w{(7 * i + j) % 50}" for j in range(8)) for i in range(8)]
    data = datasets.Dataset.from_dict({"text": texts})

    def run(callbacks):
        arguments = trl.SFTConfig(output_dir=str(tmp_path), bf16=False, **ARGUMENTS)
        return history(
            trl.SFTTrainer(
                model=build(),
                args=arguments,
                train_dataset=data,
                processing_class=processing,
                peft_config=lora(),
                callbacks=callbacks,
            )
        )

    logged = []
    theirs, ours = run([]), run([FuseCallback(log=logged.append)])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    assert logged[0].swapped
    assert not logged[0].fallbacks
