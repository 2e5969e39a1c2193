#!/usr/bin/env bash
# build.sh [COMPONENT...]: builds the images (gateway scheduler worker operator) with buildah. Prints the
# digest of the base, which the images' labels record, and the sizes.
#
#   BASE      image to start from, as NAME:TAG or NAME@sha256:DIGEST; "debian": made here from Debian's
#             packages, so that no registry is needed
#   TORCH     what pip installs as torch in the worker, as in the Makefile (CPU or CUDA build)
#   TAG       tag of the images; default: the version
#   MOUNT     host directories that RUN steps need, as HOST:CONTAINER,... (a CA bundle, local wheels)
#   BUILDAH   the command with its global options
set -euo pipefail
cd "$(dirname "$0")/../.."
BASE=${BASE:-docker.io/library/python:3.11-slim-bookworm}
BUILDAH=${BUILDAH:-buildah --storage-driver vfs}
TAG=${TAG:-$(sed -n 's/^__version__ = "\(.*\)"/\1/p' laps_sd/__init__.py)}
components=("$@")
[ ${#components[@]} -gt 0 ] || components=(gateway scheduler worker operator)

pull=--pull
if [ "$BASE" = debian ]; then
    BASE=localhost/laps-sd-base
    $BUILDAH inspect --type image "$BASE" >/dev/null 2>&1 || k8s/images/base.sh "$BASE" >/dev/null
    pull=--pull-never
fi
# Pulled once: all images start from the same base, and this is its digest.
container=$($BUILDAH from --quiet "$pull" "$BASE")
digest=$($BUILDAH inspect --format '{{.FromImageDigest}}' "$container")
$BUILDAH rm "$container" >/dev/null
name=${BASE%@*}
case ${name##*/} in *:*) name=${name%:*} ;; esac
echo "base $BASE is $name@$digest"

# Values that change are given with --label: the cache of buildah 1.28 ignores the arguments of a LABEL line.
arguments=(--pull-never --isolation=chroot --layers --format=docker --build-arg "BASE=$BASE"
    --label "org.opencontainers.image.base.name=$BASE" --label "org.opencontainers.image.base.digest=$digest"
    --label "org.opencontainers.image.version=$TAG"
    --label "org.opencontainers.image.revision=$(git rev-parse HEAD 2>/dev/null || true)")
[ -z "${TORCH:-}" ] || arguments+=(--build-arg "TORCH=$TORCH")
IFS=, read -ra mounts <<<"${MOUNT:-}"
for mount in "${mounts[@]}"; do arguments+=(--volume "$mount:ro"); done
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done

for component in "${components[@]}"; do
    file=k8s/images/Dockerfile
    [ "$component" != operator ] || file=k8s/images/operator.Dockerfile
    $BUILDAH build "${arguments[@]}" --build-arg "COMPONENT=$component" \
        --label "org.opencontainers.image.title=laps-sd-$component" \
        --file "$file" --tag "localhost/laps-sd-$component:$TAG" . >&2
done
for component in "${components[@]}"; do
    $BUILDAH images --format '{{.Name}}:{{.Tag}} {{.Size}}' "localhost/laps-sd-$component:$TAG"
done
