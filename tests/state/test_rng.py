"""Random states are read as images of memory: as exact as the generators' own functions."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fusedckpt
from fusedckpt.state import rng

# draws of each kind: 624 words make a Mersenne twister's next block, normal numbers come in pairs
DRAWS = [
    lambda python, numpys: (python.random(), numpys.random_sample()),
    lambda python, numpys: (python.gauss(0, 1), numpys.standard_normal()),
    lambda python, numpys: ([python.getrandbits(32) for _ in range(624)], numpys.bytes(4 * 624)),
    lambda python, numpys: (python.randbytes(3), numpys.permutation(5).tolist()),
    lambda python, numpys: (python.shuffle([*range(9)]), numpys.randint(7)),
]


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", DRAWS)
def test_an_image_tells_each_draw_and_brings_the_numbers_back(first, second):
    python, numpys = random.Random(3), np.random.RandomState(3)
    generators = [rng.of_object(python), rng.of_object(numpys)]
    assert all(type(read()[0]) is bytes for read, _ in generators)
    first(python, numpys)
    states = rng.RandomStates(generators)
    assert not states.have_moved()
    drawn = second(python, numpys)
    for generator in generators:
        assert rng.RandomStates([generator]).have_moved() is False
    assert states.have_moved()
    states.restore()
    assert not states.have_moved()
    assert second(python, numpys) == drawn


def test_a_normal_number_drawn_ahead_is_state():
    numpys = np.random.RandomState(0)
    numpys.standard_normal()
    states = rng.RandomStates([rng.of_object(numpys)])
    # no word of the twister is drawn
    ahead = numpys.standard_normal()
    assert states.have_moved()
    states.restore()
    assert numpys.standard_normal() == ahead


def test_the_generators_of_the_process_are_kept():
    with rng.kept(rng.everywhere()):
        drawn = random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()
    assert drawn == (random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item())


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.Philox, np.random.MT19937])
def test_other_bit_generators_are_read_by_their_own_functions(bits):
    for generator in (np.random.RandomState(bits(1)), np.random.Generator(bits(1))):
        states = rng.RandomStates([rng.of_object(generator)])
        drawn = generator.standard_normal(3).tolist(), generator.bytes(5)
        assert states.have_moved()
        states.restore()
        assert (generator.standard_normal(3).tolist(), generator.bytes(5)) == drawn


def test_a_bit_generator_that_replaces_numpys_own():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        states = rng.RandomStates(rng.PYTHON)
        drawn = np.random.rand()
        assert states.have_moved()
        states.restore()
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(before)


def test_a_subclass_of_random_keeps_its_own_functions():
    class Counting(random.Random):
        calls = 0

        def getstate(self):
            Counting.calls += 1
            return super().getstate()

    rng.RandomStates([rng.of_object(Counting(1))])
    assert Counting.calls == 1
    assert rng.of_object(random.SystemRandom()) is None


def test_no_other_file_reads_random_states():
    pattern = re.compile(r"\b(get_rng_state|getstate|get_state|fork_rng)\w*\(")
    package = Path(fusedckpt.__file__).parent
    files = [path for path in package.rglob("*.py") if path.parent.name != "state"]
    assert len(files) > 100
    assert [path.name for path in files if pattern.search(path.read_text())] == []
