"""Lightning: a callback for its Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# the checkers' environment does not have it
# pyright: reportMissingImports=false
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fusedckpt.fusing.fuser import fuse
from fusedckpt.integrations.first_batch import at_first_batch

__all__ = ["LightningFuseCallback"]


class LightningFuseCallback(Callback):
    """Fuse a LightningModule when `fit` begins, and plan and report on the first batch.

        Trainer(callbacks=[LightningFuseCallback(save="preact", module="model", report=True)])

    It fuses the layers that the module's `__init__` built, before DDP and FSDP; a model that
    `configure_model` builds is fused there, by `fusedckpt.fuse`.

    Args:
        module: the name of the module that `training_step` calls with the batch, "" for the
            LightningModule itself: that is planned and reported.
        plan, report, loss: as in `at_first_batch`, once for each `fit`; not inside FSDP.
        log: gets the FuseReport, Plan and MemoryReport, only of the first process.
        options: those of `fusedckpt.fuse`.
    """

    def __init__(
        self,
        *,
        module: str = "",
        plan: Mapping[str, Any] | None = None,
        report: bool = False,
        loss: Callable[[Any], Tensor] | None = None,
        log: Callable[[Any], Any] = print,
        **options: Any,
    ):
        self.module = module
        self.plan = plan
        self.report = report
        self.loss = loss
        # Lightning sets a `log` of its own
        self.tell = log
        self.options = options

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fuse: the event before the strategy wraps the module."""
        if stage == "fit":
            self._tell(trainer)(fuse(pl_module, **self.options))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare for the first batch."""
        if self.plan is None and not self.report:
            return
        at_first_batch(
            pl_module.get_submodule(self.module),
            plan=self.plan and {"accumulate": trainer.accumulate_grad_batches, **self.plan},
            report=self.report,
            loss=self.loss,
            optimizer=trainer.optimizers,
            log=self._tell(trainer),
        )

    def _tell(self, trainer: Trainer) -> Callable[[Any], Any]:
        return self.tell if trainer.is_global_zero else lambda result: None
