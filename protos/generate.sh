#!/usr/bin/env bash
# Generates the Python stubs of protos/ into the folder $1 (default: the repository root).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-.}
mkdir -p "$out/laps_sd/v1" "$out/laps_sd/keda"
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -Iprotos \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
    protos/laps_sd/*/*.proto
