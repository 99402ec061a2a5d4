"""The devices of a lease as one: unmodified programs, more memory than one device has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal import memory
from shoal.units import show_bytes
from tests.support import processes
from tests.support.compare import same_bits

MiB = 2**20


@pytest.fixture(scope="module")
def four() -> Iterator[shoal.Pool]:
    """Four devices, each of which may swap out to host memory and disk."""
    devices = ["cpu,memory=256MiB,host=256MiB,disk=256MiB,threads=1"] * 4
    with shoal.up(devices) as pool:
        yield pool


class Net(nn.Module):
    """Convolutions with batch norm, dropout, and wide linear layers that need the memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4)
        )
        self.wide = nn.Sequential(
            *[
                layer
                for _ in range(3)
                for layer in (nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))
            ]
        )
        self.enter = nn.Linear(8 * 16, width)
        self.out = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.wide(self.enter(self.features(x).flatten(1))))


class Gpt(nn.Module):
    def __init__(self, width: int = 128, depth: int = 3, vocabulary: int = 400) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]).to(tokens.device)
        return self.head(self.body(self.token(tokens), mask=mask, is_causal=True))


def train(kind: str, device: str, steps: int = 3) -> list[float]:
    """An ordinary program: it places nothing and moves nothing but its batches."""
    torch.manual_seed(0)
    model: nn.Module = Net(512) if kind == "cnn" else Gpt()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        if kind == "cnn":
            x = torch.randn(8, 3, 16, 16, generator=generator).to(device)
            y = torch.randint(0, 5, (8,), generator=generator).to(device)
            loss = F.cross_entropy(model(x), y)
        else:
            tokens = torch.randint(0, 400, (4, 17), generator=generator).to(device)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["cnn", "gpt"])
@pytest.mark.parametrize(("devices", "each"), [(1, 64), (2, 16), (4, 4)])
def test_unmodified_trainings_have_the_losses_of_local_torch(
    four: shoal.Pool, kind: str, devices: int, each: int
) -> None:
    expected = train(kind, "cpu")
    with shoal.connect(four.url, devices=devices, memory=each * MiB):
        assert train(kind, "shoal") == expected
        if devices == 4:
            assert torch.shoal.max_memory_allocated() > 3 * each * MiB
            assert memory.counters().peer_bytes > 0


@pytest.mark.parametrize("paging", ["next-use", "lru"])
def test_a_full_device_swaps_out_and_goes_on(paging: str) -> None:
    expected = train("cnn", "cpu")
    # Too little host memory for all of it: the rest goes to disk.
    spec = f"cpu,memory=10MiB,host=4MiB,disk=64MiB,threads=1,paging={paging}"
    with shoal.up([spec]) as pool, shoal.connect(pool.url):
        assert train("cnn", "shoal") == expected
        moved = memory.counters()
        assert moved.swapped_in_bytes > 0
        assert moved.swapped_out_bytes > 0
        assert moved.disk_bytes > 0


def test_operators_go_to_their_data(four: shoal.Pool) -> None:
    """Weights that one device cannot hold stay where they are; only activations travel."""
    with shoal.connect(four.url, devices=2, memory=24 * MiB):
        layers = [torch.randn(1024, 1024).to("shoal") for _ in range(10)]  # 40 of 48 MiB
        before = torch.shoal.traffic(0)["bytes_peer"]
        x = torch.randn(4, 1024).to("shoal")
        for _ in range(5):
            y = x
            for layer in layers:
                y = torch.tanh(y @ layer * 0.03)
        y.cpu()
        crossed = torch.shoal.traffic(0)["bytes_peer"] - before
        # One layer may have to make room for the activations, once.
        assert crossed <= layers[0].nbytes + 5 * 4 * x.nbytes
        assert memory.counters().swapped_in_bytes == 0


def test_a_replica_is_void_once_its_original_is_written(four: shoal.Pool) -> None:
    with shoal.connect(four.url, devices=2, memory=16 * MiB):
        a = torch.ones(2 * MiB, device="shoal:1")
        b = a.to("shoal:2")
        a.add_(1)
        assert b.sum().item() == 2 * MiB
        b.copy_(a)
        a.zero_()
        assert b.sum().item() == 4 * MiB


