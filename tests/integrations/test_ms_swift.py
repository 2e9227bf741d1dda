"""ms-swift trains with the callback: losses and norms are those of a run without it."""

import chats
import pytest
from little_llama import LAYERS
from recipes import recipe

pytest.importorskip("swift.callbacks")
CODE = "import sys; from swift.pipelines.train.sft import sft_main; sft_main(sys.argv[1:])"
LORA = {"tuner_type": "lora", "lora_rank": "4", "lora_alpha": "8", "target_modules": "all-linear"}


@pytest.mark.parametrize("tuner", [{"tuner_type": "full"}, LORA], ids=["full", "lora"])
def test_losses_are_those_of_a_run_without_it(tmp_path, tuner):
    folder = chats.write(tmp_path)
    (folder / "fused.py").write_text(recipe("register_callback("), encoding="utf-8")
    options = {
        "model": str(folder / "model"),
        "model_type": "llama",
        "template": "chatml",
        "dataset": str(folder / "chats.jsonl"),
        "output_dir": str(folder / "out"),
        "max_steps": "2",
        "logging_steps": "1",
        "per_device_train_batch_size": "2",
        "gradient_accumulation_steps": "2",
        "learning_rate": "1e-2",
        "lr_scheduler_type": "constant",
        "use_cpu": "true",
        "torch_dtype": "float32",
        "bf16": "false",
        "fp16": "false",
        "report_to": "none",
        "save_strategy": "no",
        "attn_impl": "sdpa",
        "dataloader_num_workers": "0",
        "split_dataset_ratio": "0",
        # its default drops
        "lora_dropout": "0",
        **tuner,
    }
    shared = [part for name, value in options.items() for part in (f"--{name}", value)]
    ours = ["--external_plugins", str(folder / "fused.py"), "--callbacks", "fusedckpt"]
    # in checkpoints, which are ms-swift's default
    outputs = [chats.run(folder, CODE, *shared, *more) for more in ([], ours)]
    truth, fused = (
        chats.numbers(output, r"'loss': '([\d.]+)', 'grad_norm': '([\d.]+)'") for output in outputs
    )
    assert fused == pytest.approx(truth, rel=2e-3)
    assert [chats.uses_our_checkpoint(output) for output in outputs] == [False, True]
    before, after = map(chats.saved_bytes, outputs)
    print(f"losses and norms {truth} and {fused}, saved bytes {before} and {after}")
    # two norms and an MLP in each layer, and the last norm
    assert [chats.num_fused(output) >= 3 * LAYERS + 1 for output in outputs] == [False, True]
