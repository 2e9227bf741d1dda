"""A plugin of Axolotl that seeds the weights of adapters, which Axolotl leaves to chance."""

import torch
from axolotl.integrations.base import BasePlugin


class Seed(BasePlugin):
    def pre_lora_load(self, cfg, model):
        torch.manual_seed(0)
