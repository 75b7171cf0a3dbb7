# syntax=docker/dockerfile:1
# The images: none runs as root, none has a compiler, everything is installed from a lock by hash.
#
#   docker build -t care-search:local .                     `service`: serves, and re-indexes with ONNX encoders; no torch
#   docker build -t care-search:gpu --target gpu .          the service on an NVIDIA GPU (x86_64)
#   docker build -t care-search:indexer --target indexer .  the re-index with Ray and Qdrant
#   docker build -t care-search:train --target train .      training, export, and document encoders that need torch
#   docker run -p 127.0.0.1:8000:8000 -v care:/app/var/collection care-search:local
#   docker run --rm -v care:/app/var/collection care-search:local index build examples/corpus.jsonl --publish

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE cli.py ./
COPY models models
COPY indexer indexer
COPY service service
COPY clients/care_client clients/care_client
# The example corpus, to which a link in the indexer points.
COPY examples examples
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .


# Wheels only: what would have to be compiled fails here and not on a machine without a compiler.
FROM python:3.11-slim AS environment
WORKDIR /locks
RUN python -m venv --without-pip /opt/care
COPY requirements/serve.lock ./
# Without the packages' own tests, 17 MB.
RUN pip --python /opt/care/bin/python install --no-cache-dir --require-hashes --only-binary :all: -r serve.lock \
    && find /opt/care/lib -type d -name tests -prune -exec rm -r {} +
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/care/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl


FROM environment AS indexer-environment
COPY requirements/indexer.lock ./
# Without tests, 53 MB, and what Ray has for programs in Java, 33 MB.
RUN pip --python /opt/care/bin/python install --no-cache-dir --require-hashes --only-binary :all: -r indexer.lock \
    && find /opt/care/lib -type d \( -name tests -o -path '*/ray/jars' \) -prune -exec rm -r {} +


FROM environment AS train-environment
COPY requirements/train.lock ./
RUN pip --python /opt/care/bin/python install --no-cache-dir --require-hashes --only-binary :all: -r train.lock \
    && find /opt/care/lib -type d \( -name tests -o -path '*/ray/jars' \) -prune -exec rm -r {} +


FROM python:3.11-slim AS runtime
# A fixed number, so that a volume's owner is known outside. A new named volume takes the folder's owner over.
RUN groupadd --gid 10001 care \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin care \
    && install -d -o 10001 -g 10001 /app/var /app/var/collection
WORKDIR /app
COPY examples examples
# ONNX Runtime reports its use to its maker unless told not to, and keeps a device id under HOME for it.
ENV PATH=/opt/care/bin:$PATH PYTHONUNBUFFERED=1 ORT_DISABLE_TELEMETRY=1 CARE_HOST=0.0.0.0 CARE_PORT=8000
VOLUME /app/var/collection
ENTRYPOINT ["care"]


FROM runtime AS indexer
COPY --from=indexer-environment /opt/care /opt/care
# Ray writes to its user's home.
ENV HOME=/tmp
USER 10001:10001
CMD ["index", "--help"]


# torch brings its CUDA libraries; the driver is the host's. Recipes name files as from the repository's root, and write
# their runs to var: docker run -v runs:/app/var care-search:train train models/training/recipes/tiny.toml
FROM runtime AS train
COPY --from=train-environment /opt/care /opt/care
RUN ln -s /opt/care/lib/python3.*/site-packages/models models
# Libraries keep downloaded weights and caches there.
ENV HOME=/app/var
USER 10001:10001
CMD ["train", "--help"]


# Never built as an image. The bundled encoder has a graph for processors alone: CARE_DEVICE=cuda needs another CARE_ENCODER.
FROM nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04 AS gpu
WORKDIR /app
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/care
COPY requirements/gpu.lock /locks/gpu.lock
RUN /opt/care/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /locks/gpu.lock
COPY --from=wheel /wheels /wheels
RUN /opt/care/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
RUN groupadd --gid 10001 care \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin care \
    && install -d -o 10001 -g 10001 /app/var/collection
COPY examples examples
ENV PATH=/opt/care/bin:$PATH PYTHONUNBUFFERED=1 ORT_DISABLE_TELEMETRY=1 CARE_HOST=0.0.0.0 CARE_PORT=8000
USER 10001:10001
VOLUME /app/var/collection
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as http; http.build_opener(http.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"CARE_PORT\"]}/livez', timeout=4)"]
ENTRYPOINT ["care"]
CMD ["serve"]


FROM runtime AS service
COPY --from=environment /opt/care /opt/care
USER 10001:10001
EXPOSE 8000
# Alive, not ready: a service that waits for its first snapshot is healthy. Past any proxy that the container inherits.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as http; http.build_opener(http.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"CARE_PORT\"]}/livez', timeout=4)"]
CMD ["serve"]
