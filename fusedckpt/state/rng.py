"""The states of random number generators: torch's, numpy's, Python's, and those of objects.

Everything that reads or restores such a state does it here. A state is cheap where nothing was
drawn: those of `random` and `numpy.random` are images of the generators' memory, which take 0.1 us
each where their own functions take 7 and 43, and are written back only where they differ.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class GeneratorCalls(NamedTuple):
    """The functions that read and write the state of a random number generator."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


class RandomStates:
    """The states of generators, as they are now."""

    def __init__(self, generators: Iterable[GeneratorCalls]):
        self.generators = [*generators]
        self._states = [read() for read, _ in self.generators]

    def _now(self) -> list[Any]:
        return [read() for read, _ in self.generators]

    def have_moved(self) -> bool:
        """Whether a generator has another state than it had."""
        return not _is_same(self._states, self._now())

    def restore(self) -> None:
        """Give the generators their states back."""
        for (_, write), state in zip(self.generators, self._states, strict=True):
            write(state)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the generators these states meanwhile, and afterwards their states from before."""
        before = RandomStates(self.generators)
        try:
            self.restore()
            yield
        finally:
            before.restore()


@contextmanager
def kept(generators: Iterable[GeneratorCalls]) -> Iterator[RandomStates]:
    """Give generators their states of now back on leaving."""
    states = RandomStates(generators)
    try:
        yield states
    finally:
        states.restore()


def everywhere() -> list[GeneratorCalls]:
    """Return the generators of the process: Python's, numpy's, those of the CPU and all devices."""
    generators = [*PYTHON, CPU]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return generators
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)
    if is_initialized():
        for index in range(torch.accelerator.device_count()):
            generators += of_device(torch.device(accelerator.type, index))
    return generators


def of_device(device: torch.device) -> list[GeneratorCalls]:
    """Return the generator of a device, if it has one."""
    if device.type == "meta":
        return []
    if device.type == "cpu":
        return [CPU]
    if device.type == "cuda":
        if not torch.cuda.default_generators:
            torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return [_of_gpu(torch.cuda.default_generators[index])]
    module = torch.get_device_module(device.type)
    # the one MPS device goes unnamed
    where = {} if device.type == "mps" else {"device": device}
    read = partial(module.get_rng_state, **where)
    return [GeneratorCalls(read, partial(module.set_rng_state, **where))]


@cache
def _of_gpu(generator: torch.Generator) -> GeneratorCalls:
    """Return a GPU's generator: its state is a seed, and a position in the numbers of that."""

    def read() -> Any:
        # a graph that is captured counts its own
        if torch.cuda.is_current_stream_capturing():
            return generator.get_state()
        return generator.initial_seed(), generator.get_offset()

    def write(state: Any) -> None:
        if isinstance(state, Tensor):
            generator.set_state(state)
        elif torch.cuda.is_current_stream_capturing():
            image = bytearray(struct.pack("=QQ", *state))
            generator.set_state(torch.frombuffer(image, dtype=torch.uint8))
        elif read() != state:
            seed, position = state
            generator.manual_seed(seed)
            generator.set_offset(position)

    return GeneratorCalls(read, write)


def position_on(device: torch.device) -> int:
    """Return how far a GPU's generator is in the numbers of its seed, or in those of a graph."""
    ((read, _),) = of_device(device)
    state = read()
    _, position = state.numpy().view(np.int64) if isinstance(state, Tensor) else state
    return int(position)


@cache
def is_generator(kind: type) -> bool:
    """Whether objects of a class are generators."""
    kinds = torch.Generator, random.Random, np.random.RandomState, np.random.Generator
    return issubclass(kind, kinds)


def of_object(value: Any) -> GeneratorCalls | None:
    """Return the generator that an object is, None for other objects."""
    if not is_generator(type(value)):
        return None
    if isinstance(value, torch.Generator):
        return GeneratorCalls(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        # the operating system's has no state
        return None if isinstance(value, random.SystemRandom) else _of_python(value)
    if isinstance(value, np.random.RandomState):
        return _of_numpy(value)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return GeneratorCalls(lambda: bits.state, partial(setattr, bits, "state"))
    return None


def generators_in(model: nn.Module) -> list[Any]:
    """Return the generators among attributes of a module and of those in it."""
    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if is_generator(type(value))]


def states_in(model: nn.Module) -> RandomStates:
    """Return the states of these generators."""
    return RandomStates(filter(None, map(of_object, generators_in(model))))


