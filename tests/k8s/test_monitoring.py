"""Dashboard and alerts query metrics that a running system exports, and an alert fires on the condition in
its name.

Where Prometheus itself is installed (`make k8s-tools`), it scrapes the system, answers every query and judges
every rule.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from laps_sd.client import Client
from laps_sd.contract.ends import End
from laps_sd.errors import LapsSdError
from laps_sd.stack.local import LocalStack
from tests.helpers import free_port, wait_until
from tests.k8s.api_server import NAMESPACE, ApiServer
from tests.k8s.helm import CHART, ROOT, TOOLS, Helm3, Helm4
from tests.k8s.operator_process import OperatorProcess, kubeconfig_of

RULES = (CHART / "rules" / "laps-sd.yaml", CHART / "rules" / "laps-sd-operator.yaml")
DASHBOARD = CHART / "dashboards" / "laps-sd.json"
UNIT_TESTS = Path(__file__).with_name("alerts.yaml")

OF_THE_SCRAPE = {"namespace", "laps_sd_dev_pool", "laps_sd_dev_shard", "pod"}
"""Labels that a PodMonitor adds."""
VALUES = {"end": {end.value for end in End}, "code": {code.name for code in grpc.StatusCode}}
"""Values of the labels that an expression may compare."""

WITH_CERTIFICATES = {"laps_sd_certificate_expiry_timestamp_seconds": ("gauge", {"use"})}
"""What a system exposes only if it has certificates (tests/shared/test_certificates.py)."""

OF_PROMETHEUS = {"up": ("gauge", {"app_kubernetes_io_name", "app_kubernetes_io_component"})}
"""What Prometheus writes itself about each target, with further labels that a PodMonitor adds."""

SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
GROUPS = re.compile(r"\b(?:by|on|ignoring|without) \(([^)]*)\)")
COUNTED = re.compile(r"\b(rate|increase)\((\w+)\{")
ALL_NAMES = re.compile(r"\blaps_sd_\w+")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def rules() -> list[dict[str, Any]]:
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Return all queries, by their place."""
    panels = {
        f"{panel['title']}, {target['refId']}": target["expr"]
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    }
    return panels | {rule["alert"]: rule["expr"] for rule in rules()}


@dataclass(frozen=True)
class Running:
    """A system that has done some work, and its exported metrics."""

    stack: LocalStack
    operator: OperatorProcess
    served: dict[str, tuple[str, set[str]]]
    """Type and labels of each sample's name."""


@pytest.fixture(scope="module")
def running(kubernetes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with (
        LocalStack(engine="fake", environment={"LAPS_SD_FAKE_TIME_SCALE": "0.1"}) as stack,
        ApiServer().serve_beside() as server,
    ):
        folder = tmp_path_factory.mktemp("operator")
        server.add("speculativepools", pool_of(stack))
        kubeconfig = kubeconfig_of(server.url, folder / "kubeconfig")
        operator = OperatorProcess(kubeconfig, NAMESPACE, folder / "log")
        operator.start()
        try:
            work(stack)

            def served() -> dict[str, tuple[str, set[str]]]:
                if not operator.is_healthy():
                    return {}
                found = scrape(targets(stack, operator).values())  # the queue is looked at every second
                return (
                    found
                    if {"laps_sd_scheduler_queue_depth", "laps_sd_operator_workers"} <= set(found)
                    else {}
                )

            yield Running(stack, operator, wait_until(served, description="all have looked around"))
        finally:
            operator.stop()


def pool_of(stack: LocalStack) -> dict[str, Any]:
    """Return a pool whose schedulers are those of the stack."""
    return {
        "metadata": {"name": "demo-worker"},
        "spec": {
            "scheduler": stack.scheduler_address,
            "template": {"spec": {"containers": [{"name": "worker", "image": "w"}]}},
        },
    }


def targets(stack: LocalStack, operator: OperatorProcess) -> dict[str, str]:
    """Return the address of the metrics of each component."""
    services = {name: stack.metrics_url(name) for name in ("gateway", "scheduler", "worker")}
    return services | {"operator": operator.metrics_url}


def scrape(urls: Iterable[str]) -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each sample's name."""
    found: dict[str, tuple[str, set[str]]] = WITH_CERTIFICATES | OF_PROMETHEUS
    for url in urls:
        with urllib.request.urlopen(url, timeout=10) as reply:
            for family in text_string_to_metric_families(reply.read().decode()):
                for sample in family.samples:
                    found.setdefault(sample.name, (family.type, set()))[1].update(sample.labels)
    return found


def work(stack: LocalStack) -> None:
    """Run a few requests, and one that is refused."""
    with Client(stack.gateway_address) as client:
        for seed in range(3):
            client.generate("What is 7 plus 5?", seed=seed, max_tokens=60, ignore_eos=True)
        with pytest.raises(LapsSdError):
            client.generate("", max_tokens=1)


@pytest.mark.parametrize("where", queries())
def test_a_query_asks_for_metrics_and_labels_that_are_there(running: Running, where: str) -> None:
    expression = queries()[where]
    selectors = SELECTOR.findall(expression)

    assert selectors
    known: set[str] = set(OF_THE_SCRAPE)
    for name, matchers in selectors:
        assert name in running.served, f"{name} is not served"
        labels = running.served[name][1] | OF_THE_SCRAPE
        known |= labels
        for label, operator, value in MATCHER.findall(matchers):
            assert label in labels, f"{name} has no label {label}"
            if label in VALUES and operator == "=":
                assert value in VALUES[label], f"{label} is never {value}"
    for group in GROUPS.findall(expression):
        assert {label.strip() for label in group.split(",")} <= known, group
    for _, name in COUNTED.findall(expression):
        assert running.served[name][0] in ("counter", "histogram"), f"{name} does not only grow"
    named = set(ALL_NAMES.findall(expression)) - OF_THE_SCRAPE
    assert named == {name for name, _ in selectors} - OF_PROMETHEUS.keys(), (
        "each metric is asked for with its release"
    )
    assert all("namespace=" in matchers for _, matchers in selectors)


def test_a_panel_names_lines_by_labels_that_its_query_keeps() -> None:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {
                label.strip()
                for group in re.findall(r"\bby \(([^)]*)\)", target["expr"])
                for label in group.split(",")
            }
            assert named <= kept, panel["title"]


def test_the_dashboard_shows_every_component() -> None:
    asked = {
        component
        for panel in dashboard()["panels"]
        for target in panel["targets"]
        for component in re.findall(r"\blaps_sd_([a-z]+)_\w+\{", target["expr"])
    }

    assert asked == {"gateway", "scheduler", "worker", "operator"}


def test_panels_fill_a_grid_without_overlapping() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(places)


def test_every_alert_is_explained_and_tested() -> None:
    names = {rule["alert"] for rule in rules()}
    explained = set(re.findall(r"^\| `(LapsSd\w+)` \|", (ROOT / "docs" / "kubernetes.md").read_text(), re.M))
    tests = yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))["tests"]
    fires = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one.get("exp_alerts")}
    quiet = {
        one["alertname"] for test in tests for one in test["alert_rule_test"] if not one.get("exp_alerts")
    }

    assert names == explained == fires == quiet


