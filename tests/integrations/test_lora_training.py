"""LoRA on every linear, trained by transformers' Trainer and by TRL's SFTTrainer, fused and not."""

import pytest
import torch
from little_llama import ARGUMENTS, VOCAB, build, history, trainer
from support import DEVICE

from fusedckpt.integrations.transformers import FuseCallback

peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the Trainer is told to use a CPU")


def config():
    return peft.LoraConfig(r=4, target_modules="all-linear")


def adapted():
    model = build()
    torch.manual_seed(1)
    return peft.get_peft_model(model, config())


def test_a_trainer_with_gradient_checkpointing(tmp_path):
    options = {"gradient_checkpointing": True}
    theirs = history(trainer(tmp_path, model=adapted(), **options))
    model, logged = adapted(), []
    callbacks = [FuseCallback(log=logged.append)]
    ours = history(trainer(tmp_path, model=model, callbacks=callbacks, **options))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    assert not logged[0].left
    assert not logged[0].fallbacks


def test_sft(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
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
                peft_config=config(),
                callbacks=callbacks,
            )
        )

    logged = []
    theirs, ours = run([]), run([FuseCallback(log=logged.append)])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    assert logged[0].swapped
    assert not logged[0].fallbacks
