"""Modules and optimizers as people use them, against the same on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.compare import agree, close, same_bits

Trained = tuple[list[float], dict[str, torch.Tensor]]


def train(
    make: Callable[[], nn.Module],
    x: torch.Tensor,
    device: str,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    steps: int = 4,
) -> Trained:
    """Losses and final state of a few steps of training."""
    torch.manual_seed(1)
    model = make().to(device)
    torch.manual_seed(2)  # the CPU's generator made the weights; both start again from here
    optim = (optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.05)))(model)
    x = x.to(device)
    losses = []
    for _ in range(steps):
        optim.zero_grad()
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        loss = out.pow(2).mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def check_training(make: Callable[[], nn.Module], x: torch.Tensor, **options: object) -> None:
    expected = train(make, x, "cpu", **options)  # type: ignore[arg-type]
    actual = train(make, x, "shoal", **options)  # type: ignore[arg-type]
    assert actual[0] == pytest.approx(expected[0], rel=1e-4)
    close(actual[1], expected[1], rtol=1e-3, atol=1e-5)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adadelta"]
)
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers(name: str, foreach: bool) -> None:
    kind = getattr(torch.optim, name)
    check_training(mlp, X, optimizer=lambda m: kind(m.parameters(), lr=0.01, foreach=foreach))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers(name: str) -> None:
    kind = getattr(torch.optim, name)
    check_training(mlp, X, optimizer=lambda m: kind(m.parameters(), lr=0.01, fused=True))


def test_momentum_schedule_clipping_and_accumulation() -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = mlp().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        norms = []
        optimizer.step()
        for step in range(6):
            model(X.to(device)).pow(2).mean().backward()
            if step % 2:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            schedule.step()
        return [*norms, *model.parameters()]

    close(run("shoal"), run("cpu"), rtol=1e-4, atol=1e-6)


def test_an_optimizer_made_before_the_move_still_trains_the_model() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.to("shoal")
    before = copy.deepcopy(model.state_dict())
    model(X.to("shoal")).pow(2).mean().backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name]), name
    assert all(p.device.type == "shoal" for g in optimizer.param_groups for p in g["params"])


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x.long() % 11))

    model = Tied().to("shoal")
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 1
    check_training(Tied, torch.arange(8.0))
    moved_back = model.cpu()
    assert moved_back.head.weight is moved_back.embed.weight


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers(kind: type[nn.RNNBase], bidirectional: bool) -> None:
    check_training(
        lambda: kind(6, 5, num_layers=2, batch_first=True, bidirectional=bidirectional),
        torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(1)),
    )


def test_recurrent_layer_with_dropout_draws_the_same_numbers() -> None:
    x = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(1))
    check_training(lambda: nn.LSTM(6, 5, num_layers=2, dropout=0.5, batch_first=True), x)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(kind: type[nn.Module]) -> None:
    check_training(lambda: kind(6, 5), X)


def test_packed_sequences() -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(4)
        layer = nn.GRU(6, 5).to(device)
        parts = [torch.randn(n, 6).to(device) for n in (5, 3, 2)]
        packed = nn.utils.rnn.pack_sequence(parts)
        out, last = layer(packed)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(out)
        return [padded, lengths, last]

    close(run("shoal"), run("cpu"))


def test_whole_and_stepwise_recurrence_agree() -> None:
    x = torch.randn(3, 7, 6)
    layer = nn.LSTM(6, 5, batch_first=True).to("shoal")
    whole, _ = layer(x.to("shoal"))
    assert torch.shoal.whole_rnn(False) is False
    try:
        x_remote = x.to("shoal").requires_grad_()
        steps, _ = layer(x_remote)
        close(steps, whole)
        (first,) = torch.autograd.grad(steps.sum(), x_remote, create_graph=True)
        first.pow(2).sum().backward()  # a second derivative needs the steps
    finally:
        torch.shoal.whole_rnn(True)


def test_attention_and_transformer_layers() -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    check_training(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), x)
    check_training(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout_p": 0.5},
        {"is_causal": True},
        {"scale": 0.3},
        {"enable_gqa": True},
        {"mask": 1},
    ],
    ids=str,
)
def test_attention_variants(options: dict[str, object], training: bool) -> None:
    options = dict(options)
    masked = options.pop("mask", None)
    heads = 2 if "enable_gqa" in options else 4

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        parts = [t.requires_grad_(training) for t in (q, k, v)]
        mask = torch.ones(8, 8, dtype=torch.bool, device=q.device).tril() if masked else None
        out = nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask, **options)
        return [out, *torch.autograd.grad(out.sum(), parts)] if training else [out]

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 8, 16, generator=generator)
    k, v = torch.randn(2, 2, heads, 8, 16, generator=generator)
    agree(run, q, k, v)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def test_convolutions_and_batch_statistics() -> None:
    check_training(cnn, IMAGES)


def test_channels_last() -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = cnn().to(device).to(memory_format=torch.channels_last)
        x = IMAGES.to(device).contiguous(memory_format=torch.channels_last)
        hidden = model[0](x)
        assert hidden.is_contiguous(memory_format=torch.channels_last)
        model(x).pow(2).mean().backward()
        return [hidden, *[p.grad for p in model.parameters()]]

    close(run("shoal"), run("cpu"), rtol=1e-4, atol=1e-5)
    x = IMAGES.to("shoal").to(memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    same_bits(x, IMAGES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_in_other_precisions(dtype: torch.dtype) -> None:
    def run(device: str) -> torch.Tensor:
        torch.manual_seed(5)
        model = mlp().to(device, dtype)
        out = model(X.to(device, dtype))
        out.float().pow(2).mean().backward()
        assert next(model.parameters()).grad.dtype == dtype
        return out

    close(run("shoal"), run("cpu"))


def test_complex_numbers() -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(6)
        z = torch.randn(4, 4, dtype=torch.complex64).to(device).requires_grad_()
        out = (z @ z.mH).exp().real.sum() + torch.fft.fft(z).abs().sum()
        out.backward()
        assert z.grad is not None
        return [out, z.grad, torch.linalg.eigvalsh(z.detach() @ z.detach().mH)]

    close(run("shoal"), run("cpu"), rtol=1e-4, atol=1e-4)


def test_moving_a_module_back_and_forth() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    assert next(model.to("shoal").parameters()).device.type == "shoal"
    assert next(model.shoal().parameters()).is_shoal
    for name, value in model.cpu().state_dict().items():
        same_bits(value, before[name])


def test_meta_modules_become_real_on_the_device() -> None:
    with torch.device("meta"):
        model = mlp()
    model.to_empty(device="shoal")
    model.load_state_dict(mlp().state_dict())
    assert model(X.to("shoal")).isfinite().all().item()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3, device="shoal").to_sparse(),
        lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="shoal"),
        lambda: torch.eye(3).to_sparse().to("shoal"),
        lambda: torch.eye(3).to_sparse_csr().to("shoal").to_dense(),
        lambda: torch.eye(3).to_sparse_csr().to("shoal") @ torch.ones(3, device="shoal"),
        lambda: nn.Embedding(4, 2, sparse=True, device="shoal").weight.to_sparse(),
    ],
)
def test_sparse_tensors_are_refused_clearly(make: Callable[[], object]) -> None:
    with pytest.raises(NotImplementedError, match=r"(?i)shoal device.*(strided|hold)"):
        make()


@pytest.mark.filterwarnings("ignore")
def test_sparse_gradients_are_refused_clearly() -> None:
    layer = nn.Embedding(4, 2, sparse=True).to("shoal")
    out = layer(torch.tensor([1], device="shoal")).sum()
    with pytest.raises(NotImplementedError, match="shoal devices hold dense strided tensors only"):
        out.backward()
