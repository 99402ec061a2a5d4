"""Small programs that never name the device. One batch is put to one process, in this order.

Each sets `answer` or raises. A guest gives the same answer as torch without Shoal.
"""

from __future__ import annotations

import torch

#: Every public function of torch.accelerator, called as programs call it.
_ACCELERATOR = {
    f"torch.accelerator.{name}()": f"import torch; answer = repr(torch.accelerator.{name}())"
    for name in torch.accelerator.__all__
    if name != "Graph"  # see KNOWN_DIFFERENCES
}

_EXPRESSIONS = {
    f"{text}": f"import torch; answer = repr({text})"
    for text in (
        "torch.accelerator.current_accelerator(True)",
        "torch.accelerator.set_device_index(0)",
        "torch.accelerator.current_stream(0)",
        "torch.accelerator.synchronize(0)",
        "torch.accelerator.memory_allocated(0)",
        "torch._C._get_accelerator()",
        "torch.get_device_module()",
        "torch.get_device_module('cpu')",
        "torch._utils._get_available_device_type()",
        "torch._utils._get_all_device_indices()",
        "torch.get_default_device()",
        "torch.device('cuda', 0)",
        "torch.device('nonsense')",
        "torch.ones(2, device='cuda')",
        "torch.ones(2, device='xpu')",
        "torch.ones(2, device='meta')",
        "torch.ones(2).cuda()",
        "torch.nn.Linear(2, 2).cuda()",
        "torch.cuda.is_available()",
        "torch.cuda.device_count()",
        "torch.cuda.current_device()",
        "torch.cuda.synchronize()",
        "torch.cuda.memory_allocated()",
        "torch.cuda.empty_cache()",
        "torch.cuda.manual_seed_all(0)",
        "torch.cuda.is_bf16_supported()",
        "torch.xpu.is_available()",
        "torch.xpu.device_count()",
        "torch.mps.is_available()",
        "torch.mtia.is_available()",
        "torch.backends.mps.is_available()",
        "torch.cpu.current_stream()",
        "torch.cpu.synchronize()",
        "torch.Stream(device='cpu').device_index",
        "torch.Event(device='cpu')",
        "torch.Stream().device",
        "torch.amp.GradScaler().is_enabled()",
        "torch.amp.GradScaler('cpu').is_enabled()",
        "torch.cuda.amp.GradScaler().is_enabled()",
        "torch.amp.is_autocast_available('cuda')",
        "torch.amp.is_autocast_available('cpu')",
        "torch.get_autocast_dtype('cpu')",
        "torch.is_autocast_enabled()",
        "torch.autocast('cuda').fast_dtype",
        "torch.backends.cudnn.is_available()",
        "torch.__config__.parallel_info()",
        "torch.Generator().device",
        "torch.Generator('cuda')",
        "torch.ones(2).is_pinned()",
        "torch.ones(2).is_pinned('cuda')",
        "torch.ones(2).storage().is_pinned()",
        "torch.ones(2).pin_memory()",
        "torch.ones(2).untyped_storage().pin_memory()",
        "torch.ones(2).get_device()",
        "torch.ones(2).__dlpack_device__()",
        "torch.from_dlpack(torch.ones(2))",
        "torch.ones(2).type()",
        "(torch.ones(2).is_cuda, torch.ones(2).is_cpu, torch.ones(2).is_xpu)",
        "torch.ones(2).share_memory_().is_shared()",
        "torch.utils.backcompat.broadcast_warning.enabled",
        "torch.profiler.supported_activities()",
        "torch.backends.cpu.get_cpu_capability()",
        "torch.serialization.default_restore_location(torch.UntypedStorage(0), 'cpu')",
        "torch.serialization.default_restore_location(torch.UntypedStorage(4), 'cuda:0')",
        "torch.serialization.default_restore_location(torch.UntypedStorage(4), 'nonsense')",
        "torch.serialization.location_tag(torch.UntypedStorage(4))",
        "torch.utils.checkpoint.DefaultDeviceType.get_device_type()",
    )
}

