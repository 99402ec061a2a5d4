"""`make demo`: the same small GPT learns on the local CPU and on a shoal device, side by side.

Both start from the same weights and see the same batches. Each side computes with one thread, and
they take turns, so that the times can be compared.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from demo_queue import demonstrate
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

import shoal

TEXT = """
A shoal is many small fish that move as one. No fish leads it. Each looks at those beside it,
keeps near them, keeps from touching them, and turns when they turn. From the shore you see one
large animal that bends around a rock and closes again behind it.
A pool of machines can be like that. Each has a little memory and a little strength. A program
that needs more than one of them should not have to know how many there are, or where they stand,
or which of them was switched off this morning. It asks for a device and it gets one.
So the program writes down what is to be done, one line after the other, and does not wait.
Somewhere else a worker reads the lines and does the work. Only when the program wants to see a
number must the number travel back, and then only that number and no other.
A fish that is lost is missed by nobody but its neighbours, and they close the gap. A line that
goes wrong is told with its place, so that the writer can find it. What was borrowed is given back
at the end. The water is still again, and nothing is left on the ground.
"""

STEPS, TURN = 240, 20  # a side makes TURN steps, then it is the other's turn
BATCH, CONTEXT, WIDTH, HEADS, DEPTH = 16, 64, 128, 4, 3


class Block(nn.Module):
    """Attention and a small network, both added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Reads characters and says how likely each next one is."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.character(text) + self.place(places)))


@dataclass
class Side:
    """One of the two trainings. The program is the same; only the device's name differs."""

    name: str
    device: str
    model: Gpt
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def take_turn(self, batches: list[torch.Tensor]) -> None:
        """Some steps. The losses are read at the end, so the device never waits for the program."""
        start = time.perf_counter()
        losses = []
        for batch in batches:
            text = batch.to(self.device)
            logits = self.model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        self.losses += torch.stack(losses).tolist()
        self.seconds += time.perf_counter() - start


@torch.no_grad()
def write(model: Gpt, alphabet: list[str], length: int) -> str:
    """What the trained model writes, most likely character first."""
    device = next(model.parameters()).device
    text = torch.tensor([[alphabet.index(c) for c in "A "]], device=device)
    for _ in range(length):
        following = model(text[:, -CONTEXT:])[:, -1].argmax(dim=-1, keepdim=True)
        text = torch.cat((text, following), dim=1)
    return "".join(alphabet[i] for i in text[0].tolist())


def draw_batches(text: torch.Tensor, count: int) -> list[torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (count, BATCH))
    return [torch.stack([text[s : s + CONTEXT + 1] for s in row]) for row in starts.tolist()]


def train(local: Side, ours: Side, text: torch.Tensor, console: Console) -> None:
    """Both sides in turns, with a bar for each."""
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = {s.name: progress.add_task(s.name, total=STEPS, loss="–") for s in (local, ours)}
        for _ in range(STEPS // TURN):
            batches = draw_batches(text, TURN)
            for side in (local, ours):
                side.take_turn(batches)
                loss = f"{side.losses[-1]:.4f}"
                progress.update(bars[side.name], advance=TURN, loss=loss)


def size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def report(local: Side, ours: Side, traffic: dict[str, int], console: Console) -> None:
    differing = [i for i in range(STEPS) if local.losses[i] != ours.losses[i]]
    verdict = f"no, from step {differing[0] + 1} on" if differing else "yes"
    calls = traffic["messages"]
    table = Table(title="The same training, twice", show_header=False, title_justify="left")
    rows = {
        "last loss, local CPU": f"{local.losses[-1]:.6f}",
        "last loss, shoal": f"{ours.losses[-1]:.6f}",
        f"all {STEPS} losses equal, bit for bit": verdict,
        "time, local CPU": f"{local.seconds:.1f} s",
        "time, shoal": f"{ours.seconds:.1f} s",
        "time ratio, shoal / local": f"{ours.seconds / local.seconds:.2f}",
        "bytes to the device": size(traffic["bytes_in"]),
        "bytes from the device": size(traffic["bytes_out"]),
        "messages in the op stream": f"{calls:,} ({calls / STEPS:.0f} a step)",
        "bytes of the op stream": f"{size(traffic['stream_bytes'])} "
        f"({traffic['stream_bytes'] / calls:.0f} a message)",
        "times the program waited for it": f"{traffic['round_trips']:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def main() -> None:
    console = Console()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    alphabet = sorted(set(TEXT))
    text = torch.tensor([alphabet.index(c) for c in TEXT])
    model = Gpt(len(alphabet))
    console.print("Starting a pool on this machine: one CPU device, one compute thread …")
    with shoal.up(devices=["cpu,threads=1"]) as pool, shoal.connect(pool.url) as lease:
        console.print(f"{pool.url} runs; the worker is process {lease.worker_pids[0]}.\n")
        local = Side("local CPU", "cpu", copy.deepcopy(model))
        ours = Side("shoal device", "shoal", model)
        before = torch.shoal.traffic()
        train(local, ours, text, console)
        after = torch.shoal.traffic()
        traffic = {key: after[key] - before[key] for key in after}
        console.print()
        report(local, ours, traffic, console)
        console.print("\nWhat the model on the shoal device writes now:")
        console.print(f"[italic]{write(ours.model, alphabet, 160)}[/italic]", highlight=False)
    console.print("\nThree tasks for two unequal devices of a standing pool …\n")
    demonstrate(console)
    console.print(
        "\nNext:\n"
        '  .venv/bin/python examples/first_program.py   ten lines with device="shoal"\n'
        "  make test                                    the tests\n"
        "  make bench                                   every speed claim, measured here\n"
        "  docs/guide.md                                devices, debugging, limits",
        highlight=False,
    )


if __name__ == "__main__":
    main()
