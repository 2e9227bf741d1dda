"""ms-swift trains with the callback: losses and norms are those of a run without it."""

import re

import chats
import pytest
from little_llama import LAYERS
from recipes import recipe

pytest.importorskip("swift.callbacks")
CODE = "import sys; from swift.pipelines.train.sft import sft_main; sft_main(sys.argv[1:])"


def test_losses_are_those_of_a_run_without_it(tmp_path):
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
    }
    shared = [part for name, value in options.items() for part in (f"--{name}", value)]
    ours = ["--external_plugins", str(folder / "fused.py"), "--callbacks", "fusedckpt"]
    # in checkpoints, which are ms-swift's default
    shared += ["--tuner_type", "full"]
    outputs = [chats.run(folder, CODE, *shared, *more) for more in ([], ours)]
    pattern = r"'loss': '([\d.]+)', 'grad_norm': '([\d.]+)'"
    truth, fused = (
        [float(x) for row in re.findall(pattern, output) for x in row] for output in outputs
    )
    assert len(truth) >= 4, outputs[0][-3000:]
    assert fused == pytest.approx(truth, rel=2e-3)
    reports = [re.findall(r"fused (\d+) modules", output) for output in outputs]
    assert not reports[0]
    # two norms and an MLP in each layer, and the last norm
    assert int(reports[1][0]) >= 3 * LAYERS + 1
