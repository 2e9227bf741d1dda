"""The pages' code runs as it stands and prints what they show; their results were measured."""

import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from support import run_ranks
from torch import nn
from torch.nn import functional as F

import fusedckpt
from bench.results import MIB, Row, groups, read, slowdown
from bench.shares import share_gone
from fusedckpt.autograd.dispatch import forced_path
from tests.kernels.compile_only import CHIPS
from tests.ptx.table import ARCHS

ROOT = Path(__file__).parents[1]
INTEGRATIONS = "fusedckpt/integrations/README.md"
# rows of the first table of results, by their names in the committed results
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

# rows of the table of LoRA over a quantized base
FINETUNE = {
    "eager": "eager",
    "checkpoint": "gradient checkpointing",
    "fuse preact": 'fused, `save="preact"`',
    "fuse": 'fused, `save="inputs"`',
    "fuse+plan": "fused, and a plan with the peak of gradient checkpointing",
}


# the ways of whole models beside eager
SURVEYED = ("fuse", "recipes", "fuse+recipes")


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
    text = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    table = text.partition(head)[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == recorded(file, labels, digits)


def test_the_tools_figures_are_the_committed_ones():
    stack = [row for row in read(ROOT / "bench/results/cpu/run.jsonl") if row["case"] == "stack"]
    rows, expected = {row["name"]: row for row in stack}, []
    for row in map(rows.__getitem__, STACK):
        thousands, peak = row["saved_bytes"] / row["tokens"] / 1000, row["peak_bytes"] / MIB
        cells = f"{thousands:.0f}", f"{peak:.0f}", f"{slowdown(row, rows['eager']):.2f}"
        expected.append(f" {' | '.join(cells)} |")
    text = (ROOT / "fusedckpt/README.md").read_text(encoding="utf-8")
    table = text.partition("| saved | peak | time |\n")[2].partition("\n\n")[0]
    texts = [line.split("|", 4)[4] for line in table.splitlines()[1:]]
    # a plan has no figure of its own there
    assert [line for line in texts if line.strip(" |")] == expected


def surveyed_groups(file: str = "shares.jsonl") -> dict[str, list[dict[str, dict]]]:
    """Return the rows of each whole model by way, by group, as the committed results have them."""
    by_group: dict[str, list[dict[str, dict]]] = {}
    for rows in groups(read(ROOT / "bench/results/cpu" / file)):
        by_group.setdefault(rows[0]["group"], []).append({row["name"]: row for row in rows})
    return by_group


def median_of(models: list[dict[str, dict]], way: str, column: str) -> float:
    """Return the median of a column of models, relative to eager's."""
    return median(rows[way][column] / rows["eager"][column] for rows in models)


def medians_of_groups(file: str = "shares.jsonl") -> list[str]:
    """Return the cells of each group of models on the page of results."""
    lines = []
    for group, models in surveyed_groups(file).items():
        ratios = [median_of(models, way, "saved_bytes") for way in ("fuse", "fuse+recipes")]
        lines.append(" | ".join((group, f"{len(models)}", *map(share_gone, ratios))))
    return lines


def costs_of_groups() -> list[str]:
    """Return the cells of each group of models on the page of `fuse`, without its name."""
    lines = []
    for models in surveyed_groups().values():
        cells = [f"{len(models)}"]
        for column in ("saved_bytes", "peak_bytes", "step_flops", "written_elements"):
            ratios = [median_of(models, way, column) for way in SURVEYED]
            if column.endswith("_bytes"):
                cells.append(", ".join(map(share_gone, ratios)))
            else:
                cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        lines.append(" | ".join(cells))
    return lines


def recorded_layers() -> dict[str, tuple[str, str, str]]:
    """Return the cells of each layer of language models, as the committed results have them."""
    cells = {}
    for rows in groups(read(ROOT / "bench/results/cpu/layers.jsonl")):
        values = {row["name"]: row["saved_bytes"] / row["unit_bytes"] for row in rows}
        eager, fused = values["eager"], values["fuse"]
        cells[rows[0]["case"]] = f"{eager:.1f}", f"{fused:.1f}", f"{1 - fused / eager:.0%}"
    return cells


def rows_below(page: str, head: str) -> list[str]:
    """Return the rows of a page's table, without the outer bars."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count(head) == 1
    lines = text.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [line.removeprefix("| ").removesuffix(" |") for line in lines]


def test_numbers_of_the_first_page_are_the_committed_ones():
    layers, models = recorded_layers(), surveyed_groups().values()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    eager, fused, _ = layers["llama"]
    assert f"saves {eager} D values a token for backward, and {fused} D after `fuse`" in text
    num_models = sum(map(len, models))
    assert f"{len(layers)} layers of language models and {num_models} whole models" in text


def test_medians_of_groups_are_the_committed_ones():
    rows = rows_below("bench/README.md", "| whole models | number | gone by `fuse` |")
    assert sorted(rows) == sorted(medians_of_groups())


def test_blocks_of_own_code_are_the_committed_ones():
    """Four of five saved bytes are gone by default, of convolutional blocks half."""
    rows = rows_below("bench/README.md", "| blocks of | number | gone by `fuse` |")
    assert sorted(rows) == sorted(medians_of_groups("own.jsonl"))
    gone = {
        group: 1 - median_of(models, "fuse", "saved_bytes")
        for group, models in surveyed_groups("own.jsonl").items()
    }
    assert gone["own code"] >= 0.8
    assert gone["own code, CNN"] >= 0.5


# bytes that recipes add to what `fuse` saves, and to its peak, by the models that the page names:
# sums of a long sequence, and copies of biases
MORE_WITH_RECIPES = {
    "autoencoder_kl": (194_880, 193_600),
    "densenet121": (591_552, 502_848),
    "flux": (813_568, 3_993_216),
    "hunyuan_video": (0, 2_987_392),
    "sdxl": (2_496, 60_608),
    "resnet50": (116_608, 0),
    "regnety_008": (12_864, 1_600),
    "efficientnet_b0": (8_800, 0),
}


def test_models_of_the_page_of_fuse_are_the_committed_ones():
    rows = rows_below("fusedckpt/recipes/README.md", "| whole models | number | saved gone |")
    assert sorted(row.split(" | ", 1)[1] for row in rows) == sorted(costs_of_groups())
    models = [ways for members in surveyed_groups().values() for ways in members]
    text = (ROOT / "fusedckpt/recipes/README.md").read_text(encoding="utf-8")
    assert f"In all {len(models)} models recipes without `fuse` run as many FLOPs as eager." in text
    for ways in models:
        eager, fused, recipes, together = (ways[way] for way in ("eager", *SURVEYED))
        assert recipes["step_flops"] == eager["step_flops"]
        assert together["step_flops"] <= fused["step_flops"]
        most_saved, most_above = MORE_WITH_RECIPES.get(eager["case"], (256, 11 * 1024))
        assert together["saved_bytes"] <= fused["saved_bytes"] + most_saved
        assert together["peak_bytes"] <= fused["peak_bytes"] + most_above


def test_layers_are_the_committed_ones():
    layers = recorded_layers()
    shown = rows_below("bench/README.md", "| model | eager | fused | gone |")
    names = [row.split(" | ")[0] for row in shown]
    assert len({*names}) == 20
    assert shown == [" | ".join((name, *layers[name])) for name in names]
    text = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    assert f"these and {len(layers) - len(names)} others" in text
    assert f"of {len(layers)} language models" in text


def test_largest_sequences_are_the_committed_ones():
    lines = []
    for rows in groups(read(ROOT / "bench/results/cpu/contexts.jsonl")):
        for row in rows:
            cells = (f"{card['size']:,}" if card["size"] else "-" for card in row["largest"])
            lines.append(" | ".join((row["case"], row["name"], *cells)))
    assert rows_below("bench/README.md", "| model | way | 24 GiB | 48 GiB | 80 GiB |") == lines


def test_host_times_are_the_committed_ones():
    lines = []
    for row in read(ROOT / "bench/results/cpu/host.jsonl"):
        times = (f"{row[part][0]:.2f}" for part in ("forward_ms", "backward_ms"))
        lines.append(
            " | ".join((row["name"], *times, str(row["launches"]), f"{row['break_even']:,}"))
        )
    head = "| way | forward, ms | backward, ms | launches | tokens |"
    assert rows_below("bench/README.md", head) == lines


def test_predicted_steps_are_the_committed_ones():
    cards: dict[tuple[str, str], dict[str, Row]] = {}
    for row in read(ROOT / "bench/results/cpu/step.jsonl"):
        cards.setdefault((row["case"], row["name"]), {})[row["size"]] = row
    lines = set()
    for name, ((_, a100), (_, h100)) in ((n, sorted(c.items())) for n, c in cards.items()):
        times = [f"{r['predicted_ms'][0]:.2f} ± {r['error_ms'][0]:.2f}" for r in (a100, h100)]
        host = f"{h100['host_ms'][0]:.2f}" if h100["host_ms"] else "-"
        saved = f"{h100['saved_bytes'] / MIB:,.0f}"
        lines.add(" | ".join((*name, saved, *times, str(h100["num_launches"]), host)))
    head = "| layer | way | saved, MiB | predicted ms, A100 | predicted ms, H100 | launches "
    assert {*rows_below("bench/README.md", head + "| host's ms |")} == lines


def test_whole_models_are_the_committed_ones():
    gone = {}
    for rows in groups(read(ROOT / "bench/results/cpu/whole.jsonl")):
        saved = {row["name"]: row["saved_bytes"] for row in rows}
        gone[rows[0]["case"]] = 1 - saved["fuse"] / saved["eager"]
    least, most = min(gone, key=gone.__getitem__), max(gone, key=gone.__getitem__)
    text = " ".join((ROOT / "bench/README.md").read_text(encoding="utf-8").split())
    assert f"{len(gone)} dense models at their published depth" in text
    assert (
        f"the median model saves {median(gone.values()):.1%} less after `fuse(head=True)`, "
        f"from {gone[least]:.1%} ({least}) to {gone[most]:.1%} ({most})"
    ) in text


def test_results_are_the_committed_ones():
    stack = [row for row in read(ROOT / "bench/results/cpu/run.jsonl") if row["case"] == "stack"]
    rows, expected = {row["name"]: row for row in stack}, []
    for name, label in STACK.items():
        row = rows[name]
        saved, peak = row["saved_bytes"] // row["tokens"], row["peak_bytes"] / MIB
        expected.append(
            f"| {label} | {saved:,} | {peak:.0f} | {slowdown(row, rows['eager']):.2f} |"
        )
    text = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    table = text.partition("| | saved, bytes per token |")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="measured on a CPU")
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "qwen3_moe"])
def test_models_save_as_recorded(name):
    pytest.importorskip("transformers", reason="needs the test extra")
    from bench.shares import LANGUAGE, measured

    # on kernels, fuse checks what it swaps in tests/fusing
    with forced_path("aten"):
        share = measured(LANGUAGE[name])
    cells = f"{share.before:.1f}", f"{share.after:.1f}", f"{share.gone:.0%}"
    assert cells == recorded_layers()[name]


def blocks(page: str, kind: str) -> list[str]:
    """Return the blocks of code of a kind, "" for output, of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in blocks if name == kind]