def test_every_alert_says_what_is_wrong_where_and_how_bad_it_is() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        of_namespace = rule["alert"].startswith(("LapsSdOperator", "LapsSdNotScraped"))
        where = (
            "NAMESPACE" if of_namespace else "pool" if "_operator_" in rule["expr"] else "laps_sd_dev_pool"
        )
        assert where in rule["expr"]
        assert of_namespace or f"$labels.{where}" in rule["annotations"]["summary"]


@pytest.mark.parametrize("operator", [False, True])
def test_the_chart_has_the_alerts_of_the_operator_only_where_one_runs(
    helm: Helm3 | Helm4, operator: bool
) -> None:
    rendered = helm.render({"monitoring": {"rules": "on"}, "operator": {"enabled": operator}})
    [found] = [one for one in rendered if one["kind"] == "PrometheusRule"]
    names = [rule["alert"] for group in found["spec"]["groups"] for rule in group["rules"]]

    assert ("LapsSdOperatorNoLeader" in names) is operator
    assert names == [rule["alert"] for rule in rules()][: len(names)]
    assert "NAMESPACE" not in str(found["spec"])


# -- Prometheus itself -------------------------------------------------------------------------------------------------


def program(name: str) -> str:
    """Return the program of Debian's package; not every system has one, so it may be missing in CI too."""
    found = shutil.which(name, path=str(TOOLS)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make k8s-tools, where apt-get has the package prometheus")
    return found


def test_alerts_fire_on_what_they_are_named_after_and_on_nothing_else(tmp_path: Path) -> None:
    for file in (*RULES, UNIT_TESTS):
        shutil.copy(file, tmp_path)

    done = subprocess.run(
        [program("promtool"), "test", "rules", UNIT_TESTS.name], cwd=tmp_path, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def prometheus(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a Prometheus that scrapes the system every second and has the rules."""
    folder = tmp_path_factory.mktemp("prometheus")
    for file in RULES:
        (folder / file.name).write_text(file.read_text(encoding="utf-8").replace("NAMESPACE", "models"))
    scraped = [
        {
            "targets": [urllib.parse.urlsplit(url).netloc],
            "labels": {
                "namespace": "models",
                "app_kubernetes_io_name": "laps-sd",
                "app_kubernetes_io_component": component,
                "laps_sd_dev_pool": "demo",
                "laps_sd_dev_shard": "demo",
                "pod": component,
            },
        }
        for component, url in targets(running.stack, running.operator).items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / file.name) for file in RULES],
        "scrape_configs": [{"job_name": "laps-sd", "static_configs": scraped}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        yield address
    finally:
        server.kill()
        server.wait()
        log.close()


def ask(address: str, path: str, **parameters: str) -> Any:
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{parameters}: {error.read().decode()}") from error
    except OSError:
        return None  # it is starting


def test_prometheus_answers_every_query_of_the_dashboard(running: Running, prometheus: str) -> None:
    filled = {
        where: expression.replace("$namespace", "models")
        .replace("$pool", "demo")
        .replace("$__rate_interval", "10s")
        for where, expression in queries().items()
        if where not in {rule["alert"] for rule in rules()}
    }

    def unanswered() -> list[str]:
        work(running.stack)
        return [
            where
            for where, expression in filled.items()
            if not (ask(prometheus, "query", query=expression) or {}).get("result")
        ]

    wait_until(lambda: not unanswered(), description="every query has an answer", every_s=1)


def test_prometheus_takes_every_rule_and_none_fires_on_a_healthy_system(
    running: Running, prometheus: str
) -> None:
    def judged() -> list[dict[str, Any]]:
        groups = (ask(prometheus, "rules") or {"groups": []})["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        return found if found and all(rule["health"] != "unknown" for rule in found) else []

    found = wait_until(judged, description="every rule was judged")

    assert {rule["name"] for rule in found} == {rule["alert"] for rule in rules()}
    assert {rule["name"]: rule.get("lastError") for rule in found if rule["health"] != "ok"} == {}
    # Before the first scrape there is no series, for which some rules wait. What the fixture did on purpose: of four requests
    # one is refused, and that for no lack of room.
    wait_until(
        lambda: {rule["state"] for rule in judged()} == {"inactive"},
        description="no rule's condition holds",
    )
