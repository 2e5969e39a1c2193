#!/usr/bin/env bash
# Installs what the tests of the Go client need on Debian 12, as root: Go 1.19, gRPC 1.33 and the generators (280 MB).
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# protobuf-1-5: the older choice of grpc's package cannot write messages of the present generator.
apt-get install -qq --no-install-recommends golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev \
    golang-google-protobuf-dev golang-google-genproto-dev protoc-gen-go protoc-gen-go-grpc
