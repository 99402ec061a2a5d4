"""Notebook views show names as text, whatever is in them."""

from __future__ import annotations

from typing import Any

from shoal import views
from shoal.pool.client.tasks import Task
from shoal.pool.wire.task_messages import TaskInfo, TaskReason


def test_nothing_becomes_markup() -> None:
    shown = views.table("<script>", ["<i>"], [["<b>", 1]])
    assert "<script>" not in shown
    assert shown.count("&lt;") == 3


def test_a_task_shows_why_it_waits() -> None:
    values: dict[str, Any] = dict.fromkeys(TaskInfo.__struct_fields__)
    values.update(id="big-7f3", name="<big>", owner="ana", state="waiting", devices=[],
                  reasons=[TaskReason("no-device", "0 of 2 devices are free")])  # fmt: skip
    shown = Task("", TaskInfo(**values))._repr_html_()
    assert "0 of 2 devices are free" in shown
    assert "<big>" not in shown
