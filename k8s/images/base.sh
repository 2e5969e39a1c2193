#!/usr/bin/env bash
# base.sh NAME: makes a base image from Debian's packages alone, for machines without a registry. Needs root, debootstrap and buildah.
set -euo pipefail
name=$1
rootfs=$(mktemp -d) && trap 'rm -rf "$rootfs"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$rootfs" "${MIRROR:-http://deb.debian.org/debian}" >&2
chmod 755 "$rootfs"
# As Debian's "slim" images: nobody reads manuals in there.
rm -rf "$rootfs"/var/cache/apt/* "$rootfs"/var/lib/apt/lists/* "$rootfs"/var/cache/debconf/*-old "$rootfs"/usr/share/{doc,man,info,locale,lintian}/* \
    "$rootfs"/var/log/*.log "$rootfs"/dev/*
container=$(buildah --storage-driver vfs from scratch)
buildah --storage-driver vfs add --quiet "$container" "$rootfs" / >&2
buildah --storage-driver vfs commit --quiet --rm "$container" "$name" >&2
echo "$name"
