"""Tensors larger than any device: made, filled, multiplied, reduced, indexed and trained by parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal import _core, memory

MiB = 2**20
DEVICE_BYTES = 8 * MiB
ROWS, COLUMNS = 49152, 128  # 24 MiB of float32: three devices' worth


@pytest.fixture(scope="module")
def lease() -> Iterator[shoal.Lease]:
    """Three devices of 8 MiB that may swap out."""
    devices = ["cpu,memory=8MiB,host=96MiB,disk=32MiB,threads=1"] * 3
    with shoal.up(devices) as pool, shoal.connect(pool.url, devices=3) as held:
        yield held


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def table(lease: shoal.Lease, large: torch.Tensor) -> torch.Tensor:
    assert large.nbytes == 3 * DEVICE_BYTES
    return large.to("shoal")


def same(ours: torch.Tensor, local: torch.Tensor) -> None:
    assert ours.device.type == "shoal"
    torch.testing.assert_close(ours.cpu(), local, rtol=1e-4, atol=1e-4)


def test_it_lies_on_several_devices(table: torch.Tensor) -> None:
    table.add_(0)
    parts = [s for s in memory.map() if s.part_of == table.untyped_storage().data_ptr()]
    assert sum(s.bytes for s in parts) == table.nbytes
    assert {s.home for s in parts} == {1, 2, 3}
    assert max(s.bytes for s in parts) < DEVICE_BYTES


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(ROWS, COLUMNS, device=d),
        lambda d: torch.full((ROWS * COLUMNS,), 7, dtype=torch.int32, device=d),
        lambda d: torch.ones(3, ROWS * COLUMNS // 3, device=d),
        lambda d: torch.empty(1, ROWS, COLUMNS, device=d).fill_(0.5),
        lambda d: torch.zeros(ROWS, COLUMNS, device=d).T.contiguous(),
    ],
)
def test_factories(lease: shoal.Lease, make: Callable[[str], torch.Tensor]) -> None:
    torch.testing.assert_close(make("shoal").cpu(), make("cpu"), rtol=0, atol=0)


@pytest.mark.parametrize("fill", ["normal_", "uniform_", "random_"])
def test_random_numbers_are_those_of_local_torch(lease: shoal.Lease, fill: str) -> None:
    torch.manual_seed(3)
    local = getattr(torch.empty(ROWS, COLUMNS), fill)()
    torch.manual_seed(3)
    ours = getattr(torch.empty(ROWS, COLUMNS, device="shoal"), fill)()
    torch.testing.assert_close(ours.cpu(), local, rtol=0, atol=0)


def test_there_and_back(table: torch.Tensor, large: torch.Tensor) -> None:
    assert torch.equal(table.cpu(), large)
    assert torch.equal(table.T.cpu(), large.T)
    assert torch.equal(table[1000:30000:7, 5:9].cpu(), large[1000:30000:7, 5:9])
    assert table[40000, 3].item() == large[40000, 3].item()
    half = table.half()
    assert torch.equal(half.cpu(), large.half())
    back = torch.empty_like(large)
    back.copy_(table)
    assert torch.equal(back, large)
    assert torch.equal(table.clone().cpu(), large)
    assert torch.equal(table.view(-1).view(128, ROWS).cpu(), large.view(-1).view(128, ROWS))


POINTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "number": lambda x: x * 3 + 1,
    "itself": lambda x: x * x - x.abs().sqrt(),
    "row": lambda x: x + torch.arange(COLUMNS, device=x.device, dtype=x.dtype),
    "column": lambda x: x * torch.arange(ROWS, device=x.device, dtype=x.dtype)[:, None],
    "compare": lambda x: (x > 0.5) & (x < 1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "transposed": lambda x: x.T + x.flip(0).T,
    "tiles": lambda x: x.view(COLUMNS, ROWS) + x.T,
    "other dtype": lambda x: x.double() / 2,
    "in place": lambda x: x.clone().mul_(2).add_(x, alpha=0.5).clamp_(-1, 1),
    "slices": lambda x: x[100:-100, 1:] - x[200:, :-1],
    "gelu": lambda x: F.gelu(x),
    "softmax": lambda x: x.softmax(1),
    "layer norm": lambda x: F.layer_norm(x, (COLUMNS,)),
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "cat": lambda x: torch.cat([x[:5000], x, x[-3:]]),
    "stack": lambda x: torch.stack([x, x], 1)[:, 1],
    "triangle": lambda x: x.masked_fill(x < 0, 9),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(table: torch.Tensor, large: torch.Tensor, name: str) -> None:
    same(POINTWISE[name](table), POINTWISE[name](large))


REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "sum of columns": lambda x: x.sum(1, keepdim=True),
    "sum of both": lambda x: x.sum((0, 1), keepdim=True),
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0, keepdim=True),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(),
    "var of columns": lambda x: x.var(1, unbiased=False),
    "max": lambda x: x.max(),
    "amin": lambda x: x.amin(0),
    "max of rows": lambda x: x.max(0).values,
    "place of max": lambda x: x.max(0).indices,
    "argmax": lambda x: x.argmax(),
    "argmin of columns": lambda x: x.argmin(1),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, 1, dim=0),
    "any": lambda x: (x > 4).any(),
    "all of columns": lambda x: (x > -9).all(1),
    "count": lambda x: torch.count_nonzero(x > 1),
    "cumsum": lambda x: x.cumsum(0)[-1],
    "sort": lambda x: x.sort(1).values,
    "top": lambda x: x.topk(3, 1).values,
    "nonzero": lambda x: (x > 3.5).nonzero(),
    "masked": lambda x: x[x > 3.5],
    "logsumexp": lambda x: x.logsumexp(1),
}


@pytest.mark.parametrize("name", REDUCED)
def test_reductions(table: torch.Tensor, large: torch.Tensor, name: str) -> None:
    """Against exact sums: those of parts are nearer to them than local torch's own."""
    ours, exact = REDUCED[name](table), REDUCED[name](large.double())
    torch.testing.assert_close(ours.cpu(), exact.to(ours.dtype), rtol=1e-4, atol=2e-2)


PRODUCTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x @ torch.ones(COLUMNS, 64, device=x.device),
    "rows, large result": lambda x: x @ torch.eye(COLUMNS, device=x.device),
    "columns": lambda x: torch.ones(4, COLUMNS, device=x.device) @ x.T,
    "inner": lambda x: torch.ones(4, ROWS, device=x.device) @ x,
    "both": lambda x: x.T @ x,
    "linear": lambda x: F.linear(torch.ones(2, COLUMNS, device=x.device), x),
    "linear with bias": lambda x: (
        F.linear(torch.ones(2, ROWS, device=x.device), x.T.contiguous()) + 1
    ),
    "biased": lambda x: F.linear(
        torch.ones(2, COLUMNS, device=x.device), x, torch.ones(ROWS, device=x.device)
    ),
    "vector": lambda x: x @ torch.ones(COLUMNS, device=x.device),
    "batches": lambda x: x.view(384, 128, 128) @ torch.ones(384, 128, 2, device=x.device),
    "outer": lambda x: x[:, :1] @ torch.ones(1, COLUMNS, device=x.device),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(table: torch.Tensor, large: torch.Tensor, name: str) -> None:
    ours, local = PRODUCTS[name](table), PRODUCTS[name](large)
    torch.testing.assert_close(ours.cpu(), local, rtol=1e-3, atol=3e-2)


def picks(device: torch.device) -> torch.Tensor:
    return torch.tensor([[0, 49151, 7], [-1, 20000, 7]], device=device)


INDEXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "embedding": lambda x: F.embedding(picks(x.device).clamp(0), x),
    "index": lambda x: x[picks(x.device)],
    "index with two": lambda x: x[picks(x.device), torch.tensor([1, 2, 3], device=x.device)],
    "index of columns": lambda x: x[:, torch.tensor([5, 2], device=x.device)],
    "host index": lambda x: x[torch.tensor([3, 40000])],
    "mask of rows": lambda x: x[(torch.arange(ROWS, device=x.device) % 5000) == 0],
    "select": lambda x: x.index_select(0, torch.tensor([9, 48000], device=x.device)),
    "gather": lambda x: x.gather(0, picks(x.device).clamp(0)),
    "gather columns": lambda x: x.gather(1, torch.zeros_like(x[:, :1], dtype=torch.long)),
    "slice": lambda x: x[16000:17000],
    "one row": lambda x: x[33333],
    "put": lambda x: x.clone().index_put_((picks(x.device),), torch.tensor(5.0, device=x.device)),
    "accumulate": lambda x: x.clone().index_put_(
        (picks(x.device),), torch.ones(2, 3, COLUMNS, device=x.device), accumulate=True
    ),
    "assign": lambda x: assigned(x),
    "add": lambda x: x.index_add(
        0, picks(x.device).clamp(0).view(-1), torch.ones(6, COLUMNS, device=x.device), alpha=2
    ),
    "copy": lambda x: x.index_copy(
        0, torch.tensor([5, 48000], device=x.device), torch.ones(2, COLUMNS, device=x.device)
    ),
    "fill": lambda x: x.index_fill(0, torch.tensor([5, 48000], device=x.device), 3),
    "scatter": lambda x: x.scatter(0, picks(x.device).clamp(0), 2.5),
    "scatter add": lambda x: x.scatter_add(
        0, picks(x.device).clamp(0), torch.ones(2, 3, device=x.device)
    ),
}


