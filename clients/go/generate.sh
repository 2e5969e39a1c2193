#!/usr/bin/env bash
# Generates the messages and stubs of the Go client from protos/ into the folder $1 (default: lapssdv1).
set -euo pipefail
out=$(realpath -m "${1:-$(dirname "$0")/lapssdv1}")
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
file=laps_sd/v1/inference.proto
mkdir -p "$out"
"$python" -m grpc_tools.protoc -Iprotos \
    --go_out="$out" --go_opt="M$file=lapssd/lapssdv1,module=lapssd/lapssdv1" \
    --go-grpc_out="$out" --go-grpc_opt="M$file=lapssd/lapssdv1,module=lapssd/lapssdv1" "$file"
