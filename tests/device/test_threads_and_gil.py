"""Issuing calls and freeing tensors in several threads never waits in a circle for the GIL."""

from __future__ import annotations

import threading

import torch

CODE = """
def step(x, number):
    y = x + number
    z = y * 2
    del y
    return z
"""


def test_new_code_in_one_thread_while_another_frees() -> None:
    """Code that was never seen takes the GIL to be known; frees take the stream's lock under it."""
    failures: list[BaseException] = []

    def fresh_code(worker: int) -> None:
        try:
            x = torch.ones(8, device="shoal")
            for number in range(150):
                scope: dict[str, object] = {}
                exec(compile(CODE, f"made-{worker}-{number}.py", "exec"), scope)
                result = scope["step"](x, number)  # type: ignore[operator]
                if number % 50 == 0:
                    assert result[0].item() == 2 * (1 + number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=fresh_code, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "the threads wait for one another"
    assert not failures, failures
