#!/usr/bin/env bash
# build.sh [COMPONENT...]: builds the images (gateway scheduler worker operator; worker-vllm on request) with
# buildah. Prints the digest of each base, which the images' labels record, and the sizes.
#
#   BASE      image to start from, as NAME:TAG or NAME@sha256:DIGEST; "debian": made here from Debian's
#             packages, so that no registry is needed
#   VLLM_BASE vLLM's image, which worker-vllm starts from, in the same form; BASE then builds the wheel alone
#   TORCH     what pip installs as torch in the worker, as in the Makefile (CPU or CUDA build)
#   TAG       tag of the images; default: the version
#   MOUNT     host directories that RUN steps need, as HOST:CONTAINER,... (a CA bundle, local wheels)
#   BUILDAH   the command with its global options
set -euo pipefail
cd "$(dirname "$0")/../.."
BASE=${BASE:-docker.io/library/python:3.11-slim-bookworm}
VLLM_BASE=${VLLM_BASE:-docker.io/vllm/vllm-openai:v0.32.0}
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
# pulled POLICY IMAGE: prints the digest of an image.
pulled() {
    local container
    container=$($BUILDAH from --quiet "$1" "$2")
    $BUILDAH inspect --format '{{.FromImageDigest}}' "$container"
    $BUILDAH rm "$container" >/dev/null
}
# described IMAGE DIGEST: prints the image with its digest, without its tag.
described() {
    local name=${1%@*}
    case ${name##*/} in *:*) name=${name%:*} ;; esac
    echo "base $1 is $name@$2"
}
# Pulled once: all images start from the same base, and this is its digest.
digest=$(pulled "$pull" "$BASE")
described "$BASE" "$digest"
case " ${components[*]} " in *" worker-vllm "*)
    vllm_digest=$(pulled --pull "$VLLM_BASE")
    described "$VLLM_BASE" "$vllm_digest" ;;
esac

# Values that change are given with --label: the cache of buildah 1.28 ignores the arguments of a LABEL line.
arguments=(--pull-never --isolation=chroot --layers --format=docker --build-arg "BASE=$BASE"
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
    from=(--label "org.opencontainers.image.base.name=$BASE" --label "org.opencontainers.image.base.digest=$digest")
    case $component in
        operator) file=k8s/images/operator.Dockerfile ;;
        worker-vllm)
            file=k8s/images/worker-vllm.Dockerfile
            from=(--build-arg "VLLM_BASE=$VLLM_BASE" --label "org.opencontainers.image.base.name=$VLLM_BASE"
                --label "org.opencontainers.image.base.digest=$vllm_digest") ;;
    esac
    $BUILDAH build "${arguments[@]}" "${from[@]}" --build-arg "COMPONENT=$component" \
        --label "org.opencontainers.image.title=laps-sd-$component" \
        --file "$file" --tag "localhost/laps-sd-$component:$TAG" . >&2
done
for component in "${components[@]}"; do
    $BUILDAH images --format '{{.Name}}:{{.Tag}} {{.Size}}' "localhost/laps-sd-$component:$TAG"
done
