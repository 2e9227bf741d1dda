"""LLaMA-Factory trains with us: losses and norms are those of a run without us."""

import json
import re

import chats
import pytest
from little_llama import LAYERS
from recipes import recipe

pytest.importorskip("llamafactory.v1.plugins.model_plugins.kernels.interface")
yaml = pytest.importorskip("yaml")
V0 = "from llamafactory.train.tuner import run_exp\n\nrun_exp()\n"
# two norms and an MLP in each layer, and the last norm
FUSED = 3 * LAYERS + 1


def numbers(output, pattern):
    rows = re.findall(pattern, output)
    assert len(rows) >= 2, output[-3000:]
    return [float(x) for row in rows[:2] for x in row]


def num_fused(output):
    counts = re.search(r"fused (\d+) modules", output)
    return int(counts[1]) if counts else 0


def test_v1_takes_the_kernel_plugin(tmp_path):
    folder = chats.write(tmp_path, as_parts=True)
    config = {
        "model": str(folder / "model"),
        "train_dataset": str(folder / "chats.jsonl"),
        "output_dir": str(folder / "out"),
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "cutoff_len": 64,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "bf16": False,
        "batching_workers": 0,
    }
    outputs = []
    for kernel in (None, {"name": "fusedckpt"}):
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump({**config, "kernel_config": kernel}), encoding="utf-8")
        outputs.append(chats.run(folder, recipe("run_sft()"), str(path)))
    pattern = r"'?loss'?: '?([\d.e-]+)'?.*?'?grad_norm'?: '?([\d.e-]+)"
    truth, ours = (numbers(output, pattern) for output in outputs)
    assert ours == pytest.approx(truth, rel=2e-3)
    assert num_fused(outputs[0]) == 0
    assert num_fused(outputs[1]) >= FUSED


def test_before_v1_run_exp_takes_the_callback(tmp_path):
    folder = chats.write(tmp_path)
    columns = {"columns": {"messages": "messages"}, "formatting": "sharegpt"}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
    entry = {"file_name": "chats.jsonl", **columns, "tags": {**tags, "assistant_tag": "assistant"}}
    (folder / "dataset_info.json").write_text(json.dumps({"chats": entry}), encoding="utf-8")
    config = {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "chats",
        "dataset_dir": str(folder),
        "template": "default",
        "output_dir": str(folder / "out"),
        "overwrite_output_dir": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "preprocessing_num_workers": 1,
        "cutoff_len": 64,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    outputs = [chats.run(folder, code, str(path)) for code in (V0, recipe("run_exp("))]
    truth, ours = (
        numbers(output, r"'loss': '?([\d.]+)'?, 'grad_norm': '?([\d.]+)") for output in outputs
    )
    assert ours == pytest.approx(truth, rel=2e-3)
    assert num_fused(outputs[0]) == 0
    assert num_fused(outputs[1]) >= FUSED
