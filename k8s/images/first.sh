#!/bin/sh
# first.sh COMMAND...: the first process of a container; runs the command and hands on its signals and its exit code.
# The kernel drops signals that a first process does not handle, and a service handles them only once it has imported
# what it needs: a pod that was deleted before that would stay until its grace period is over.
trap 'kill -TERM $! || exit 143' TERM
trap 'kill -INT $! || exit 130' INT
"$@" &
while :; do
    wait $!
    code=$?
    kill -0 $! 2>/dev/null || exit $code
done
