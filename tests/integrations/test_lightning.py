"""A callback for Lightning's Trainer."""

import pytest
import torch
from support import DEVICE
from torch import nn
from torch.utils.data import DataLoader

import fusedckpt

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the Trainer is told to use a CPU")

from fusedckpt.integrations.lightning import LightningFuseCallback  # noqa: E402  # where lightning is

PLAN = {"policy": "all", "progress": False}


class Module(lightning.LightningModule):
    def __init__(self, steps):
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.model, self.steps = nn.Sequential(*blocks, nn.Dropout(0.1)), steps

    def training_step(self, batch, index):
        loss = self.model(batch).square().mean()
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.steps.append([p.grad.clone() for p in self.parameters()])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder, *callbacks, **options):
    """Train, and return the gradients of every step, the last loss and the parameters."""
    torch.manual_seed(1)
    data = DataLoader(torch.randn(16, 8), batch_size=2, shuffle=True)
    module = Module([])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        default_root_dir=folder,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data)
    assert len(module.steps) == 4
    found = [grad for step in module.steps for grad in step]
    loss = trainer.callback_metrics["loss"]
    return [*found, loss, *(p.detach() for p in module.parameters())], module, trainer


class Before(lightning.Callback):
    """Note what is fused when the strategy gets the module."""

    def setup(self, trainer, pl_module, stage):
        setup = trainer.strategy.setup

        def watched(*args):
            self.seen = [type(block) for block in pl_module.model][:3]
            setup(*args)

        trainer.strategy.setup = watched


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fit(tmp_path, precision):
    seen, before = [], Before()
    callback = LightningFuseCallback(module="model", plan=PLAN, report=True, log=seen.append)
    found, module, trainer = fit(tmp_path, callback, before, precision=precision)
    assert before.seen == [fusedckpt.Sequential] * 3
    assert [type(one).__name__ for one in seen] == ["FuseReport", "Plan", "MemoryReport"]
    assert len(seen[0].swapped) == 3
    assert seen[-1].input_bytes == 2 * 8 * 4
    assert seen[-1].optimizer_bytes > 2 * seen[-1].parameter_bytes
    expected = fit(tmp_path, precision=precision)[0]
    if precision == "32-true":
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    else:
        # half precision rounds gradients to 1 in 256
        ours, theirs = (torch.cat([x.flatten() for x in one[:24]]) for one in (found, expected))
        assert (ours - theirs).norm() < theirs.norm() / 64
    # the plan stays, and the fused module is not fused again
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(torch.randn(4, 8), batch_size=2))
    assert [type(one).__name__ for one in seen[3:]] == ["FuseReport", "MemoryReport"]
    assert (len(seen[3].swapped), len(seen[3].already)) == (0, 3)
