"""Libraries with few questions, and libraries that follow the program."""

from __future__ import annotations

import sys
import tempfile
import types
from typing import Any

from tests.ecosystem.cases import parts


def sentence_transformers(cpu: bool) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel

    parts.seed()
    folder = tempfile.mkdtemp()
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    BertModel(config).save_pretrained(folder)
    parts.tokenizer().save_pretrained(folder)
    model = SentenceTransformer(folder, **({"device": "cpu"} if cpu else {}))
    return {"device": parts.place(model), "values": model.encode(parts.TEXTS[0]).tolist()}


def _image_pipeline() -> Any:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    parts.seed()
    unet = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8),
        norm_num_groups=4, down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return DDPMPipeline(unet=unet, scheduler=DDPMScheduler())


def _image(pipe: Any) -> list[float]:
    import torch

    generator = torch.Generator().manual_seed(5)
    image = pipe(generator=generator, num_inference_steps=2, output_type="np").images
    values: list[float] = image.flatten().tolist()
    return values


def diffusers(cpu: bool) -> dict[str, Any]:
    """The device that diffusers takes by itself, as `enable_model_cpu_offload()` does."""
    from diffusers.utils.torch_utils import get_device

    device = "cpu" if cpu else get_device()
    pipe = _image_pipeline().to(device)
    return {"device": parts.place(pipe.unet), "values": _image(pipe)}


def diffusers_offload(cpu: bool) -> dict[str, Any]:
    """Offload to the CPU between uses; the model computes on the accelerator."""
    pipe = _image_pipeline()
    if cpu:
        return {"device": "cpu", "values": _image(pipe)}
    seen: list[str] = []
    pipe.unet.register_forward_hook(lambda *_: seen.append(parts.place(pipe.unet)))
    pipe.enable_model_cpu_offload()
    values = _image(pipe)
    return {"device": seen[0], "values": values}


def torch_geometric(cpu: bool) -> dict[str, Any]:
    import torch_geometric
    from torch_geometric.nn import GCNConv
    import torch  # isort: skip

    device = torch_geometric.device("cpu" if cpu else "auto")
    parts.seed()
    layer = GCNConv(4, 4).to(device)
    edges = torch.tensor([[0, 1, 2, 0], [1, 2, 3, 3]]).to(device)
    found = layer(torch.eye(4).to(device), edges)
    return {"device": parts.place(layer), "values": found.flatten().tolist()}


def timm(cpu: bool) -> dict[str, Any]:
    """timm's own choice of `--device`."""
    _ensure_torchvision()
    import timm
    from timm.utils import init_distributed_device
    import torch  # isort: skip

    arguments = types.SimpleNamespace(device="cpu" if cpu else "shoal")
    device = init_distributed_device(arguments)
    parts.seed()
    model = timm.create_model("resnet18", num_classes=3).to(device).eval()
    image = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32).to(device)
    return {"device": parts.place(model), "values": model(image).flatten().tolist()}


def _ensure_torchvision() -> None:
    """timm reads images with torchvision, of which no build fits every build of torch."""
    try:
        import torchvision  # noqa: F401
    except Exception:
        from unittest.mock import MagicMock

        for name in ("", ".transforms", ".transforms.functional", ".datasets", ".ops", ".models",
                     ".ops.misc", ".models.feature_extraction"):  # fmt: skip
            sys.modules[f"torchvision{name}"] = MagicMock()


def torchmetrics(cpu: bool) -> dict[str, Any]:
    from torchmetrics.classification import MulticlassAccuracy
    import torch  # isort: skip

    device = "cpu" if cpu else "shoal"
    metric = MulticlassAccuracy(num_classes=3).to(device)
    metric.update(
        torch.tensor([0, 1, 2, 1], device=device), torch.tensor([0, 1, 1, 1], device=device)
    )
    found = metric.compute()
    return {"device": str(found.device), "values": [found.item()]}


def torchdata(cpu: bool) -> dict[str, Any]:
    """A node that pins its batches in the memory of the device that is named."""
    from torchdata.nodes import IterableWrapper, Loader, PinMemory
    import torch  # isort: skip

    node = IterableWrapper([torch.arange(4.0)])
    batch = next(iter(Loader(node if cpu else PinMemory(node, pin_memory_device="shoal"))))
    moved = batch.to("cpu" if cpu else "shoal")
    assert cpu or batch.is_pinned()
    return {"device": str(moved.device), "values": moved.tolist()}
