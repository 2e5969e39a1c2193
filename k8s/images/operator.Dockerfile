# The operator. From the root of the repository: docker build -f k8s/images/operator.Dockerfile -t laps-sd-operator .
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_COMPILE=0
COPY k8s/images/requirements/operator.txt /requirements/
RUN python3 -m venv /opt/laps-sd \
 && /opt/laps-sd/bin/pip install --no-deps --require-hashes -r /requirements/operator.txt \
 && /opt/laps-sd/bin/pip uninstall --yes --quiet setuptools pip

FROM ${BASE}
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="laps-sd-operator" \
      org.opencontainers.image.description="LAPS-SD serves large language models with speculative decoding: the operator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/laps-sd /opt/laps-sd
COPY k8s/images/first.sh /opt/laps-sd/bin/
COPY laps_sd /opt/laps-sd/source/laps_sd
COPY k8s/operator/laps_sd_operator /opt/laps-sd/source/laps_sd_operator
ENV PATH=/opt/laps-sd/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/laps-sd/source PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["first.sh", "python3", "-m", "laps_sd_operator"]
