"""Helm 4 as a process: a line of JSON in, a line of JSON out. Its library brings a Go runtime, which stays
out of pytest's process.

In: {"do": "render" | "lint", "chart", "values", "namespace"}. Out: {"manifests"} or {"messages"} or
{"refused"}.
"""

import json
import sys

import helm_python.chart as helm
from helm_python.errors import HelmError


def answer(request):
    if request["do"] == "lint":
        report = helm.lint(request["chart"], request["values"], strict=True, kube_version="v1.30.0")
        bad = [message["error"] for message in report["messages"] if message["severity"] > 1]
        return {"messages": bad + report["errors"]}
    with helm.Chart.load(request["chart"]) as chart:
        chart.validate_schema(request["values"])
        manifests = chart.render(request["values"], name="demo", namespace=request["namespace"])
        notes = "".join(text for path, text in manifests.items() if path.endswith("NOTES.txt"))
        rest = [text for path, text in manifests.items() if path.endswith(".yaml")]
        return {"manifests": "\n---\n".join(rest), "notes": notes}


for line in sys.stdin:
    try:
        said = answer(json.loads(line))
    except HelmError as error:
        said = {"refused": str(error)}
    print(json.dumps(said), flush=True)
