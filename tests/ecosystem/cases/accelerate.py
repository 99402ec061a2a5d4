"""accelerate's device, memory and precision."""

from __future__ import annotations

from typing import Any

from tests.ecosystem.cases import parts


def _train(cpu: bool, precision: str | None) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    import torch  # isort: skip

    AcceleratorState._reset_state(reset_partial_state=True)  # each is as if it were the first
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision)
    model = parts.mlp()
    dtypes = parts.Dtypes(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(parts.points(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    scaler = accelerator.scaler
    return {
        "device": parts.place(model),
        "values": losses,
        "dtypes": dtypes.names(),
        "scaler": scaler is not None and scaler.is_enabled(),
    }


def accelerator(cpu: bool) -> dict[str, Any]:
    return _train(cpu, None)


def bf16(cpu: bool) -> dict[str, Any]:
    return _train(cpu, "bf16")


def fp16(cpu: bool) -> dict[str, Any]:
    return _train(cpu, "fp16")


def device_map(cpu: bool) -> dict[str, Any]:
    """Dispatch a model over what `get_max_memory` finds."""
    from accelerate import dispatch_model, infer_auto_device_map
    import torch  # isort: skip

    model = parts.mlp()
    limits: dict[Any, Any] | None = {"cpu": "1GiB"} if cpu else None
    found = infer_auto_device_map(model, max_memory=limits)
    model = dispatch_model(model, device_map=found)
    x = torch.linspace(0, 1, 8).to(next(model.parameters()).device)
    return {"device": parts.place(model), "values": model(x).tolist()}


def batch_size(cpu: bool) -> dict[str, Any]:
    """Find the batch that fits a device of 64 MiB: a sample takes 1 MiB."""
    from accelerate.utils import find_executable_batch_size
    import torch  # isort: skip

    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size: int) -> float:
        tried.append(batch_size)
        x = torch.ones(batch_size, 2**18, device="cpu" if cpu else "shoal")
        return float(x.sum())

    return {"device": "cpu" if cpu else "shoal:0", "values": [train() / 2**18], "tried": tried}
