"""LLaMA-Factory trains with us: losses and norms are those of a run without us."""

import json

import chats
import pytest
from little_llama import LAYERS
from recipes import recipe

pytest.importorskip("llamafactory.v1.plugins.model_plugins.kernels.interface")
yaml = pytest.importorskip("yaml")
V0 = "from llamafactory.train.tuner import run_exp\n\nrun_exp()\n"
# two norms and an MLP in each layer, and the last norm
FUSED = 3 * LAYERS + 1
# v1 drops by default
V1_LORA = {"name": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
V0_LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_target": "all"}
# as the page says
CHECKPOINTED = {
    "disable_gradient_checkpointing": True,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


def compare(outputs, pattern, share):
    """Assert equal losses and norms, and that the run with us saves less than a share."""
    truth, ours = (chats.numbers(output, pattern) for output in outputs)
    assert ours == pytest.approx(truth, rel=2e-3)
    assert chats.num_fused(outputs[0]) == 0
    assert chats.num_fused(outputs[1]) >= FUSED
    before, after = map(chats.saved_bytes, outputs)
    print(f"losses and norms {truth} and {ours}, saved bytes {before} and {after}")
    assert after < share * before


@pytest.mark.parametrize("adapter", [None, V1_LORA], ids=["full", "lora"])
def test_v1_takes_the_kernel_plugin(tmp_path, adapter):
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
        "enable_activation_checkpointing": False,
        "peft_config": adapter,
    }
    outputs = []
    for kernel in (None, {"name": "fusedckpt"}):
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump({**config, "kernel_config": kernel}), encoding="utf-8")
        outputs.append(chats.run(folder, recipe("run_sft()"), str(path)))
    compare(outputs, r"'?loss'?: '?([\d.e-]+)'?.*?'?grad_norm'?: '?([\d.e-]+)", 0.5)


@pytest.mark.parametrize("options", [{"finetuning_type": "full"}, V0_LORA], ids=["full", "lora"])
def test_before_v1_run_exp_takes_the_callback(tmp_path, options):
    folder = chats.write(tmp_path)
    columns = {"columns": {"messages": "messages"}, "formatting": "sharegpt"}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
    entry = {"file_name": "chats.jsonl", **columns, "tags": {**tags, "assistant_tag": "assistant"}}
    (folder / "dataset_info.json").write_text(json.dumps({"chats": entry}), encoding="utf-8")
    config = {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
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
        "disable_gradient_checkpointing": True,
        **options,
    }
    path = folder / "config.yaml"
    outputs = []
    for code, more in ((V0, {}), (recipe("run_exp("), CHECKPOINTED)):
        path.write_text(yaml.safe_dump({**config, **more}), encoding="utf-8")
        outputs.append(chats.run(folder, code, str(path)))
    compare(outputs, r"'loss': '?([\d.]+)'?, 'grad_norm': '?([\d.]+)", 0.25)
    assert chats.uses_our_checkpoint(outputs[1])