def first_code(page: str) -> str:
    return blocks(page, "python")[0]


# digits of lines that depend on times
TIMED = re.compile(r"(?<=predicted peak).*|(?<=measured peak).*|(?<=extra time).*")


def test_the_first_lines_print_what_is_shown(tmp_path, monkeypatch):
    """And the page on plans goes on from there."""
    pytest.importorskip("transformers", reason="needs the test extra")
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    names = {"print": lambda value: printed.extend(str(value).splitlines())}
    with forced_path("aten"):
        exec(first_code("README.md"), names)
        assert all(p.grad is not None for p in names["model"].parameters())
        plan = names["plan"]
        assert plan.measured_bytes <= plan.budget_bytes < names["before"].peak_bytes
        plan.undo()
        exec(first_code("fusedckpt/planning/README.md"), names)
        exec(first_code("fusedckpt/README.md"), names)
    lines = iter([TIMED.sub("", line) for line in printed])
    # each line in its turn
    for line in blocks("README.md", "")[0].splitlines():
        assert TIMED.sub("", line) in lines, line
    assert names["plan"].measured_bytes <= 20 * 2**30
    assert (tmp_path / "plan.json").exists()
    assert (tmp_path / "plan.png").exists()


def test_the_table_of_cards_is_that_of_the_tests():
    text = (ROOT / "kernels/README.md").read_text(encoding="utf-8")
    rows = text.partition("| card | compiled")[2].partition("\n\n")[0].splitlines()[2:]
    # a chip's cells, without links
    cells = {}
    for row in rows:
        name, *others = [cell.strip() for cell in row.strip("|").split("|")]
        cells |= dict.fromkeys(re.findall(r"sm_\d+|gfx\d+", name), others)
    shown = {
        "everything": "all kernels",
        "near_limits": "kernels near a limit",
        "one_of_each": "some launches of each",
    }
    chips = {name: chip for name, chip in CHIPS.items() if name != "gfx1100"}
    assert cells.keys() == chips.keys()
    for name, (compiled, executed, run, aten) in cells.items():
        assert compiled == shown[chips[name].launches]
        is_executed = name in ARCHS
        assert executed.startswith("all kernels" if is_executed else ("as sm_80", "no"))
        assert (run, aten) == ("no", "float64")


