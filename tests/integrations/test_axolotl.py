"""Axolotl's own command trains with the plugin: the losses are those of a run without it."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from little_llama import LAYERS, VOCAB
from little_llama import build as little_llama

pytest.importorskip("axolotl")
yaml = pytest.importorskip("yaml")
PLUGIN = "fusedckpt.integrations.axolotl.FusedckptPlugin"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model, its tokenizer, and texts."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("axolotl")
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    words = [*special.values(), *(f"w{i}" for i in range(VOCAB - len(special)))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    little_llama().save_pretrained(folder / "model")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words[4:], k=30)) for _ in range(32)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def run(folder, name, **options):
    """Train two steps by a configuration; return losses, norms of gradients, and the output."""
    data = {"path": str(folder / "data.jsonl"), "ds_type": "json", "type": "completion"}
    # its own kernels for adapters need a GPU
    kernels = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, **kernels}
    config = {
        "base_model": str(folder / "model"),
        "datasets": [data],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / name),
        "sequence_len": 64,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "attn_implementation": "sdpa",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        **lora,
        **options,
        "plugins": ["axolotl_seed.Seed", *options.get("plugins", [])],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    inherited = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent), inherited))
    environment = {"PYTHONPATH": paths, "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "axolotl.cli.train", str(path)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    rows = re.findall(r"'loss': '?([\d.e-]+)'?, 'grad_norm': '?([\d.e-]+)", output)
    return [tuple(map(float, row)) for row in rows], output


def test_losses_are_those_of_a_run_without_it(folder):
    truth, output = run(folder, "plain")
    assert len(truth) == 2, output[-2000:]
    ours = {"plugins": [PLUGIN]}
    checkpointed = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "fusedckpt_checkpoint": {"save_regions": ["attention"]},
    }
    # two norms, an MLP and attention in each, and the last norm
    layers = (2 + 1 + 1) * LAYERS + 1
    for name, fused, options in [
        ("fused", layers + 1, {"fusedckpt_fuse": {"head": True}}),
        ("checkpointed", layers, checkpointed),
        ("planned", layers, {"fusedckpt_plan": {"policy": "all"}}),
        ("off", None, {"fusedckpt_fuse": False}),
    ]:
        losses, output = run(folder, name, **ours, **options)
        assert losses == [pytest.approx(row, rel=2e-3) for row in truth], output[-2000:]
        reports = re.findall(r"fused (\d+) modules", output)
        assert reports == ([] if fused is None else [str(fused)])
        assert ("Plan for" in output) == (name == "planned")


def test_a_wrong_key_ends_the_run(folder):
    _, output = run(folder, "wrong", plugins=[PLUGIN], fusedckpt_checkpoint={"regions": ["x"]})
    assert "fusedckpt_checkpoint" in output
    assert "Extra inputs are not permitted" in output


def test_an_import_error_ends_the_run(folder, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['fusedckpt.integrations.transformers'] = None\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    losses, output = run(folder, "broken", plugins=[PLUGIN])
    assert not losses
    assert "fusedckpt.integrations.axolotl cannot be imported" in output
