"""`python -m bench run` at toy sizes, in this process."""

from __future__ import annotations

import json
from pathlib import Path

from bench import __main__ as command

TINY = ["run", "--in-process", "--device=cpu", "--size=tiny", "--repeat=3"]


def bench(out: Path, *options: str) -> tuple[int, list[dict]]:
    status = command.main([*TINY, *options, f"--out={out}"])
    lines = (out / "run.jsonl").read_text().splitlines()
    return status, [json.loads(line) for line in lines]


def rows_of(result: list[dict], case: str = "mlp") -> dict[str, dict]:
    rows = [line for line in result if line["case"] == case]
    return {row["name"]: row for row in rows if row["failure"] != "not installed"}