def assigned(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[10000:40000, 3] = 1
    x[5] = x[6]
    x[x < -3] = 0
    return x


@pytest.mark.parametrize("name", INDEXED)
def test_indexing(table: torch.Tensor, large: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(INDEXED[name](table).cpu(), INDEXED[name](large))


def wide(rows: torch.Tensor) -> torch.Tensor:
    """Row numbers for `gather` and `scatter`: the same in every column."""
    return rows.view(-1, 1).expand(-1, COLUMNS).contiguous()


def ones(*sizes: int, device: torch.device) -> torch.Tensor:
    return torch.ones(*sizes, device=device)


#: Operators on a table and three row numbers.
BY_ROW: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "embedding": lambda x, rows: F.embedding(rows, x),
    "index_select": lambda x, rows: x.index_select(0, rows),
    "index": lambda x, rows: x[rows],
    "index of two": lambda x, rows: x[rows, torch.arange(3, device=x.device)],
    "gather": lambda x, rows: x.gather(0, wide(rows)),
    "gather some columns": lambda x, rows: x.gather(0, wide(rows)[:, :2]),
    "assign": lambda x, rows: x.__setitem__(rows, 1.0),
    "put": lambda x, rows: x.index_put_((rows,), ones(3, COLUMNS, device=x.device)),
    "put, added": lambda x, rows: x.index_put_(
        (rows,), ones(3, COLUMNS, device=x.device), accumulate=True
    ),
    "add": lambda x, rows: x.index_add_(0, rows, ones(3, COLUMNS, device=x.device)),
    "add to a copy": lambda x, rows: x.index_add(0, rows, ones(3, COLUMNS, device=x.device)),
    "copy": lambda x, rows: x.index_copy_(0, rows, ones(3, COLUMNS, device=x.device)),
    "fill": lambda x, rows: x.index_fill_(0, rows, 3.0),
    "scatter": lambda x, rows: x.scatter_(0, wide(rows), ones(3, COLUMNS, device=x.device)),
    "scatter a number": lambda x, rows: x.scatter_(0, wide(rows), 2.0),
    "scatter to a copy": lambda x, rows: x.scatter(0, wide(rows), 2.0),
    "scatter add": lambda x, rows: x.scatter_add_(0, wide(rows), ones(3, COLUMNS, device=x.device)),
}


def raised(work: Callable[[], object]) -> type[Exception] | None:
    """What a call raises, at once or when its result is read."""
    try:
        result = work()
        if isinstance(result, torch.Tensor) and result.numel() < ROWS * COLUMNS:
            result.sum().item()
        torch.shoal.synchronize()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("outside", [ROWS, -1, -ROWS - 1])
@pytest.mark.parametrize("name", BY_ROW)
def test_a_row_outside_raises_what_local_torch_raises(
    table: torch.Tensor, large: torch.Tensor, name: str, outside: int
) -> None:
    """Some operators count negative numbers from the end, others refuse them. What is refused has
    written nothing."""
    rows = torch.tensor([0, outside, 40000])
    expected = raised(lambda: BY_ROW[name](large.clone(), rows))
    assert raised(lambda: BY_ROW[name](table, rows.to("shoal"))) == expected
    if expected is not None:
        assert torch.equal(table.cpu(), large)


#: Calls that are wrong whatever the numbers are.
MISSHAPED: dict[str, Callable[[torch.Tensor], object]] = {
    "column outside": lambda x: x[numbers(x, 0, 1), numbers(x, 0, COLUMNS)],
    "column far below": lambda x: x[numbers(x, 0, 1), numbers(x, 0, -COLUMNS - 1)],
    "short mask": lambda x: x[torch.ones(ROWS - 1, dtype=torch.bool, device=x.device)],
    "long mask": lambda x: x[torch.ones(ROWS + 1, dtype=torch.bool, device=x.device)],
    "narrow mask": lambda x: x[torch.zeros(ROWS, COLUMNS - 1, dtype=torch.bool, device=x.device)],
    "assigned by a short mask": lambda x: x.__setitem__(
        torch.ones(ROWS - 1, dtype=torch.bool, device=x.device), 0.0
    ),
    "too many indices": lambda x: x[numbers(x, 0), numbers(x, 0), numbers(x, 0)],
    "select by a table": lambda x: x.index_select(0, numbers(x, 0, 1).view(1, 2)),
    "select by floats": lambda x: x.index_select(0, numbers(x, 0, 1).float()),
    "add too much": lambda x: x.index_add_(0, numbers(x, 0, 1), ones(3, COLUMNS, device=x.device)),
    "copy too much": lambda x: x.index_copy_(
        0, numbers(x, 0, 1), ones(3, COLUMNS, device=x.device)
    ),
    "scatter too little": lambda x: x.scatter_(
        0, wide(numbers(x, 0, 1, 2)), ones(2, COLUMNS, device=x.device)
    ),
    "scatter by floats": lambda x: x.scatter_(0, wide(numbers(x, 0, 1)).float(), 1.0),
    "gather too wide": lambda x: x.gather(0, numbers(x, 0).view(1, 1).expand(1, COLUMNS + 1)),
}


def numbers(like: torch.Tensor, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=like.device)


@pytest.mark.parametrize("name", MISSHAPED)
def test_a_misshaped_index_raises_what_local_torch_raises(
    table: torch.Tensor, large: torch.Tensor, name: str
) -> None:
    expected = raised(lambda: MISSHAPED[name](large.clone()))
    assert expected is not None
    assert raised(lambda: MISSHAPED[name](table)) == expected
    assert torch.equal(table.cpu(), large)


def test_a_gathered_row_outside_is_not_waited_for(table: torch.Tensor) -> None:
    """The device refuses it, and its result is never read."""
    rows = wide(torch.tensor([0, 1])).to("shoal")
    assert table.gather(0, rows).shape == (2, COLUMNS)  # new shapes may be asked for
    rows[1] = ROWS
    before = _core.traffic(0)["round_trips"]
    picked = table.gather(0, rows)
    assert _core.traffic(0)["round_trips"] == before
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of bounds"):
            picked.sum().item()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_an_embedding_table_trains(
    lease: shoal.Lease, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    """Forward, backward with a gradient as large as the table, norm and update: as local torch."""

    def train(device: str) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(ROWS, COLUMNS).to(device)
        head = nn.Linear(COLUMNS, 4).to(device)
        parameters = [*table.parameters(), *head.parameters()]
        steps = optimizer(parameters)
        losses = []
        for step in range(3):
            tokens = torch.randint(
                0, ROWS, (32, 8), generator=torch.Generator().manual_seed(step)
            ).to(device)
            loss = head(table(tokens).mean(1)).square().mean()
            steps.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            steps.step()
            losses.append(loss.item())
        return losses, table.weight.detach().cpu()

    losses, weight = train("shoal")
    expected, local = train("cpu")
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weight, local, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_split_is_refused_before_it_runs(table: torch.Tensor) -> None:
    before = torch.shoal.memory_allocated()
    with pytest.raises(
        NotImplementedError, match=r"aten::.*sort.* 25165824 bytes together.*8388608"
    ):
        table.view(-1).sort()
    assert torch.shoal.memory_allocated() == before


def test_what_cannot_be_split_but_fits_runs_whole(lease: shoal.Lease) -> None:
    local = torch.randn(1280 * 1024, generator=torch.Generator().manual_seed(1))
    ours = local.to("shoal")
    assert torch.equal(ours.view(1280, 1024).trace().cpu(), local.view(1280, 1024).trace())


def test_more_than_the_lease_has_is_refused(lease: shoal.Lease) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(2**30, device="shoal")


def test_freed_with_its_last_view(lease: shoal.Lease, large: torch.Tensor) -> None:
    before = torch.shoal.memory_allocated()
    table = large.to("shoal")
    row = table[40000]
    del table
    assert torch.equal((row + 0).cpu(), large[40000])
    del row
    torch.shoal.synchronize()
    assert torch.shoal.memory_allocated() == before
