"""What is not used is not imported, and all of it is in the wheel."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_library_is_imported_unless_used():
    code = (
        "import sys, fusedckpt, fusedckpt.integrations, fusedckpt.integrations.first_batch\n"
        "names = {'transformers', 'accelerate', 'lightning', 'torchtitan'} & sys.modules.keys()\n"
        "assert not names, names\n"
        "import fusedckpt\n"
        "assert 'fusedckpt.integrations' not in vars(fusedckpt).get('__all__')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_wheels_have_every_folder():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = re.search(r"packages = \[(.*?)\]", text, re.DOTALL)
    assert packages is not None
    folders = {path.parent for path in (ROOT / "fusedckpt").glob("**/*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(re.findall(r'"(.+?)"', packages[1])) == names | {"fusedckpt.kernels"}
