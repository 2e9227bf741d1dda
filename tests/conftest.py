"""One process, one device: kernels run for real on a GPU, in Triton's interpreter on a CPU."""

import gc
import os
import tempfile

import pytest
import torch

# what is imported and collected stays
gc.disable()
# before triton is imported, which fixes it for the process
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# what inductor compiles is for this machine, these settings and this process
_compiled = tempfile.TemporaryDirectory(prefix="inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name
# cuBLAS asks for it under deterministic algorithms
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# the profiler's own messages
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# the tensors are small: more threads only wait for each other
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

import quick_interpreter  # noqa: E402  # after the environment is set
from broken_device import end_if_broken  # noqa: E402

from fusedckpt.autograd.dispatch import forced_path  # noqa: E402

quick_interpreter.patch()


def pytest_addoption(parser):
    """Add an option by which tests show that mix devices."""
    parser.addoption(
        "--on-device",
        action="store_true",
        help="make tensors on the GPU unless a test names a device: a test that passes with this "
        "alone makes one on the CPU that belongs on the GPU",
    )


def pytest_configure(config):
    """Set the default device, also for tensors made as test files are imported."""
    if config.getoption("--on-device") and torch.cuda.is_available():
        torch.set_default_device("cuda")


def pytest_collection_finish():
    """Collect no garbage among the million objects that were imported: see `garbage`.

    Steps of two plans are not compared time after time.
    """
    from torch._dynamo import guards

    from fusedckpt.planning import trials

    trials._SECONDS = 0.0
    # each compilation flushes the CPU's caches for it, in 50 ms
    guards.profile_guard_manager = lambda *args: 0.0
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 20, 1000)


@pytest.fixture(autouse=True, scope="module")
def garbage():
    """Collect what a file of tests leaves, and never look again at what outlives it.

    That is imports, compiled graphs and caches.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill uninitialized memory with NaN, so that reading what was not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # torch.manual_seed formats a traceback for each kind of device that is not there
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def unbroken_device(request):
    """Let no test run on a device that an earlier one broke."""
    yield
    if torch.cuda.is_available():
        end_if_broken(request.node)


@pytest.fixture(params=["triton", "aten"])
def path(request):
    """Run the test on the kernels (compiled or interpreted) and on ATen."""
    if request.param == "aten":
        with forced_path("aten"):
            yield "aten"
    else:
        yield "triton"


@pytest.fixture
def unverified(monkeypatch):
    """Swap layers without comparing them, which tests/fusing and tests/models do."""
    monkeypatch.setattr("fusedckpt.fusing.verification.difference", lambda *args: None)