RANDOM = {
    "manual_seed": "import torch; torch.manual_seed(1); answer = torch.rand(2).tolist()",
    "seed": "import torch; torch.seed(); answer = torch.random.initial_seed() > 0",
    "torch.random.manual_seed": "import torch; answer = torch.random.manual_seed(2).initial_seed()",
    "fork_rng()": """
        import torch
        torch.manual_seed(0)
        with torch.random.fork_rng():
            inside = torch.rand(2).tolist()
        answer = [inside, torch.rand(2).tolist()]
    """,
    "fork_rng(enabled=False)": """
        import torch
        with torch.random.fork_rng(enabled=False):
            answer = 1
    """,
    "fork_rng(devices=[])": """
        import torch
        torch.manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.rand(2)
        answer = torch.rand(2).tolist()
    """,
    "fork_rng(device_type='cuda')": """
        import torch
        with torch.random.fork_rng(device_type="cuda"):
            answer = 1
    """,
    "freeze_rng_state": """
        import torch
        from torch.testing._utils import freeze_rng_state
        torch.manual_seed(0)
        with freeze_rng_state():
            torch.rand(2)
        answer = torch.rand(2).tolist()
    """,
    "get_rng_state": """
        import torch
        torch.manual_seed(0)
        state = torch.get_rng_state()
        first = torch.rand(3)
        torch.set_rng_state(state)
        answer = torch.equal(first, torch.rand(3))
    """,
    "a generator": """
        import torch
        answer = torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
    """,
}

ANSWERS = {**_EXPRESSIONS, **_ACCELERATOR, **RANDOM}

TENSORS = {
    "first backward()": """
        import torch
        x = torch.ones(3, requires_grad=True)
        (x * x).sum().backward()
        answer = x.grad.tolist()
    """,
    "a training step": """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        answer = losses
    """,
    "a fused optimizer": """
        import torch
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([p], fused=True)
        p.sum().backward()
        optimizer.step()
        answer = p.tolist()
    """,
    "GradScaler with a CPU optimizer": """
        import torch
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([p], lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        answer = [p.tolist(), scaler.get_scale()]
    """,
    "autocast": """
        import torch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer = str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    """,
    "autocast('cuda') on a CPU": """
        import torch
        with torch.autocast("cuda"):
            answer = str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    """,
    "nn.DataParallel": """
        import torch
        torch.manual_seed(0)
        model = torch.nn.DataParallel(torch.nn.Linear(2, 1))
        answer = [model(torch.ones(2, 2)).tolist(), model.device_ids, str(model.module.weight.device)]
    """,
    "checkpoint": """
        import torch
        from torch.utils.checkpoint import checkpoint
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
        grads = []
        for reentrant in (False, True):
            x = torch.ones(2, 3, requires_grad=True)
            checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
            grads.append(x.grad.tolist())
        answer = grads
    """,
    "saved_tensors on the CPU": """
        import torch
        x = torch.ones(4, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            (x * x).sum().backward()
        answer = x.grad.tolist()
    """,
    "saved_tensors pinned": """
        import torch
        x = torch.ones(4, requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            (x * x).sum().backward()
        answer = x.grad.tolist()
    """,
    "benchmark.Timer": """
        import torch
        from torch.utils.benchmark import Timer
        answer = Timer("x + 1", globals={"x": torch.ones(2)}).timeit(3).mean > 0
    """,
    "torch.profiler.profile()": """
        import torch
        with torch.profiler.profile() as profile:
            torch.ones(3) + 1
        answer = [sorted(e.key for e in profile.key_averages()),
                  profile.profiler.use_device, len(profile.key_averages().table().splitlines())]
    """,
    "record_function": """
        import torch
        with torch.autograd.profiler.profile() as profile:
            with torch.autograd.profiler.record_function("mine"):
                torch.ones(3).sum()
        answer = sorted(e.key for e in profile.key_averages())
    """,
    "set_default_device": """
        import torch
        torch.set_default_device("cpu")
        answer = [str(torch.ones(1).device), str(torch.get_default_device())]
        torch.set_default_device(None)
    """,
    "with torch.device": """
        import torch
        with torch.device("meta"):
            answer = str(torch.nn.Linear(2, 2).weight.device)
    """,
    "copy and pickle": """
        import copy, io, pickle, torch
        model = torch.nn.Linear(2, 2)
        x = torch.arange(3.0)
        answer = [copy.deepcopy(x).tolist(), pickle.loads(pickle.dumps(x)).tolist(),
                  sorted(copy.deepcopy(model).state_dict())]
    """,
    "torch.save and torch.load": """
        import io, torch
        file = io.BytesIO()
        torch.save({"x": torch.ones(2), "model": torch.nn.Linear(1, 1).state_dict()}, file)
        places = []
        for where in (None, "cpu", torch.device("cpu"), "meta", {"cpu": "cpu"}, lambda s, _: s):
            file.seek(0)
            places.append(str(torch.load(file, map_location=where)["x"].device))
        answer = places
    """,
    "torch.load to a CUDA device": """
        import io, torch
        file = io.BytesIO()
        torch.save(torch.ones(2), file)
        file.seek(0)
        torch.load(file, map_location="cuda")
    """,
    "attention": """
        import torch
        torch.manual_seed(0)
        q = torch.rand(1, 2, 4, 8)
        layer = torch.nn.MultiheadAttention(8, 2)
        answer = [torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().item(),
                  layer(q[0], q[0], q[0])[0].sum().item()]
    """,
    "an LSTM": """
        import torch
        torch.manual_seed(0)
        answer = torch.nn.LSTM(3, 4)(torch.ones(2, 1, 3))[0].sum().item()
    """,
    "torch.func": """
        import torch
        square = lambda x: (x * x).sum()
        answer = [torch.func.grad(square)(torch.ones(2)).tolist(),
                  torch.func.vmap(square)(torch.ones(3, 2)).tolist(),
                  torch.func.jacrev(lambda x: x * 2)(torch.ones(2)).tolist()]
    """,
    "torch.testing": """
        import torch
        torch.testing.assert_close(torch.ones(2), torch.ones(2))
        torch.testing.assert_close(torch.ones(2), torch.zeros(2))
    """,
    "gradcheck": """
        import torch
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        answer = torch.autograd.gradcheck(torch.sin, (x,))
    """,
    "torch.library": """
        import torch
        @torch.library.custom_op("ecosystem::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2
        @twice.register_fake
        def _(x):
            return torch.empty_like(x)
        answer = [twice(torch.ones(2)).tolist(), twice(torch.ones(2, device="meta")).shape]
    """,
    "sparse and nested": """
        import torch
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        answer = [torch.eye(2).to_sparse().to_dense().tolist(), nested.shape[0]]
    """,
    "numpy": """
        import numpy, torch
        answer = [torch.ones(2).numpy().tolist(), torch.from_numpy(numpy.ones(2)).tolist()]
    """,
    "printing": "import torch; answer = repr(torch.arange(3.0)) + repr(torch.nn.Linear(1, 1))",
    "to_empty and skip_init": """
        import torch
        model = torch.nn.Linear(2, 2, device="meta").to_empty(device="cpu")
        answer = [str(model.weight.device),
                  str(torch.nn.utils.skip_init(torch.nn.Linear, 2, 2).weight.device)]
    """,
    "deterministic algorithms": """
        import torch
        torch.use_deterministic_algorithms(True)
        answer = torch.ones(4).cumsum(0).tolist()
        torch.use_deterministic_algorithms(False)
    """,
    "threads of the program": """
        import torch
        from concurrent.futures import ThreadPoolExecutor
        def work(n):
            x = torch.full((3,), float(n), requires_grad=True)
            (x * x).sum().backward()
            return x.grad.tolist()
        with ThreadPoolExecutor(2) as pool:
            answer = list(pool.map(work, range(4)))
    """,
    "non_blocking copies": """
        import torch
        x = torch.ones(3).to("cpu", non_blocking=True)
        y = torch.empty(3).copy_(x, non_blocking=True)
        answer = y.tolist()
    """,
    "torch.hub and environment": """
        import torch
        answer = [torch.hub.get_dir().endswith("hub"), torch.version.cuda, torch.__version__]
    """,
}

