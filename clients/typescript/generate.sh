#!/usr/bin/env bash
# Generates the messages of the TypeScript client from protos/ into the folder $1 (default: src/gen).
set -euo pipefail
out=$(realpath -m "${1:-$(dirname "$0")/src/gen}")
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
# google/rpc: the details of refusals, from the package googleapis-common-protos.
google=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$out" && mkdir -p "$out"
"$python" -m grpc_tools.protoc -Iprotos -I"$google" \
    --plugin=protoc-gen-es=clients/typescript/node_modules/.bin/protoc-gen-es \
    --es_out="$out" --es_opt=target=ts,import_extension=js \
    laps_sd/v1/inference.proto google/rpc/status.proto google/rpc/error_details.proto