def _is_same(a: Any, b: Any) -> bool:
    """Whether two states are equal: tensors, arrays or data, in lists, tuples and dicts."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(x, b[key]) for key, x in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b)


# Python and numpy draw by Mersenne twisters: 624 words, and the position of the next one. An object
# of C has its fields behind the header of all objects: in `random` these are position and words. In
# numpy's RandomState they are pointers, and the normal number that it has drawn ahead; words and
# position are its bit generator's. An image is the bytes of such fields.
_HEADER = object.__basicsize__
_TWISTER: Any = ctypes.c_char * 2500
_AHEAD: Any = ctypes.c_char * 16


def _of_python(generator: random.Random) -> GeneratorCalls:
    if not _HAS_PYTHON_IMAGES or type(generator) is not random.Random:
        return GeneratorCalls(generator.getstate, generator.setstate)
    read = _python_reader(generator)

    def write(image: Any) -> None:
        if read() != image:
            generator.setstate(_python_state(image))

    return GeneratorCalls(read, write)


def _python_reader(generator: Any) -> Callable[[], Any]:
    memory = _TWISTER.from_address(id(generator) + _HEADER)
    return lambda: (memory.raw, generator.gauss_next)


def _python_state(image: Any) -> Any:
    position, *words = struct.unpack("=i624I", image[0])
    return random.Random.VERSION, (*words, position), image[1]


def _has_python_images() -> bool:
    """Whether an image of a generator of `random` tells its state, after draws of each kind."""
    generator = random.Random(1)
    if type(generator).__basicsize__ < _HEADER + ctypes.sizeof(_TWISTER):
        return False
    read = _python_reader(generator)
    for draw in (lambda: None, generator.random, lambda: generator.gauss(0, 1)):
        draw()
        if _python_state(read()) != generator.getstate():
            return False
    return True


def _of_numpy(generator: np.random.RandomState) -> GeneratorCalls:
    bits = getattr(generator, "_bit_generator", None)
    is_known = type(generator) is np.random.RandomState and type(bits) is np.random.MT19937
    if _NUMPY_AHEAD is None or not is_known:
        return GeneratorCalls(partial(generator.get_state, legacy=False), generator.set_state)
    read = _numpy_reader(generator, _NUMPY_AHEAD)

    def write(image: Any) -> None:
        if isinstance(image, dict):
            generator.set_state(image)
        elif read() != image:
            generator.set_state(_numpy_state(image))

    return GeneratorCalls(read, write)


def _numpy_reader(generator: Any, place: int) -> Callable[[], Any]:
    twister = generator._bit_generator
    memory = _TWISTER.from_address(twister.ctypes.state_address)
    ahead = _AHEAD.from_address(id(generator) + place)

    def read() -> Any:
        # numpy.random.set_bit_generator replaces it
        if generator._bit_generator is not twister:
            return generator.get_state(legacy=False)
        return memory.raw, ahead.raw

    return read


def _numpy_state(image: Any) -> Any:
    *words, position = struct.unpack("=624Ii", image[0])
    has_ahead, ahead = struct.unpack("=i4xd", image[1])
    return "MT19937", np.array(words, np.uint32), position, has_ahead, ahead


def _numpy_ahead() -> int | None:
    """Return where a RandomState has the number drawn ahead, None where no image tells its state.

    That is found by its value, and verified by draws with and without such a number.
    """
    generator: Any = np.random.RandomState(1)
    if not hasattr(getattr(generator, "_bit_generator", None), "ctypes"):
        return None
    generator.standard_normal()
    size = np.random.RandomState.__basicsize__
    fields = ctypes.string_at(id(generator), size)
    number = struct.pack("=d", generator.get_state()[4])
    place = fields.find(number, _HEADER + 8) - 8
    if place < 0 or (place + 16) > size:
        return None
    read = _numpy_reader(generator, place)
    for draw in (lambda: None, generator.standard_normal, generator.random, generator.normal):
        draw()
        if not _is_same(_numpy_state(read()), generator.get_state()):
            return None
    return place


_HAS_PYTHON_IMAGES = _has_python_images()
_NUMPY_AHEAD = _numpy_ahead()

CPU = GeneratorCalls(torch.default_generator.get_state, torch.default_generator.set_state)
# of `random` and `numpy.random`: their functions are methods of objects
PYTHON = [_of_python(random.getstate.__self__), _of_numpy(np.random.get_state.__self__)]