def use_styles(rank):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    layer = nn.ModuleDict({"norm": nn.RMSNorm(8), "mlp": fusedckpt.GatedMLP(8, 16)})
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    code = blocks("fusedckpt/layers/README.md", "python")[0]
    exec(code, {"fusedckpt": fusedckpt, "model": model, "mesh": mesh})
    assert isinstance(layer["mlp"].gate_proj.weight, torch.distributed.tensor.DTensor)


def test_code_of_tensor_parallelism(tmp_path):
    run_ranks(use_styles, tmp_path, 1)


def test_code_of_micro_batches_in_a_plan():
    code = blocks("fusedckpt/planning/README.md", "python")[1]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    optimizer, target = torch.optim.SGD(model.parameters()), torch.randint(8, (16,))
    names = {"model": model, "optimizer": optimizer, "x": torch.randn(16, 8), "target": target}
    exec(code, {**names, "F": F, "fusedckpt": fusedckpt})


def test_code_of_integrations():
    pytest.importorskip("transformers")
    code = blocks(INTEGRATIONS, "python")[0]
    seen = []

    class Trainer:
        def __init__(self, **options):
            seen.extend(options["callbacks"])

        def train(self):
            pass

        def fit(self, module):
            pass

    model = llama()
    optimizer = torch.optim.SGD(model.parameters())
    names = {"model": model, "optimizer": optimizer, "Trainer": Trainer, "fusedckpt": fusedckpt}
    names |= dict.fromkeys(("args", "data", "loader", "module"))
    names["accelerator"] = SimpleNamespace(prepare=lambda *given: given)
    parts = re.split(r"\n\n(?=#)", code)
    for part in parts:
        if "lightning" not in part or find_spec("lightning"):
            exec(part, names)
    assert len(parts) == 5
    assert [type(callback).__name__ for callback in seen][:1] == ["FuseCallback"]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def test_code_of_a_model_of_yours():
    pytest.importorskip("transformers")
    names = {}
    exec(blocks("bench/README.md", "python")[0], names)
    model, batch = names["small"]()
    assert model(**batch).loss.isfinite()


