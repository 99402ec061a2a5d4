"""The device by its name in torch.load, safetensors, queues, nn.DataParallel and torch.distributed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

import shoal
from tests.ecosystem import programs


@pytest.fixture(scope="module")
def pool() -> Iterator[shoal.Pool]:
    """A pool for programs that need more than one lease."""
    with shoal.up(["cpu,memory=256MiB,threads=1", "cpu,memory=256MiB,threads=1"]) as made:
        yield made


def _answer(program: str, **env: str) -> object:
    found = programs.run(program, env=env)
    assert found["error"] is None, found["err"]
    return found["answer"]


# --- the first use --------------------------------


def test_torch_load_as_the_first_use() -> None:
    answer = _answer(
        """
        import io, json, torch
        file = io.BytesIO()
        torch.save({"x": torch.arange(3.0)}, file)
        found = []
        for where in ("shoal", "shoal:0", torch.device("shoal"), {"cpu": "shoal"}):
            file.seek(0)
            x = torch.load(file, map_location=where)["x"]
            found.append([str(x.device), x.tolist()])
        print(json.dumps(found))
        """
    )
    assert answer == [["shoal:0", [0.0, 1.0, 2.0]]] * 4


def test_a_file_saved_on_the_device_is_loaded_there_by_another_program() -> None:
    save = """
        import os, sys, torch
        x = torch.arange(4.0, device="shoal")
        torch.save({"x": x, "view": x[1:3], "p": torch.nn.Parameter(x * 2)}, os.environ["FILE"])
        """
    load = """
        import json, os, torch
        found = torch.load(os.environ["FILE"])
        x, view, p = found["x"], found["view"], found["p"]
        view.fill_(9)  # of the same storage, as it was saved
        print(json.dumps([str(x.device), x.tolist(), str(p.device), p.requires_grad]))
        """
    with tempfile.NamedTemporaryFile() as file:
        assert programs.run(save, env={"FILE": file.name})["error"] is None
        assert _answer(load, FILE=file.name) == ["shoal:0", [0, 9, 9, 3], "shoal:0", True]
        local = _answer(load.replace("])\n", "], map_location='cpu')\n", 1), FILE=file.name)
        assert local == ["cpu", [0, 9, 9, 3], "cpu", True]


def test_a_file_of_a_device_that_the_lease_lacks_says_what_to_type(pool: shoal.Pool) -> None:
    found = programs.run(
        """
        import io, json, torch, shoal
        with shoal.connect(devices=2, memory="64MiB"):
            file = io.BytesIO()
            torch.save(torch.ones(2, device="shoal:2"), file)
            file.seek(0)
            again = str(torch.load(file).device)
        with shoal.connect(devices=1, memory="64MiB"):
            file.seek(0)
            whole = torch.load(file, map_location="shoal").tolist()
            file.seek(0)
            print(json.dumps([again, whole]), flush=True)
            torch.load(file)
        """,
        env={"SHOAL_POOL": pool.url},
    )
    assert found["answer"] == ["shoal:2", [1.0, 1.0]]
    assert 'torch.load(file, map_location="shoal")' in found["error"]["text"]


def test_set_device_as_the_first_use() -> None:
    answer = _answer(
        """
        import json, torch
        torch.shoal.set_device(0)
        torch.shoal.set_device("shoal:0")
        print(json.dumps([torch.shoal.current_device(), str(torch.ones(1, device="shoal").device)]))
        """
    )
    assert answer == [0, "shoal:0"]


# --- safetensors --------------------------------


def test_safetensors_loads_to_the_device() -> None:
    answer = _answer(
        """
        import json, os, tempfile, torch, safetensors.torch
        path = os.path.join(tempfile.gettempdir(), f"by-name-{os.getpid()}.safetensors")
        try:
            x = torch.arange(3.0, device="shoal")
            safetensors.torch.save_file({"x": x, "half": x.bfloat16()}, path)
            places = []
            for device in ("shoal", "shoal:0", torch.device("shoal"), "cpu"):
                loaded = safetensors.torch.load_file(path, device=device)
                places.append([str(loaded["x"].device), loaded["half"].float().tolist()])
            model = torch.nn.Linear(3, 1, bias=False)
            safetensors.torch.save_model(model, path)
            target = torch.nn.Linear(3, 1, bias=False).to("shoal")
            safetensors.torch.load_model(target, path, device="shoal")
            places.append(torch.equal(target.weight.cpu(), model.weight))
        finally:
            os.unlink(path)
        print(json.dumps(places))
        """
    )
    values = [0.0, 1.0, 2.0]
    assert answer == [["shoal:0", values]] * 3 + [["cpu", values], True]


def test_a_name_that_was_bound_to_load_file_before_works_too() -> None:
    answer = _answer(
        """
        import json, os, tempfile, torch
        from safetensors.torch import load_file, save_file
        path = os.path.join(tempfile.gettempdir(), f"bound-{os.getpid()}.safetensors")
        try:
            x = torch.arange(3.0, device="shoal")
            save_file({"x": x}, path)
            loaded = load_file(path, device="shoal")
        finally:
            os.unlink(path)
        print(json.dumps([str(loaded["x"].device), loaded["x"].tolist()]))
        """
    )
    assert answer == ["shoal:0", [0.0, 1.0, 2.0]]


# --- other processes --------------------------------


def test_a_tensor_for_another_process_is_an_error_that_says_what_to_type() -> None:
    answer = _answer(
        """
        import json, torch, torch.multiprocessing as mp
        from multiprocessing.reduction import ForkingPickler
        x = torch.ones(3, device="shoal")
        texts = []
        for value in (x, torch.nn.Parameter(x), x[1:], {"x": [x]}, torch.nn.Linear(1, 1).to("shoal")):
            try:
                ForkingPickler.dumps(value)
                texts.append("no error")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        near, far = mp.Pipe()
        near.send(torch.ones(2))
        print(json.dumps([texts, far.recv().tolist()]))
        """
    )
    texts, local = answer  # type: ignore[misc]
    for text in texts:
        assert text.startswith("ShareError: ")
        assert "tensor.cpu()" in text
        assert "shoal.share(tensor)" in text
    assert local == [1.0, 1.0]


def test_what_the_error_says_to_type_works(pool: shoal.Pool) -> None:
    answer = _answer(
        """
        import json, torch, shoal, torch.multiprocessing as mp

        def work(inbox, outbox):
            shoal.connect(memory="64MiB")
            outbox.put(shoal.open(inbox.get()).sum().item())
            outbox.put(inbox.get().to("shoal").sum().item())

        if __name__ == "__main__":
            shoal.connect(memory="64MiB")
            x = torch.arange(4.0, device="shoal")
            context = mp.get_context("spawn")
            inbox, outbox = context.Queue(), context.Queue()
            process = context.Process(target=work, args=(inbox, outbox))
            process.start()
            inbox.put(shoal.share(x))
            inbox.put(x.cpu())
            found = [outbox.get(timeout=60), outbox.get(timeout=60)]
            process.join()
            print(json.dumps(found))
        """,
        SHOAL_POOL=pool.url,
    )
    assert answer == [6.0, 6.0]


# --- nn.DataParallel --------------------------------

DATA_PARALLEL = """
    import json, torch
    torch.manual_seed(0)
    local = torch.nn.Linear(3, 1)
    model = torch.nn.DataParallel(MODEL)
    model.load_state_dict({"module." + k: v for k, v in local.state_dict().items()})
    x = torch.ones(2, 3)
    grads = []
    for one, batch in ((local, x), (model, x), (model, x.to("shoal"))):
        one.zero_grad()
        batch = batch.detach().requires_grad_()
        one(batch).sum().backward()
        weight = next(one.parameters())
        grads.append([weight.grad.tolist(), batch.grad.tolist(), str(weight.device)])
    print(json.dumps(grads))
