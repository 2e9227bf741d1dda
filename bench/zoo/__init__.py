"""Models beyond language models: hybrids, diffusion, images, encoders and audio, by group.

Each model is built with a number of its repeated parts, which is 1 or 2 where it is measured, and
is told with the number that its checkpoint has; a convolutional network is built whole. Widths are
those of the checkpoint divided by up to 32. Ratios of widths, heads and experts stay.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.zoo.diffusion import DIFFUSION, UNETS
from bench.zoo.model import Model
from bench.zoo.own_nets import OWN_NETS
from bench.zoo.own_transformers import OWN_TRANSFORMERS
from bench.zoo.pictures import CNNS, VISION
from bench.zoo.sequences import AUDIO, ENCODERS, HYBRID

ZOO: Mapping[str, Model] = {
    **HYBRID,
    **DIFFUSION,
    **UNETS,
    **CNNS,
    **VISION,
    **ENCODERS,
    **AUDIO,
}
# blocks of public repositories, by kind
OWN: Mapping[str, Model] = {**OWN_TRANSFORMERS, **OWN_NETS}