# blocks of Python, by page and a part of them, and the tests that run them
RUN_IN = {
    ("fusedckpt/README.md", "fusedckpt.report("): "test_readme.py",
    ("README.md", "model = LlamaForCausalLM"): "test_readme.py",
    ("bench/README.md", "def small():"): "test_readme.py",
    ("fusedckpt/checkpointing/README.md", "RecomputingStage"): "models/test_slow_link.py",
    ("fusedckpt/checkpointing/README.md", "may_see"): "models/test_packed_sequences.py",
    (INTEGRATIONS, "use_checkpoint"): "test_readme.py",
    (
        INTEGRATIONS,
        "register_experts()",
    ): "integrations/test_register_experts.py",
    # as the tests have them
    (INTEGRATIONS, "run_exp("): "integrations/test_llamafactory.py",
    (INTEGRATIONS, "run_sft()"): "integrations/test_llamafactory.py",
    (INTEGRATIONS, "register_callback("): "integrations/test_ms_swift.py",
    (INTEGRATIONS, "FusedExperts"): "integrations/test_torchtitan_experts.py",
    ("fusedckpt/layers/README.md", "parallelize_module"): "test_readme.py",
    ("fusedckpt/layers/README.md", "fusedckpt.explain("): "blocks/test_shown.py",
    ("fusedckpt/layers/README.md", "accumulate_in_fp32"): "layers/test_fp32_gradients.py",
    ("fusedckpt/planning/README.md", 'plan.save("plan.json")'): "test_readme.py",
    ("fusedckpt/planning/README.md", "def share("): "test_readme.py",
}


def pages() -> list[Path]:
    """Return the pages of the repository, without those of an environment in it."""
    return sorted(path for path in ROOT.glob("**/*.md") if not {".venv", "venv"} & {*path.parts})


def test_links_between_pages_lead_somewhere():
    num_links = 0
    for page in pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, heading = target.partition("#")
            if "://" in target:
                continue
            linked = page.parent / name if name else page
            assert linked.exists(), f"{page}: {target}"
            num_links += 1
            if heading:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
                assert heading in anchors, f"{page}: {target}"
    assert num_links > 60


def test_all_code_of_all_pages_runs():
    found = []
    for path in pages():
        page = path.relative_to(ROOT).as_posix()
        for code in blocks(page, "python"):
            marks = [mark for place, mark in RUN_IN if place == page and mark in code]
            assert len(marks) == 1, code
            found.append((page, *marks))
    assert sorted(found) == sorted(RUN_IN)
    for (page, mark), test in RUN_IN.items():
        text = (ROOT / "tests" / test).read_text(encoding="utf-8")
        assert "README" in text or "recipe(" in text, (page, mark)


def test_the_page_for_agents_names_what_there_is():
    text = (ROOT / "fusedckpt/llms.txt").read_text(encoding="utf-8")
    names = {*re.findall(r"`[^`]*?\b(fusedckpt(?:\.\w+)+)", text)}
    assert len(names) > 25
    for name in names:
        # integrations need their libraries
        if ".integrations" not in name:
            resolve_name(name)
    for call, options in re.findall(r"fusedckpt\.(fuse|checkpoint|plan)\((.*?)\)", text):
        parameters = inspect.signature(getattr(fusedckpt, call)).parameters
        assert {*re.findall(r"(\w+)=", options)} <= parameters.keys()
