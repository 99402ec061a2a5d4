"""In-place, `out=`, views and aliasing, shapes that depend on data."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.compare import agree, close, same_bits

torch.manual_seed(0)
A = torch.randn(6, 5)
B = torch.randn(6, 5)


IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda x: x.add_(2),
    "operator": lambda x: x.__imul__(3),
    "relu_": lambda x: x.relu_(),
    "slice": lambda x: x[1:3].zero_(),
    "transposed": lambda x: x.t().add_(torch.arange(6.0, device=x.device)),
    "setitem": lambda x: x.__setitem__((slice(None), 2), -1.0),
    "setitem mask": lambda x: x.__setitem__(x > 0, 0.5),
    "setitem index": lambda x: x.__setitem__(torch.tensor([0, 2], device=x.device), 8.0),
    "setitem host index": lambda x: x.__setitem__(torch.tensor([0, 2]), 8.0),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1, 1], device=x.device), x[:2].clone()),
    "scatter_": lambda x: x.scatter_(1, torch.zeros(6, 1, dtype=torch.long, device=x.device), 7.0),
    "masked_fill_": lambda x: x.masked_fill_(x < 0, float("inf")),
    "addcmul_": lambda x: x.addcmul_(x.clone(), x.clone(), value=0.5),
    "clamp_": lambda x: x.clamp_(-0.5, 0.5),
    "diagonal": lambda x: x.diagonal().fill_(4),
    "fill_ nan": lambda x: x.fill_(float("nan")),
    "swap": lambda x: x.copy_(x.flip(0)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        version = x._version
        IN_PLACE[name](x)
        assert x._version > version  # autograd relies on it
        return x

    agree(run, A)


def test_in_place_returns_the_same_tensor() -> None:
    x = A.to("shoal")
    assert x.add_(1) is x
    assert x.data_ptr() == x.mul_(2).data_ptr()


def test_a_view_sees_what_its_base_gets_and_the_other_way_round() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        row, column, flat = x[1], x[:, 2], x.view(-1)
        x.add_(1)
        row.mul_(2)
        column.sub_(3)
        flat[7] = 100
        return [x, row, column, flat]

    agree(run, A)


def test_views_share_storage_and_addresses() -> None:
    x = torch.zeros(4, 6, device="shoal")
    view = x[1:, 2:]
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert view.data_ptr() == x.data_ptr() + (6 + 2) * 4
    assert view._base is x
    assert x.view(torch.int32).data_ptr() == x.data_ptr()
    assert x.detach().data_ptr() == x.data_ptr()
    assert x.clone().data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x.reshape(5, 6),
        lambda x: x.unsqueeze(0).expand(3, 6, 5),
        lambda x: x.as_strided((3, 2), (5, 2), 1),
        lambda x: x.unfold(1, 3, 1),
        lambda x: x.movedim(0, 1)[::2],
        lambda x: x.unflatten(0, (2, 3)),
        lambda x: x.chunk(2, 1)[1],
        lambda x: x.split([2, 4])[1],
        lambda x: x.diagonal(1),
        lambda x: x.narrow(0, 2, 3).squeeze(),
        lambda x: x.view(torch.int32),
        lambda x: torch.view_as_complex(x.reshape(3, 5, 2)),
        lambda x: torch.block_diag(x, x),
        lambda x: x.swapaxes(0, 1).contiguous(),
    ],
)
def test_views_read_like_local_ones(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    local, remote = view(A), view(A.to("shoal"))
    same_bits(remote, local)
    assert remote.stride() == local.stride()
    assert remote.storage_offset() == local.storage_offset()


# --- out= --------------------------------


def test_out_fills_what_it_is_given() -> None:
    out = torch.empty(6, 5, device="shoal")
    address = out.data_ptr()
    assert torch.add(A.to("shoal"), B.to("shoal"), out=out) is out
    assert out.data_ptr() == address
    close(out, A + B)


def test_out_of_another_size_is_resized() -> None:
    for start in ((0,), (2, 2), (100,)):
        local, remote = torch.empty(start), torch.empty(start, device="shoal")
        with warnings.catch_warnings():  # local torch warns of every resize that is not from zero
            warnings.simplefilter("ignore")
            torch.mm(A, B.t(), out=local)
            torch.mm(A.to("shoal"), B.t().to("shoal"), out=remote)
        close(remote, local)
        remote.add_(1)  # it is an ordinary tensor afterwards
        close(remote, local + 1)


def test_out_into_a_view_changes_just_the_view() -> None:
    local, remote = torch.zeros(6, 10), torch.zeros(6, 10, device="shoal")
    torch.exp(A, out=local[:, ::2])
    torch.exp(A.to("shoal"), out=remote[:, ::2])
    close(remote, local)


def test_several_outputs() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty(0, device=x.device)
        indices = torch.empty(0, dtype=torch.long, device=x.device)
        torch.max(x, 1, out=(values, indices))
        return values, indices

    agree(run, A)


def test_out_of_the_wrong_dtype_is_refused() -> None:
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(A.to("shoal"), 1.5, out=torch.empty(6, 5, dtype=torch.int32, device="shoal"))


# --- shapes that depend on data --------------------------------


@settings(max_examples=25)
@given(st.lists(st.integers(-3, 3), max_size=40))
def test_data_dependent_shapes(values: list[int]) -> None:
    x = torch.tensor(values, dtype=torch.int64)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        unique, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
        return [
            x.nonzero(),
            x[x > 0],
            x.masked_select(x < 0),
            unique,
            inverse,
            counts,
            torch.unique_consecutive(x),
            torch.bincount(x + 3, minlength=2),
            torch.repeat_interleave(x, (x > 0).long()),
        ]

    agree(run, x)


def test_where_with_one_argument_and_argwhere() -> None:
    agree(lambda x: [*torch.where(x > 0), torch.argwhere(x > 1)], A)


def test_an_empty_selection_is_usable() -> None:
    picked = A.to("shoal")[torch.zeros(6, dtype=torch.bool, device="shoal")]
    assert picked.shape == (0, 5)
    assert picked.sum().item() == 0
    assert (picked + 1).cpu().shape == (0, 5)


def test_control_flow_on_values() -> None:
    x = torch.tensor(5.0, device="shoal")
    steps = 0
    while x > 0:
        x -= 1
        steps += 1
    assert steps == 5
    assert bool(torch.tensor([True], device="shoal"))
    assert int(torch.tensor(7, device="shoal")) == 7
    assert f"{torch.tensor(1.5, device='shoal'):.2f}" == "1.50"
    assert "device='shoal:0'" in repr(torch.ones(2, device="shoal"))
    assert torch.equal(A.to("shoal"), A.to("shoal"))
    assert torch.allclose(A.to("shoal"), A.to("shoal") + 1e-9)
    assert [row.sum().item() for row in torch.eye(2, device="shoal")] == [1.0, 1.0]


def test_integers_are_counted_as_on_any_accelerator() -> None:
    """Local CPU counts floating-point numbers only; Hugging Face's experts count integers elsewhere."""
    numbers = torch.tensor([0, 2, 2, 3, 1, 2], dtype=torch.int32)
    counted = torch.histc(numbers.to("shoal"), bins=4, min=0, max=3)
    assert counted.dtype == torch.int32
    assert counted.tolist() == torch.histc(numbers.float(), bins=4, min=0, max=3).tolist()


def test_numbers_and_host_scalars_mix_with_device_tensors() -> None:
    agree(lambda x: [x + 1, 2.5 * x, x / torch.tensor(3.0), torch.tensor(2) ** x, x + (1 + 2j)], A)


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)device"):
        A.to("shoal") + B


def test_operators_that_torch_makes_from_others() -> None:
    agree(
        lambda x: [
            torch.einsum("ij,kj->ik", x, x),
            torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
            torch.linalg.svdvals(x),
            torch.fft.rfft(x).abs(),
            torch.cdist(x, x),
            torch.nn.functional.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
            torch.stft(x.reshape(-1), 8, return_complex=True, window=torch.ones(8).to(x.device)),
            x.softmax(1).log(),
            torch.tensordot(x, x, dims=([1], [1])),
            torch.searchsorted(x[0].sort().values, x[1]),
        ],
        A,
    )


def test_linear_algebra_errors_keep_their_type() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(3, 3, device="shoal")).cpu()