"""


@pytest.mark.parametrize(
    ("model", "env"),
    [("torch.nn.Linear(3, 1).to('shoal')", {}), ("torch.nn.Linear(3, 1)", {"SHOAL_DEFAULT": "1"})],
    ids=["named", "asked"],
)
def test_data_parallel_on_one_device(model: str, env: dict[str, str]) -> None:
    local, first, second = _answer(DATA_PARALLEL.replace("MODEL", model), **env)  # type: ignore[misc]
    assert local[2] == "cpu"
    assert first == second == [*local[:2], "shoal:0"]


def test_data_parallel_on_several_devices_names_what_to_use(pool: shoal.Pool) -> None:
    found = programs.run(
        """
        import json, torch, shoal
        shoal.connect(devices=2, memory="64MiB")
        one = torch.nn.DataParallel(torch.nn.Linear(3, 1).to("shoal"), device_ids=[0])
        print(json.dumps(one(torch.ones(2, 3)).shape), flush=True)
        torch.nn.DataParallel(torch.nn.Linear(3, 1).to("shoal"))(torch.ones(6, 3))
        """,
        env={"SHOAL_POOL": pool.url},
    )
    assert found["answer"] == [2, 1]
    assert "shoal.train" in found["error"]["text"]
    assert "device_ids=[0]" in found["error"]["text"]
