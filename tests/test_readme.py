"""The first lines of README and of the page on plans run as they stand; results were measured."""

import re
from pathlib import Path

import pytest
import torch

from bench.results import MIB, groups, read, slowdown
from fusedckpt.autograd.dispatch import forced_path

ROOT = Path(__file__).parents[1]
# rows of README's first table of results, by their names in the committed results
STACK = {
    "eager": "eager",
    "fusedckpt preact": 'fused, `save="preact"`',
    "fusedckpt inputs": 'fused, `save="inputs"`',
    "ours(fused) per layer": "`fusedckpt.checkpoint` around every fused layer",
    "torch(fused) per layer": "`torch.utils.checkpoint` around every fused layer",
    "torch(eager) per layer": "`torch.utils.checkpoint` around every eager layer",
    "torch.compile": "`torch.compile`",
    "torch.compile 0.5": "`torch.compile`, `activation_memory_budget` 0.5",
    "torch.compile 0": "`torch.compile`, `activation_memory_budget` 0",
}

# rows of the table of two models
WAYS = {
    "eager": "eager",
    "checkpoint": "`torch.utils.checkpoint` around every layer",
    "compile": "`torch.compile`",
    "compile 0.5": "`torch.compile`, `activation_memory_budget` 0.5",
    "compile 0": "`torch.compile`, `activation_memory_budget` 0",
    "fuse preact+compile": '`fuse(model, save="preact")`, then `torch.compile`',
    "fuse+compile": "`fuse`, then `torch.compile`",
    "fuse": "`fuse`",
    "fuse+ckpt": "`fuse`, then `fusedckpt.checkpoint` around every layer",
    "fuse+plan memory": "`fuse`, then a plan of the least peak",
}

# rows of the table of LoRA over a quantised base
FINETUNE = {
    "eager": "eager",
    "checkpoint": "gradient checkpointing",
    "fuse preact": 'fused, `save="preact"`',
    "fuse": 'fused, `save="inputs"`',
    "fuse+plan": "fused, and a plan with the peak of gradient checkpointing",
}


def recorded(file: str, labels: dict[str, str], digits: int) -> list[str]:
    """Return a table's rows as the committed results have them, sizes with so many decimals."""
    cases = groups(read(ROOT / "bench/results" / file))
    models = [{row["name"]: row for row in rows} for rows in cases]
    lines = []
    for name, label in labels.items():
        cells = [label]
        for rows in models:
            row, eager = rows[name], rows["eager"]
            cells += [f"{row[key] / MIB:.{digits}f}" for key in ("saved_bytes", "peak_bytes")]
            cells.append(f"{slowdown(row, eager):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


@pytest.mark.parametrize(
    ("head", "file", "labels", "digits"),
    [
        ("| | Llama: saved, MiB |", "ways-cpu.jsonl", WAYS, 0),
        ("| | saved, MiB | peak, MiB |", "finetune-cpu.jsonl", FINETUNE, 1),
    ],
)
def test_ways_are_the_committed_ones(head, file, labels, digits):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition(head)[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == recorded(file, labels, digits)


def test_results_are_the_committed_ones():
    stack = [row for row in read(ROOT / "bench/results/cpu/run.jsonl") if row["case"] == "stack"]
    rows, expected = {row["name"]: row for row in stack}, []
    for name, label in STACK.items():
        row = rows[name]
        saved, peak = row["saved_bytes"] // row["tokens"], row["peak_bytes"] / MIB
        expected.append(
            f"| {label} | {saved:,} | {peak:.0f} | {slowdown(row, rows['eager']):.2f} |"
        )
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("| | saved, bytes per token |")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="measured on a CPU")
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "qwen3_moe"])
def test_models_save_as_the_table_says(name):
    pytest.importorskip("transformers", reason="needs the test extra")
    from bench.shares import DENSE, EXPERTS, HARDER, measured

    found = measured({**DENSE, **EXPERTS, **HARDER}[name])
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = f"| {name} | {found.before:.1f} | {found.after:.1f} | {found.gone:.0%} |"
    assert row in text


def saved_model(folder: Path) -> str:
    """Save a tiny model like SmolLM2 with its tokenizer, as the hub would give them."""
    transformers = pytest.importorskip("transformers", reason="needs the test extra")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = {word: i for i, word in enumerate(("as", "it", "stands", "[UNK]"))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder)
    return str(folder)


def first_code(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


def test_the_first_lines_run(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    monkeypatch.chdir(tmp_path)
    # no downloads: the name of the model is all that is another
    ours = f"name = {saved_model(tmp_path)!r}\n"
    code, count = re.subn(
        r'^name = ".*"\n', lambda _: ours, first_code("README.md"), flags=re.MULTILINE
    )
    assert count == 1
    found = {}
    with forced_path("aten"):
        exec(code, found)
        gradients = [p.grad for p in found["model"].parameters()]
        assert found["loss"].isfinite()
        assert all(gradient is not None for gradient in gradients)
        exec(first_code("fusedckpt/planning/README.md"), found)
    assert found["plan"].measured_bytes <= 20 * 2**30
    assert (tmp_path / "plan.json").exists()
    assert (tmp_path / "plan.png").exists()
