"""The rest of torch that people use: compile, save and load, copies, profiler, accelerator API."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.compare import close, same_bits

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def network(device: str = "shoal") -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)


# --- torch.compile --------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str) -> None:
    torch._dynamo.reset()
    model, local = network(), network("cpu")
    compiled = torch.compile(model, backend=backend)
    out, expected = compiled(X.to("shoal")), local(X)
    close(out, expected)
    out.sum().backward()
    expected.sum().backward()
    close([p.grad for p in model.parameters()], [p.grad for p in local.parameters()])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_a_graph_break_and_other_shapes(backend: str) -> None:
    torch._dynamo.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        if y.sum() > 0:
            return y + 1
        return y - 1

    compiled = torch.compile(function, backend=backend)
    for rows in (2, 3, 7):
        x = torch.full((rows, 4), 0.5)
        close(compiled(x.to("shoal")), function(x))
        close(compiled(-x.to("shoal")), function(-x))


def test_compile_with_the_default_backend_says_what_to_do() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"(?s)shoal.*aot_eager"):
        torch.compile(lambda x: x.sin() + 1)(X.to("shoal"))


# --- saving, loading, copying --------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    model = network()
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    there = torch.load(path)
    assert all(v.device.type == "shoal" for v in there.values())
    here = torch.load(path, map_location="cpu")
    assert all(v.device.type == "cpu" for v in here.values())
    for name, value in model.state_dict().items():
        same_bits(there[name], value)
        same_bits(here[name], value)


def test_a_local_checkpoint_loads_onto_the_device(tmp_path: Path) -> None:
    torch.save({"x": X, "y": X[1:, ::2]}, tmp_path / "local.pt")
    for location in ("shoal", "shoal:0", torch.device("shoal"), {"cpu": "shoal"}):
        loaded = torch.load(tmp_path / "local.pt", map_location=location)
        assert loaded["x"].device.type == "shoal"
        same_bits(loaded["y"], X[1:, ::2])


def test_views_of_one_storage_are_saved_once_and_stay_views() -> None:
    base = torch.arange(10_000.0, device="shoal")
    buffer = io.BytesIO()
    torch.save([base, base[5:], base.view(100, 100).t()], buffer)
    assert len(buffer.getvalue()) < 2 * base.nbytes
    buffer.seek(0)
    whole, part, transposed = torch.load(buffer)
    whole[6] = -1
    assert part[1].item() == transposed[6, 0].item() == -1


def test_an_optimizer_resumes_where_it_was() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(X.to("shoal")).pow(2).mean().backward()
        optimizer.step()

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    step(model, optimizer)
    buffer.seek(0)
    saved = torch.load(buffer, map_location="cpu")
    resumed = network()
    resumed.load_state_dict(saved["model"])
    again = torch.optim.AdamW(resumed.parameters(), lr=0.01)
    again.load_state_dict(saved["optimizer"])
    step(resumed, again)
    close(resumed.state_dict(), model.state_dict())


def test_deepcopy_is_independent() -> None:
    model = network()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.add_(1)
    close(twin[0].weight - model[0].weight, torch.ones(8, 4))
    shared = [model[0].weight, model[0].weight]
    first, second = copy.deepcopy(shared)
    assert first is second


def test_pickling_a_module() -> None:
    model = network().eval()
    again = pickle.loads(pickle.dumps(model))  # noqa: S301  (our own bytes)
    assert next(again.parameters()).device.type == "shoal"
    close(again(X.to("shoal")), model(X.to("shoal")))


def test_whole_module_through_torch_save() -> None:
    buffer = io.BytesIO()
    torch.save(network().eval(), buffer)
    buffer.seek(0)
    local = torch.load(buffer, map_location="cpu", weights_only=False)
    close(local(X), network("cpu").eval()(X))


# --- streams and events --------------------------------


def test_events_measure_the_devices_time() -> None:
    x = torch.randn(400, 400, device="shoal")
    start, end = torch.shoal.Event(enable_timing=True), torch.shoal.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        x = (x @ x).tanh()
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0
    assert torch.Event("shoal", enable_timing=True).query()


def test_an_event_is_not_done_before_the_work_in_front_of_it() -> None:
    x = torch.randn(1000, 1000, device="shoal")
    torch.shoal.synchronize()
    done = torch.shoal.Event()
    for _ in range(20):
        y = x @ x
    done.record()
    assert not done.query()  # 40 billion operations take longer than the way to this line
    done.synchronize()
    assert done.query()
    assert y.isfinite().all().item()


def test_streams_keep_program_order() -> None:
    side = torch.shoal.Stream()
    x = torch.zeros(1000, device="shoal")
    with torch.shoal.stream(side):
        assert torch.shoal.current_stream() == side
        x.add_(1)
        event = side.record_event()
    torch.shoal.current_stream().wait_event(event)
    x.mul_(3)
    side.wait_stream(torch.shoal.current_stream())
    side.synchronize()
    assert side.query()
    assert x.sum().item() == 3000
    assert torch.shoal.current_stream() == torch.shoal.default_stream()
    x.record_stream(side)


# --- torch.accelerator and torch.shoal --------------------------------


def test_the_accelerator_api() -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("shoal")
    assert accelerator.current_device_index() == 0
    accelerator.set_device_index(0)
    accelerator.synchronize()
    stream = accelerator.current_stream()
    assert stream.device.type == "shoal"
    accelerator.set_stream(stream)
    before = accelerator.memory_allocated()
    kept = torch.ones(1000, device="shoal")
    assert accelerator.memory_allocated() - before == kept.nbytes
    assert accelerator.max_memory_allocated() >= accelerator.memory_allocated()
    assert accelerator.memory_reserved() >= accelerator.memory_allocated()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    assert accelerator.memory_stats()


def test_memory_figures() -> None:
    shoal = torch.shoal
    before = shoal.memory_allocated()
    shoal.reset_peak_memory_stats()
    blocks = [torch.ones(2**20, device="shoal") for _ in range(4)]
    assert shoal.memory_allocated() - before == 4 * 4 * 2**20
    del blocks[1:]
    assert shoal.memory_allocated() - before == 4 * 2**20
    assert shoal.max_memory_allocated() - before == 4 * 4 * 2**20
    view = blocks[0][10:]
    del blocks
    assert shoal.memory_allocated() - before == 4 * 2**20  # a view keeps its storage
    del view
    assert shoal.memory_allocated() == before
    free, total = shoal.mem_get_info()
    assert 0 < free <= total == 6 * 2**30
    stats = shoal.memory_stats()
    assert stats["allocated_bytes.all.current"] == before
    assert stats["allocation.all.allocated"] >= stats["allocation.all.freed"]
    assert "allocated_bytes" in shoal.memory_summary()


def test_the_worker_frees_what_the_client_frees() -> None:
    def held() -> int:
        return torch.shoal.memory_stats()["worker.segment_bytes"]

    before = held()
    x = torch.ones(2**20, device="shoal")
    assert held() - before == 4 * 2**20
    del x
    assert held() == before


def test_device_properties_and_names() -> None:
    assert torch.shoal.device_count() == 1
    assert torch.shoal.is_available()
    assert torch.shoal.is_initialized()
    assert torch.shoal.get_device_name() == torch.shoal.get_device_properties().name == "cpu/0"
    with torch.shoal.device(0):
        assert torch.shoal.current_device() == 0
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.shoal.set_device(5)
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.ones(1, device="shoal:3")
    with torch.shoal.device_of(X.to("shoal")):
        assert torch.empty(1, device="shoal").device.index == 0


def test_completion_offers_the_public_names_only() -> None:
    assert dir(torch.shoal) == sorted(torch.shoal.__all__)
    assert all(hasattr(torch.shoal, name) for name in torch.shoal.__all__)


def test_methods_that_torch_gives_to_backends() -> None:
    x = X.to("shoal")
    assert x.is_shoal
    same_bits(X.shoal(), x)
    assert x.untyped_storage().device.type == "shoal"
    assert x.new_ones(2).device.type == "shoal"
    assert torch.zeros_like(x).device.type == "shoal"
    assert torch.get_device_module("shoal") is torch.shoal
    torch.set_default_device("shoal")
    try:
        assert torch.ones(1).device.type == "shoal"
    finally:
        torch.set_default_device(None)


# --- torch.profiler --------------------------------


def test_the_profiler_sees_the_operators() -> None:
    x = X.to("shoal")
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
        with torch.profiler.record_function("my range"):
            y = torch.relu(x @ x.t()).sum()
            y.item()
    names = {event.key for event in profile.key_averages()}
    assert {"my range", "aten::mm", "aten::relu"} <= names
    assert "aten::mm" in profile.key_averages().table()


def test_the_profiler_writes_a_trace(tmp_path: Path) -> None:
    x = X.to("shoal").requires_grad_()
    with torch.profiler.profile() as profile:
        x.exp().sum().backward()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "aten::exp" in (tmp_path / "trace.json").read_text()


def test_modes_see_every_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Count() as count:
        (X.to("shoal") + 1).exp()
    assert count.seen >= 3
