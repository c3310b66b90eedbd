"""The chart is rendered and linted by Helm's library, and each resource is checked by Kubernetes' schemas. No
cluster has run it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from petiole.tasks.fleet import exporter
from petiole.tasks.settings import Settings
from petiole.tasks.worker.reports.heartbeat import READY
from tests.support.site import REPOSITORY

CHART = REPOSITORY / "deploy" / "chart"
OF_OPERATORS = {"ScaledObject", "ServiceMonitor"}
"""Kinds that operators declare: Kubernetes has no schema of them."""
GPU = {
    "name": "large",
    "model": "/models/Qwen3-8B",
    "queue": "petiole.large",
    "gpus": 1,
    "memory": "24Gi",
    "loadSeconds": 901,
    "drainSeconds": 60,
    "nodeSelector": {"card": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "settings": {"PETIOLE_MAX_NUM_SEQS": 32},
    "scaling": {"enabled": True, "max": 5, "tasks": 16},
}
TINY = {"name": "tiny", "model": "petiole-tiny", "queue": "petiole"}
EVERYTHING: dict[str, Any] = {
    "models": [TINY, GPU],
    "settings": {"PETIOLE_STREAM_TTL_S": 600, "OTEL_SERVICE_NAME": "llm"},
    "cache": {"hostPath": "/var/cache/petiole"},
    "image": {"pullSecrets": ["registry"]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "redis": {"enabled": True},
}


def rendered(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    texts = helm_python.Chart.load(CHART).render(values, name="llm", namespace="default")
    found = [one for text in texts.values() for one in yaml.safe_load_all(text)]
    return [one for one in found if one is not None]


def of(kind: str, name: str, values: dict[str, Any]) -> dict[str, Any]:
    [found] = [one for one in rendered(values) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod(name: str, values: dict[str, Any] = EVERYTHING) -> dict[str, Any]:
    spec: dict[str, Any] = of("Deployment", name, values)["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"models": [], "gateway": {"enabled": False}}])
def test_helm_and_kubernetes_take_it(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert [one for one in report["messages"] if one["severity"] > 1] == []
    resources = rendered(values)
    for resource in resources:
        if resource["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(resource, "1.31", strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in resources]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    "values",
    [
        {"modles": []},
        {"models": [{"name": "Large", "model": "m", "queue": "q"}]},
        {"models": [{"name": "large", "model": "m"}]},
        {"settings": {"MAX_NUM_SEQS": 3}},
        {"cache": {"hostPath": "var/cache"}},
        {"gateway": {"broker": {"url": "redis://"}}},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        helm_python.Chart.load(CHART).validate_schema(values)


def test_the_secret_of_the_redis_for_trials_has_each_key_that_parts_ask_for() -> None:
    own = {
        "models": [TINY, GPU | {"broker": {"key": "worker"}}],
        "exporter": {"broker": {"key": "monitor"}},
        "gateway": {"broker": {"secret": "other", "key": "elsewhere"}},
    }
    urls = of("Secret", "petiole-broker", EVERYTHING | own)["stringData"]
    assert urls == dict.fromkeys(("url", "worker", "monitor"), "redis://llm-redis:6379/0")


def test_nobody_is_root_and_nothing_is_writable() -> None:
    for resource in rendered(EVERYTHING):
        if resource["kind"] != "Deployment":
            continue
        spec = resource["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            confined = container["securityContext"]
            assert confined["readOnlyRootFilesystem"]
            assert confined["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_a_worker_with_a_card() -> None:
    spec = pod("llm-worker-large")
    [worker] = spec["containers"]
    environment = {one["name"]: one.get("value") for one in worker["env"]}
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert worker["image"] == "petiole:gpu"
    assert environment["PETIOLE_QUEUE"] == "petiole.large"
    assert environment["PETIOLE_MAX_NUM_SEQS"] == "32"
    assert environment["PETIOLE_STREAM_TTL_S"] == "600"
    known = {f"PETIOLE_{name.upper()}" for name in Settings.model_fields}
    assert {name for name in environment if name.startswith("PETIOLE_")} <= known
    assert spec["terminationGracePeriodSeconds"] > float(environment["PETIOLE_DRAIN_SECONDS"] or 0)
    startup = worker["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 901
    file = environment["PETIOLE_HEARTBEAT_FILE"] or ""
    assert worker["readinessProbe"]["exec"]["command"] == ["test", "-e", file + READY]
    assert file in worker["livenessProbe"]["exec"]["command"][-1]
    assert {one["name"]: one for one in spec["volumes"]}["cache"]["hostPath"]["path"] == "/var/cache/petiole"


def test_each_part_may_have_a_redis_user_of_its_own() -> None:
    values = EVERYTHING | {
        "models": [TINY, GPU | {"broker": {"secret": "of-workers", "key": "large"}}],
        "gateway": {"broker": {"key": "gateway"}},
        "exporter": {"broker": {"key": "monitor"}},
    }
    found = {}
    for part in ("worker-tiny", "worker-large", "gateway", "exporter"):
        [container] = pod(f"llm-{part}", values)["containers"]
        [url] = [one["valueFrom"] for one in container["env"] if one["name"] == "PETIOLE_BROKER_URL"]
        found[part] = tuple(url["secretKeyRef"].values())
    assert found == {
        "worker-tiny": ("petiole-broker", "url"),
        "worker-large": ("of-workers", "large"),
        "gateway": ("petiole-broker", "gateway"),
        "exporter": ("petiole-broker", "monitor"),
    }


def test_prometheus_calls_both_jobs_by_the_names_of_the_alerts() -> None:
    jobs = {}
    for part in ("exporter", "gateway"):
        [endpoint] = of("ServiceMonitor", f"llm-{part}", EVERYTHING)["spec"]["endpoints"]
        [jobs[part]] = [one["replacement"] for one in endpoint["relabelings"] if one["targetLabel"] == "job"]
    assert jobs == {"exporter": "petiole", "gateway": "petiole-gateway"}


def test_a_worker_begins_without_the_files_of_the_one_before_it(tmp_path: Path) -> None:
    """A volume outlives the container, and its probes see the files before the worker can remove them."""
    [worker] = pod("llm-worker-large")["containers"]
    beating, other = tmp_path / "alive", tmp_path / "other"
    for file in (beating, beating.with_name(beating.name + READY), other):
        file.touch()
    environment = {**os.environ, "PETIOLE_HEARTBEAT_FILE": str(beating)}
    ran = subprocess.run(
        [*worker["command"], "echo", *worker["args"]], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == worker["args"]
    assert [*tmp_path.iterdir()] == [other]


def test_scaling_asks_for_figures_that_there_are() -> None:
    scaled = of("ScaledObject", "llm-worker-large", EVERYTHING)["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 5)
    assert "replicas" not in of("Deployment", "llm-worker-large", EVERYTHING)["spec"]
    query = scaled["triggers"][0]["metadata"]["query"]
    exported = {family.name for family in exporter._figures([])} | {"petiole_queue_messages"}
    assert {*re.findall(r"petiole_[a-z_]+", query)} <= exported
    assert scaled["scaleTargetRef"]["name"] == "llm-worker-large"


def test_selectors_find_the_pods() -> None:
    resources = rendered(EVERYTHING)
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in resources if one["kind"] == "Deployment"]
    services = [one["metadata"]["labels"] for one in resources if one["kind"] == "Service"]
    for resource in resources:
        spec = resource.get("spec") or {}
        match resource["kind"]:
            case "Service":
                wanted, among = spec["selector"], pods
            case "PodDisruptionBudget":
                wanted, among = spec["selector"]["matchLabels"], pods
            case "NetworkPolicy":
                wanted, among = spec["podSelector"]["matchLabels"], pods
            case "ServiceMonitor":
                wanted, among = spec["selector"]["matchLabels"], services
            case _:
                continue
        assert sum(wanted.items() <= labels.items() for labels in among) == 1, resource["metadata"]["name"]