PROCESSES = {
    "DataLoader(pin_memory=True)": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(8.0))
        answer = [[b.tolist(), b.is_pinned()] for b, in DataLoader(data, 4, pin_memory=True)]
    """,
    "DataLoader with workers": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(8.0))
        answer = [b.tolist() for b, in DataLoader(data, 4, num_workers=2)]
    """,
    "DataLoader with workers and pinned memory": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(8.0))
        loader = DataLoader(data, 4, num_workers=1, pin_memory=True, persistent_workers=True)
        answer = [[b.tolist(), b.is_pinned()] for b, in loader]
        del loader
    """,
    "DataLoader(shuffle=True)": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset, random_split
        torch.manual_seed(0)
        first, _ = random_split(TensorDataset(torch.arange(8.0)), [4, 4])
        answer = [b.tolist() for b, in DataLoader(first, 2, shuffle=True)]
    """,
    "fork": """
        import os, torch
        torch.ones(2, requires_grad=True).sum().backward()
        pid = os.fork()
        if pid == 0:
            x = torch.ones(2, requires_grad=True)
            torch.manual_seed(0)
            (x * 2).sum().backward()
            os._exit(int(x.grad.sum().item()))
        answer = os.waitpid(pid, 0)[1] >> 8
    """,
    "a queue of CPU tensors": """
        import torch, torch.multiprocessing as mp
        def work(inbox, outbox):
            outbox.put(inbox.get() + 1)
            inbox.get()  # the parent has it: the memory is sent by a thread of this process
        context = mp.get_context("fork")
        inbox, outbox = context.Queue(), context.Queue()
        process = context.Process(target=work, args=(inbox, outbox))
        process.start()
        inbox.put(torch.ones(2))
        answer = outbox.get().tolist()
        inbox.put(None)
        process.join()
        for queue in (inbox, outbox):
            queue.close()
            queue.join_thread()
    """,
    "shared memory": """
        import os, torch
        x = torch.zeros(2).share_memory_()
        pid = os.fork()
        if pid == 0:
            x.fill_(7)
            os._exit(0)
        os.waitpid(pid, 0)
        answer = x.tolist()
    """,
    "a spawned process": """
        import torch, torch.multiprocessing as mp
        def work(rank, x):
            x += rank + 1
        if __name__ == "__main__":
            x = torch.zeros(2).share_memory_()
            mp.spawn(work, args=(x,), nprocs=1)
            answer = x.tolist()
    """,
}