def test_random_numbers_are_one_sequence_wherever_they_are_drawn(four: shoal.Pool) -> None:
    def draw(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        big = [torch.empty(MiB, device=device).normal_() for _ in range(4)]
        own = torch.Generator(device).manual_seed(9)
        return [F.dropout(x, 0.5) for x in big] + [
            torch.rand(5, device=device),
            torch.rand(1000, device=device, generator=own),
            big[3].bernoulli_(0.3),
            torch.rand(5, device=device, generator=own),
        ]

    expected = draw("cpu")
    with shoal.connect(four.url, devices=3, memory=18 * MiB):
        for drawn, wanted in zip(draw("shoal"), expected, strict=True):
            same_bits(drawn, wanted)


def test_an_error_on_one_device_is_told_wherever_its_result_is_asked_for(four: shoal.Pool) -> None:
    with shoal.connect(four.url, devices=2):
        index = torch.tensor([9], device="shoal:1")
        bad = F.embedding(index, torch.ones(2, 2, device="shoal:1"))
        with pytest.raises(IndexError, match="index out of range"):
            (bad.to("shoal:2") + 1).cpu()
        assert torch.ones(3, device="shoal").sum().item() == 3


def test_more_than_all_tiers_is_refused_at_once(four: shoal.Pool) -> None:
    with shoal.connect(four.url, devices=2, memory=16 * MiB):
        kept = torch.ones(1000, device="shoal")
        with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate"):
            torch.empty(97 * MiB, dtype=torch.uint8, device="shoal")
        assert kept.sum().item() == 1000


def test_the_map_says_where_everything_is(four: shoal.Pool) -> None:
    with shoal.connect(four.url, devices=2, memory=16 * MiB):
        a = torch.ones(MiB, device="shoal:1")
        b = torch.ones(MiB, device="shoal:2")
        torch.shoal.synchronize()
        found = {s.address: s for s in memory.map()}
        assert found[a.data_ptr()].home == found[a.data_ptr()].device == 1
        assert found[b.data_ptr()].copies == (2,)
        assert found[b.data_ptr()].bytes == b.nbytes
        assert found[b.data_ptr()].state == "resident"
        assert found[b.data_ptr()].frame is not None
        before = found[b.data_ptr()].version
        b.add_(1)
        assert {s.address: s for s in memory.map()}[b.data_ptr()].version > before
        assert "shoal:2" in memory.picture()


def test_fresh_memory_holds_nothing_of_another_session(four: shoal.Pool) -> None:
    """Large blocks, slabs and what had been swapped out, after several sessions that filled all."""
    for _ in range(3):
        with shoal.connect(four.url, memory=32 * MiB):
            kept = [
                torch.full((MiB,), 7.0, device="shoal") for _ in range(12)
            ]  # 16 MiB swapped out
            kept += [torch.full((100,), 7.0, device="shoal") for _ in range(500)]
            torch.shoal.synchronize()
            assert memory.counters().swapped_out_bytes > 0
            del kept
            torch.shoal.empty_cache()
        with shoal.connect(four.url, memory=32 * MiB):
            large = [torch.empty(MiB, device="shoal") for _ in range(12)]
            small = [torch.empty(100, device="shoal") for _ in range(500)]
            assert not any(x.cpu().any() for x in large + small)


def test_emptying_the_cache_gives_swap_space_back_and_loses_nothing() -> None:
    spec = "cpu,memory=8MiB,host=64MiB,disk=0,threads=1"
    with shoal.up([spec]) as pool, shoal.connect(pool.url) as lease:
        kept = [torch.full((300_001,), float(i), device="shoal") for i in range(40)]  # 45 MiB
        torch.shoal.synchronize()
        before = processes.resident_bytes(lease.worker_pids[0])
        left = {i: kept[i] for i in range(1, 40, 2)}  # what goes lies between what stays
        del kept
        torch.shoal.empty_cache()
        torch.shoal.synchronize()
        given = before - processes.resident_bytes(lease.worker_pids[0])
        assert given > 8 * MiB  # more than the device has
        assert all((x == float(i)).all().item() for i, x in left.items())


def test_watching_says_what_an_optimal_pager_would_have_moved() -> None:
    with (
        shoal.up(["cpu,memory=16MiB,host=64MiB,disk=0,threads=1"]) as pool,
        shoal.connect(pool.url),
    ):
        layers = [torch.randn(512, 512).to("shoal") for _ in range(24)]  # 24 of 16 MiB
        x = torch.randn(1, 512).to("shoal")

        def token() -> None:
            y = x
            for layer in layers:
                y = torch.tanh(y @ layer)
            y.sum().item()

        for _ in range(3):
            token()
        with memory.watch() as seen:
            for _ in range(6):
                token()
        least = 6 * (24 - 16) * MiB
        assert seen.optimal_bytes >= least // 2
        assert seen.moved.swapped_bytes >= seen.clairvoyant_bytes * 0.9
        assert seen.moved.disk_bytes == 0
        assert f"an optimal pager would have moved {show_bytes(seen.optimal_bytes)}" in str(seen)
        states = {s.state for s in memory.map()}
        assert {"resident", "swapped"} <= states
        assert memory.check() > 0
