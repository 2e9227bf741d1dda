"""A folder with a little Llama, its tokenizer, and chats, as a host's command reads them."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from little_llama import VOCAB
from little_llama import build as little_llama

ROOT = Path(__file__).parents[2]
# prints the bytes that each forward saves for backward, and the module of the checkpoint it calls
MEASURE = """
import functools
from fusedckpt.memory import saved_tensors
from transformers import LlamaForCausalLM

forward = LlamaForCausalLM.forward

@functools.wraps(forward)
def measured(self, *args, **kwargs):
    with saved_tensors() as saved:
        result = forward(self, *args, **kwargs)
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in self.modules()]
    kinds = {getattr(function, "func", function).__module__ for function in functions if function}
    print(f"saved {saved.nbytes} bytes, checkpoints by {sorted(kinds)}", flush=True)
    return result

LlamaForCausalLM.forward = measured
"""
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {{ eos_token }} {% endfor %}"


def write(folder: Path, as_parts: bool = False) -> Path:
    """Write `model` and `chats.jsonl`; as_parts: the content of a message as a list of parts."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    words = [*special.values(), *(f"w{i}" for i in range(VOCAB - len(special)))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder / "model")
    little_llama().save_pretrained(folder / "model")
    draw = random.Random(0)

    def message(role: str, count: int):
        text = " ".join(draw.choices(words[4:], k=count))
        return {"role": role, "content": [{"type": "text", "value": text}] if as_parts else text}

    rows = [{"messages": [message("user", 8), message("assistant", 20)]} for _ in range(16)]
    lines = "\n".join(map(json.dumps, rows))
    (folder / "chats.jsonl").write_text(lines, encoding="utf-8")
    return folder


def run(folder: Path, code: str, *arguments: str, **environment: str) -> str:
    """Run a program in a process of its own, measured; return what it prints."""
    path = folder / "train.py"
    path.write_text(MEASURE + code, encoding="utf-8")
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    given = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        env=given,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def numbers(output: str, pattern: str) -> list[float]:
    """Return losses and norms of gradients of two steps."""
    rows = re.findall(pattern, output)
    assert len(rows) == 2, output[-3000:]
    return [float(x) for row in rows for x in row]


def num_fused(output: str) -> int:
    """Return how many modules were fused."""
    counts = re.search(r"fused (\d+) modules", output)
    return int(counts[1]) if counts else 0


def uses_our_checkpoint(output: str) -> bool:
    """Whether each forward checkpoints by fusedckpt."""
    kinds = set(re.findall(r"checkpoints by \[(.*)\]", output))
    return kinds == {"'fusedckpt.checkpointing.entry'"}


def saved_bytes(output: str) -> int:
    """Return the most bytes that a forward saves."""
    return max(map(int, re.findall(r"saved (\d+) bytes", output)))