_GROUP = """
        import os, socket, torch, torch.distributed as dist
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0",
                       "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""

DISTRIBUTED = {
    "importing torch.distributed": """
        import torch.distributed as dist
        answer = [dist.is_available(), sorted(dist.Backend.backend_list)]
    """,
    "default backends": """
        import torch.distributed as dist
        answer = [dist.get_default_backend_for_device("cpu"),
                  dict(dist.Backend.default_device_backend_map)]
    """,
    "torchrun --nproc-per-node": """
        from torch.distributed.run import determine_local_world_size
        answer = [determine_local_world_size(n) for n in ("auto", "cpu", "3")]
    """,
    "torchrun --nproc-per-node=gpu": """
        from torch.distributed.run import determine_local_world_size
        determine_local_world_size("gpu")
    """,
    "init_process_group()": _GROUP
    + """
        dist.init_process_group()
        x = torch.ones(2)
        dist.all_reduce(x)
        dist.barrier()
        answer = [dist.get_backend(), x.tolist(), dist.get_backend_config()]
        dist.destroy_process_group()
    """,
    "init_process_group('gloo')": _GROUP
    + """
        dist.init_process_group("gloo")
        found = [None]
        dist.all_gather_object(found, {"rank": 0})
        dist.barrier(device_ids=[0])
        answer = [dist.get_backend(), found]
        dist.destroy_process_group()
    """,
    "DistributedDataParallel": _GROUP
    + """
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        loss = model(torch.ones(2, 2)).sum()
        loss.backward()
        answer = [loss.item(), model.module.weight.grad.tolist()]
        dist.destroy_process_group()
    """,
    "a device mesh and DTensor": _GROUP
    + """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        answer = [mesh.device_type, (x + 1).full_tensor().tolist(), dist.get_backend()]
        dist.destroy_process_group()
    """,
    "fully_shard without a mesh": _GROUP
    + """
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        fully_shard(model)
        loss = model(torch.ones(2, 2)).sum()
        loss.backward()
        answer = [loss.item(), str(model.weight.device)]
        dist.destroy_process_group()
    """,
    "dcp.save and dcp.load": """
        import tempfile, torch, torch.distributed.checkpoint as dcp
        state = {"x": torch.arange(4.0)}
        with tempfile.TemporaryDirectory() as directory:
            dcp.save(state, checkpoint_id=directory)
            loaded = {"x": torch.zeros(4)}
            dcp.load(loaded, checkpoint_id=directory)
        answer = loaded["x"].tolist()
    """,
    "dcp.async_save": _GROUP
    + """
        import tempfile, torch.distributed.checkpoint as dcp
        dist.init_process_group("cpu:gloo")
        with tempfile.TemporaryDirectory() as directory:
            dcp.async_save({"x": torch.arange(4.0)}, checkpoint_id=directory).result()
            loaded = {"x": torch.zeros(4)}
            dcp.load(loaded, checkpoint_id=directory)
        answer = loaded["x"].tolist()
        dist.destroy_process_group()
    """,
    "a HashStore": """
        import torch.distributed as dist
        store = dist.HashStore()
        store.set("a", "1")
        answer = store.get("a").decode()
    """,
}

COMPILE = {
    "torch.compile(backend='eager')": """
        import torch
        answer = torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(2)).tolist()
    """,
    "torch.compile(backend='aot_eager')": """
        import torch
        x = torch.ones(2, requires_grad=True)
        torch.compile(lambda x: (x * x).sum(), backend="aot_eager")(x).backward()
        answer = x.grad.tolist()
    """,
    "torch.compile of a model": """
        import torch
        torch.manual_seed(0)
        model = torch.compile(torch.nn.Linear(2, 2), backend="eager")
        answer = model(torch.ones(1, 2)).tolist()
    """,
    "torch._dynamo.list_backends()": "import torch; answer = torch._dynamo.list_backends()",
    "FakeTensor": """
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            x = torch.ones(2, 3) @ torch.ones(3, 4)
        answer = [str(x.device), list(x.shape)]
    """,
    "torch.export": """
        import torch
        class Model(torch.nn.Module):
            def forward(self, x):
                return x.sin() + 1
        program = torch.export.export(Model(), (torch.ones(2),))
        answer = [program.module()(torch.ones(2)).tolist(), [n.name for n in program.graph.nodes]]
    """,
    "torch.fx": """
        import torch
        answer = torch.fx.symbolic_trace(torch.nn.Linear(2, 2)).code
    """,
    "torch.jit": """
        import torch
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2
        traced = torch.jit.trace(torch.nn.ReLU(), torch.ones(2))
        answer = [torch.jit.script(double)(torch.ones(2)).tolist(), traced(-torch.ones(2)).tolist()]
    """,
    "make_fx": """
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx
        answer = make_fx(lambda x: x.cos() * 2)(torch.ones(2)).code
    """,
    "create_block_mask": """
        import torch
        from torch.nn.attention.flex_attention import create_block_mask
        mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
        answer = str(mask.kv_indices.device)
    """,
    "create_block_mask without a device": """
        import torch
        from torch.nn.attention.flex_attention import create_block_mask
        mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128)
        answer = str(mask.kv_indices.device)
    """,
}

#: Inductor generates C++ and starts a compiler: alone it takes longer than all others together.
INDUCTOR = {
    "torch.compile": """
        import torch
        answer = torch.compile(lambda x: (x * 2 + 1).sum())(torch.ones(4)).item()
    """,
}

BATCHES = {
    "answers": ANSWERS,
    "tensors": TENSORS,
    "processes": PROCESSES,
    "distributed": DISTRIBUTED,
    "compile": COMPILE,
}

#: What torch decides before it asks Shoal: program and reason. docs/ecosystem.md has the same list.
#: Those that start a pool come last, because all of them run in one process.
KNOWN_DIFFERENCES: dict[str, tuple[str, str]] = {
    "hasattr(torch, 'shoal')": (
        "import torch; answer = [hasattr(torch, 'shoal'), hasattr(torch.Tensor, 'is_shoal')]",
        "the device must be there when a program names it",
    ),
    "the name of PrivateUse1": (
        "import torch; answer = torch._C._get_privateuse1_backend_name()",
        "torch.device('shoal') is that name",
    ),
    "torch.device(0)": (
        "import torch; answer = str(torch.device(0))",
        "C++ turns an integer into a device of the named PrivateUse1 backend and asks nobody",
    ),
    "torch.Event()": (
        "import torch; answer = repr(torch.Event().device)",
        "C++ takes the type of the named backend and asks nobody",
    ),
    "torch.ones(2, device='mps')": (
        "import torch; torch.ones(2, device='mps')",
        "the error's text lists the kernels of all backends, ours among them",
    ),
    "Adam(capturable=True) on the CPU": (
        """
        import torch
        p = torch.nn.Parameter(torch.ones(2))
        p.grad = torch.ones(2)
        torch.optim.Adam([p], capturable=True).step()
        """,
        "the error's text lists the devices that capture, and the named backend is one",
    ),
    "torch.empty(3, pin_memory=True)": (
        "import torch; torch.empty(3, pin_memory=True)",
        "the same error as pin_memory(), because C++ asks one hook for both",
    ),
    "torch.accelerator.Graph()": (
        "import torch; torch.accelerator.Graph()",
        "C++ takes the type of the named backend; the error's text names it",
    ),
    "torch.ones(2, device=0)": ("import torch; torch.ones(2, device=0)", "an integer, as above"),
    "tensor.to(0)": ("import torch; torch.ones(2).to(0)", "an integer, as above"),
    "module.to(0)": ("import torch; torch.nn.Linear(1, 1).to(0)", "an integer, as above"),
}

#: Those that raise the same exception in both cases.
ONLY_THE_TEXT = (
    "Adam(capturable=True) on the CPU",
    "torch.ones(2, device='mps')",
    "torch.empty(3, pin_memory=True)",
    "torch.accelerator.Graph()",
)
