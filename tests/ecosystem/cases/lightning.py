"""Lightning's `Trainer` and `Fabric`, in the packages `lightning` and `pytorch_lightning`."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

from tests.ecosystem.cases import parts


def _module(package: str) -> Any:
    lightning = importlib.import_module(package)
    import torch

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = parts.mlp()
            self.losses: list[float] = []
            self.batch_size = 4

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.layers(x), y)
            self.losses.append(loss.item())
            self.place = str(loss.device)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(parts.points(), batch_size=self.batch_size)

    return Model()


def _train(package: str, accelerator: str, precision: str = "32-true") -> dict[str, Any]:
    model = _module(package)
    trainer = importlib.import_module(package).Trainer(
        accelerator=accelerator,
        precision=precision,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    dtypes = parts.Dtypes(model)
    trainer.fit(model)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "device": model.place,
        "values": model.losses,
        "dtypes": dtypes.names(),
        "scaler": scaler is not None and scaler.is_enabled(),
    }


def _fabric(package: str, accelerator: str, precision: str = "32-true") -> dict[str, Any]:
    fabric = importlib.import_module(package).Fabric(accelerator=accelerator, precision=precision)
    import torch

    model = parts.mlp()
    dtypes = parts.Dtypes(model)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = torch.utils.data.DataLoader(parts.points(), batch_size=8)
    losses = []
    for x, y in fabric.setup_dataloaders(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    scaler = getattr(fabric._precision, "scaler", None)
    return {
        "device": parts.place(model),
        "values": losses,
        "dtypes": dtypes.names(),
        "scaler": scaler is not None and scaler.is_enabled(),
    }


def _auto(cpu: bool) -> str:
    return "cpu" if cpu else "auto"


def _named(cpu: bool) -> str:
    return "cpu" if cpu else "shoal"


def trainer(cpu: bool) -> dict[str, Any]:
    return _train("lightning", _auto(cpu))


def trainer_named(cpu: bool) -> dict[str, Any]:
    return _train("lightning", _named(cpu))


def trainer_bf16(cpu: bool) -> dict[str, Any]:
    return _train("lightning", _auto(cpu), "bf16-mixed")


def trainer_fp16(cpu: bool) -> dict[str, Any]:
    return _train("lightning", _auto(cpu), "16-mixed")


def fabric(cpu: bool) -> dict[str, Any]:
    return _fabric("lightning", _auto(cpu))


def fabric_named(cpu: bool) -> dict[str, Any]:
    return _fabric("lightning", _named(cpu))


def fabric_bf16(cpu: bool) -> dict[str, Any]:
    return _fabric("lightning", _auto(cpu), "bf16-mixed")


def fabric_fp16(cpu: bool) -> dict[str, Any]:
    return _fabric("lightning", _auto(cpu), "16-mixed")


def old_trainer(cpu: bool) -> dict[str, Any]:
    return _train("pytorch_lightning", _auto(cpu))


def old_trainer_bf16(cpu: bool) -> dict[str, Any]:
    return _train("pytorch_lightning", _named(cpu), "bf16-mixed")


def old_fabric(cpu: bool) -> dict[str, Any]:
    return _fabric("lightning_fabric", _auto(cpu))


def old_fabric_bf16(cpu: bool) -> dict[str, Any]:
    return _fabric("lightning_fabric", _named(cpu), "bf16-mixed")


def batch_size(cpu: bool) -> dict[str, Any]:
    """Let the finder double the batch until a device of 64 MiB is full: a sample takes 1 MiB."""
    return _find_batch("lightning.pytorch", cpu)


def old_batch_size(cpu: bool) -> dict[str, Any]:
    return _find_batch("pytorch_lightning", cpu)


def _find_batch(package: str, cpu: bool) -> dict[str, Any]:
    lightning = importlib.import_module(package)
    tuner = importlib.import_module(f"{package}.tuner")
    import torch

    tried: list[int] = []
    places: set[str] = set()

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.batch_size = 4

        def training_step(self, batch: Any, index: int) -> Any:
            tried.append(len(batch[0]))
            large = torch.ones(len(batch[0]), 2**18, device=self.device)
            places.add(str(large.device))
            return (large.sum() * self.weight).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-9)

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(torch.zeros(1024, 1))
            return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    trainer = lightning.Trainer(
        accelerator=_auto(cpu),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    model = Model()
    found = tuner.Tuner(trainer).scale_batch_size(model, steps_per_trial=1, max_trials=8)
    return {"device": ", ".join(places), "values": [], "tried": [max(tried), found]}
