# A worker whose engine is vLLM, and `vllm serve` with LAPS-SD's scheduler. From the root of the repository:
#
#   docker build -f k8s/images/worker-vllm.Dockerfile -t laps-sd-worker-vllm .
#
# NOT TESTED: over vLLM's image this has never been built and never run on a GPU by us, only over a stand-in with
# older packages. tests/k8s/test_image_vllm.py checks this file, and compares the requirements of the wheel that it
# builds with the packages that are installed here.

# Where the wheel is built; any Python 3.11 or newer.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
# vLLM with its torch and its transformers: 0.32 or 0.33. NAME@sha256:DIGEST pins it.
ARG VLLM_BASE=docker.io/vllm/vllm-openai:v0.32.0

FROM ${BASE} AS build
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_COMPILE=0
COPY k8s/images/requirements/build.txt /requirements/
RUN python3 -m venv /build && /build/bin/pip install --no-deps --require-hashes -r /requirements/build.txt
COPY pyproject.toml setup.py README.md LICENSE /source/
COPY laps_sd /source/laps_sd
COPY gateway /source/gateway
COPY scheduler_svc /source/scheduler_svc
COPY worker_svc /source/worker_svc
COPY laps_vllm /source/laps_vllm
# Without the worker's kernels in C, which vLLM does not use: the wheel then suits every Python that vLLM's image may have.
RUN cd /source && PURE_PYTHON=1 /build/bin/pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /dist .

FROM ${VLLM_BASE}
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="laps-sd-worker-vllm" \
      org.opencontainers.image.description="LAPS-SD serves large language models with speculative decoding: a worker over vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 0:0
COPY k8s/images/first.sh /usr/local/bin/
COPY --from=build /dist /laps-sd/
COPY k8s/images/join.py k8s/images/requirements/worker-vllm.txt /laps-sd/
# Only what is missing is installed, and nothing that vLLM's packages exclude: join.py. Torch looks up the user's name.
RUN export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_COMPILE=0 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
 && python3 /laps-sd/join.py /laps-sd/worker-vllm.txt /laps-sd/*.whl otel \
 && rm -r /laps-sd \
 && groupadd --gid 10001 laps-sd \
 && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /cache laps-sd \
 && mkdir /cache && chown 10001:10001 /cache
# /cache is the one writable folder apart from /tmp: compiled kernels and graphs, and what vLLM downloads. The root may be read-only.
ENV HOME=/cache USER=laps-sd VLLM_CACHE_ROOT=/cache/vllm HF_HOME=/cache/huggingface VLLM_NO_USAGE_STATS=1 \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    LAPS_SD_GRPC_HOST=:: LAPS_SD_HEALTH_PORT=50050
USER 10001:10001
WORKDIR /tmp
# As that user: what a worker imports before it loads vLLM, and whether this vLLM is one that LAPS-SD supports.
RUN laps-sd worker --help > /dev/null \
 && python3 -c 'import worker_svc.__main__, laps_vllm.versions as v; from importlib.metadata import version; v.check_version(version("vllm"))'
STOPSIGNAL SIGTERM
ENTRYPOINT ["first.sh", "laps-sd", "worker", "--engine", "vllm"]
