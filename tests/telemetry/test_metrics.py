"""The metrics by themselves."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from decathlon_mcp.events import Ended, Judged, Ready, Recovered, Started, Swept
from decathlon_mcp.plugins.metrics import Metrics


def lines(collector: Collector) -> set[str]:
    """The samples of the text format, without the times of creation that prometheus_client adds."""
    text = generate_latest(collector).decode()
    return {line for line in text.splitlines() if "_created" not in line and not line.startswith("#")}


def test_events_of_the_recovery_are_counted() -> None:
    metrics = Metrics()
    metrics.on_event(Recovered("continued"))
    metrics.on_event(Recovered("continued"))
    metrics.on_event(Recovered("ended"))
    metrics.on_event(Swept(3))
    metrics.on_event(Swept(0))
    text = lines(metrics.registry)
    assert 'decathlon_episodes_recovered_total{result="continued"} 2.0' in text
    assert 'decathlon_episodes_recovered_total{result="graded"} 0.0' in text
    assert "decathlon_sweeps_total 2.0" in text
    assert "decathlon_swept_sandboxes_total 3.0" in text


def test_a_recovered_episode_is_not_started_again_and_has_no_times_of_another_server() -> None:
    metrics = Metrics()
    emit = metrics.episode("suite", "task", "")
    emit(Ready())
    emit(Judged("scored"))
    emit(Ended("scored"))
    text = lines(metrics.registry)
    assert not any(line.startswith("decathlon_episodes_started_total{") for line in text)
    assert 'decathlon_episodes_ended_total{ending="scored",suite="suite"} 1.0' in text
    assert {"decathlon_opening_seconds_count 0.0", "decathlon_evaluation_seconds_count 0.0"} <= text


@pytest.mark.parametrize("by_task", [False, True])
def test_tasks_are_labels_only_if_asked_for(by_task: bool) -> None:
    metrics = Metrics(by_task=by_task, suites=["suite"])
    for number in range(5):
        emit = metrics.episode("suite", f"task-{number}", "")
        emit(Started())
        emit(Judged("scored"))
        emit(Ended("scored"))
    family = "decathlon_evaluations_total{"
    series = [
        line for line in lines(metrics.registry) if line.startswith(family) and 'status="scored"' in line
    ]
    assert len(series) == (5 if by_task else 1)
